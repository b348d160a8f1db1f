"""Least-Stale (row A17)."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.policies.eviction.victims import ByLayer, farthest_first
from expertcast.runtime.policies.registry import CacheShape, PolicyConfig

ORDERS = ("distance", "layer")


@dataclass(frozen=True, kw_only=True)
class LeastStaleConfig(PolicyConfig):
    """Which of several stale experts is given up."""

    order: str = "distance"
    """Among stale experts, and then among current ones: `distance` gives up those whose layer runs again last, `layer`
    those of the first layer, as the paper has it, which is LRU while the cache holds no more than one pass."""

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ExpertcastError(f"order={self.order!r}: choose from {', '.join(ORDERS)}")


class LeastStale(ByLayer):
    """Gives up stale experts, those last accessed in an earlier pass, before current ones.

    An access is a use, a copy or a forecast that wants the expert (trap 3 under row A27). The key, smallest first, is
    (current, -((layer - running layer - 1) mod L), last access), or (current, layer, last access) for `order=layer`
    (trap 2). O(1) per expert and O(L) bits: a layer's stale experts are in front of its current ones, so that one
    order per layer serves as both of the paper's heaps.
    """

    name = "least_stale"
    config_class = LeastStaleConfig

    def __init__(self, config: LeastStaleConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._stale = 0
        """Bit l is set when layer l may have stale experts."""
        self._began = 0
        """The clock when the pass began: what was accessed then or before is stale."""
        self._by_layer = config.order == "layer"

    def start_pass(self, fresh: bool) -> None:
        self._began = self._clock
        self._stale = self._occupied

    def touch(self, keys: Sequence[int]) -> None:
        self.use(keys)

    def victim(self, protected: Container[int]) -> int | None:
        began = self._began
        for layer in self._ordered(self._stale):
            stale = False
            for key, last in self._orders[layer].items():
                if last > began:
                    break
                if key not in protected:
                    return key
                stale = True
            if not stale:
                self._stale ^= 1 << layer
        for layer in self._ordered(self._occupied):
            for key, last in self._orders[layer].items():
                if last > began and key not in protected:
                    return key
        return None

    def _ordered(self, layers: int) -> Iterator[int]:
        return _first_to_last(layers) if self._by_layer else farthest_first(layers, self._layer)


def _first_to_last(layers: int) -> Iterator[int]:
    """Layers of a bit mask."""
    while layers:
        yield (layers & -layers).bit_length() - 1
        layers &= layers - 1
