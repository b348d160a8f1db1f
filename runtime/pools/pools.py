"""The pools of all layers of a model, and what changes in them as it runs.

L MoE layers, E routed experts per layer. An expert's key is layer * E + expert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.pools.cache import MARGIN, PoolCache
from expertcast.runtime.pools.ranking import FADE
from expertcast.runtime.pools.states import POOLS, ExpertBytes, State


class Pools:
    """Which expert is to be held in which state. Calls come from the thread that runs the model, but for `state`.

    Args:
        layers: L.
        experts: E.
        size: bytes of an expert's parts.
        room: experts for which each state has room, of all layers together; layers share it as evenly as can be.
        margin, fade: of :class:`PoolCache`.

    Raises:
        ExpertcastError: room for less than none.
    """

    def __init__(
        self,
        *,
        layers: int,
        experts: int,
        size: ExpertBytes,
        room: Mapping[State, int],
        margin: int = MARGIN,
        fade: float = FADE,
    ) -> None:
        wrong = {state.name: count for state, count in room.items() if count < 0 or state not in POOLS}
        if wrong:
            raise ExpertcastError(f"room for {wrong} experts: give pools F, C, S and E, 0 or more")
        self.experts = experts
        self.room = {state: room.get(state, 0) for state in POOLS}
        """Experts for which each state has room, of all layers together."""
        self._layers = []
        for layer in range(layers):
            shares = {state: _share(count, layer, layers) for state, count in self.room.items()}
            memory = {state: count * size.held(state) for state, count in shares.items()}
            self._layers.append(PoolCache(experts, size=size, memory=memory, margin=margin, fade=fade))
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
        access = self._layers[layer].use([key - first for key in keys])
        changed = [(first + expert, state) for expert, state in access.changed.items()]
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
