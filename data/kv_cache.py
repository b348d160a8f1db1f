"""Key-value caches of transformers: layers that grow in place, and copies that are written to.

A `DynamicCache` copies all keys and values of the past at each token: at 4,096 tokens of Qwen3-30B-A3B .4 GB. Here its
layers get room for later tokens, and a token is written behind the others.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

_MORE, _LEAST = 16, 64
"""Room for later tokens: this fraction of those held, and at least so many."""


@dataclass(slots=True)
class _Room:
    """Memory of a layer, [B, H, capacity, D] each, and the number of tokens that were written to it."""

    keys: Tensor
    values: Tensor
    written: int

    def holds(self, keys: Tensor) -> bool:
        """Return whether `keys` are all that was written: no copy of the layer wrote more, and nothing was cropped."""
        return keys.data_ptr() == self.keys.data_ptr() and keys.shape[-2] == self.written

    def takes(self, new: Tensor) -> bool:
        """Return whether more keys fit behind those that were written."""
        own = self.keys
        return (
            self.written + new.shape[-2] <= own.shape[-2]
            and (own.shape[:-2], own.shape[-1], own.dtype) == (new.shape[:-2], new.shape[-1], new.dtype)
            and (torch.is_inference_mode_enabled() or not own.is_inference())
        )


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of a `DynamicCache` that writes new tokens behind the others; its tensors are views of larger memory.

    No token is ever overwritten, so tensors that it returned, and shallow copies of it, keep what they hold.
    """

    keys: Tensor
    values: Tensor
    _room: _Room | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Add keys and values [B, H, S, D]; return all."""
        traced = torch.jit.is_tracing() or torch.compiler.is_compiling()  # type: ignore[attr-defined, no-untyped-call]
        if traced or (torch.is_grad_enabled() and key_states.requires_grad):
            both: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return both
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held, room = self.get_seq_length(), self._room
        if room is None or not room.holds(self.keys) or not room.takes(key_states):
            capacity = held + key_states.shape[-2]
            capacity += max(capacity // _MORE, _LEAST)
            keys, values = _wider(self.keys, key_states, capacity), _wider(self.values, value_states, capacity)
            room = self._room = _Room(keys, values, held)
        end = room.written = held + key_states.shape[-2]
        for memory, new in ((room.keys, key_states), (room.values, value_states)):
            memory.narrow(-2, held, end - held).copy_(new)
        self.keys, self.values = room.keys.narrow(-2, 0, end), room.values.narrow(-2, 0, end)
        return self.keys, self.values

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens. The next update takes new memory: others may still hold what was removed."""
        super().crop(tokens_to_remove)  # beside `update`, so that drafts know that it undoes what that adds


def _wider(held: Tensor, new: Tensor, capacity: int) -> Tensor:
    """Return memory for `capacity` tokens that begins with those held."""
    memory = new.new_empty(*new.shape[:-2], capacity, new.shape[-1])
    if held.numel():
        memory[..., : held.shape[-2], :] = held
    return memory


def grow_in_place(_module: nn.Module, _args: object, kwargs: dict[str, object]) -> None:
    """Let the layers of a forward's `DynamicCache` grow in place; a hook before the forward of a base model."""
    past = kwargs.get("past_key_values")
    if isinstance(past, Cache) and not past.offloading:
        if past.layer_class_to_replicate is DynamicLayer:
            past.layer_class_to_replicate = GrowingLayer
        for layer in past.layers:
            if type(layer) is DynamicLayer:
                layer.__class__ = GrowingLayer


# Key-value caches: reading without writing. The class decides, because the writes of an unknown class are not known.

_COPIED = (DynamicLayer, GrowingLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer)
"""Cache layers that never overwrite: a shallow copy is safe to write to."""
_CLONED = (StaticLayer, StaticSlidingWindowLayer)
"""Cache layers that write into their tensors: a copy needs clones."""


def added(past: Cache, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Add keys and values [B, H, S, D], whose memory is written again, to layer `index` of a cache; return all."""
    layers = getattr(past, "layers", ())
    own = layers[index] if index < len(layers) else None
    if type(own) is GrowingLayer and _readable(past) and "update" not in {**vars(past), **vars(own)}:
        return own.update(keys, values)  # it copies them
    every: tuple[Tensor, Tensor] = past.update(keys.clone(), values.clone(), index)
    return every


def reading_copy(past: Cache, index: int) -> Cache | None:
    """Copy a cache so that a block can write to layer `index` of the copy and leave the original unchanged.

    Returns None for a cache that quantises, moves its layers to the host, or has a class of its own.
    """
    if not _readable(past):
        return None
    reader = copy.copy(past)
    reader.layers = list(past.layers)
    if index >= len(past.layers):  # the first write adds the layer
        return reader if past.layer_class_to_replicate in _COPIED else None
    kind = type(past.layers[index])
    if kind not in (*_COPIED, *_CLONED):
        return None
    mirrored = reader.layers[index] = copy.copy(past.layers[index])
    if kind is GrowingLayer:
        mirrored.__class__ = DynamicLayer  # what it adds is not the next token, whose place it would take
    if kind in _CLONED:
        for name, value in vars(mirrored).items():
            if isinstance(value, Tensor):
                setattr(mirrored, name, value.clone())
    return reader


def appended_layer(past: Cache, index: int) -> CacheLayerMixin | None:
    """Return the cache's layer `index` if it holds tokens and never overwrites them, else None."""
    if not _readable(past) or index >= len(past.layers):
        return None
    layer = past.layers[index]
    return layer if type(layer) in _COPIED and layer.is_initialized else None


def _readable(past: Cache) -> bool:
    return getattr(type(past), "update", None) is Cache.update and not past.offloading
