"""How one expert's parameters lie in one contiguous block: the same in host memory and in a slot.

block    [ gate_up | down | biases ... ]      each parameter at a multiple of 256 bytes
S blocks [ block 0 | block 1 | ... ]          so that one copy moves one expert
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.view import MoEView

ALIGNMENT = 256
"""Bytes. The kernels of CUDA and of the CPU read weights at 16 and 64; 256 is what CUDA's own allocator keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One parameter of the experts module, without its leading expert dimension."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """Bytes from the block's start."""

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter, padding left out."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """The fields of a block, in the order of the module's parameters."""

    fields: tuple[Field, ...]
    block_bytes: int
    """Bytes of one expert, padding included."""

    @classmethod
    def of(cls, view: MoEView) -> BlockLayout:
        """The layout that all MoE layers of a model share.

        Raises:
            ExpertcastError: layers differ, or an experts module has no per-expert parameter.
        """
        layouts = [cls._of_module(layer.experts, layer.num_experts) for layer in view]
        for layer, layout in zip(view, layouts, strict=True):
            if layout != layouts[0]:
                raise ExpertcastError(
                    f"experts of {layer.experts_name} differ in shape or dtype from those of the first MoE layer: "
                    "one pool of slots needs them alike; not supported"
                )
        return layouts[0]

    @classmethod
    def _of_module(cls, experts: nn.Module, num_experts: int) -> BlockLayout:
        fields, offset = [], 0
        for name, parameter in expert_parameters(experts, num_experts).items():
            field = Field(name=name, shape=tuple(parameter.shape[1:]), dtype=parameter.dtype, offset=offset)
            fields.append(field)
            offset = aligned_bytes(offset + field.nbytes)
        if not fields:
            raise ExpertcastError(f"{type(experts).__name__} holds no [experts, ...] parameter: not supported")
        return cls(fields=tuple(fields), block_bytes=offset)

    def views(self, blocks: Tensor) -> dict[str, Tensor]:
        """Each parameter as a strided view [S, ...] of S blocks, contiguous uint8 [S * block_bytes]."""
        rows = blocks.view(-1, self.block_bytes)
        return {
            field.name: rows[:, field.offset : field.offset + field.nbytes].view(field.dtype).view(-1, *field.shape)
            for field in self.fields
        }


def aligned_bytes(count: int) -> int:
    """The next multiple of 256."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def expert_parameters(experts: nn.Module, num_experts: int) -> dict[str, nn.Parameter]:
    """The module's own parameters that hold one row per expert, by name."""
    return {
        name: parameter
        for name, parameter in experts.named_parameters(recurse=False)
        if parameter.dim() > 0 and parameter.shape[0] == num_experts
    }
