"""The experts of a model in host memory: one contiguous, aligned block per expert.

L MoE layers, E routed experts per layer. An expert's key is layer * E + expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.view import MoELayer, MoEView
from expertcast.runtime.layout import BlockLayout, aligned_bytes, expert_parameters


@dataclass(slots=True)
class _Origin:
    """Where one layer's parameter came from, so that it can be put back exactly."""

    module: nn.Module
    name: str
    parameter: nn.Parameter
    size: torch.Size
    stride: tuple[int, ...]


class ExpertStore:
    """Host copies of all experts; page-locked when the model computes on CUDA.

    `pack` takes the weights out of the model layer by layer (no second copy of the whole model exists at
    any time) and `unpack` puts them back into the very same `nn.Parameter` objects, bit for bit.
    """

    def __init__(self, view: MoEView, *, pinned: bool = False) -> None:
        self.layers = len(view)
        self.experts = view.shape.experts
        self.layout = BlockLayout.of(view)
        self.device = self.device_of(view)
        self._blocks = [
            aligned_bytes(self.experts * self.layout.block_bytes, "cpu", pinned=pinned) for _ in range(self.layers)
        ]
        self._origins: list[list[_Origin]] = []

    @property
    def nbytes(self) -> int:
        return self.layers * self.experts * self.layout.block_bytes

    def key(self, layer: int, expert: int) -> int:
        return layer * self.experts + expert

    def block(self, key: int) -> Tensor:
        """uint8 [block_bytes] of one expert."""
        layer, expert = divmod(key, self.experts)
        size = self.layout.block_bytes
        return self._blocks[layer][expert * size : (expert + 1) * size]

    def views(self, layer: int) -> dict[str, Tensor]:
        """One layer's parameters in host memory, [E, ...] by name."""
        return self.layout.views(self._blocks[layer])

    def pack(self, view: MoEView) -> None:
        """Copy every expert into its block and release the model's own memory for it."""
        for layer in view:
            self._origins.append(self._pack_layer(layer))

    def _pack_layer(self, layer: MoELayer) -> list[_Origin]:
        views, origins = self.views(layer.index), []
        for name, parameter in expert_parameters(layer.experts, layer.num_experts).items():
            origins.append(_Origin(layer.experts, name, parameter, parameter.shape, parameter.stride()))
            with torch.no_grad():
                views[name].copy_(parameter)
            parameter.data = parameter.data.new_empty(0)
        return origins

    def unpack(self) -> None:
        """Give every parameter its weights back, on the device it came from."""
        for layer, origins in enumerate(self._origins):
            views = self.views(layer)
            for origin in origins:
                data = torch.empty_strided(origin.size, origin.stride, dtype=origin.parameter.dtype, device=self.device)
                origin.parameter.data = data.copy_(views[origin.name])
                origin.module._parameters[origin.name] = origin.parameter
        self._origins = []

    @staticmethod
    def block_bytes_of(view: MoEView) -> int:
        """Bytes of one expert's block, before anything is packed."""
        return BlockLayout.of(view).block_bytes

    @staticmethod
    def device_of(view: MoEView) -> torch.device:
        """The one device that all experts lie on.

        Raises:
            ExpertcastError: the model has no weights, or is spread over devices.
        """
        devices = {parameter.device for layer in view for parameter in layer.experts.parameters()}
        if any(device.type == "meta" for device in devices):
            raise ExpertcastError("the model has no weights (meta device): load it before offloading")
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ExpertcastError(f"the experts lie on several devices ({names}): load the model onto one")
        return devices.pop()
