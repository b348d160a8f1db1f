"""Recorded routing through a cache of so many bytes, with experts of any size and the runtime's eviction policies.

A layer of a forward is one event: its misses are counted against what was held before, all of them come in, and only
then experts that it does not need are given up until the rest fits. Slots, links and time are left to
:mod:`expertcast.runtime.simulation.simulator`, whose slots are all of one size.

L MoE layers, E routed experts per layer, K experts per token. An expert's key is layer * E + expert.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from expertcast.data.routing_file import Ids, Routing
from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.policies.base import CacheShape, Choice
from expertcast.runtime.policies.belady import Belady
from expertcast.runtime.policies.eviction import PROMPT_ROWS, Eviction, EvictionPolicy


@dataclass(frozen=True, slots=True)
class Event:
    """One layer of one forward."""

    layer: int
    fresh: bool
    rows: list[list[int]]
    """Experts of each token."""
    keys: list[int]
    """Distinct, the one used last behind all others."""


@dataclass(slots=True)
class ReplayCounts:
    """Of prompts or of decoded tokens."""

    steps: int = 0
    requests: int = 0
    misses: int = 0
    bytes_moved: int = 0
    requests_L: list[int] = field(default_factory=list)
    misses_L: list[int] = field(default_factory=list)

    @property
    def hits(self) -> float:
        """Share of the requests; 1 where there are none."""
        return 1 - self.misses / self.requests if self.requests else 1.0


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay counted."""

    decode: ReplayCounts
    prompt: ReplayCounts


def forwards_of(routing: Routing) -> list[list[Event]]:
    """The events of each forward, in order; layers that did not run have none."""
    forwards = []
    for step in routing.steps():
        events = []
        for layer, rows in enumerate(step.rows):
            used = [layer * routing.experts + expert for row in rows for expert in row]
            keys = list(dict.fromkeys(reversed(used)))[::-1]
            if keys:
                events.append(Event(layer, step.fresh, rows, keys))
        forwards.append(events)
    return forwards


def replay(
    forwards: Sequence[Sequence[Event]],
    choice: Choice[EvictionPolicy],
    *,
    bytes_LE: Ids,
    top_k: int,
    memory: int,
    scope: str = "global",
) -> Replayed:
    """Run forwards through an empty cache.

    An event that alone needs more than the cache holds, as prompts do, keeps all of it until the next one. The policy
    is told of `memory` as slots of the mean size. `belady` gives up the expert whose next use is farthest off, whatever
    its size: the fewest misses where all have one size, a strong yardstick and no bound where they differ (that optimum
    is NP-hard).

    Args:
        forwards: of :func:`forwards_of`.
        choice: the policy.
        bytes_LE: of each expert.
        top_k: K
        memory: bytes of the cache.
        scope: `global`, or `layer` for an equal share of the bytes each.

    Raises:
        ExpertcastError: a policy that reads more than routing, or less memory than a token's experts of one layer take.
    """
    layers, experts = bytes_LE.shape
    if choice.cls.reads_scores:
        raise ExpertcastError(
            f"{choice.name} reads the router's scores of all experts, which routing does not hold: choose another"
        )
    least = top_k * int(bytes_LE.max())
    share = memory if scope == "global" else memory // layers
    if share < least:
        raise ExpertcastError(
            f"memory={memory} leaves {share} bytes for {'a layer' if scope == 'global' else 'each layer'}, and one "
            f"token's experts of it take {least}: give {least * (1 if scope == 'global' else layers)} or more"
        )
    slots = max(int(memory // bytes_LE.mean()), top_k * (1 if scope == "global" else layers))
    shape = CacheShape(layers=layers, experts=experts, top_k=top_k, slots=min(slots, layers * experts))
    cache = ByteCache(Eviction(choice, shape, scope), bytes_LE, share)
    for layer, policy in enumerate(cache.eviction.policies):
        if isinstance(policy, Belady):
            events = itertools.chain.from_iterable(forwards)
            policy.set_future([event.keys for event in events if scope == "global" or event.layer == layer])
    counts = {fresh: ReplayCounts(requests_L=[0] * layers, misses_L=[0] * layers) for fresh in (False, True)}
    for forward in forwards:
        if forward:
            counts[forward[0].fresh].steps += 1
            cache.eviction.start_pass(forward[0].fresh)
        for event in forward:
            cache.run(event, counts[event.fresh])
    return Replayed(counts[False], counts[True])


class ByteCache:
    """What is held, in bytes, by one budget or by one for each layer."""

    def __init__(self, eviction: Eviction, bytes_LE: Ids, share: int) -> None:
        self.eviction, self._share = eviction, share
        self._bytes: list[int] = np.ravel(bytes_LE).tolist()
        self._held: set[int] = set()
        self._used = [0] * len(eviction.policies)

    def run(self, event: Event, counts: ReplayCounts) -> None:
        """One event, counted."""
        eviction, held, sizes, keys = self.eviction, self._held, self._bytes, event.keys
        budget = 0 if eviction.shares is None else event.layer
        policy = eviction.by_layer[event.layer]
        if event.fresh and eviction.reads_routing:
            policy.see_routing(event.layer, event.rows[-PROMPT_ROWS:])
        policy.start_layer(event.layer, keys)
        missing = [key for key in keys if key not in held]
        for key in missing:
            policy.insert(key)
        held.update(missing)
        moved = sum(map(sizes.__getitem__, missing))
        self._used[budget] += moved
        policy.use(keys)
        needed = set(keys)
        while self._used[budget] > self._share:
            victim = policy.victim(needed)
            if victim is None:
                break
            policy.remove(victim)
            held.remove(victim)
            self._used[budget] -= sizes[victim]
        counts.requests += len(keys)
        counts.misses += len(missing)
        counts.bytes_moved += moved
        counts.requests_L[event.layer] += len(keys)
        counts.misses_L[event.layer] += len(missing)
