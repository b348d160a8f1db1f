"""Link "kernel" performs no operation that a CUDA graph forbids, and vLLM's Triton kernel reads slots (interpreted)."""

from __future__ import annotations

import json
import os
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
    """Runs of the resident model, with host tables, with device tables, and with fewer slots than a step needs."""
    asked: list[Mapping[str, object] | None] = [
        None, {"slots": 200, "link": "instant"}, {"slots": 200, "link": "kernel"}, {"slots": 30, "link": "kernel"}
    ]  # fmt: skip
    with ThreadPoolExecutor(2) as pool:
        return tuple(pool.map(lambda options: run(options, engine=FP32), asked))


def test_same_tokens_and_counts_as_with_host_tables(runs: tuple[Ran, ...]) -> None:
    resident, *offloaded = runs
    assert [each.tokens for each in offloaded] == [resident.tokens] * 3
    counts = [[each.workers[0][name] for name in ("requests", "hits", "misses", "bytes_moved")] for each in offloaded]
    assert counts[0] == counts[1]
    assert counts[2][0] > counts[1][0], "groups of tokens request experts again"
    assert "GB moved, " not in offloaded[1].log, "the host did not wait"


def as_if_captured(options: Mapping[str, object], tokens: int = 12) -> dict[str, Any]:
    """Return the result of `captured_run.py`.

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


def test_decode_steps_with_forecasts_and_padding_need_no_host_read() -> None:
    given = as_if_captured({"slots": 200, "link": "kernel", "predictor": "next_norm"})
    assert given["captured"]["tokens"] == given["plain"]["tokens"]
    assert given["captured"]["counters"] == given["plain"]["counters"], "padding requests no experts"
    assert given["plain"]["counters"]["prefetched_used"] > 0
    assert given["layers"] == 11 * 12
    assert given["functions"] > given["layers"]


def test_a_host_read_fails() -> None:
    """The test above can fail: for a step that may need more experts than slots, the host counts them."""
    with pytest.raises(RuntimeError, match="unique needs the host"):
        as_if_captured({"slots": 40, "link": "kernel"})


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
