"""Key-value cache of drafting and verifying, with roll-back of rejected tokens.

Attention layers are cropped. Sliding windows and convolutions keep tokens that leave the window until the next mark. A
recurrent state (linear attention, Mamba) cannot be cropped; it is copied at the mark, and rolling back restores the
copy.

Source: draft and target share the cache in MoE-SpeQ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from expertcast.predictors.messages import ExpertcastError

_UNREAD = 1e-5
"""Maximum relative effect of a change of the state on the next state if the pass does not read the state."""

_NO_LIMIT = (0.0, float("inf"))


@dataclass(slots=True)
class _Copy:
    """Copy of an object's attributes."""

    owner: object
    saved: dict[str, Any]

    @classmethod
    def of(cls, owner: object, without: frozenset[str] = frozenset()) -> _Copy:
        return cls(owner, {name: _copied(value) for name, value in vars(owner).items() if name not in without})

    def restore(self) -> None:
        for name, value in self.saved.items():
            setattr(self.owner, name, _copied(value))

    def states(self) -> list[Tensor]:
        """Return the current recurrent states: those of a layer, or the tensors that a cache subclass adds."""
        if isinstance(self.owner, LinearAttentionCacheLayerMixin):
            return _tensors(self.owner.recurrent_states)
        return _tensors([getattr(self.owner, name) for name in self.saved])


class SharedCache:
    """Cache of a model with a mark to roll back to; the first mark is its current end.

    Args:
        cache: a `DynamicCache` or a subclass of it; may be empty.

    Raises:
        ExpertcastError: the cache is of another class, or one of its layers can neither be cropped nor copied.
    """

    def __init__(self, cache: Cache) -> None:
        if not isinstance(cache, DynamicCache):
            raise ExpertcastError(
                f"a {type(cache).__name__} cannot be rolled back: for drafts leave out cache_implementation and "
                "past_key_values, or pass a DynamicCache"
            )
        for layer in cache.layers:
            if not isinstance(layer, LinearAttentionCacheLayerMixin) and not _crops_what_it_adds(type(layer)):
                raise ExpertcastError(
                    f"{type(layer).__name__} of this model's cache cannot be rolled back: generate without drafts"
                )
        self.cache = cache
        self.mark()

    @property
    def length(self) -> int:
        """Number of tokens in every layer, including padding."""
        return min(self._held(), default=0)

    def mark(self) -> int:
        """Set the mark to the current end and free what earlier marks needed.

        Returns:
            Number of tokens in the cache.
        """
        self._copies: dict[int, _Copy] = {}
        self._columns: dict[int, int] = {}
        self._layers = len(self.cache.layers)
        for index, layer in enumerate(self.cache.layers):
            if not layer.is_croppable:
                self._copies[index] = _Copy.of(layer)
                continue
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
            if getattr(layer, "is_initialized", True):
                layer.crop(0)
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                self._columns[index] = _columns(layer)
        added = vars(self.cache).keys() - vars(DynamicCache()).keys()
        if added and type(self.cache) is not DynamicCache:
            self._copies[-1] = _Copy.of(self.cache, without=frozenset(vars(self.cache).keys() - added))
        self._mark = self._floor = self.length
        return self._mark

    def roll_back(self, length: int) -> int:
        """Remove all tokens after the first `length` from every layer.

        A cache with recurrent states returns to the mark, unless `length` is its current end in every layer.

        Args:
            length: number of tokens to keep; at least the mark, or the last roll-back after it.

        Returns:
            Number of tokens in the cache: `length`, or that at the mark; the caller feeds the missing ones again.

        Raises:
            RuntimeError: `length` lies before the mark or after the end.
        """
        held = self._held()
        if not self._floor <= length <= min(held, default=0):
            raise RuntimeError(f"cannot roll back to {length} tokens: give {self._floor} to {min(held, default=0)}")
        if self._copies and (length == self._mark or length != max(held)):
            length = self._mark
            for copy in self._copies.values():
                copy.restore()
        if length == self._mark:
            del self.cache.layers[self._layers :]
        for index, layer in enumerate(self.cache.layers):
            if index not in self._copies:
                self._crop(index, layer, length)
        self._floor = length
        return length

    def check_verifiable(self, model: nn.Module, feed: Callable[[], object]) -> None:
        """Check that a pass over several tokens gives the same result as single steps.

        Some Mamba layers ignore their state in a pass over several tokens. The check runs two passes after a mark, one
        of them with a changed state, and requires that the next states differ. Mamba2 layers limit their time step in
        such passes only. A model without recurrent states needs no check, and no pass runs.

        Args:
            model: model of this cache.
            feed: runs the exact model over any two tokens per row, after those in the cache.

        Raises:
            ExpertcastError: the model does not read its state, or limits its time step.
        """
        self.mark()
        copies = [copy for copy in self._copies.values() if copy.states()]
        if not copies:
            return
        for part in model.modules():
            if tuple(getattr(part, "time_step_limit", None) or _NO_LIMIT) != _NO_LIMIT:
                raise ExpertcastError(
                    f"{type(part).__name__} limits its time steps only in passes over several tokens, so verifying "
                    "would not be exact: generate without drafts"
                )
        next_states: list[Tensor] = []
        step = torch.ones(())
        for change in (0.0, 1.0):
            state = copies[-1].states()[-1]
            step = state.abs().amax().clamp_min(1.0)
            state += change * step
            feed()
            next_states.append(copies[-1].states()[-1].clone())
            self.roll_back(self._mark)
        if (next_states[1] - next_states[0]).abs().amax() <= _UNREAD * step:
            raise ExpertcastError(
                f"a {type(model).__name__} ignores its state in a pass over several tokens, so verifying would not be "
                "exact: generate without drafts"
            )

    def _held(self) -> list[int]:
        """Return the number of tokens in each layer that counts them and is not empty."""
        return [
            int(layer.get_seq_length())
            for layer in self.cache.layers
            if hasattr(layer, "get_seq_length") and layer.is_initialized
        ]

    def _crop(self, index: int, layer: Any, length: int) -> None:
        if not getattr(layer, "is_initialized", True):
            return
        if hasattr(layer, "get_seq_length"):
            excess = layer.get_seq_length() - length
        elif index in self._columns:  # a convolution, which has grown by one column per token since the mark
            excess = self._mark + _columns(layer) - self._columns[index] - length
        else:
            return
        if excess > 0:
            layer.crop(-excess)


def _columns(layer: LinearAttentionCacheLayerMixin) -> int:
    """Return the number of columns of the layer's convolution states [B, C, columns]."""
    return int(_tensors(layer.conv_states)[0].shape[-1])


def _crops_what_it_adds(layer: type) -> bool:
    """Return whether `crop` is defined by the class that defines `update`, or by a subclass of it."""
    order = [cls for cls in layer.__mro__ if {"update", "crop"} & vars(cls).keys()]
    return bool(order) and "crop" in vars(order[0]) and bool(getattr(layer, "is_croppable", False))


def _copied(value: Any) -> Any:
    """Return a copy of a value with copies of its tensors, because states are updated in place."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested lists and dictionaries, in order."""
    if isinstance(value, Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for one in inside for tensor in _tensors(one)]
