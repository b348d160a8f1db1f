"""How one expert's parameters lie in one contiguous block: the same in host memory and in a slot.

block    [ gate_up | down | biases ... ]      each parameter at a multiple of 256 bytes
S blocks [ block 0 | block 1 | ... ]          so that one copy moves one expert
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from expertcast.data.packed_experts import packed_matrices
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import ModelShape, MoEView

# Precisions of experts: the model's own, and those of packed copies.

FULL = "full"
"""The model's own precision."""
PRECISIONS = ("int8", "int4", "int2")
"""Copies that a store can hold beside it, best first."""
_ORDER = (FULL, *PRECISIONS)


def is_better(precision: str, other: str) -> bool:
    """Whether a precision is finer than another."""
    return _ORDER.index(precision) < _ORDER.index(other)


ALIGNMENT = 256
"""Bytes. The kernels of CUDA and of the CPU read weights at 16 and 64; 256 is what CUDA's own allocator keeps."""
_SECTOR = 4096
"""Bytes: a disk is read directly in multiples of it."""


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
    """Fields of the first MoE layer."""
    block_bytes: int
    """Bytes of one expert, padding included, in the layer where they are most."""
    by_layer: tuple[tuple[Field, ...], ...] = ()
    """Fields of each layer; empty: all layers have those of the first one."""

    @classmethod
    def of(cls, view: MoEView) -> BlockLayout:
        """The layout of the experts of a model; packed matrices may have another form in each layer.

        Raises:
            ExpertcastError: layers differ otherwise, or an experts module has no per-expert parameter.
        """
        layouts = [cls._of_module(layer.experts, layer.num_experts) for layer in view]
        for layer, layout in zip(view, layouts, strict=True):
            if layout != layouts[0] and not packed_matrices(layer.experts):
                raise ExpertcastError(
                    f"experts of {layer.experts_name} differ in shape or dtype from those of the first MoE layer: "
                    "one pool of slots needs them alike; not supported"
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
            raise ExpertcastError(f"{type(experts).__name__} holds no [experts, ...] parameter: not supported")
        with torch.no_grad():
            return cls.of_tensors({name: parameter[0] for name, parameter in parameters.items()})

    @classmethod
    def of_tensors(cls, expert: Mapping[str, Tensor]) -> BlockLayout:
        """The layout of an expert that consists of these tensors, by name: shapes and dtypes count, weights do not."""
        fields, offset = [], 0
        for name, tensor in expert.items():
            field = Field(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, offset=offset)
            fields.append(field)
            offset = aligned_bytes(offset + field.nbytes)
        return cls(fields=tuple(fields), block_bytes=offset)

    def nbytes_of(self, layer: int) -> int:
        """Return the first bytes of a block that one layer uses, in whole sectors of a disk where they are fewer."""
        if not self.by_layer:
            return self.block_bytes
        last = self.by_layer[layer][-1]
        return min(-(-(last.offset + last.nbytes) // _SECTOR) * _SECTOR, self.block_bytes)

    def views(self, blocks: Tensor, layer: int = 0) -> dict[str, Tensor]:
        """Each parameter of a layer as a strided view [S, ...] of S blocks, contiguous uint8 [S * block_bytes]."""
        rows = blocks.view(-1, self.block_bytes)
        return {
            field.name: rows[:, field.offset : field.offset + field.nbytes].view(field.dtype).view(-1, *field.shape)
            for field in (self.by_layer[layer] if self.by_layer else self.fields)
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsForm:
    """Form of the experts of a store: their number, and the layout of each in memory."""

    shape: ModelShape
    layout: BlockLayout
    model_id: str = ""
    """Model that the experts come from; a store on disk writes its name down."""

    @classmethod
    def of(cls, view: MoEView) -> ExpertsForm:
        """Return the form of a model's experts.

        Raises:
            ExpertcastError: as :meth:`BlockLayout.of` says.
        """
        return cls(shape=view.shape, layout=BlockLayout.of(view), model_id=view.model_id)


def aligned_bytes(count: int) -> int:
    """The next multiple of 256."""
    return -(-count // ALIGNMENT) * ALIGNMENT


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


def expert_parameters(experts: nn.Module, num_experts: int) -> dict[str, nn.Parameter]:
    """The module's own parameters that hold one row per expert, by name."""
    return {
        name: parameter
        for name, parameter in experts.named_parameters(recurse=False)
        if parameter.dim() > 0 and parameter.shape[0] == num_experts
    }
