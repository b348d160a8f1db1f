"""Which layers' attention can be run early, as far as a model's structure tells; no weight is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn
from transformers import PreTrainedModel

from expertcast.data.means import adds_block
from expertcast.predictors.view import MoEView

FIRST = "no MoE layer stands before it"
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers, as configurations name them, whose cache holds keys and values."""
_MASKED = ("sdpa", "eager")
"""Attention implementations that take any mask, which whole texts need."""


def static_refusals(model: PreTrainedModel, view: MoEView, *, whole: bool = False) -> dict[int, str]:
    """By MoE layer, why its block cannot be run early: layers that can be are left out.

    Args:
        model: may be on the meta device.
        view: its MoE layers.
        whole: over whole texts, as collection does.
    """
    paths = {module: name for name, module in model.named_modules()}
    refused = {0: FIRST}
    for layer in view.layers[1:]:
        before, own = paths[view[layer.index - 1].decoder], paths[layer.decoder]
        reason = _refusal(before, own, kind_of(model, layer.decoder), cache_index(layer.decoder))
        if not reason and not adds_block(view[layer.index - 1]):
            reason = "the layer before it adds more to the residual stream than its block's output, or another thing"
        if not reason and not layer.norm_name:
            reason = "no norm stands before its router, where its block could be left"
        if not reason and whole and not takes_masks(model):
            reason = f"attention by {_implementation(model)} takes no mask of ours (sdpa does)"
        if reason:
            refused[layer.index] = reason
    return refused


def takes_masks(model: PreTrainedModel) -> bool:
    """Whether attention follows any mask that it is given."""
    return _implementation(model) in _MASKED


def _implementation(model: PreTrainedModel) -> str:
    return str(model.config.get_text_config()._attn_implementation)


def _refusal(before: str, own: str, kind: str | None, index: int | None) -> str:
    if index is None:
        return "its block has no layer_idx, by which a cache is read"
    stem, _, number = own.rpartition(".")
    if not number.isdigit() or before != f"{stem}.{int(number) - 1}":
        return "another layer stands between it and the MoE layer before it"
    if kind is not None and kind not in _ATTENTION:
        return f"{kind.replace('_', ' ')} keeps a state that a read would change"
    return ""


def kind_of(model: PreTrainedModel, decoder: nn.Module) -> str | None:
    """What a model's configuration calls a block's attention; blocks of one kind are called with the same mask and
    positions. None where it makes no difference between blocks."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    index = cache_index(decoder)
    return str(kinds[index]) if kinds and index is not None and index < len(kinds) else None


def cache_index(decoder: nn.Module) -> int | None:
    """The number by which a block knows its own layer of a cache."""
    for module in decoder.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int):
            return index
    return None


def told(refused: Mapping[int, str]) -> list[str]:
    """A line for each reason, with the layers that it holds for; that the first MoE layer has none before it is not
    worth a line."""
    by_reason: dict[str, list[int]] = {}
    for layer, reason in sorted(refused.items()):
        if reason != FIRST:
            by_reason.setdefault(reason, []).append(layer)
    return [f"layer{'s' * (len(layers) > 1)} {ranges(layers)}: {reason}" for reason, layers in by_reason.items()]


def ranges(numbers: Sequence[int]) -> str:
    """Rising numbers in words: `1-3, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
