"""Options that change the output in mode 'exact', or have no effect, are named in a line; all others are silent."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from expertcast.cli import main
from expertcast.runtime import OffloadConfig, offload
from expertcast.runtime.config import remarks
from expertcast.runtime.policies import MISS, PRESETS, ROUTING, Policies
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy
from tests.runtime.faults import INPUTS

LINES: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"predictor": "next_norm", "ahead": 2, "reach": 3, "overfetch": 1.5, "forecasts": "worth"}, []),
    ({"mode": "speculate", "predictor": "next_norm", "policies": Policies(miss="drop")}, []),
    ({"mode": "hybrid", "predictor": "next_norm", "min_recall": 0.5, "true_weights": True}, []),
    ({"policies": "on_demand"}, []),
    ({"policies": "specmd_5"}, []),
    ({"policies": Policies(prefetch="value"), "predictor": "next_norm"}, []),
    ({"layers": (1,), "true_weights": True}, ["layers, true_weights have no effect in mode 'exact'"]),
    ({"speculate_prefill": True}, ["speculate_prefill has no effect in mode 'exact'"]),
    (
        {"mode": "speculate", "predictor": "next_norm", "min_recall": 0.5},
        ["min_recall has no effect unless mode 'hybrid' chooses its layers by it"],
    ),
    ({"policies": Policies(prefetch="value")}, ["prefetch 'value' has no effect without a predictor"]),
    (
        {"policies": Policies(prefetch="top_k:overfetch=2.0", pre_eviction="gap"), "ahead": 2},
        ["ahead, prefetch 'top_k:overfetch=2.0', pre_eviction 'gap' have no effect without a predictor"],
    ),
    ({"overfetch": 2.0, "forecasts": "worth"}, ["forecasts, overfetch have no effect without a predictor"]),
    ({"overfetch": 2.0, "cache": False}, []),
    (
        {"cache": False, "predictor": "next_norm", "forecasts": "worth"},
        ["forecasts has no effect without a cache"],
    ),
    (
        {"policies": Policies(eviction="forecast"), "likely": 0.5},
        ["likely, looking ahead by eviction 'forecast' have no effect without next_token"],
    ),
    ({"policies": Policies(eviction="forecast"), "likely": 0.5, "next_token": "folder"}, []),
    (
        {"policies": Policies(miss="cascade", routing="cache_aware:strength=0.1")},
        [
            "miss 'cascade' and routing 'cache_aware' may change the output, in mode 'exact' too: only lossless "
            "policies leave every bit"
        ],
    ),
]


@pytest.mark.parametrize(("fields", "lines"), LINES)
def test_lines(fields: dict[str, Any], lines: list[str]) -> None:
    assert remarks(OffloadConfig(**fields)) == lines


def test_every_lossy_policy_says_so() -> None:
    lossless = {"miss": {"fetch"}, "routing": {"standard"}}
    for kind, registry in (("miss", MISS), ("routing", ROUTING)):
        for name in registry.names():
            said = remarks(OffloadConfig(policies=Policies(**{kind: name})))
            assert said == [] if name in lossless[kind] else said[0].startswith(f"{kind} '{name}' may change")
    for name, preset in PRESETS.items():
        said = " ".join(remarks(OffloadConfig(policies=name)))
        assert (f"of preset {name!r} may change the output" in said) == preset.policies.lossy


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("qwen3_moe")


def test_an_offload_warns(model: PreTrainedModel) -> None:
    expected = greedy(model, INPUTS)
    with pytest.warns(UserWarning, match="miss 'fetch_lowest' may change the output") as told:
        lossy = offload(model, slots=4, policies=Policies(miss="fetch_lowest"))
    with lossy:
        got = greedy(lossy, INPUTS)
        assert any(not (own == other).all() for own, other in zip(got[1], expected[1], strict=True))
    assert [warning.filename for warning in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with offload(model, slots=5, predictor="next_norm", policies=Policies(prefetch="value")) as offloaded:
            assert_same(greedy(offloaded, INPUTS), expected)


def test_generate_says_so_in_one_line(tmp_path: Path) -> None:
    words = ["generate", "reference", "--prompt", "It is", "--new-tokens", "3", "--slots", "48"]
    with pytest.warns(UserWarning, match="may change the output") as told:
        assert main([*words, "--policies", "specmd_4", "--json", str(tmp_path / "found.json")]) == 0
    (warning,) = [warning for warning in told if "may change" in str(warning.message)]
    shown = warnings.formatwarning(warning.message, warning.category, warning.filename, warning.lineno)
    assert shown == f"warning: {remarks(OffloadConfig(policies='specmd_4'))[0]}\n", "as the command line prints it"
    assert json.loads((tmp_path / "found.json").read_text())["stats"]["requests"] > 0
