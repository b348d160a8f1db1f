"""One KV cache for drafting and verifying: what is rejected is taken out of it again (row C11).

Attention layers are cropped, each by what it holds too much: a draft that left early ran the first layers only. Sliding
windows and convolutions keep what has left their window until the next mark, so that it can come back. A recurrent
state (linear attention, Mamba) has no tokens to crop: a copy of it is kept at the mark, and back there the cache goes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from expertcast.compat import LinearAttentionCacheLayerMixin
from expertcast.predictors.messages import ExpertcastError

_UNREAD = 1e-5
"""Share of a change in a state that reaches the next state, at most, where the state was not read."""

_NO_LIMIT = (0.0, float("inf"))


@dataclass(slots=True)
class _Copy:
    """An object's attributes, as they were."""

    owner: object
    saved: dict[str, Any]

    @classmethod
    def of(cls, owner: object, without: frozenset[str] = frozenset()) -> _Copy:
        return cls(owner, {name: _copied(value) for name, value in vars(owner).items() if name not in without})

    def restore(self) -> None:
        for name, value in self.saved.items():
            setattr(self.owner, name, _copied(value))

    def states(self) -> list[Tensor]:
        """The recurrent states that the object holds now: of a layer its own, of a cache whatever it adds."""
        if isinstance(self.owner, LinearAttentionCacheLayerMixin):
            return _tensors(self.owner.recurrent_states)
        return _tensors([getattr(self.owner, name) for name in self.saved])


class SharedCache:
    """A model's cache with a mark to which it can be rolled back: its present end, at first.

    Args:
        cache: as the model fills it, `DynamicCache` or a subclass; it may be empty still.

    Raises:
        ExpertcastError: it is fixed in size or quantised, or a layer keeps what nothing takes back.
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
        """Tokens that every layer holds, padding included."""
        return min(self._held(), default=0)

    @property
    def recurrent(self) -> bool:
        """Whether the last mark is the only way back."""
        return bool(self._copies)

    def mark(self) -> int:
        """Make the present end the furthest point back, and drop what only an earlier one needed.

        Returns:
            The tokens that the cache holds.
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
        """Take out what follows the first `length` tokens, in every layer.

        With recurrent states only the mark can be gone back to, as long as every layer has run all tokens since.

        Args:
            length: from the mark, or from where it was last rolled back to, to the present end.

        Returns:
            Tokens that the cache holds now: `length`, or those at the mark; the caller feeds the rest again.

        Raises:
            RuntimeError: what lies further back than the mark is gone.
        """
        held = self._held()
        if not self._floor <= length <= min(held, default=0):
            raise RuntimeError(f"cannot go to {length} tokens of {held} from {self._floor} on: mark first")
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

    def refuse_unfit(self, model: nn.Module, feed: Callable[[], object]) -> None:
        """Refuse a model that says something else in a pass over several tokens than in steps.

        Some Mamba layers begin such a pass anew instead of reading their state. To find out, two passes run after a
        mark, one of them with the last state changed: the next state must show it. Mamba2 layers limit their time step
        in such passes, but not in steps. Without recurrent states there is nothing to ask, and no pass runs.

        Args:
            model: whose cache this is.
            feed: runs the whole model, exactly, over any two tokens for every row, behind what the cache holds.

        Raises:
            ExpertcastError: the state is not read, or time steps are limited.
        """
        self.mark()
        copies = [copy for copy in self._copies.values() if copy.states()]
        if not copies:
            return
        for part in model.modules():
            if tuple(getattr(part, "time_step_limit", None) or _NO_LIMIT) != _NO_LIMIT:
                raise ExpertcastError(
                    f"{type(part).__name__} limits its time steps in passes over several tokens alone, so verifying "
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
                f"a {type(model).__name__} forgets its past in a pass over several tokens, so verifying would not be "
                "exact: generate without drafts"
            )

    def _held(self) -> list[int]:
        """Tokens in each layer that counts them and has seen any."""
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
        elif index in self._columns:  # of a convolution: it grew by a column for each token since the mark
            excess = self._mark + _columns(layer) - self._columns[index] - length
        else:
            return
        if excess > 0:
            layer.crop(-excess)


def _columns(layer: LinearAttentionCacheLayerMixin) -> int:
    """Columns of the layer's convolution states [B, C, columns]."""
    return int(_tensors(layer.conv_states)[0].shape[-1])


def _crops_what_it_adds(layer: type) -> bool:
    """Whether the class that says how the layer grows, or one made of it, says how it shrinks."""
    order = [cls for cls in layer.__mro__ if {"update", "crop"} & vars(cls).keys()]
    return bool(order) and "crop" in vars(order[0]) and bool(getattr(layer, "is_croppable", False))


def _copied(value: Any) -> Any:
    """The value with tensors of its own, through lists and dictionaries: states are updated in place."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in lists and dictionaries, in order."""
    if isinstance(value, Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for one in inside for tensor in _tensors(one)]
