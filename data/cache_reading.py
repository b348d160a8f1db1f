"""Reading a key-value cache without writing to it: a copy that shares the past, and takes what is written.

Which layers of a cache can be read is decided by their class alone: of a class that is not known here, nobody can say
what a write would change.
"""

from __future__ import annotations

import copy

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

_COPIED = (DynamicLayer, DynamicSlidingWindowLayer, DynamicIndexedLayer)
"""Layers that put new tensors in the place of old ones: a shallow copy leaves them as they were."""
_CLONED = (StaticLayer, StaticSlidingWindowLayer)
"""Those that write into their tensors."""


def reading_copy(past: Cache, index: int) -> Cache | None:
    """The cache with a copy of its layer `index`, which takes what is written there; None where it cannot be read so:
    a cache that quantises, moves its layers to the host, or is of a class of its own."""
    if not _readable(past):
        return None
    reader = copy.copy(past)
    reader.layers = list(past.layers)
    if index >= len(past.layers):  # it grows by what is written first
        return reader if past.layer_class_to_replicate in _COPIED else None
    kind = type(past.layers[index])
    if kind not in (*_COPIED, *_CLONED):
        return None
    mirrored = reader.layers[index] = copy.copy(past.layers[index])
    if kind in _CLONED:
        for name, value in vars(mirrored).items():
            if isinstance(value, Tensor):
                setattr(mirrored, name, value.clone())
    return reader


def growing_layer(past: Cache, index: int) -> CacheLayerMixin | None:
    """The cache's layer `index`, where it holds something and a write puts new tensors in the place of its own."""
    if not _readable(past) or index >= len(past.layers):
        return None
    layer = past.layers[index]
    return layer if type(layer) in _COPIED and layer.is_initialized else None


def _readable(past: Cache) -> bool:
    return getattr(type(past), "update", None) is Cache.update and not past.offloading
