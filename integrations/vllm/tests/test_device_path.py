"""With link 'kernel' what is copied is decided on the device: vLLM's tokens, and nothing that a CUDA graph forbids."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engines import PROMPTS, REFERENCE, Ran, run
from one_run import RESULT

FP32 = {"dtype": "float32"}


@pytest.fixture(scope="module")
def runs() -> tuple[Ran, ...]:
    """Resident, by the host's books, by tables, and by tables too small for a step."""
    asked: list[Mapping[str, object] | None] = [
        None, {"slots": 200, "link": "instant"}, {"slots": 200, "link": "kernel"}, {"slots": 30, "link": "kernel"}
    ]  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        return tuple(pool.map(lambda options: run(options, engine=FP32), asked))


def test_same_tokens_and_counts_as_by_the_hosts_books(runs: tuple[Ran, ...]) -> None:
    resident, *offloaded = runs
    assert [each.tokens for each in offloaded] == [resident.tokens] * 3
    counts = [[each.workers[0][name] for name in ("requests", "hits", "misses", "bytes_moved")] for each in offloaded]
    assert counts[0] == counts[1]
    assert counts[2][0] > counts[1][0], "groups of tokens ask for experts again"
    assert "GB moved, " not in offloaded[1].log, "nobody waited on the host"


def as_if_captured(options: Mapping[str, object], tokens: int = 12) -> dict[str, Any]:
    """What `captured_run.py` gives.

    Raises:
        RuntimeError: it failed; the message is its log.
    """
    environment = {"EXPERTCAST_VLLM": json.dumps(options)}
    asked = {"model": REFERENCE, "engine": FP32, "environment": environment, "prompts": PROMPTS, "tokens": tokens}
    script = Path(__file__).with_name("captured_run.py")
    done = subprocess.run(
        [sys.executable, str(script)], input=json.dumps(asked), capture_output=True, text=True, timeout=180
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    given: dict[str, Any] = json.loads(line.removeprefix(RESULT))
    return given


def test_decode_steps_with_forecasts_and_padding_ask_the_device_for_no_value() -> None:
    given = as_if_captured({"slots": 200, "link": "kernel", "predictor": "next_norm"})
    assert given["captured"]["tokens"] == given["plain"]["tokens"]
    assert given["captured"]["counters"] == given["plain"]["counters"], "nothing is brought for padding"
    assert given["plain"]["counters"]["prefetched_used"] > 0
    assert given["layers"] == 11 * 12
    assert given["functions"] > given["layers"]


def test_asking_would_be_refused() -> None:
    """The test above can fail: of a step that may name more experts than there are slots, the host counts them."""
    with pytest.raises(RuntimeError, match="unique needs the host"):
        as_if_captured({"slots": 40, "link": "kernel"})
