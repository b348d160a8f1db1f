"""Sizes of a model's experts in each form."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

from torch import nn

from expertcast.checkpoints.results import Cell
from expertcast.data.inspection import OpenModel
from expertcast.data.packed_experts import Forms, make_packed, weight_bits
from expertcast.predictors.messages import ExpertcastError, format_bytes
from expertcast.predictors.view import MoEView
from expertcast.runtime.config import EXPANDED, EXPERTS_BITS, PACKED
from expertcast.runtime.loading import mxfp4_dequantizer, packed_forms, rounded_forms
from expertcast.runtime.storage.checkpoint_experts import ExpertSources
from expertcast.runtime.storage.layout import BlockLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class FormOption:
    """Sizes of the experts in one form."""

    form: str
    """Value of `experts` in :class:`expertcast.OffloadConfig`."""
    weight_bits: float | None = None
    """Bits per weight, scales included."""
    expert_bytes: int | None = None
    """Bytes of one expert in a slot."""
    all_experts_bytes: int | None = None
    slots: int | None = None
    """Number of experts that fit the given memory."""
    note: str = ""
    """Effect on the output, or the reason why the model does not have the form."""

    @classmethod
    def of(cls, form: str, view: MoEView, memory: int | None) -> FormOption:
        """Return the sizes of a model's experts, which may be on the meta device; memory None: room for all."""
        block_bytes, count = BlockLayout.of(view).block_bytes, len(view) * view.shape.experts
        return cls(
            form=form,
            weight_bits=weight_bits(view),
            expert_bytes=block_bytes,
            all_experts_bytes=count * block_bytes,
            slots=count if memory is None else min(count, memory // block_bytes),
            note=LOSSY if form in EXPERTS_BITS else "",
        )

    @property
    def cells(self) -> list[Cell]:
        """The row in a table."""
        bits, nbytes = self.weight_bits, self.all_experts_bytes
        shown = None if bits is None else f"{bits:.3g}", None if nbytes is None else format_bytes(nbytes)
        return [self.form, shown[0], self.expert_bytes, shown[1], self.slots]


LOSSY = "rounded, which changes the model's output"


def form_sizes(opened: OpenModel, memory: int | None) -> list[FormOption]:
    """Return the sizes of the experts in each form that a checkpoint can have, without reading weights.

    Args:
        opened: the model, which is supported. Its packed form needs the weight files on this machine.
        memory: bytes for slots; None: room for all experts.
    """
    own = () if opened.form is None else (PACKED,)
    return [_sizes(opened, form, memory) for form in (EXPANDED, *own, *EXPERTS_BITS)]


def checkpoint_forms(opened: OpenModel, experts: str) -> Sequence[Forms]:
    """Return the forms of a checkpoint's experts by layer and parameter name, from the headers of its files.

    Args:
        opened: the model, whose weight files are on this machine.
        experts: `packed`; or `auto`, which gives no forms where the experts are expanded.

    Raises:
        ExpertcastError: an unsupported model, no files on this machine, or experts that are not quantised or cannot be
            packed.
    """
    if opened.view is None or opened.files is None:
        raise opened.error
    sources = ExpertSources(opened.model, opened.view, opened.files, mxfp4_dequantizer(opened.form))
    return packed_forms(experts, sources, opened.view)


def _sizes(opened: OpenModel, experts: str, memory: int | None) -> FormOption:
    assert opened.view is not None
    try:
        by_layer = checkpoint_forms(opened, experts) if experts == PACKED else rounded_forms(experts, opened.view)
    except ExpertcastError as error:
        return FormOption(form=experts, note=str(error))
    layers = tuple(replace(layer, experts=_shallow(layer.experts)) for layer in opened.view)
    for layer, forms in zip(layers, by_layer, strict=True):
        make_packed(layer.experts, layer.num_experts, forms)
    return FormOption.of(experts, replace(opened.view, layers=layers), memory)


def _shallow(module: nn.Module) -> nn.Module:
    """Return a module with the same parameters, which may be replaced."""
    own = copy(module)
    own._parameters = dict(module._parameters)
    return own
