"""Pools of full, compressed and partial experts: which expert is kept in which state (ZipMoE, section 3.4).

Each layer has pools F, C, S and E of its own, in bytes. Beside them stand the slots that a running layer computes with.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence

from expertcast.runtime.pools.states import POOLS, ExpertBytes, State

FADE = 0.97
"""What a use still counts after one step of its layer: half after 23 steps. Recorded routing drifts from what it was at
the start of a text, so that plain counts (a fade of 1, as in the paper) keep experts that are over."""
_LARGEST = 1e100


class Ranking:
    """Counts of one layer's experts, which fade, and their order.

    A count is O(log E) comparisons; of equals the expert with the smaller number ranks first. `fade` is above 0, and 1
    for plain counts.
    """

    def __init__(self, experts: int, fade: float = FADE) -> None:
        self._fade, self._gain = fade, 1.0
        self._entries = [(0.0, expert) for expert in range(experts)]
        """By expert; the number is below zero, so that the order is the natural one."""
        self._order = list(self._entries)

    def use(self, experts: Sequence[int]) -> None:
        """One step of the layer, with distinct experts."""
        self._gain /= self._fade
        if self._gain > _LARGEST:
            self._rescale()
        for expert in experts:
            entry = self._entries[expert]
            del self._order[bisect_left(self._order, entry)]
            entry = self._entries[expert] = (entry[0] - self._gain, expert)
            insort(self._order, entry)

    def rank(self, expert: int) -> int:
        """0 for the one used most."""
        return bisect_left(self._order, self._entries[expert])

    def entry(self, expert: int) -> tuple[float, int]:
        """What orders experts: the one used most has the smallest."""
        return self._entries[expert]

    def _rescale(self) -> None:
        self._entries = [(score / self._gain, expert) for score, expert in self._entries]
        self._order = sorted(self._entries)
        self._gain = 1.0


MARGIN = 1
_F, _C, _S, _E = range(len(POOLS))


class PoolCache:
    """The pools of one layer. An access costs a few searches in sorted lists.

    A used expert goes into the first pool behind whose end its rank by use does not lie: r < S_F + ... + S_i + margin,
    with S_i the experts that fit pool i. Behind the last pool nothing is kept. A pool that overflows gives its least
    used expert to the next one, in what state its parts allow: to drop a part costs nothing, to get one back is a read.
    A full expert has no compressed shards. It cannot become C or E; as S, its bytes taken apart, it waits in pool C
    until it is used again.

    The paper drops what overflows. Then F beside C is worse than either alone, because ranks change all the time.

    Args:
        experts: E, of the layer.
        size: bytes of an expert's parts.
        memory: bytes of each pool; one that is left out has none.
        margin: experts by which a rank may be off (the paper's delta, which is the step of its planner's grid as well).
        fade: of :class:`Ranking`.
    """

    def __init__(
        self, experts: int, *, size: ExpertBytes, memory: Mapping[State, int], margin: int = MARGIN, fade: float = FADE
    ) -> None:
        self._bytes = {state: size.held(state) for state in State}
        self._memory = [memory.get(state, 0) for state in POOLS]
        fitting = [given // self._bytes[state] for given, state in zip(self._memory, POOLS, strict=True)]
        self._used = [pool for pool, count in enumerate(fitting) if count]
        """Pools that hold anything at all, in order."""
        self._limits = [(pool, sum(fitting[: pool + 1]) + margin) for pool in self._used]
        self._ranking = Ranking(experts, fade)
        self._state = [State.M] * experts
        self._pool: list[int | None] = [None] * experts
        self._members: list[list[int]] = [[] for _ in POOLS]
        """Experts, the least used one last."""
        self._held = [0] * len(POOLS)
        """Bytes in each pool."""

    def state(self, expert: int) -> State:
        """What is held of an expert."""
        return self._state[expert]

    @property
    def held(self) -> dict[State, int]:
        """Bytes in each pool."""
        return dict(zip(POOLS, self._held, strict=True))

    def use(self, experts: Sequence[int]) -> dict[int, State]:
        """One step of the layer with distinct experts: count them, and keep what is worth it.

        All parts of an expert that was not found full are at hand behind the step, but for what was not read.

        Returns:
            The new state of every expert whose state is another now, used or not.
        """
        found = {expert: self._state[expert] for expert in experts}
        before = dict(found)
        for expert in experts:
            self._take_out(expert)
        self._ranking.use(experts)
        for expert in sorted(experts, key=self._ranking.entry):
            pool = self._dispatch(expert, found[expert])
            if pool is not None:
                self._put(expert, pool, POOLS[pool])
                self._drive_out(pool, found, before)
        return {expert: self._state[expert] for expert, old in before.items() if self._state[expert] is not old}

    def lose(self, expert: int) -> None:
        """Nothing is held of an expert any more, for other reasons than use."""
        self._take_out(expert)

    def clear(self) -> None:
        """Nothing is held any more; what was counted stays."""
        for expert in range(len(self._state)):
            self._take_out(expert)

    def _dispatch(self, expert: int, found: State) -> int | None:
        rank = self._ranking.rank(expert)
        pool = next((pool for pool, limit in self._limits if rank < limit), None)
        return _F if found is State.F and pool in (_C, _E) else pool

    def _put(self, expert: int, pool: int, state: State) -> None:
        self._state[expert], self._pool[expert] = state, pool
        self._held[pool] += self._bytes[state]
        insort(self._members[pool], expert, key=self._ranking.entry)

    def _drive_out(self, pool: int, found: Mapping[int, State], before: dict[int, State]) -> None:
        """Make a pool fit; what it gives up goes on to the next one.

        Args:
            pool: that something was put into.
            found: states of the step's experts before it.
            before: the same of all experts that the step has touched; the victims are added.
        """
        following = next((other for other in self._used if other > pool), None)
        while self._held[pool] > self._memory[pool]:
            victim = self._members[pool][-1]
            has = self._state[victim]
            before.setdefault(victim, has)
            self._take_out(victim)
            if following is None:
                continue
            if found.get(victim, State.F) is not State.F:
                has = State.C  # just read and decoded: all of its parts are there
            lower = _lowered(has, following)
            if lower is not State.M:
                self._put(victim, following, lower)
                self._drive_out(following, found, before)

    def _take_out(self, expert: int) -> None:
        pool = self._pool[expert]
        if pool is not None:
            self._members[pool].remove(expert)
            self._held[pool] -= self._bytes[self._state[expert]]
            self._state[expert], self._pool[expert] = State.M, None


def _lowered(state: State, pool: int) -> State:
    """What an expert can be in a pool further down with the parts that it has."""
    if pool == _C and state is State.C:
        return State.C
    if pool == _E:
        return State.E if state in (State.C, State.E) else State.M
    return State.M if state is State.E else State.S


class Pools:
    """Which expert is to be held in which state. Calls come from the thread that runs the model, but for `state`.

    Args:
        layers: L.
        experts: E.
        size: bytes of an expert's parts.
        room: experts for which each state has room, of all layers together; layers share it as evenly as can be.
    """

    def __init__(self, *, layers: int, experts: int, size: ExpertBytes, room: Mapping[State, int]) -> None:
        self.experts = experts
        self.room = {state: room.get(state, 0) for state in POOLS}
        """Experts for which each state has room, of all layers together."""
        self._layers = []
        for layer in range(layers):
            shares = {state: _share(count, layer, layers) for state, count in self.room.items()}
            memory = {state: count * size.held(state) for state, count in shares.items()}
            self._layers.append(PoolCache(experts, size=size, memory=memory))
        self._changed: list[tuple[int, State]] = []
        self.running: frozenset[int] = frozenset()
        """Experts that the last layer ran with."""

    def state(self, key: int) -> State:
        """What is to be held of an expert."""
        layer, expert = divmod(key, self.experts)
        return self._layers[layer].state(expert)

    def use(self, layer: int, keys: Sequence[int]) -> list[tuple[int, State]]:
        """A layer runs with these experts (distinct): those that are to be held in another state now, with it."""
        first = layer * self.experts
        self.running = frozenset(keys)
        found = self._layers[layer].use([key - first for key in keys])
        changed = [(first + expert, state) for expert, state in found.items()]
        self._changed += changed
        return changed

    def lose(self, key: int) -> None:
        """Nothing is held of an expert any more, for other reasons than use."""
        layer, expert = divmod(key, self.experts)
        self._layers[layer].lose(expert)

    def changes(self) -> list[tuple[int, State]]:
        """Experts whose state is another one since this was asked last, with the new one; the last entry of an expert
        counts."""
        changed, self._changed = self._changed, []
        return changed

    def clear(self) -> None:
        """Nothing is held any more; what was counted stays."""
        self._changed.clear()
        for layer in self._layers:
            layer.clear()


def _share(count: int, layer: int, layers: int) -> int:
    """As equal as can be; what is left over goes to layers all over the model."""
    return count * (layer + 1) // layers - count * layer // layers
