"""Exact mode: the bits of the resident model, with any slots, link, predictor, batch and step size."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, StaticCache

from expertcast import OffloadedModel, offload
from expertcast.data.traces import TraceDataset
from expertcast.predictors import MoEView, predictor_class
from expertcast.predictors.baselines import Frequency, QuasiHidden
from expertcast.runtime.policies import Policies
from tests.families.models import tiny_model
from tests.runtime.conftest import PROMPT, assert_same, greedy

CONFIGURATIONS: list[dict[str, Any]] = [
    {"slots": 4},
    {"slots": 8, "cache": False},
    {"slots": 8, "cache": False, "predictor": "next_norm", "bandwidth": 2e9, "latency": 1e-5},
    {"slots": 16, "predictor": "router_input", "policies": "prefetch=top_k:overfetch=2.0", "bandwidth": 1e9},
    {"slots": 200, "predictor": "next_norm", "link": "emulated"},
    {"slots": 5000, "predictor": "router_input"},
]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_one_sequence(
    dtype: str, reference_model: PreTrainedModel, reference_fp32: PreTrainedModel, one: dict[str, Tensor]
) -> None:
    model = reference_model if dtype == "bf16" else reference_fp32
    expected = greedy(model, one, 5)
    for configuration in CONFIGURATIONS if dtype == "bf16" else CONFIGURATIONS[:3]:
        with offload(model, **configuration) as offloaded:
            assert_same(greedy(offloaded, one, 5), expected)
            assert offloaded.stats.total.requests > 0
    assert_same(greedy(model, one, 5), expected)


def test_one_slot() -> None:
    """A prompt of a top-1 model runs expert by expert, for all layers together and for each."""
    model = tiny_model("qwen3_moe", num_experts_per_tok=1)
    inputs = {"input_ids": torch.arange(20).unsqueeze(0)}
    expected = greedy(model, inputs, 3)
    for configuration in ({"slots": 1}, {"slots": 4, "policies": Policies(scope="layer")}):
        with offload(model, **configuration) as offloaded:
            assert_same(greedy(offloaded, inputs, 3), expected)


def test_batch_with_left_padding(reference_model: PreTrainedModel, four: dict[str, Tensor]) -> None:
    expected = greedy(reference_model, four)
    for configuration in ({"slots": 6}, {"slots": 64, "predictor": "next_norm", "bandwidth": 2e9}):
        with offload(reference_model, **configuration) as offloaded:
            got = greedy(offloaded, four)
            assert torch.equal(got[0], expected[0])
            if configuration["slots"] == 64:  # every decode step fits: one kernel call, the same bits
                assert_same(got, expected)
            else:
                total = offloaded.stats.total
                assert total.chunks > total.steps, "16 experts and 6 slots: steps in chunks"


def test_prefill_in_chunks(reference_model: PreTrainedModel, reference_tokenizer: Any) -> None:
    text = " ".join([PROMPT] * 20)
    inputs = dict(reference_tokenizer(text, return_tensors="pt"))
    sequences, logits = greedy(reference_model, inputs, 6)
    with offload(reference_model, slots=7) as offloaded:
        got_sequences, got_logits = greedy(offloaded, inputs, 6)
        assert offloaded.stats.total.chunks > 100
    assert torch.equal(got_sequences, sequences)
    for own, other in zip(got_logits, logits, strict=True):
        torch.testing.assert_close(own.float(), other.float(), rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("share", [0.25, 0.75])
@pytest.mark.parametrize("options", [{}, {"bandwidth": 2e9}, {"predictor": "router_input", "bandwidth": 2e9}])
@torch.no_grad()
def test_a_prompt_of_all_experts_moves_those_that_have_no_slot(share: float, options: dict[str, Any]) -> None:
    """And a few more, that gave the first ones their slots. Decode steps after it find what they found before."""
    model = tiny_model("qwen3_moe", num_hidden_layers=8, num_experts=32)
    everything, text = 8 * 32, torch.randint(0, 100, (1, 340), generator=torch.Generator().manual_seed(0))

    def outputs() -> Iterator[Tensor]:
        for _ in range(3):
            output = model(text[:, :300])
            yield output.logits
            for token in text[0, 300:]:
                output = model(token.view(1, 1), past_key_values=output.past_key_values)
                yield output.logits

    expected, found = list(outputs()), [(0, 0, 0)]
    with offload(model, slots=int(share * everything), **options) as offloaded:
        for place, logits in enumerate(outputs()):
            assert torch.equal(logits, expected[place])
            if place % 41 in (0, 40):
                total = offloaded.stats.total
                found.append((total.requests, total.hits, total.misses))
    counts = [[now - then for then, now in zip(*pair, strict=True)] for pair in pairwise(found)]
    first, second, third = counts[::2]
    assert first[0] == second[0] == third[0] > 0.95 * everything
    assert max(second[2], third[2]) <= (1.05 - share) * everything
    hits = [hits / requests for requests, hits, _ in counts[1::2]]
    assert min(hits[1:]) > hits[0] - 0.02


def test_trained_predictors(
    reference_model: PreTrainedModel, reference_view: MoEView, reference_traces: TraceDataset, one: dict[str, Tensor]
) -> None:
    shape = reference_view.shape
    quasi = QuasiHidden(QuasiHidden.config_class(ahead=(1, 2)), shape)
    quasi.set_defaults(reference_traces.defaults)
    previous = predictor_class("previous_token")(Frequency.config_class(), shape)
    expected = greedy(reference_model, one)
    with offload(reference_model, predictor=quasi, slots=24, cache=False, forecasts="always") as offloaded:
        assert_same(greedy(offloaded, one), expected)
        near = offloaded.stats.total
    with offload(reference_model, predictor=quasi, slots=24, cache=False, ahead=2, forecasts="always") as offloaded:
        assert_same(greedy(offloaded, one), expected)
        far = offloaded.stats.total
    assert near.prefetched_used > far.prefetched_used
    assert far.prefetched_used > 0.5 * far.prefetched  # chance is K / E = 1/16; prefill requests cannot be forecast
    with offload(reference_model, predictor=previous, slots=24, cache=False, forecasts="always") as offloaded:
        assert_same(greedy(offloaded, one), expected)
        assert offloaded.stats.total.prefetched_used > 0


def test_plain_forward(reference_model: PreTrainedModel, one: dict[str, Tensor]) -> None:
    expected = reference_model(**one, labels=one["input_ids"])
    with offload(reference_model, slots=64, predictor="next_norm", forecasts="always") as offloaded:
        got = offloaded(**one, labels=one["input_ids"])
        assert torch.equal(got.logits, expected.logits)
        assert torch.equal(got.loss, expected.loss)
        with torch.inference_mode():
            assert torch.equal(offloaded(**one).logits, expected.logits)


@pytest.mark.parametrize("kernel", ["batched_mm", "eager"])
def test_the_models_own_kernel(kernel: str, reference_model: PreTrainedModel, one: dict[str, Tensor]) -> None:
    before = reference_model.get_experts_implementation()
    try:
        reference_model.set_experts_implementation("grouped_mm" if kernel == "eager" else kernel)
        expected = greedy(reference_model, one, 4)
        reference_model.set_experts_implementation(kernel)
        if kernel == "eager":
            summed_otherwise = reference_model(**one).logits[:, -1].float()
            assert not torch.equal(summed_otherwise, expected[1][0].float())
            torch.testing.assert_close(summed_otherwise, expected[1][0].float(), rtol=0, atol=0.5)
            with pytest.warns(UserWarning, match="'eager' cannot read slots"):
                offloaded: OffloadedModel = offload(reference_model, slots=64)
        else:
            offloaded = offload(reference_model, slots=64)
        with offloaded:
            assert_same(greedy(offloaded, one, 4), expected)
        assert reference_model.get_experts_implementation()[""] == kernel
    finally:
        reference_model.set_experts_implementation(before)


def test_slot_views_are_read_in_place(reference_model: PreTrainedModel) -> None:
    """The kernel's own multiplication is given memory of the pool, not a copy of it."""
    with offload(reference_model, slots=40) as offloaded:
        pool = offloaded.pool
        low, high = pool.block(0).data_ptr(), pool.block(0).data_ptr() + pool.nbytes
        assert pool.block(0).data_ptr() % 256 == 0
        experts = offloaded.view[3].experts
        for name in ("gate_up_proj", "down_proj"):
            parameter = experts.get_parameter(name)
            assert parameter.shape[0] == 40
            assert low <= parameter.data_ptr() < high
            assert parameter.stride(0) * parameter.element_size() == pool.layout.block_bytes
        with torch.profiler.profile(record_shapes=True) as profile, torch.no_grad():
            offloaded(input_ids=torch.tensor([[5]]))
    one_layer = 40 * pool.layout.block_bytes // 2
    copies = [e for e in profile.events() if e.name in ("aten::contiguous", "aten::clone", "aten::copy_")]
    assert copies
    assert all(torch.Size(shape).numel() < one_layer for e in copies for shape in e.input_shapes[:1] if shape)


# torch.compile: attention, norms and routers are compiled, the runtime is not


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    model = tiny_model("qwen3_moe", torch.float32)
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    yield model
    torch.compiler.reset()  # type: ignore[no-untyped-call]


@torch.no_grad()
def _decode(model: PreTrainedModel, step: Callable[..., Any], tokens: int = 3) -> list[Tensor]:
    """Logits of greedy decode steps over a static cache, whose steps `generate` compiles on CUDA."""
    cache = StaticCache(config=copy.deepcopy(model.config), max_cache_len=32)
    ids, positions = torch.tensor([[3, 4, 5]]), torch.arange(3).unsqueeze(0)
    found, forward = [], model
    for _ in range(tokens):
        output = forward(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        found.append(output.logits[0, -1].clone())
        ids, positions, forward = found[-1].argmax().view(1, 1), positions[:, -1:] + 1, step
    return found


def _compiled(model: PreTrainedModel, backend: str) -> Callable[..., Any]:
    torch.compiler.reset()  # type: ignore[no-untyped-call]
    return torch.compile(model.forward, backend=backend, dynamic=False)


@pytest.mark.parametrize(
    ("mode", "backend"),
    [("exact", "eager"), ("speculate", "eager"), pytest.param("exact", "inductor", marks=pytest.mark.slow)],
)
def test_compiled_steps_decode_the_same(model: PreTrainedModel, mode: str, backend: str) -> None:
    """As steps that are not compiled, to rounding: attention is computed otherwise. In exact mode as the resident
    model's compiled steps, to the bit, where the backend adds no rounding of its own."""
    same = (mode, backend) == ("exact", "eager")
    resident = _decode(model, _compiled(model, backend)) if same else []
    with offload(model, slots=6, predictor="next_norm", mode=mode) as offloaded:
        expected = _decode(model, model)
        total = offloaded.stats.total
        offloaded.reset_stats()
        got = _decode(model, _compiled(model, backend))
        assert offloaded.stats.total.requests == total.requests
        assert offloaded.stats.total.steps == total.steps
    for own, other in zip(got, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(own, other) for own, other in zip(got, resident, strict=same))


# continuous batching: a step holds one token of each request, one behind the other

PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16], [17, 18]]


def _written(model: PreTrainedModel) -> list[list[int]]:
    options = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    memory = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    outputs = model.generate_batch(
        inputs=PROMPTS, generation_config=options, continuous_batching_config=memory, progress_bar=False
    )
    return [outputs[name].generated_tokens for name in sorted(outputs)]


def test_steps_of_several_requests_are_forecast(reference_model: PreTrainedModel) -> None:
    """Tokens stay; most experts of later layers are under way when they are requested."""
    expected = _written(reference_model)
    hits = {}
    for forecasts in ("never", "always", "auto"):
        with offload(
            reference_model, predictor="next_norm", slots=192, bandwidth=5e8, forecasts=forecasts
        ) as offloaded:
            assert _written(reference_model) == expected
            hits[forecasts] = offloaded.stats.hit_rate
            if forecasts == "always":
                assert offloaded.stats.total.prefetched_used > 100
            if forecasts == "auto":
                assert "4" in offloaded.stats.as_dict()["forecasts"]
    assert hits["always"] > hits["never"]
