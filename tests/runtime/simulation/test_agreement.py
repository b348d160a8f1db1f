"""The runtime over the emulated link and the simulator count the same, decision by decision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.text import load_documents
from expertcast.predictors import ExpertcastError
from expertcast.predictors.next_token import NextToken, NextTokenConfig
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.policies import Policies
from tests.runtime.simulation.agreement import compare, measure

LINK = OffloadConfig(bandwidth=2e9)


@pytest.fixture(scope="module")
def prompt_ids(reference_tokenizer: Any) -> torch.Tensor:
    text = load_documents(["reference"])[0].text[:400]
    return torch.tensor([reference_tokenizer(text)["input_ids"][:16]])


RUNS = {
    "lru": (Policies(eviction="lru"), 60),
    "prefill in chunks": (Policies(eviction="lru", scope="layer"), 72),
    "lfu": (Policies(eviction="lfu"), 190),
    "score": (Policies(eviction="score"), 120),
    "drop": (Policies(eviction="least_stale", miss="drop"), 100),
    "packed": (Policies(eviction="lru", miss="fetch_lowest"), 100),
    "cache_aware": (Policies(eviction="lru", routing="cache_aware"), 100),
}


@pytest.mark.parametrize(("policies", "slots"), RUNS.values(), ids=RUNS)
def test_same_counts(
    reference_model: PreTrainedModel, prompt_ids: torch.Tensor, policies: Policies, slots: int
) -> None:
    found = compare(measure(reference_model, prompt_ids, replace(LINK, policies=policies, slots=slots), new_tokens=24))
    measured, simulated = (
        {name: value for name, value in found[side].items() if name != "tpot_s"} for side in ("measured", "simulated")
    )
    assert simulated == measured
    assert found["same_counts"]
    assert measured["hits"] > 0
    assert measured["misses"] > 0
    assert measured["bytes_moved"] > 0


def test_same_forecasts_of_tokens(reference_model: PreTrainedModel, prompt_ids: torch.Tensor) -> None:
    """Both sides look ahead with the same predictor, of random weights. Loads while the link is idle, or when a token
    begins, would depend on time."""
    view = find_moe_layers(reference_model)
    torch.manual_seed(0)
    next_token = NextToken(NextTokenConfig(tokens=2, width=16), view.shape).eval().bind(view)
    assert isinstance(next_token, NextToken)
    torch.nn.init.normal_(next_token.network.head.weight)
    torch.nn.init.normal_(next_token.network.token_VW)
    next_token.know(torch.arange(5000))
    found = {
        name: compare(
            measure(
                reference_model,
                prompt_ids,
                replace(LINK, policies=Policies(eviction=name, prefetch="none"), slots=100, next_token=given),
                new_tokens=24,
            )
        )
        for name, given in {"lru": None, "forecast:idle_loads=0": next_token}.items()
    }
    assert all(each["same_counts"] for each in found.values())
    lru, forecast = (each["measured"]["misses"] for each in found.values())
    assert 0 < forecast != lru


def test_needs_no_more_prompt_than_steps(reference_model: PreTrainedModel, prompt_ids: torch.Tensor) -> None:
    with pytest.raises(ExpertcastError, match="new_tokens=16 for a prompt of 16: give more new tokens"):
        measure(reference_model, prompt_ids, LINK, new_tokens=16)
    with pytest.raises(ExpertcastError, match="no bandwidth for the emulated link"):
        measure(reference_model, prompt_ids, OffloadConfig(), new_tokens=24)
