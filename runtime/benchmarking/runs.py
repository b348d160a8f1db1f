"""Greedy decoding with every step timed, a store shared by several offloads, and the peer.

The peer is the same model under accelerate's own CPU offload, what a transformers user would otherwise take. accelerate
moves whole modules: all experts of a layer for every token, whichever of them are routed to. Its hooks load a module's
weights before its forward and drop them after it; what fits the memory stays on the device (`device_map`).

V vocabulary, L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from expertcast.data.machine import with_index
from expertcast.data.moe_layers import experts_implementation, find_moe_layers
from expertcast.predictors import MoEView
from expertcast.predictors.messages import Json, Progress
from expertcast.runtime.benchmarking.shapes import weight_bytes
from expertcast.runtime.engine.kernels import kernel_name
from expertcast.runtime.offloading import OffloadedModel
from expertcast.runtime.recording.recorder import Recorder
from expertcast.runtime.storage.layout import BlockLayout
from expertcast.runtime.storage.store import ExpertStore


@dataclass(slots=True)
class Decoding:
    """One greedy decoding."""

    tokens: list[int]
    logits: list[Tensor]
    """Logits [V] from which each token was taken."""
    ttft_s: float
    """Prefill up to the first token."""
    steps_s: list[float]
    """Each further token."""


@torch.no_grad()
def decode_greedily(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    new_tokens: int,
    *,
    offloaded: OffloadedModel | None = None,
    recorder: Recorder | None = None,
) -> Decoding:
    """Decode `new_tokens` tokens (an end-of-text token does not stop it).

    Statistics and recording start after the prefill: both are about the tokens after the first.

    Args:
        model: the model, offloaded or not.
        prompt_ids: [1, T] on the model's device.
        new_tokens: how many are decoded.
        offloaded: the offload that the model runs under.
        recorder: the one that the offload was given.
    """
    cache = DynamicCache(config=model.config)
    decoding = Decoding([], [], 0.0, [])
    inputs = prompt_ids
    for step in Progress("decoding", unit="token", steps=range(new_tokens)):
        start = _now(prompt_ids.device)
        if recorder is not None:
            recorder.step_start()
        logits_V = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        inputs = logits_V.argmax().view(1, 1)
        if recorder is not None:
            recorder.step_end()
        seconds = _now(prompt_ids.device) - start
        decoding.logits.append(logits_V)
        if step:
            decoding.steps_s.append(seconds)
        else:
            decoding.ttft_s = seconds
            if offloaded is not None:
                offloaded.reset_stats()
            if recorder is not None:
                recorder.clear()
        decoding.tokens.append(int(inputs))
    return decoding


def balanced_bandwidth(model: PreTrainedModel, resident: Decoding) -> float:
    """Bytes per second at which K copies take as long as one layer of the resident model."""
    view = find_moe_layers(model)
    layer_s = statistics.median(resident.steps_s) / len(view)
    return view.shape.top_k * BlockLayout.of(view).block_bytes / layer_s


def same_logits(one: Decoding, other: Decoding) -> bool:
    """Whether the logits of every step that both have are the same bits."""
    return all(torch.equal(own, its) for own, its in zip(one.logits, other.logits, strict=False))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class LentStore(ExpertStore):
    """A store that one model's offloads use in turn: the experts are packed once. `give_back` ends it.

    Between offloads the model's experts are views of the blocks in host memory: a model that computes on the CPU runs
    as ever, one on `device` runs inside :meth:`resident`, while its experts may still lie on the CPU.
    """

    def __init__(self, view: MoEView, device: torch.device) -> None:
        super().__init__(view, device=device, pinned=device.type == "cuda")
        self._view = view
        super().pack(view)
        self._lend(self.views)

    def pack(self, view: MoEView) -> None:
        """The blocks are there already."""
        assert view[0].experts is self._view[0].experts, "a lent store belongs to one model"

    def unpack(self) -> None:
        """An offload is over: the next one finds the experts' shapes on the model."""
        self._lend(self.views)

    def close(self) -> None:
        """An offload is over; the blocks stay."""

    def give_back(self, device: torch.device | None = None) -> None:
        """Put the weights into the model's own parameters (on `device`, or where it computes) and free the blocks."""
        if device is not None:
            self.device = device
        super().unpack()
        super().close()

    @property
    def fits(self) -> bool:
        """Whether the whole model has room where it computes."""
        if self.device.type != "cuda":
            return True
        return torch.cuda.mem_get_info(self.device)[0] > 1.1 * self.nbytes

    @contextmanager
    def resident(self) -> Iterator[None]:
        """All experts are where the model computes."""
        if self.device.type != "cuda":
            yield
            return

        def on_device(layer: int) -> dict[str, Tensor]:
            blocks = self._layer_bytes[layer]
            assert blocks is not None
            return self.layout.views(blocks.to(self.device))

        self._lend(on_device)
        try:
            yield
        finally:
            self._lend(self.views)
            torch.cuda.empty_cache()

    def _lend(self, views: Callable[[int], dict[str, Tensor]]) -> None:
        """Make these [E, ...] tensors the model's parameters."""
        for layer in self._view:
            for name, tensor in views(layer.index).items():
                layer.experts._parameters[name] = nn.Parameter(tensor, requires_grad=False)


def without_experts_to(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Move a model to a device and leave its experts where they are; a model that is there stays as it is."""
    if next(model.parameters()).device == with_index(device):
        return model
    kept = [(layer.experts._parameters, dict(layer.experts._parameters)) for layer in find_moe_layers(model)]
    for parameters, _ in kept:
        parameters.clear()
    try:
        return model.to(device)
    finally:
        for parameters, own in kept:
            parameters.update(own)


ON_CPU = (
    "the model computes on the CPU, where its weights are: accelerate moves nothing here, so its time shows what its "
    "hooks cost and not what its copies cost; moved_bytes is what it would move per token, and least_tpot_s those "
    "bytes over the emulated link (calculated, not measured)"
)


def measure_peer(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    *,
    memory: int,
    new_tokens: int = 4,
    bandwidth: float | None = None,
    truth: Decoding | None = None,
) -> Json:
    """Decode under accelerate's offload, which starts from a model on the CPU; it is left there, without hooks.

    Args:
        model: a model that is not offloaded.
        prompt_ids: [1, T] on the model's device, where the computation stays.
        memory: bytes of the device that weights may take: what the offloaded runs take.
        new_tokens: how many are decoded.
        bandwidth: of the emulated link, bytes per second, for `least_tpot_s` on the CPU.
        truth: the first tokens of what it must decode.

    Returns:
        `tpot_s`, `ttft_s`, `moved_bytes` per token, `identical`, `note`.
    """
    device = prompt_ids.device
    model.to("cpu")
    try:
        device_map = _device_map(model, memory)
        moved = _offloaded_bytes(model, device_map)
        _dispatch(model, device_map, device)
        with experts_implementation(model, kernel_name(model)):
            decode_greedily(model, prompt_ids[:, :8], 2)  # warm-up
            decoding = decode_greedily(model, prompt_ids, new_tokens)
    finally:
        _restore(model)
    tpot_s = statistics.median(decoding.steps_s)
    on_cpu = device.type == "cpu"
    return {
        "tpot_s": tpot_s,
        "ttft_s": decoding.ttft_s,
        "new_tokens": new_tokens,
        "moved_bytes": moved,
        "least_tpot_s": moved / bandwidth if on_cpu and bandwidth else None,
        "identical": None if truth is None else same_logits(decoding, truth),
        "note": ON_CPU if on_cpu else "measured",
    }


def _device_map(model: PreTrainedModel, memory: int) -> dict[str, int | str]:
    """Module name to 0 (the device) or "cpu": as much as the memory holds stays on the device."""
    from accelerate import infer_auto_device_map

    logging.getLogger("accelerate").setLevel(logging.ERROR)  # it says that a CPU is no device 0
    found: dict[str, int | str] = infer_auto_device_map(
        model, max_memory={0: memory, "cpu": 2 * weight_bytes(model)}, no_split_module_classes=model._no_split_modules
    )
    return found


def _offloaded_bytes(model: PreTrainedModel, device_map: dict[str, int | str]) -> int:
    """Bytes of the weights that are not on the device: each forward moves them all."""
    away = [name for name, where in device_map.items() if where == "cpu"]
    return sum(
        parameter.numel() * parameter.dtype.itemsize
        for name, parameter in model.named_parameters()
        if any(not module or name.startswith(module + ".") for module in away)
    )


def _dispatch(model: PreTrainedModel, device_map: dict[str, int | str], device: torch.device) -> None:
    from accelerate import cpu_offload, dispatch_model

    if device.type == "cpu":
        cpu_offload(model, execution_device=device)
        return
    places = {name: device if where == 0 else where for name, where in device_map.items()}
    dispatch_model(model, places, main_device=device, force_hooks=True)


def _restore(model: PreTrainedModel) -> None:
    from accelerate.hooks import remove_hook_from_submodules

    remove_hook_from_submodules(model)
    model.__dict__.pop("hf_device_map", None)
    for name in ("to", "cuda"):  # dispatch_model puts warnings in their place
        model.__dict__.pop(name, None)
    model.to("cpu")
