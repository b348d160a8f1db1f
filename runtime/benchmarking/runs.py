"""Timed greedy decoding, and a store shared by several offloads.

V vocabulary, L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from expertcast.data.machine import with_index
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import MoEView
from expertcast.predictors.messages import Progress
from expertcast.runtime.offloading import OffloadedModel
from expertcast.runtime.recording.recorder import Recorder
from expertcast.runtime.storage.layout import BlockLayout
from expertcast.runtime.storage.store import ExpertStore


@dataclass(slots=True)
class Decoding:
    """One greedy decoding."""

    tokens: list[int]
    logits: list[Tensor]
    """Logits [V] of each token."""
    ttft_s: float
    """Seconds of the prefill, up to the first token."""
    steps_s: list[float]
    """Seconds of each later token."""


@torch.no_grad()
def decode_greedily(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    new_tokens: int,
    *,
    offloaded: OffloadedModel | None = None,
    recorder: Recorder | None = None,
) -> Decoding:
    """Decode `new_tokens` tokens, past any end-of-text token.

    Statistics and recording start after the prefill and describe the tokens after the first.

    Args:
        model: the model, offloaded or not.
        prompt_ids: [1, T] on the model's device.
        new_tokens: number of tokens.
        offloaded: the model's offload, if any.
        recorder: the offload's recorder, if any.
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
    """Return the bytes per second at which K copies take as long as one layer of the resident model."""
    view = find_moe_layers(model)
    layer_s = statistics.median(resident.steps_s) / len(view)
    return view.shape.top_k * BlockLayout.of(view).block_bytes / layer_s


def same_logits(one: Decoding, other: Decoding) -> bool:
    """Return whether the logits of all common steps are equal bit for bit."""
    return all(torch.equal(own, its) for own, its in zip(one.logits, other.logits, strict=False))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class BorrowedStore(ExpertStore):
    """Store shared by several offloads of one model in turn: experts are packed once. :meth:`give_back` ends it.

    Between offloads the model's experts are views of the blocks in host memory. A model that computes on the CPU runs
    as usual; a model on `device` runs inside :meth:`resident`, and its experts may stay on the CPU otherwise.
    """

    def __init__(self, view: MoEView, device: torch.device) -> None:
        super().__init__(view, device=device, pinned=device.type == "cuda")
        self._view = view
        super().pack(view)
        self._lend(self.views)

    def pack(self, view: MoEView) -> None:
        """Do nothing: the experts are packed already."""
        assert view[0].experts is self._view[0].experts, "a shared store belongs to one model"

    def unpack(self) -> None:
        """Point the model's experts at the blocks again, for the next offload."""
        self._lend(self.views)

    def close(self) -> None:
        """Keep the blocks for the next offload."""

    def give_back(self, device: torch.device | None = None) -> None:
        """Copy the weights into the model's own parameters on `device` (None: the compute device); free the blocks."""
        if device is not None:
            self.device = device
        super().unpack()
        super().close()

    @property
    def fits(self) -> bool:
        """Whether the whole model fits the compute device."""
        if self.device.type != "cuda":
            return True
        return torch.cuda.mem_get_info(self.device)[0] > 1.1 * self.nbytes

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Put all experts on the compute device for a while."""
        if self.device.type != "cuda":
            yield
            return

        def on_device(layer: int) -> dict[str, Tensor]:
            blocks = self._layer_bytes[layer]
            assert blocks is not None
            return self.layout.views(blocks.to(self.device), layer)

        self._lend(on_device)
        try:
            yield
        finally:
            self._lend(self.views)
            torch.cuda.empty_cache()

    def _lend(self, views: Callable[[int], dict[str, Tensor]]) -> None:
        """Set these [E, ...] tensors as the model's parameters."""
        for layer in self._view:
            for name, tensor in views(layer.index).items():
                layer.experts._parameters[name] = nn.Parameter(tensor, requires_grad=False)


def loaded_model(offloaded: OffloadedModel) -> PreTrainedModel:
    """Close an offload of :func:`expertcast.load_offloaded`, and return its model with all of its experts in memory."""
    held = [(layer.experts, offloaded.store.views(layer.index)) for layer in offloaded.view]
    offloaded.close()
    for experts, parts in held:
        for name, part in parts.items():
            experts._parameters[name] = nn.Parameter(part, requires_grad=False)
    return offloaded.model


def without_experts_to(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Move a model to a device without its experts. A model on that device is returned unchanged."""
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
