"""The benchmark: what it reports is what the runs did."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

from expertcast.predictors import ExpertcastError
from expertcast.runtime import benchmark
from tests.runtime.conftest import PROMPT


def test_benchmark(reference_model: PreTrainedModel, reference_tokenizer: Any) -> None:
    runs: dict[str, dict[str, Any]] = {
        "on_demand": {"cache": False},
        "exact": {"cache": False, "predictor": "next_norm"},
        "speculate": {"cache": False, "predictor": "next_norm", "mode": "speculate"},
        "cached": {"slots": 768},
    }
    got = benchmark(
        reference_model, reference_tokenizer, PROMPT, runs=runs, slots=8, bandwidth=2e7, new_tokens=6, repetitions=2
    )
    on_demand, exact, speculated, cached = (got["runs"][name] for name in runs)
    block = 36864
    assert on_demand["bytes_per_token"] == 12 * 4 * block
    assert on_demand["hit_rate"] == 0.0
    assert speculated["bytes_per_token"] == 12 * 4 * block
    assert speculated["hit_rate"] == 11 / 12
    assert on_demand["bytes_per_token"] <= exact["bytes_per_token"] < 1.5 * on_demand["bytes_per_token"]
    assert cached["bytes_per_token"] < on_demand["bytes_per_token"] / 4
    assert [run["identical"] for run in (on_demand, exact, speculated, cached)] == [True, True, False, True]
    assert exact["same_tokens"]
    copying = 12 * 4 * block / 2e7
    assert on_demand["tpot_s"] > copying
    assert on_demand["waited_s_per_token"] > 0.3 * copying
    assert cached["tpot_s"] < on_demand["tpot_s"]
    assert exact["tpot_quartiles_s"][0] <= exact["tpot_s"] <= exact["tpot_quartiles_s"][1]
    assert got["resident"]["tpot_s"] < on_demand["tpot_s"]
    assert got["bandwidth"] == 2e7


def test_balanced_bandwidth(reference_model: PreTrainedModel, reference_tokenizer: Any) -> None:
    got = benchmark(reference_model, reference_tokenizer, PROMPT, runs={}, new_tokens=4, repetitions=1)
    layer_s = got["resident"]["tpot_s"] / 12
    assert got["bandwidth"] == pytest.approx(4 * 36864 / layer_s)


def test_bad_input(reference_model: PreTrainedModel, reference_tokenizer: Any) -> None:
    with pytest.raises(ExpertcastError, match="new_tokens=1"):
        benchmark(reference_model, reference_tokenizer, PROMPT, runs={}, new_tokens=1)
    with pytest.raises(ExpertcastError, match="no token"):
        benchmark(reference_model, reference_tokenizer, "", runs={})
