"""A store that one model's offloads use in turn: its experts are packed once, however many runs a benchmark has.

L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from expertcast.data.devices import with_index
from expertcast.data.discovery import find_moe_layers
from expertcast.predictors import MoEView
from expertcast.runtime.storage.store import ExpertStore


class LentStore(ExpertStore):
    """Give it to :func:`expertcast.offload` as `store`, as often as needed; `give_back` ends it.

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
