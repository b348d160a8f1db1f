"""The runtime over the emulated link and the simulator count the same, decision by decision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from expertcast.data.text import load_documents
from expertcast.predictors import ExpertcastError
from expertcast.runtime.policies import Policies
from expertcast.runtime.simulation.agreement import compare, measure

LINK: dict[str, Any] = {"bandwidth": 2e9, "new_tokens": 24}


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
    found = compare(measure(reference_model, prompt_ids, policies=policies, slots=slots, **LINK))
    measured, simulated = (
        {name: value for name, value in found[side].items() if name != "tpot_s"} for side in ("measured", "simulated")
    )
    assert simulated == measured
    assert found["same_counts"]
    assert measured["hits"] > 0
    assert measured["misses"] > 0
    assert measured["bytes_moved"] > 0


def test_needs_no_more_prompt_than_steps(reference_model: PreTrainedModel, prompt_ids: torch.Tensor) -> None:
    with pytest.raises(ExpertcastError, match="new_tokens=16 for a prompt of 16: give more new tokens"):
        measure(reference_model, prompt_ids, policies=Policies(), slots=60, bandwidth=1e9, new_tokens=16)
