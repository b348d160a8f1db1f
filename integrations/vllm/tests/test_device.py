"""vLLM's Triton kernel reads experts from slots (interpreted on the CPU)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from one_run import RESULT

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
DEFAULTS = {
    "seed": 0, "experts": 11, "top_k": 3, "tokens": 7, "slots": 20, "among": 11, "dtype": "float32", "ids": "int32",
    "biased": False, "padding": 0,
}  # fmt: skip
CASES = {
    "one token": {"tokens": 1, "experts": 8, "slots": 3, "top_k": 2, "among": 8},
    "one token, separate pairs in the resident layer": {"tokens": 1, "experts": 37, "slots": 5, "among": 37},
    "several tokens": {},
    "more slots than experts": {"slots": 45},
    "ids of 64 bits": {"ids": "int64", "tokens": 5},
    "few experts requested, many absent": {"experts": 29, "among": 4, "tokens": 9, "slots": 4},
    "more tokens of an expert than a tile": {"tokens": 40, "experts": 5, "among": 5, "top_k": 2},
    "tiles of a larger step": {"tokens": 70, "experts": 6, "among": 6, "top_k": 2, "slots": 6},
    "rows of padding": {"padding": 3, "tokens": 8},
    "one token, rows of padding": {"padding": 1, "tokens": 2, "experts": 37, "slots": 5, "among": 37, "ids": "int64"},
    "biases": {"biased": True},
    "float16 with biases": {"dtype": "float16", "biased": True, "ids": "int64"},
    "float16": {"dtype": "float16"},
    "in groups": {"tokens": 24, "slots": 5},
    "in groups, with tiles of the step": {"tokens": 40, "slots": 4, "dtype": "float16", "biased": True},
}
AWAY = {"float32": 1e-5, "float16": 5e-3}
"""Tolerance relative to the largest output. bfloat16 is left out: Triton interprets by NumPy, which cannot multiply it.
"""


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """Results of all cases, from one process: Triton decides at its import whether to interpret."""
    asked = "\n".join(json.dumps({**DEFAULTS, **case, "seed": seed}) for seed, case in enumerate(CASES.values()))
    environment = {
        **os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(HERE.parent)]),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(HERE / "interpreted.py")], input=asked, capture_output=True, text=True, timeout=300,
        env=environment,
    )  # fmt: skip
    assert not done.returncode, done.stdout + done.stderr
    lines = [json.loads(line.removeprefix(RESULT)) for line in done.stdout.splitlines() if line.startswith(RESULT)]
    return dict(zip(CASES, lines, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_slots_give_the_bits_of_all_experts(results: dict[str, dict[str, Any]], case: str) -> None:
    got, asked = results[case], {**DEFAULTS, **CASES[case]}
    assert got["same"]
    assert got["away"] < AWAY[str(asked["dtype"])]
    assert got["tiles"], "tiles of the whole step, whatever the group"
    assert got["launches"] == 2 * got["parts"]
    assert (got["parts"] > 1) == ("groups" in case)
