"""Pools of full, compressed and partial experts: the state in which each expert is kept.

Each layer has its own pools F, C, S and E, measured in bytes. The slots that a layer computes with are separate.

Source: ZipMoE, section 3.4.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence

from expertcast.runtime.pools.states import POOLS, ExpertBytes, State

FADE = 0.97
"""Factor by which a use decays per step of its layer (half-life 23 steps). The paper uses plain counts, a factor of 1;
these keep outdated experts, since routing drifts within a sequence."""
_LARGEST = 1e100


class Ranking:
    """Ranking of one layer's experts by their decayed number of uses; ties by number. O(log E) comparisons per use.

    Args:
        experts: experts of the layer, E.
        fade: factor by which a use decays per step, in (0, 1].
    """

    def __init__(self, experts: int, fade: float = FADE) -> None:
        self._fade, self._gain = fade, 1.0
        self._entries = [(0.0, expert) for expert in range(experts)]
        """Negated count and number of each expert: ascending order puts the most used first."""
        self._order = list(self._entries)

    def use(self, experts: Sequence[int]) -> None:
        """Count one step of the layer that uses these distinct experts."""
        self._gain /= self._fade
        if self._gain > _LARGEST:
            self._entries = [(score / self._gain, expert) for score, expert in self._entries]
            self._order, self._gain = sorted(self._entries), 1.0
        for expert in experts:
            entry = self._entries[expert]
            del self._order[bisect_left(self._order, entry)]
            entry = self._entries[expert] = (entry[0] - self._gain, expert)
            insort(self._order, entry)

    def rank(self, expert: int) -> int:
        """Return the rank of an expert; 0 is the most used."""
        return bisect_left(self._order, self._entries[expert])

    def entry(self, expert: int) -> tuple[float, int]:
        """Return the sort key of an expert; the most used has the smallest."""
        return self._entries[expert]


MARGIN = 1
_F, _C, _S, _E = range(len(POOLS))


class PoolCache:
    """Pools of one layer.

    A used expert of rank r goes into the first pool i with r < S_F + ... + S_i + margin, where S_i is the number of
    experts that fit pool i. Without such a pool it is not kept. A pool that overflows moves its least used expert to
    the next pool, in a state that the expert's parts allow: dropping a part is free, and regaining it needs a read. A
    full expert has no compressed shards, so it cannot become C or E; it becomes S and stays in pool C until its next
    use. An access costs a few searches in sorted lists.

    Source: ZipMoE, section 3.4. The paper drops experts that overflow; this makes F and C together worse than either
    alone, because ranks change all the time.

    Args:
        experts: experts of the layer, E.
        size: bytes of an expert's parts.
        memory: bytes of each pool; a missing pool has none.
        margin: tolerance of the rank (the paper's delta, which is also the step of its planner's grid).
        fade: decay of :class:`Ranking`.
    """

    def __init__(
        self, experts: int, *, size: ExpertBytes, memory: Mapping[State, int], margin: int = MARGIN, fade: float = FADE
    ) -> None:
        self._bytes = {state: size.held(state) for state in State}
        self._memory = [memory.get(state, 0) for state in POOLS]
        fitting = [available // self._bytes[state] for available, state in zip(self._memory, POOLS, strict=True)]
        self._used = [pool for pool, count in enumerate(fitting) if count]
        """Pools that fit at least one expert, in order."""
        self._limits = [(pool, sum(fitting[: pool + 1]) + margin) for pool in self._used]
        self._ranking = Ranking(experts, fade)
        self._state = [State.M] * experts
        self._pool: list[int | None] = [None] * experts
        self._members: list[list[int]] = [[] for _ in POOLS]
        """Experts of each pool, most used first."""
        self._held = [0] * len(POOLS)
        """Bytes in each pool."""

    def state(self, expert: int) -> State:
        """Return the state of an expert."""
        return self._state[expert]

    def use(self, experts: Sequence[int]) -> dict[int, State]:
        """Count a step with distinct experts and choose their new states.

        After the step, all parts of a used expert are in memory unless it was found full.

        Returns:
            New state of every expert whose state changed, used or not.
        """
        found = {expert: self._state[expert] for expert in experts}
        before = dict(found)
        for expert in experts:
            self.lose(expert)
        self._ranking.use(experts)
        for expert in sorted(experts, key=self._ranking.entry):
            rank = self._ranking.rank(expert)
            pool = next((pool for pool, limit in self._limits if rank < limit), None)
            if found[expert] is State.F and pool in (_C, _E):
                pool = _F
            if pool is not None:
                self._put(expert, pool, POOLS[pool])
                self._drive_out(pool, found, before)
        return {expert: self._state[expert] for expert, old in before.items() if self._state[expert] is not old}

    def clear(self) -> None:
        """Remove all experts; keep the counts."""
        for expert in range(len(self._state)):
            self.lose(expert)

    def _put(self, expert: int, pool: int, state: State) -> None:
        self._state[expert], self._pool[expert] = state, pool
        self._held[pool] += self._bytes[state]
        insort(self._members[pool], expert, key=self._ranking.entry)

    def _drive_out(self, pool: int, found: Mapping[int, State], before: dict[int, State]) -> None:
        """Move the least used experts of a pool to the next one until the pool fits its memory.

        Args:
            pool: index of the pool.
            found: states of the used experts before the step.
            before: states of all changed experts before the step; this adds the victims.
        """
        following = next((other for other in self._used if other > pool), None)
        while self._held[pool] > self._memory[pool]:
            victim = self._members[pool][-1]
            has = self._state[victim]
            before.setdefault(victim, has)
            self.lose(victim)
            if following is None:
                continue
            if found.get(victim, State.F) is not State.F:
                has = State.C  # just read and decoded: all parts are in memory
            lower = _lowered(has, following)
            if lower is not State.M:
                self._put(victim, following, lower)
                self._drive_out(following, found, before)

    def lose(self, expert: int) -> None:
        """Remove an expert from its pool."""
        pool = self._pool[expert]
        if pool is not None:
            self._members[pool].remove(expert)
            self._held[pool] -= self._bytes[self._state[expert]]
            self._state[expert], self._pool[expert] = State.M, None


def _lowered(state: State, pool: int) -> State:
    """Return the state that an expert can have in a later pool with the parts that it has."""
    if pool == _C and state is State.C:
        return State.C
    if pool == _E:
        return State.E if state in (State.C, State.E) else State.M
    return State.M if state is State.E else State.S


class Pools:
    """Pools of all layers. Only `state` may be called from threads other than the one that runs the model.

    Args:
        layers: number of MoE layers, L.
        experts: experts per layer, E.
        size: bytes of an expert's parts.
        room: number of experts that fit each pool, over all layers; layers share it evenly.
    """

    def __init__(self, *, layers: int, experts: int, size: ExpertBytes, room: Mapping[State, int]) -> None:
        self.experts = experts
        self.room = {state: room.get(state, 0) for state in POOLS}
        """Number of experts that fit each pool, over all layers."""
        self._layers = []
        for layer in range(layers):
            shares = {state: _share(count, layer, layers) for state, count in self.room.items()}
            memory = {state: count * size.held(state) for state, count in shares.items()}
            self._layers.append(PoolCache(experts, size=size, memory=memory))
        self._changed: list[tuple[int, State]] = []
        self.running: frozenset[int] = frozenset()
        """Experts that the last layer used."""

    def state(self, key: int) -> State:
        """Return the state in which an expert should be kept."""
        layer, expert = divmod(key, self.experts)
        return self._layers[layer].state(expert)

    def use(self, layer: int, keys: Sequence[int]) -> list[tuple[int, State]]:
        """Count a step of a layer with distinct experts and return (key, new state) of every changed expert."""
        first = layer * self.experts
        self.running = frozenset(keys)
        found = self._layers[layer].use([key - first for key in keys])
        changed = [(first + expert, state) for expert, state in found.items()]
        self._changed += changed
        return changed

    def lose(self, key: int) -> None:
        """Remove an expert from its pool."""
        layer, expert = divmod(key, self.experts)
        self._layers[layer].lose(expert)

    def changes(self) -> list[tuple[int, State]]:
        """Return (key, new state) of the changes since the last call; the last entry of an expert is valid."""
        changed, self._changed = self._changed, []
        return changed

    def clear(self) -> None:
        """Remove all experts; keep the counts."""
        self._changed.clear()
        for layer in self._layers:
            layer.clear()


def _share(count: int, layer: int, layers: int) -> int:
    """Divide a count evenly among layers, with the remainder spread over the model."""
    return count * (layer + 1) // layers - count * layer // layers
