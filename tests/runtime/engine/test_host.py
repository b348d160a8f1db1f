"""Misses that the host computes: the bits of the resident model, and the choice between link and host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast import offload
from expertcast.runtime.policies import Policies
from tests.runtime.conftest import assert_same, greedy
from tests.runtime.drafts.loops import SLOTS, prompt
from tests.runtime.drafts.test_identity import EACH, FAMILIES, unlimited

OVERFETCH = Policies(prefetch="top_k:overfetch=2.0")
WAYS: list[dict[str, Any]] = [
    {"slots": 64, "misses": "host"},
    {"slots": 64, "misses": "auto"},
    {"slots": 64, "misses": "host", "predictor": "next_norm", "forecasts": "always"},
    {"slots": 64, "misses": "auto", "predictor": "router_input", "forecasts": "always", "policies": OVERFETCH},
    {"slots": 96, "misses": "auto", "cache": False},
    {"slots": 96, "misses": "host", "policies": Policies(scope="layer")},
]


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_sequences_and_batches(
    way: int, reference_model: PreTrainedModel, one: dict[str, Tensor], four: dict[str, Tensor]
) -> None:
    expected = [greedy(reference_model, inputs) for inputs in (one, four)]
    with offload(reference_model, bandwidth=2e7, **WAYS[way]) as offloaded:
        for inputs, own in zip((one, four), expected, strict=True):
            assert_same(greedy(offloaded, inputs), own)
        total = offloaded.stats.total
        assert 0 < total.on_host <= total.misses
        assert total.hits + total.misses == total.requests
        assert (total.bytes_moved == offloaded.link.bytes_moved) or offloaded.residency.copies


@pytest.mark.parametrize("kernel", ["batched_mm", "grouped_mm"])
def test_the_models_own_kernel(kernel: str, reference_fp32: PreTrainedModel, four: dict[str, Tensor]) -> None:
    before = reference_fp32.get_experts_implementation()
    reference_fp32.set_experts_implementation(kernel)
    try:
        expected = greedy(reference_fp32, four, 4)
        with offload(reference_fp32, slots=64, link="emulated", misses="host") as offloaded:
            assert_same(greedy(offloaded, four, 4), expected)
            assert offloaded.stats.total.on_host > 0
    finally:
        reference_fp32.set_experts_implementation(before)


@pytest.mark.parametrize("family", FAMILIES)
def test_drafts(family: str) -> None:
    ids_BS = prompt()
    model = unlimited(family)
    expected = model.generate(ids_BS, max_new_tokens=10, do_sample=False)
    for misses in ("host", "auto") if family == "qwen3_moe" else ("host",):
        options: dict[str, Any] = {"predictor": "next_norm", "forecasts": "always", "misses": misses}
        with offload(model, slots=SLOTS, bandwidth=1e7, **options) as offloaded:
            for draft in EACH:
                got = offloaded.generate(ids_BS, max_new_tokens=10, do_sample=False, draft=draft)
                assert torch.equal(got, expected), (misses, draft)
            assert offloaded.stats.total.on_host > 0


def test_an_error_of_the_host_ends_the_forward(reference_model: PreTrainedModel, one: dict[str, Tensor]) -> None:
    """The next one starts anew."""
    expected = greedy(reference_model, one, 4)
    with offload(reference_model, slots=64, link="emulated", misses="host") as offloaded:
        host = offloaded.flow.host
        assert host is not None
        run_pairs = host.run_pairs

        def fail(*_args: object) -> Tensor:
            raise MemoryError("none left")

        host.run_pairs = fail
        with pytest.raises(MemoryError, match="none left"):
            greedy(offloaded, one, 4)
        host.run_pairs = run_pairs
        assert_same(greedy(offloaded, one, 4), expected)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"link": "instant"}, "over link 'instant'"),
        ({"store": "disk"}, "without all experts in memory"),
        ({"link": "emulated", "policies": Policies(miss="drop")}, "with miss 'drop'"),
    ],
)
def test_misses_are_copied_where_the_host_cannot_compute(
    options: dict[str, Any], reason: str, reference_model: PreTrainedModel
) -> None:
    with pytest.warns(UserWarning, match=f"misses 'host' has no effect {reason}"):
        offload(reference_model, slots=64, misses="host", **options).close()
