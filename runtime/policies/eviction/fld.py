"""Farthest layer distance (row A15)."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.policies.eviction.base import EvictionPolicy
from expertcast.runtime.policies.eviction.victims import LayerOrders, farthest_first
from expertcast.runtime.policies.registry import CacheShape, PolicyConfig

DISTANCES = ("cyclic", "absolute")


@dataclass(frozen=True, kw_only=True)
class FLDConfig(PolicyConfig):
    """How far apart two layers are."""

    distance: str = "cyclic"
    """`cyclic`: layers until an expert's layer runs again. `absolute`: the difference of the layers' numbers, which
    gives up the first layer's experts at the last layer, just before they are needed."""

    def __post_init__(self) -> None:
        if self.distance not in DISTANCES:
            raise ExpertcastError(f"distance={self.distance!r}: choose from {', '.join(DISTANCES)}")


class FLD(EvictionPolicy):
    """Gives up the expert whose layer is farthest from the running one; ties by LRU. O(1) per expert and O(L) bits."""

    name: ClassVar[str] = "fld"
    config_class: ClassVar[type[PolicyConfig]] = FLDConfig
    config: FLDConfig

    def __init__(self, config: FLDConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._orders = LayerOrders(shape)
        self._clock = 0
        self._layer = 0
        self._absolute = config.distance == "absolute"

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        self._layer = layer

    def insert(self, key: int, full: bool = True) -> None:
        self._clock += 1
        self._orders.add(key, self._clock)

    def use(self, keys: Sequence[int]) -> None:
        self._clock += 1
        self._orders.access(keys, self._clock)

    def remove(self, key: int) -> None:
        self._orders.remove(key)

    def clear(self) -> None:
        self._orders.clear()

    def victim(self, protected: Container[int]) -> int | None:
        if self._absolute:
            return self._victim_absolute(protected)
        for layer in farthest_first(self._orders.occupied, self._layer):
            for key in self._orders[layer]:
                if key not in protected:
                    return key
        return None

    def _victim_absolute(self, protected: Container[int]) -> int | None:
        for layers in _from_the_ends(self._orders.occupied, self._layer):
            oldest = [next((key for key in self._orders[layer] if key not in protected), None) for layer in layers]
            found = [key for key in oldest if key is not None]
            if found:
                return min(found, key=lambda key: self._orders[key // self.shape.experts][key])
        return None


def _from_the_ends(layers: int, current: int) -> Iterator[list[int]]:
    """Layers of a bit mask by falling absolute distance, those at the same distance together."""
    while layers:
        first, last = (layers & -layers).bit_length() - 1, layers.bit_length() - 1
        farthest = max(current - first, last - current)
        equal = sorted({layer for layer in (first, last) if abs(layer - current) == farthest})
        yield equal
        for layer in equal:
            layers ^= 1 << layer
