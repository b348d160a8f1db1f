"""Offline bounds: Belady's policy and the minimum number of misses with bypassing.

An event is one layer of one step, as the list of distinct experts that it needs. L MoE layers, E routed experts per
layer. The key of an expert is layer * E + expert.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Sequence

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.policies.base import CacheShape, PolicyConfig
from expertcast.runtime.policies.eviction import ByPriority

Events = Sequence[Sequence[int]]


class Belady(ByPriority):
    """Evicts the expert whose next use is farthest away; ties by LRU. O(log n).

    Call :meth:`set_future` first. No policy that loads on demand has fewer misses if every event fits the slots and
    every missed expert gets a slot. :func:`bypass_misses` is the bound without the second condition.

    Source: Belady (1966).
    """

    name = "belady"
    offline = True

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._events: Events | None = None
        self._nexts: list[list[int]] = []
        self._next: dict[int, int] = {}
        """Event of each key's next use; may lack keys that are not used again."""
        self._event = 0
        """Index of the next event."""

    def set_future(self, events: Events) -> None:
        """Set the keys of all future events in order; each call of `start_layer` is one event.

        A policy that manages one layer receives the events of that layer, `events[layer::L]`.
        """
        self._events, self._event = events, 0
        self._nexts, self._next = next_uses(events)
        for key in list(self._valid):
            self._access(key)

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        """Advance by one event.

        Raises:
            ExpertcastError: the event differs from the one that `set_future` received.
        """
        events, index = self._future(), self._event
        if index == len(events):
            raise ExpertcastError(
                f"layer {layer} runs after the {index} events that belady received: give all events to set_future()"
            )
        if set(keys) != set(events[index]):
            raise ExpertcastError(
                f"belady received keys {sorted(events[index])} for event {index}, layer {layer} needs {sorted(keys)}: "
                "give the events of this run to set_future() (belady is for offline replays)"
            )
        self._next.update(zip(events[index], self._nexts[index], strict=True))
        self._event += 1

    def victim(self, protected: Container[int]) -> int | None:
        self._future()
        return super().victim(protected)

    def _priority(self, key: int) -> float:
        return -self._next.get(key, len(self._nexts))

    def _future(self) -> Events:
        if self._events is None:
            raise ExpertcastError(
                "belady needs all future events: give those of a recorded trace to set_future(), or choose another "
                "eviction policy (belady is for offline replays)"
            )
        return self._events


def next_uses(events: Events) -> tuple[list[list[int]], dict[int, int]]:
    """Find the next use of every key of every event.

    Returns:
        For each event the index of the next event that needs each of its keys (`len(events)`: never), and the index of
        the first event that needs each key.
    """
    coming: dict[int, int] = {}
    nexts = []
    for index in range(len(events) - 1, -1, -1):
        nexts.append([coming.get(key, len(events)) for key in events[index]])
        coming.update(dict.fromkeys(events[index], index))
    nexts.reverse()
    return nexts, coming


def bypass_misses(events: Events, slots: int) -> list[int]:
    """Count the misses of each event under the optimal policy if a missed expert need not get a slot.

    After each event the policy keeps any `slots` of the experts that were resident or used; to keep those whose next
    use is nearest is optimal. O(n log n) in the total number of uses.

    Args:
        events: distinct keys of each event.
        slots: number of slots.

    Returns:
        Number of misses of each event.

    Example:
        >>> from expertcast.runtime.policies.belady import bypass_misses
        >>> bypass_misses([[0, 1], [2], [0, 1], [2]], slots=2)
        [2, 1, 0, 1]
    """
    nexts, _ = next_uses(events)
    held: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    misses = []
    for keys, following in zip(events, nexts, strict=True):
        misses.append(sum(key not in held for key in keys))
        for key, index in zip(keys, following, strict=True):
            held[key] = index
            heapq.heappush(farthest, (-index, key))
        while len(held) > slots:
            index, key = heapq.heappop(farthest)
            if held.get(key) == -index:
                del held[key]
    return misses
