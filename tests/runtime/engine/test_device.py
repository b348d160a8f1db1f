"""Offloading with link='kernel': the resident model's bits, the ordinary engine's counts, no host reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError
from expertcast.predictors.baselines import PreviousToken
from expertcast.runtime import offload
from expertcast.runtime.experimental.graph_decoder import GraphDecoder
from expertcast.runtime.experimental.kernel_link import KernelLink
from expertcast.runtime.recording.recorder import Recorder
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy

CONFIGURATIONS: list[dict[str, Any]] = [
    {"slots": 4},
    {"slots": 5, "predictor": "next_norm"},
    {"slots": 24},
    {"slots": 96, "predictor": "next_norm"},
    {"slots": 300, "predictor": "router_input", "overfetch": 2.0},
    {"cache": False, "predictor": "next_norm"},
]


@pytest.mark.parametrize(("prompts", "configurations"), [("one", CONFIGURATIONS), ("four", CONFIGURATIONS[::2])])
def test_same_bits_as_the_resident_model(
    reference_fp32: PreTrainedModel, request: pytest.FixtureRequest, prompts: str, configurations: list[dict[str, Any]]
) -> None:
    inputs = request.getfixturevalue(prompts)
    reference_fp32.set_experts_implementation("grouped_mm")
    expected = greedy(reference_fp32, inputs, 5)
    for configuration in configurations:
        with offload(reference_fp32, link="kernel", **configuration) as offloaded:
            assert_same(greedy(offloaded, inputs, 5), expected)
            total = offloaded.stats.total
            assert offloaded.link.bytes_moved == total.bytes_moved > 0
            assert offloaded.link.copies == total.misses + total.prefetched
            assert offloaded.link.busy_s > 0
            offloaded.reset_stats()
            assert offloaded.stats.total.requests == offloaded.link.copies == 0
    assert_same(greedy(reference_fp32, inputs, 5), expected)


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "glm4_moe_lite"])
@pytest.mark.parametrize("mode", ["exact", "speculate"])
def test_other_families_as_the_ordinary_engine(family: str, mode: str) -> None:
    model = tiny_model(family)
    inputs = {"input_ids": torch.tensor([[3, 4, 5, 9]])}
    runs = []
    for link in ("instant", "kernel"):
        with offload(model, link=link, slots=6, predictor="next_norm", mode=mode) as offloaded:
            runs.append(greedy(offloaded, inputs, 8))
    assert_same(runs[1], runs[0])


@pytest.mark.parametrize("configuration", [{"slots": 8}, {"slots": 96}, {"cache": False}])
def test_counts_on_demand_are_those_of_the_ordinary_engine(
    reference_fp32: PreTrainedModel, one: dict[str, Tensor], configuration: dict[str, Any]
) -> None:
    counts = []
    for link in ("instant", "kernel"):
        with offload(reference_fp32, link=link, **configuration) as offloaded:
            greedy(offloaded, one, 4)
            counts.append(offloaded.stats.as_dict())
    for stats in counts:
        for layer in (stats, *stats["per_layer"]):
            for name in ("waited_s", "evicted", "collisions"):  # not counted on the device
                del layer[name]
    assert counts[0] == counts[1]


def test_prefetches_hit_as_often(reference_fp32: PreTrainedModel, one: dict[str, Tensor]) -> None:
    rates = []
    for link in ("instant", "kernel"):
        with offload(reference_fp32, link=link, slots=96, predictor="next_norm", forecasts="always") as offloaded:
            greedy(offloaded, one, 8)
            rates.append(offloaded.stats.hit_rate)
            assert offloaded.stats.total.prefetched_used > 50
    assert rates[1] == pytest.approx(rates[0], abs=0.02)  # ties in age are broken differently


class _NoHost(TorchFunctionMode):
    """Raises on operations that bring a tensor's value to the host, or whose shape depends on one."""

    FORBIDDEN = frozenset(
        {
            "item", "tolist", "numpy", "cpu", "nonzero", "unique", "masked_select", "equal", "allclose", "__bool__",
            "__int__", "__float__", "__index__", "is_nonzero", "argwhere", "bincount",
        }
    )  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert name not in self.FORBIDDEN, f"{name} needs the host"
        if name == "__getitem__":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(part, Tensor) and part.dtype == torch.bool for part in index)
        return func(*args, **(kwargs or {}))


@contextmanager
def _as_if_captured(link: KernelLink, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Refuse operations that a capture forbids; only copies run as usual."""
    plain = link._copier.copy

    def copy(moves: Any) -> None:
        with torch._C.DisableTorchFunction():
            plain(moves)

    with monkeypatch.context() as patch, _NoHost():
        patch.setattr(link._copier, "copy", copy)
        patch.setattr("expertcast.data.taps.capturing", lambda: True)
        patch.setattr("expertcast.runtime.experimental.device_engine.capturing", lambda: True)
        patch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True)
        yield


@pytest.mark.parametrize(
    "configuration",
    [
        {"slots": 24},
        {"slots": 24, "predictor": "next_norm", "overfetch": 1.5},
        {"slots": 24, "predictor": "next_norm", "mode": "speculate"},
        {"predictor": "router_input", "cache": False},
    ],
)
def test_decode_steps_ask_the_device_for_no_value(
    reference_fp32: PreTrainedModel,
    one: dict[str, Tensor],
    configuration: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference_fp32.set_experts_implementation("batched_mm")  # on the CPU, grouped_mm over slots counts on the host
    try:
        with offload(reference_fp32, link="kernel", **configuration) as offloaded:
            link = offloaded.link
            assert isinstance(link, KernelLink)
            decoder = GraphDecoder(offloaded, 64)
            decoder.start(one["input_ids"])
            expected = [decoder.step().clone() for _ in range(4)]
            link.residency.clear()
            decoder.start(one["input_ids"])
            with _as_if_captured(link, monkeypatch):
                got = [decoder.step().clone() for _ in range(4)]
        assert all(torch.equal(own, other) for own, other in zip(got, expected, strict=True))
    finally:
        reference_fp32.set_experts_implementation("grouped_mm")


class TestGraphDecoder:
    def test_generates_what_generate_does(self, reference_fp32: PreTrainedModel, one: dict[str, Tensor]) -> None:
        expected = greedy(reference_fp32, one, 8)[0]
        with offload(reference_fp32, link="kernel", slots=96, predictor="next_norm") as offloaded:
            decoder = GraphDecoder(offloaded, 64)
            for _ in range(2):
                assert torch.equal(decoder.generate(one["input_ids"], 8), expected)
            assert torch.equal(greedy(offloaded, one, 8)[0], expected)
        with pytest.raises(ExpertcastError, match="closed"):
            decoder.step()

    def test_what_it_refuses(self, reference_fp32: PreTrainedModel, one: dict[str, Tensor]) -> None:
        with (
            offload(reference_fp32, slots=8) as offloaded,
            pytest.raises(ExpertcastError, match="link='kernel'"),
        ):
            GraphDecoder(offloaded, 8)
        remembering = PreviousToken(PreviousToken.config_class(), find_moe_layers(reference_fp32).shape)
        with (
            offload(reference_fp32, link="kernel", predictor=remembering) as offloaded,
            pytest.raises(ExpertcastError, match="'previous_token' keeps the last token's routing"),
        ):
            GraphDecoder(offloaded, 8)
        with (
            offload(tiny_model("gpt_oss"), link="kernel") as offloaded,
            pytest.raises(ExpertcastError, match="sliding-window"),
        ):
            GraphDecoder(offloaded, 8)
        with offload(reference_fp32, link="kernel", slots=8) as offloaded:
            decoder = GraphDecoder(offloaded, 12)
            with pytest.raises(ExpertcastError, match="max_length=12"):
                decoder.generate(one["input_ids"], 8)
            with pytest.raises(ExpertcastError, match=r"shape \[2, 3\]"):
                decoder.start(torch.zeros(2, 3, dtype=torch.int64))
            decoder.start(one["input_ids"])
            for _ in range(12 - one["input_ids"].shape[1]):
                decoder.step()
            with pytest.raises(ExpertcastError, match="max_length=12 is reached"):
                decoder.step()


def test_a_copy_that_fails_leaves_no_wrong_expert(
    reference_fp32: PreTrainedModel, one: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = greedy(reference_fp32, one, 4)
    with offload(reference_fp32, link="kernel", slots=96) as offloaded:
        link = offloaded.link
        assert isinstance(link, KernelLink)
        greedy(offloaded, one, 4)
        with monkeypatch.context() as patch:

            def fail(_moves: Any) -> None:
                raise OSError("bus error")

            patch.setattr(link._copier, "copy", fail)
            with pytest.raises(OSError, match="bus error"):
                offloaded(**one)
        assert_same(greedy(offloaded, one, 4), expected)


def test_recorder_sees_states_and_copies(reference_fp32: PreTrainedModel, one: dict[str, Tensor]) -> None:
    recorder = Recorder()
    with offload(reference_fp32, link="kernel", slots=96, predictor="next_norm", observers=[recorder]) as offloaded:
        recorder.step_start()
        offloaded(**one)
        recorder.step_end()
        assert {span.state for span in recorder.spans()} == {"compute", "forecast", "wait", "policy"}
        assert {span.layer for span in recorder.copies()} == set(range(len(offloaded.view)))
        assert sum(span.seconds for span in recorder.copies()) == pytest.approx(offloaded.link.busy_s)
