"""The offline bounds: what could be kept if the future were known.

An event is one layer of one forward, with all distinct experts it needs. L MoE layers, E routed experts per layer. An
expert's key is layer * E + expert.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Sequence

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.policies.base import CacheShape, PolicyConfig
from expertcast.runtime.policies.eviction import ByPriority

Events = Sequence[Sequence[int]]


class Belady(ByPriority):
    """Gives up the expert whose next use is farthest away; ties by LRU. O(log n). Needs :meth:`foresee`.

    No policy that loads on demand has fewer misses, as long as every event fits the slots and a missed expert must be
    given one (forced admission); :func:`bypass_misses` is the bound without that.
    """

    name = "belady"
    offline = True

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._events: Events | None = None
        self._nexts: list[list[int]] = []
        self._next: dict[int, int] = {}
        """Event of each key's next use; keys that are not used again may be missing."""
        self._event = 0
        """Index of the event that starts next."""

    def foresee(self, events: Events) -> None:
        """The keys of every event to come, in order; each `start_layer` is one. A policy that rules over one layer is
        given that layer's events, `events[layer::L]`."""
        self._events, self._event = events, 0
        self._nexts, self._next = next_uses(events)
        for key in list(self._valid):
            self._access(key)

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        """
        Raises:
            ExpertcastError: the keys are not those that were foreseen.
        """
        events, index = self._foreseen(), self._event
        if index == len(events):
            raise ExpertcastError(f"belady foresaw {index} events, and layer {layer} runs after them: foresee them all")
        if set(keys) != set(events[index]):
            raise ExpertcastError(
                f"belady foresaw keys {sorted(events[index])} at event {index}, layer {layer} needs {sorted(keys)}: "
                "foresee the events that are run (belady is for offline replays)"
            )
        self._next.update(zip(events[index], self._nexts[index], strict=True))
        self._event += 1

    def victim(self, protected: Container[int]) -> int | None:
        self._foreseen()
        return super().victim(protected)

    def _priority(self, key: int) -> float:
        return -self._next.get(key, len(self._nexts))

    def _foreseen(self) -> Events:
        if self._events is None:
            raise ExpertcastError(
                "belady needs the future: give the events of a recorded trace to foresee(), or choose another eviction "
                "policy (belady is for offline replays)"
            )
        return self._events


def next_uses(events: Events) -> tuple[list[list[int]], dict[int, int]]:
    """Index of the event after each event that needs each of its keys again, `len(events)` for never; and index of the
    first event that needs each key."""
    coming: dict[int, int] = {}
    nexts = []
    for index in range(len(events) - 1, -1, -1):
        nexts.append([coming.get(key, len(events)) for key in events[index]])
        coming.update(dict.fromkeys(events[index], index))
    nexts.reverse()
    return nexts, coming


def bypass_misses(events: Events, slots: int) -> list[int]:
    """Misses of each event with the fewest in all, if a missed expert may be used from a staging place: after an event
    any `slots` of the experts that were held or used stay. Keeping those whose next use is nearest is optimal.
    O(n log n) in all uses."""
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
