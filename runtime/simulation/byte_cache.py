"""Replay of recorded routing through a cache measured in bytes, for experts of different sizes.

Each layer of each step is one event: its misses are counted and loaded, and then experts that it does not need are
evicted until the rest fits. :mod:`expertcast.runtime.simulation.simulator` has slots of one size, links and times.

L MoE layers, E routed experts per layer, K experts per token. The key of an expert is layer * E + expert.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from expertcast.data.routing_file import Ids, Routing
from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.policies.base import CacheShape, Choice
from expertcast.runtime.policies.eviction import PROMPT_ROWS, Belady, Eviction, EvictionPolicy


@dataclass(frozen=True, slots=True)
class Event:
    """One layer of one step."""

    layer: int
    fresh: bool
    """Whether the step is a prefill."""
    rows: list[list[int]]
    """Experts of each token."""
    keys: list[int]
    """Distinct keys in the order of their last use."""


@dataclass(slots=True)
class ReplayCounts:
    """Counts of prompts or of decode steps; fields ending in `_L` are by layer."""

    steps: int = 0
    requests: int = 0
    misses: int = 0
    bytes_moved: int = 0
    requests_L: list[int] = field(default_factory=list)
    misses_L: list[int] = field(default_factory=list)

    @property
    def hits(self) -> float:
        """Hit rate; 1 without requests."""
        return 1 - self.misses / self.requests if self.requests else 1.0


@dataclass(frozen=True, slots=True)
class Replayed:
    """Counts of a replay."""

    decode: ReplayCounts
    prompt: ReplayCounts
    policy_s: float
    """Median processor seconds per decode step, which the policy takes in the thread that runs the model."""


def forwards_of(routing: Routing) -> list[list[Event]]:
    """Return the events of each step in order; layers that did not run have none."""
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
    """Replay steps through an empty cache.

    An event that needs more than the cache holds, such as a prompt, keeps all its experts until the next event. The
    policy's number of slots is `memory` divided by the mean size of an expert. `belady` ignores sizes: it has the
    minimum number of misses if all experts have the same size, and is no bound otherwise.

    Args:
        forwards: result of :func:`forwards_of`.
        choice: eviction policy.
        bytes_LE: bytes of each expert.
        top_k: experts per token, K.
        memory: size of the cache in bytes.
        scope: `global`, or `layer` for an equal share of the bytes per layer.

    Raises:
        ExpertcastError: the policy reads more than routing, or the memory does not hold one token's experts of a layer.
    """
    layers, experts = bytes_LE.shape
    if choice.cls.reads_scores:
        raise ExpertcastError(
            f"{choice.name} reads the router's scores, which recorded routing lacks: choose another eviction policy"
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
    took_s: list[float] = []
    for forward in filter(None, forwards):
        start = time.process_time()
        counts[forward[0].fresh].steps += 1
        cache.eviction.start_pass(forward[0].fresh)
        for event in forward:
            cache.run(event, counts[event.fresh])
        if not forward[0].fresh:
            took_s.append(time.process_time() - start)
    return Replayed(counts[False], counts[True], statistics.median(took_s) if took_s else 0.0)


class ByteCache:
    """Cache with one budget in bytes, or one per layer.

    Args:
        eviction: eviction policy with its scope.
        bytes_LE: bytes of each expert.
        share: bytes of each budget.
    """

    def __init__(self, eviction: Eviction, bytes_LE: Ids, share: int) -> None:
        self.eviction, self._share = eviction, share
        self._bytes: list[int] = np.ravel(bytes_LE).tolist()
        self._held: set[int] = set()
        self._used = [0] * len(eviction.policies)

    def run(self, event: Event, counts: ReplayCounts) -> None:
        """Run one event and add it to the counts."""
        eviction, held, sizes, keys = self.eviction, self._held, self._bytes, event.keys
        budget = eviction.group_of[event.layer]
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
            victim = eviction.victim(event.layer, needed, held)
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
