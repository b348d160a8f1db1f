"""Slots as the pool of full experts (rows E12 and E14): who may stay in one is decided with what is kept compressed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence

from expertcast.runtime.policies.eviction.base import EvictionPolicy
from expertcast.runtime.pools.pools import Pools
from expertcast.runtime.pools.states import State


class Pooled(EvictionPolicy):
    """Gives up experts that only pass through a slot first, the one used longest ago, then full ones in the same order.

    No name chooses it: it comes with the pools of :attr:`OffloadConfig.pools`, over all slots.

    Args:
        pools: are told here of every use.
    """

    name = "pooled"

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._passing: OrderedDict[int, None] = OrderedDict()
        self._full: OrderedDict[int, None] = OrderedDict()

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        for key, state in self._pools.use(layer, keys):
            if state is State.F and key in self._passing:
                self._full[key] = self._passing.pop(key)
            elif state is not State.F and key in self._full:
                self._passing[key] = self._full.pop(key)

    def insert(self, key: int, full: bool = True) -> None:
        (self._full if self._pools.state(key) is State.F else self._passing)[key] = None

    def use(self, keys: Sequence[int]) -> None:
        for key in keys:
            (self._full if key in self._full else self._passing).move_to_end(key)

    def remove(self, key: int) -> None:
        if key in self._passing:
            del self._passing[key]
        else:
            del self._full[key]
            self._pools.lose(key)

    def clear(self) -> None:
        self._passing.clear()
        self._full.clear()
        self._pools.clear()

    def victim(self, protected: Container[int]) -> int | None:
        for order in (self._passing, self._full):
            for key in order:
                if key not in protected:
                    return key
        return None
