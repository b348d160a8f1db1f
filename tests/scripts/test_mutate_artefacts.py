"""Three hundred damaged files, opened by commands: a one-line refusal or the right result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripts import fault_trials

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "mutate_artefacts.py"
SEED = 16


@pytest.mark.slow
def test_one_line_or_the_right_answer(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--count", "300", "--seed", str(SEED), "--json", str(found)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert run.returncode in (0, 1), run.stderr[-3000:]
    result = json.loads(found.read_text())
    assert result["operations"] >= 400
    assert len(result["by_file"]) >= 15
    assert result["failures"] == []
    total = {kind: sum(row[kind] for row in result["by_file"].values()) for kind in ("right", "refused")}
    assert total["refused"] >= 100
    assert total["right"] >= 20, "some damage is harmless"


NAMED = "expertcast: experts.safetensors is damaged\n"


def _says(text: str, status: int) -> Callable[[], int]:
    """Function of a fork; it writes to the file descriptors, because pytest replaces the streams."""
    return lambda: os.write(2, text.encode()) * 0 + status


@pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux's")
@pytest.mark.parametrize(
    ("work", "given", "edited", "expected"),
    [
        (_says("", 0), 1, False, ("right", "")),
        (_says("", 0), {"a": [1, 2]}, False, ("changed", ".a[1]: 1 became 2")),
        (_says("", 0), {"a": [1, 2]}, True, ("edited", "")),
        (_says(NAMED, 2), None, False, ("refused", "experts.safetensors is damaged")),
        (_says("expertcast: no\n", 2), None, False, ("unnamed", "no")),
        (_says(NAMED + "more\n", 2), None, False, ("traceback", None)),
        (_says(NAMED, 3), None, False, ("traceback", None)),
        (lambda: len(bytearray(1 << 40)), None, False, ("traceback", None)),
        (lambda: time.sleep(60) or 0, None, False, ("hung", None)),
    ],
)
def test_what_came_out_is_told_apart(
    work: Callable[[], int], given: Any, edited: bool, expected: tuple[str, str | None], tmp_path: Path
) -> None:
    (tmp_path / "experts.safetensors").touch()
    ended = fault_trials.run(work, tmp_path, fault_trials.Limits(seconds=0.5, memory=1 << 30))
    right = {"a": [1, 1]} if isinstance(given, dict) else given
    kind, line = fault_trials.outcome(ended, given, right, tmp_path, edited)
    assert (kind, line if expected[1] is not None else None) == expected
