"""Selection of policies: refused options, presets, and the runtime with each policy.

Lossless policies keep every bit; lossy ones report what they changed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast import offload
from expertcast.predictors import ExpertcastError
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.policies import (
    EVICTION,
    LRU,
    MISS,
    PRE_EVICTION,
    PREFETCH,
    PRESETS,
    ROUTING,
    CacheShape,
    Choice,
    Fetch,
    Policies,
    PolicyConfig,
    RoutingPolicy,
    TopK,
)
from expertcast.runtime.policies.miss import Lookup, MissDecision
from expertcast.runtime.policies.prefetch import Candidates, TopKConfig
from expertcast.runtime.policies.routing import RouterOutput
from expertcast.runtime.policies.settings import preset
from expertcast.runtime.quality import measure_policies
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy, refused

# What is refused

REGISTRIES = {"eviction": EVICTION, "prefetch": PREFETCH, "miss": MISS, "routing": ROUTING, "pre": PRE_EVICTION}
SHAPE = CacheShape(layers=4, experts=8, top_k=2, slots=16)


BAD = {
    "eviction": """
        next_use:hedge=true importance:alpha=2 importance:gamma=0 least_stale:order=layer""",
    "pre": "gap:tau=2 gap:r_max=-1 gap:rmax=1",
    "prefetch": """
        percentile:percentile=100 percentile:percentile=0 percentile:share=2
        top_k:overfetch=0.5 top_k:overfetch=1e6 top_k:overfetch=nan""",
    "miss": """
        fetch_lowest:levels=int3 fetch_lowest:levels= fetch_lowest:levels=int4/int8 fetch_lowest:levels=int4/int4
        cascade:levels=full cascade:levels=full/int8/int4/int2
        cascade:important=0.1,minor=0.2 cascade:minor=-1 drop_cascade:minor=nan drop_cascade:fetched=0 drop:fetched=0
        drop:ranks=2 substitute:tolerance=1.5""",
    "routing": "cache_aware:strength=-1 cache_aware:keep=-1 cache_aware:keep=3 budget:k_max=1",
}
"""K is 2."""


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in BAD.items() for text in texts.split()])
def test_bad_options(kind: str, text: str) -> None:
    """One line that names the option."""
    with refused(text.partition(":")[2].partition("=")[0]):
        REGISTRIES[kind].choose(text).make(SHAPE)


@pytest.mark.parametrize("kind", REGISTRIES)
def test_unknown_names(kind: str) -> None:
    with pytest.raises(ExpertcastError, match=f"choose from {', '.join(REGISTRIES[kind].names())}"):
        REGISTRIES[kind].choose("nothing")


class Elsewhere(LRU):
    name = "elsewhere"

    def victim(self, protected: Container[int]) -> int | None:
        return 10**6


class Stubborn(LRU):
    name = "stubborn"

    def victim(self, protected: Container[int]) -> int | None:
        return None


class Beyond(TopK):
    name = "beyond"

    def experts(self, candidates: Candidates) -> list[int]:
        return [8]


class Coarse(Fetch):
    name, lossy = "coarse", True

    def decide(self, lookup: Lookup) -> MissDecision:
        return MissDecision(precision=dict.fromkeys(lookup.missing(), "int3"))


class Astray(RoutingPolicy):
    name = "astray"

    def route(self, routed: RouterOutput) -> tuple[Tensor, Tensor]:
        return routed.ids_TK + 8, routed.weights_TK


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"miss": Choice(Coarse, PolicyConfig())}, "miss policy 'coarse' chose int3 at layer 0"),
        ({"routing": Choice(Astray, PolicyConfig())}, r"routing policy 'astray' .* chose \d+"),
        ({"eviction": Choice(Elsewhere, PolicyConfig())}, "eviction policy 'elsewhere' evicts 1000000 for layer"),
        ({"eviction": Choice(Stubborn, PolicyConfig())}, "eviction policy 'stubborn' gives no victim for layer"),
        ({"prefetch": Choice(Beyond, TopKConfig())}, r"prefetch policy 'beyond' chose experts \[8\] of layer 1"),
    ],
)
def test_a_faulty_policy_is_named(policy: dict[str, Any], message: str) -> None:
    model = tiny_model("qwen3_moe")
    with (
        offload(
            model, policies=Policies(**policy), slots=6, predictor="next_norm", bandwidth=1e9, forecasts="always"
        ) as offloaded,
        pytest.raises(ExpertcastError, match=message),
    ):
        offloaded.generate(torch.arange(1, 9).unsqueeze(0), max_new_tokens=8, do_sample=False)


def test_hits_of_a_prefill_are_experts_that_nobody_moved() -> None:
    """The prompt executes all 32 experts, layer by layer: those of the next layer come while one computes."""
    model = tiny_model("qwen3_moe")
    with offload(model, slots=16, bandwidth=1e9) as offloaded:
        assert repr(offloaded.stats).startswith("RunStatistics(requests=0, hits=0 (0.0%)")
        model(torch.arange(64).unsqueeze(0))
        total = offloaded.stats.total
        assert (total.requests, total.hits, total.misses) == (32, 0, 32)
        assert total.bytes_moved == 32 * offloaded.store.layout.block_bytes
        assert offloaded.stats.as_dict()["forecasts"] == {}
        assert "16 slots" in repr(offloaded.residency)


def test_policies_are_written_as_their_arguments() -> None:
    assert eval(repr(Policies(eviction="lfu", scope="layer"))) == Policies(eviction="lfu", scope="layer")


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


# Presets: published systems with the settings of their published runs

SPECMD = [f"specmd_{number}" for number in range(1, 6)]


def test_specmds_table() -> None:
    """The five configurations of SpecMD's Table 1: prefetch, eviction, miss handling and routing."""
    rows = {
        name: (each.prefetch.name, each.eviction.name, each.miss.name, each.routing.name)
        for name, each in ((name, PRESETS[name].policies) for name in SPECMD)
    }
    assert list(rows.values()) == [
        ("top_k", "lru", "fetch", "standard"),
        ("percentile", "score", "substitute", "standard"),
        ("top_k", "lhu", "cascade", "standard"),
        ("none", "lru", "fetch", "cache_aware"),
        ("percentile", "least_stale", "fetch", "standard"),
    ]
    assert [PRESETS[name].predictor for name in SPECMD] == ["router_input"] * 3 + [None, "router_input"]


def test_an_unknown_preset() -> None:
    with pytest.raises(ExpertcastError, match="unknown preset 'fastest': choose from on_demand"):
        preset("fastest")


# In the runtime: 4 layers of 8 experts, 2 per token

INPUTS = {"input_ids": torch.arange(1, 9)[None]}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("qwen3_moe")


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> Any:
    return greedy(model, INPUTS)


@pytest.mark.parametrize("eviction", [name for name in EVICTION.names() if name != "belady"])
def test_every_eviction_policy_is_exact(model: PreTrainedModel, expected: Any, eviction: str) -> None:
    policies = Policies(eviction=eviction, scope="layer" if len(eviction) % 2 else "global")
    with offload(model, policies=policies, slots=10, predictor="router_input", forecasts="always") as offloaded:
        assert_same(greedy(offloaded, INPUTS), expected)
        total = offloaded.stats.total
    assert 0 < total.misses < total.requests
    assert total.evicted > 0
    assert total.hits + total.misses == total.requests
    assert total.skipped == 0


@pytest.mark.parametrize("selection", PREFETCH.names())
def test_every_selection_is_exact(model: PreTrainedModel, expected: Any, selection: str) -> None:
    policies = Policies(prefetch=selection, pre_eviction="gap", eviction="importance")
    with offload(model, policies=policies, slots=10, predictor="router_input", bandwidth=2e9) as offloaded:
        assert_same(greedy(offloaded, INPUTS), expected)
        assert (offloaded.stats.total.prefetched > 0) == (selection != "none")


def test_per_layer_shares(model: PreTrainedModel) -> None:
    """14 slots in 4 layers: 4 for the first two, 3 for the others; never more, and nothing lost."""
    with offload(model, policies=Policies(scope="layer"), slots=14) as offloaded:
        greedy(offloaded, INPUTS)
        assert [len(offloaded.residency.held(layer)) for layer in range(4)] == [4, 4, 3, 3]
        assert len(offloaded.pool.free_slots[0]) == 0


@pytest.mark.parametrize("name", PRESETS)
def test_presets_run(model: PreTrainedModel, expected: Any, name: str) -> None:
    made = PRESETS[name]
    with offload(model, policies=name, slots=12, bandwidth=2e9, forecasts="always") as offloaded:
        found = greedy(offloaded, INPUTS)
        assert offloaded.policies == made.policies
        total = offloaded.stats.total
    prefetches = made.predictor is not None and made.policies.prefetch.name != "none"
    assert (total.prefetched > 0) == prefetches
    if not made.policies.lossy:
        assert_same(found, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policies": "specmd_9"}, "unknown preset 'specmd_9': choose from on_demand, moe_offloading, "),
        ({"policies": Policies(eviction="belady")}, "eviction 'belady' needs"),
        ({"policies": Policies(scope="layer"), "slots": 7}, "give slots=8 or more, or scope='global'"),
    ],
)
def test_bad_arguments(model: PreTrainedModel, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ExpertcastError, match=re.escape(message)):
        offload(model, **arguments)


@pytest.mark.slow
def test_lossy_runs_say_so(reference_model: PreTrainedModel) -> None:
    """Every lossy policy moves the output, and reports how far; lossless ones do not."""
    ids = torch.randint(0, 4096, (2, 26), generator=torch.Generator().manual_seed(0))
    lossy: dict[str, Any] = {
        "drop": Policies(miss="drop"),
        "substitute": Policies(miss="substitute"),
        "cache_aware": Policies(routing="cache_aware"),
        "activeevict": PRESETS["activeevict"].policies,
    }
    packed = {name: Policies(miss=name) for name in ("fetch_lowest", "cascade", "drop_cascade")}
    runs = {name: OffloadConfig(policies=policies, slots=60) for name, policies in (lossy | packed).items()}
    runs["activeevict"] = dataclasses.replace(runs["activeevict"], predictor=PRESETS["activeevict"].predictor)
    runs["lossless"] = OffloadConfig(policies=Policies(eviction="least_stale"), slots=60)
    result = measure_policies(reference_model, ids, runs, prefill=8)
    assert result["tokens"] == 36
    measured = result["runs"]
    exact = measured.pop("exact")
    assert exact["kl"] == 0.0
    assert exact["top1_agreement"] == 1.0
    lossless = measured.pop("lossless")
    assert lossless["kl"] == 0.0
    assert lossless["perplexity"] == exact["perplexity"]
    for name, run in measured.items():
        assert run["kl"] > 0, name
