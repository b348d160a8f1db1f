"""Eviction that knows what verification will need: Belady inside the buffer's window, another policy beyond (row C10).

The paper names it and defines nothing (trap 3). Verification runs the layers once, in order, for all positions at once:
the next use of an expert that stands in the buffer is when its layer comes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from torch import Tensor

from expertcast.runtime.drafts.lookahead import LookaheadBuffer
from expertcast.runtime.policies.eviction.base import EvictionPolicy
from expertcast.runtime.policies.scope import Eviction


class WindowEviction(EvictionPolicy):
    """Gives up what the window does not need, as another policy says; else what it needs last, the least sure first.

    Args:
        beyond: decides among experts that the window does not need (any more); is told everything.
        buffer: the window, empty while nothing is drafted.
        held: what has a slot already.
    """

    name = "window"

    def __init__(self, beyond: EvictionPolicy, buffer: LookaheadBuffer, held: Iterable[int] = ()) -> None:
        super().__init__(beyond.config, beyond.shape)
        self._beyond, self._buffer = beyond, buffer
        self._held = set(held)
        self.passed = -1
        """The last layer that verification has run: what the buffer says of it is over; -1 while drafting."""

    def victim(self, protected: Container[int]) -> int | None:
        key = self._beyond.victim(_Kept(protected, self._buffer, self.passed))
        if key is not None:
            return key
        experts, layers = self._buffer.experts, range(self._buffer.layers)
        sure = [self._buffer.union(layer) for layer in layers]
        left = [key for key in self._held if key not in protected]
        return max(left, key=lambda key: (key // experts, -sure[key // experts].get(key, 0.0), -key), default=None)

    def insert(self, key: int, full: bool = True) -> None:
        self._held.add(key)
        self._beyond.insert(key, full)

    def remove(self, key: int) -> None:
        self._held.discard(key)
        self._beyond.remove(key)

    def clear(self) -> None:
        self._held.clear()
        self._beyond.clear()

    def start_pass(self, fresh: bool) -> None:
        self._beyond.start_pass(fresh)

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        self._beyond.start_layer(layer, keys)

    def use(self, keys: Sequence[int]) -> None:
        self._beyond.use(keys)

    def touch(self, keys: Sequence[int]) -> None:
        self._beyond.touch(keys)

    def see_scores(self, layer: int, probability_E: Sequence[float]) -> None:
        self._beyond.see_scores(layer, probability_E)

    def see_routing(self, layer: int, experts: Sequence[Sequence[int]]) -> None:
        self._beyond.see_routing(layer, experts)

    def see_forecast(self, layer: int, probability_E: Sequence[float]) -> None:
        self._beyond.see_forecast(layer, probability_E)

    def see_tokens(self, probability_HLE: Tensor) -> None:
        self._beyond.see_tokens(probability_HLE)

    def wanted(self) -> list[tuple[int, float]]:
        return self._beyond.wanted()

    def worth(self, key: int) -> float | None:
        return self._beyond.worth(key)


def over_window(eviction: Eviction, buffer: LookaheadBuffer, held: Iterable[int] = ()) -> list[WindowEviction]:
    """Have the policies of a running model, all of one kind, know the window too; returns what now decides.

    Args:
        eviction: of the model's residency; changed in place.
        buffer: the window.
        held: keys that have a slot.
    """
    held = list(held)
    shared = eviction.shares is None
    around = [
        WindowEviction(policy, buffer, (key for key in held if shared or key // buffer.experts == number))
        for number, policy in enumerate(eviction.policies)
    ]
    eviction.policies[:] = around
    eviction.by_layer[:] = around * (len(eviction.by_layer) // len(around))
    return around


class _Kept:
    """What is protected, and what the window still needs."""

    def __init__(self, protected: Container[int], buffer: LookaheadBuffer, passed: int) -> None:
        self._protected, self._buffer, self._first = protected, buffer, (passed + 1) * buffer.experts

    def __contains__(self, key: object) -> bool:
        return key in self._protected or (isinstance(key, int) and key >= self._first and key in self._buffer)
