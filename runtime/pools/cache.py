"""Which experts are kept in which state: pools of full, compressed and partial experts (ZipMoE, section 3.4; rows E12
and E14).

Each layer has pools F, C, S and E of its own, in bytes. Beside them stand the slots that a running layer computes with.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.pools.ranking import FADE, Ranking
from expertcast.runtime.pools.states import POOLS, ExpertBytes, State

MARGIN = 1
_F, _C, _S, _E = range(len(POOLS))


@dataclass(frozen=True, slots=True)
class Access:
    """What one step of a layer did to its pools."""

    found: dict[int, State]
    """State of each expert that the step used, before it."""
    changed: dict[int, State]
    """New state of every expert whose state is another now, used or not."""


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

    Raises:
        ExpertcastError: negative memory or margin, or memory for M.
    """

    def __init__(
        self,
        experts: int,
        *,
        size: ExpertBytes,
        memory: Mapping[State, int],
        margin: int = MARGIN,
        fade: float = FADE,
    ) -> None:
        wrong = [state.name for state, given in memory.items() if given < 0 or state is State.M]
        if wrong or margin < 0:
            raise ExpertcastError(f"memory of {wrong}, margin={margin}: give pools F, C, S, E and a margin 0 or more")
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

    def use(self, experts: Sequence[int]) -> Access:
        """One step of the layer with distinct experts: count them, and keep what is worth it.

        All parts of an expert that was not found full are at hand behind the step, but for what was not read.
        """
        found = {expert: self._state[expert] for expert in experts}
        step = _Step(found, dict(found))
        for expert in experts:
            self._take_out(expert)
        self._ranking.use(experts)
        for expert in sorted(experts, key=self._ranking.entry):
            pool = self._dispatch(expert, found[expert])
            if pool is not None:
                self._put(expert, pool, POOLS[pool], step)
        changed = {expert: self._state[expert] for expert, old in step.before.items() if self._state[expert] is not old}
        return Access(found, changed)

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

    def _put(self, expert: int, pool: int, state: State, step: _Step) -> None:
        """Into a pool; what that drives out goes on to the next one."""
        self._state[expert], self._pool[expert] = state, pool
        self._held[pool] += self._bytes[state]
        insort(self._members[pool], expert, key=self._ranking.entry)
        following = next((other for other in self._used if other > pool), None)
        while self._held[pool] > self._memory[pool]:
            victim = self._members[pool][-1]
            has = self._state[victim]
            step.before.setdefault(victim, has)
            self._take_out(victim)
            if following is None:
                continue
            if step.found.get(victim, State.F) is not State.F:
                has = State.C  # just read and decoded: all of its parts are there
            lower = _lowered(has, following)
            if lower is not State.M:
                self._put(victim, following, lower, step)

    def _take_out(self, expert: int) -> None:
        pool = self._pool[expert]
        if pool is not None:
            self._members[pool].remove(expert)
            self._held[pool] -= self._bytes[self._state[expert]]
            self._state[expert], self._pool[expert] = State.M, None


@dataclass(frozen=True, slots=True)
class _Step:
    found: dict[int, State]
    before: dict[int, State]
    """State of every expert that the step has touched, before it."""


def _lowered(state: State, pool: int) -> State:
    """What an expert can be in a pool further down with the parts that it has."""
    if pool == _C and state is State.C:
        return State.C
    if pool == _E:
        return State.E if state in (State.C, State.E) else State.M
    return State.M if state is State.E else State.S
