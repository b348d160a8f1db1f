"""Policies in the runtime: lossless ones leave every bit, lossy ones say what they did."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.predictors import ExpertcastError
from expertcast.runtime import offload
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.policies import EVICTION, PREFETCH, PRESETS, Policies
from expertcast.runtime.quality.policies import measure_policies
from tests.runtime.conftest import assert_same, greedy

ONLINE = [name for name in EVICTION.names() if not EVICTION.choose(name).cls.offline]


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_every_eviction_policy_is_exact(reference_model: PreTrainedModel, one: dict[str, Tensor], scope: str) -> None:
    expected = greedy(reference_model, one)
    for eviction in ONLINE:
        policies = Policies(eviction=eviction, scope=scope)
        with offload(reference_model, policies=policies, slots=60, predictor="router_input") as offloaded:
            assert_same(greedy(offloaded, one), expected)
            total = offloaded.stats.total
        assert 0 < total.misses < total.requests, eviction
        assert total.evicted > 0, eviction
        assert total.hits + total.misses == total.requests
        assert total.skipped == 0


def test_every_selection_is_exact(reference_model: PreTrainedModel, one: dict[str, Tensor]) -> None:
    expected = greedy(reference_model, one)
    prefetched = {}
    for selection in PREFETCH.names():
        policies = Policies(prefetch=selection, pre_eviction="gap", eviction="importance")
        with offload(
            reference_model, policies=policies, slots=60, predictor="router_input", bandwidth=2e9
        ) as offloaded:
            assert_same(greedy(offloaded, one), expected)
            prefetched[selection] = offloaded.stats.total.prefetched
    assert prefetched.pop("none") == 0
    assert all(count > 0 for count in prefetched.values()), prefetched


def test_per_layer_shares(reference_model: PreTrainedModel, one: dict[str, Tensor]) -> None:
    """63 slots in 12 layers: 6 for the first three, 5 for the others; never more, and nothing lost."""
    with offload(reference_model, policies=Policies(scope="layer"), slots=63) as offloaded:
        greedy(offloaded, one)
        held = [len(offloaded.residency.held(layer)) for layer in range(12)]
        assert held == [6] * 3 + [5] * 9
        assert len(offloaded.pool.free_slots) == 0


@pytest.mark.slow
def test_lossy_runs_say_so(reference_model: PreTrainedModel) -> None:
    """Every lossy policy changes what is executed, and reports how far the output moves; lossless ones do not."""
    ids = torch.randint(0, 4096, (2, 26), generator=torch.Generator().manual_seed(0))
    lossy: dict[str, Any] = {
        "drop": Policies(miss="drop"),
        "substitute": Policies(miss="substitute"),
        "cache_aware": Policies(routing="cache_aware"),
        "activeevict": PRESETS["activeevict"].policies,
    }
    packed = {name: Policies(miss=name) for name in ("fetch_lowest", "fetch_priority", "cascade", "drop_cascade")}
    runs = {name: OffloadConfig(policies=policies, slots=60) for name, policies in (lossy | packed).items()}
    runs["activeevict"] = dataclasses.replace(runs["activeevict"], predictor=PRESETS["activeevict"].predictor)
    runs["lossless"] = OffloadConfig(policies=Policies(eviction="least_stale"), slots=60)
    result = measure_policies(reference_model, ids, runs, prefill=8)
    assert result["tokens"] == 36
    measured = result["runs"]
    exact = measured.pop("exact")
    assert exact["kl"] == 0.0
    assert exact["top1_agreement"] == exact["executed_recall"] == 1.0
    lossless = measured.pop("lossless")
    assert lossless["kl"] == 0.0
    assert lossless["perplexity"] == exact["perplexity"]
    for name, run in measured.items():
        assert run["kl"] > 0, name
        assert run["executed_recall"] < 1.0, name  # other experts or other weights: later layers route otherwise
        assert (run["skipped"] > 0) == (name not in ("fetch_lowest", "fetch_priority", "cascade")), name
        if (lossy | packed)[name].scope == "global":
            assert run["bytes"] < lossless["bytes"], name


def test_presets_run(reference_model: PreTrainedModel, one: dict[str, Tensor]) -> None:
    expected = greedy(reference_model, one)
    for name, preset in PRESETS.items():
        with offload(reference_model, policies=name, slots=96, bandwidth=2e9) as offloaded:
            found = greedy(offloaded, one)
            assert offloaded.policies == preset.policies
            total = offloaded.stats.total
        prefetches = preset.predictor is not None and preset.policies.prefetch.name != "none"
        assert (total.prefetched > 0) == prefetches, name
        if not preset.policies.lossy:
            assert_same(found, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policies": "specmd_9"}, "unknown preset 'specmd_9': choose from on_demand, moe_offloading, "),
        ({"policies": Policies(), "overfetch": 2.0}, "give Policies(prefetch='top_k:overfetch=1.5')"),
        ({"policies": Policies(eviction="belady")}, "eviction 'belady' needs to know the future"),
        ({"policies": Policies(eviction="lfu"), "link": "kernel"}, "without policies other than lru over all slots"),
        ({"policies": Policies(scope="layer"), "slots": 47}, "give slots=48 or more, or scope='global'"),
    ],
)
def test_bad_arguments(reference_model: PreTrainedModel, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ExpertcastError, match=re.escape(message)):
        offload(reference_model, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"miss": "fetsch"}, "unknown miss policy 'fetsch': choose from fetch, "),
        ({"scope": "model"}, "unknown scope 'model': choose from global, layer"),
        ({"routing": "standard:x=1"}, "routing policy 'standard' has no option 'x=1'"),
    ],
)
def test_bad_policies(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ExpertcastError, match=re.escape(message)):
        Policies(**arguments)
