"""Layout of one expert's parameters in a contiguous block, the same in host memory and in a slot.

block    [ gate_up | down | biases ... ]      each parameter at a multiple of 256 bytes
S blocks [ block 0 | block 1 | ... ]          one copy moves one expert
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from expertcast.data.packed_experts import packed_matrices
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import ModelShape, MoEView

# Precisions of experts: full, and those of packed copies.

FULL = "full"
"""Precision in which the model computes."""
PRECISIONS = ("int8", "int4", "int2")
"""Precisions of the packed copies that a store can hold beside the full experts, finest first."""
_ORDER = (FULL, *PRECISIONS)


def is_better(precision: str, other: str) -> bool:
    """Whether `precision` is finer than `other`."""
    return _ORDER.index(precision) < _ORDER.index(other)


ALIGNMENT = 256
"""Bytes. CUDA kernels need weights aligned to 16 bytes, CPU kernels to 64; CUDA's allocator aligns to 256."""
SECTOR = 4096
"""Bytes. Direct reads begin and end at a multiple of it, in the file and in memory. Disks need 512 or 4096."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One parameter of the experts module, without its leading expert dimension."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """Bytes from the start of the block."""

    @property
    def nbytes(self) -> int:
        """Bytes of the parameter without padding."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLayout:
    """The fields of a block, in the order of the module's parameters."""

    fields: tuple[Field, ...]
    """Fields of the first MoE layer."""
    block_bytes: int
    """Bytes of one expert, padding included, in the layer where they are most."""
    by_layer: tuple[tuple[Field, ...], ...] = ()
    """Fields of each layer; empty: all layers have those of the first one."""

    @classmethod
    def of(cls, view: MoEView) -> BlockLayout:
        """Return the layout of a model's experts; packed matrices may have another form in each layer.

        Raises:
            ExpertcastError: layers have different layouts otherwise, or an experts module has no per-expert parameter,
                or one without weights.
        """
        layouts = [cls._of_module(layer.experts, layer.num_experts) for layer in view]
        for layer, layout in zip(view, layouts, strict=True):
            if layout != layouts[0] and not packed_matrices(layer.experts):
                raise ExpertcastError(
                    f"experts of {layer.experts_name} differ in shape or dtype from those of the first MoE layer: "
                    "not supported, since all layers share one pool of slots"
                )
        if all(layout == layouts[0] for layout in layouts):
            return layouts[0]
        return cls(
            fields=layouts[0].fields, block_bytes=max(layout.block_bytes for layout in layouts),
            by_layer=tuple(layout.fields for layout in layouts),
        )  # fmt: skip

    @classmethod
    def _of_module(cls, experts: nn.Module, num_experts: int) -> BlockLayout:
        parameters = expert_parameters(experts, num_experts)
        if not parameters:
            raise ExpertcastError(f"{type(experts).__name__} has no parameter of shape [experts, ...]: not supported")
        for name, parameter in parameters.items():
            if not parameter.numel():
                raise ExpertcastError(f"experts have no weights in {name!r}, whose shape is {list(parameter.shape)}")
        with torch.no_grad():
            return cls.of_tensors({name: parameter[0] for name, parameter in parameters.items()})

    @classmethod
    def of_tensors(cls, expert: Mapping[str, Tensor]) -> BlockLayout:
        """Return the layout of an expert with these tensors, by name. Only their shapes and dtypes are read."""
        fields, offset = [], 0
        for name, tensor in expert.items():
            field = Field(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, offset=offset)
            fields.append(field)
            offset = aligned_bytes(offset + field.nbytes)
        return cls(fields=tuple(fields), block_bytes=offset)

    def fields_of(self, layer: int) -> tuple[Field, ...]:
        """Return the fields of a layer."""
        return self.by_layer[layer] if self.by_layer else self.fields

    def nbytes_of(self, layer: int) -> int:
        """Return the number of a block's first bytes that a layer uses, rounded up to whole sectors of a disk."""
        if not self.by_layer:
            return self.block_bytes
        last = self.by_layer[layer][-1]
        return min(sectors(last.offset + last.nbytes), self.block_bytes)

    def views(self, blocks: Tensor, layer: int = 0, block_bytes: int | None = None) -> dict[str, Tensor]:
        """Return a layer's parameters as strided views [S, ...] of S blocks: contiguous uint8 [S * block_bytes].

        One block alone may be cut off behind the bytes that its layer uses.

        Args:
            blocks: the memory.
            layer: the layer.
            block_bytes: bytes from one block to the next; None: those of the layout.
        """
        rows = blocks.view(-1, min(block_bytes or self.block_bytes, len(blocks)))
        return {
            field.name: rows[:, field.offset : field.offset + field.nbytes].view(field.dtype).view(-1, *field.shape)
            for field in self.fields_of(layer)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsForm:
    """Number of experts in a store and the layout of each in memory."""

    shape: ModelShape
    layout: BlockLayout
    model_id: str = ""
    """Model that the experts come from; recorded in the header of a store on disk."""

    @classmethod
    def of(cls, view: MoEView) -> ExpertsForm:
        """Return the form of a model's experts.

        Raises:
            ExpertcastError: see :meth:`BlockLayout.of`.
        """
        return cls(shape=view.shape, layout=BlockLayout.of(view), model_id=view.model_id)


class Region(NamedTuple):
    """Slots of one size, which some layers share."""

    layers: tuple[int, ...]
    slots: int
    """Number of slots."""
    block_bytes: int
    """Bytes of a slot."""


def sectors(nbytes: int) -> int:
    """Round bytes up to whole sectors."""
    return -(-nbytes // SECTOR) * SECTOR


def aligned_bytes(count: int) -> int:
    """Round up to a multiple of 256."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def device_of(view: MoEView) -> torch.device:
    """Return the device that holds all experts.

    Raises:
        ExpertcastError: the model has no weights, or its experts are on several devices.
    """
    devices = {parameter.device for layer in view for parameter in layer.experts.parameters()}
    if any(device.type == "meta" for device in devices):
        raise ExpertcastError("the model has no weights (meta device): load it before offloading")
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ExpertcastError(f"the experts are on several devices ({names}): load the model onto one")
    return devices.pop()


def expert_parameters(experts: nn.Module, num_experts: int) -> dict[str, nn.Parameter]:
    """Return the module's parameters whose first dimension is the expert, by name; submodules are ignored."""
    return {
        name: parameter
        for name, parameter in experts.named_parameters(recurse=False)
        if parameter.dim() > 0 and parameter.shape[0] == num_experts
    }
