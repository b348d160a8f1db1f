"""Farthest layer distance (row A15)."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.policies.eviction.victims import ByLayer, farthest_first
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


class FLD(ByLayer):
    """Gives up the expert whose layer is farthest from the running one; ties by LRU. O(1) per expert and O(L) bits."""

    name = "fld"
    config_class = FLDConfig

    def __init__(self, config: FLDConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._absolute = config.distance == "absolute"

    def victim(self, protected: Container[int]) -> int | None:
        if self._absolute:
            return self._victim_absolute(protected)
        for layer in farthest_first(self._occupied, self._layer):
            for key in self._orders[layer]:
                if key not in protected:
                    return key
        return None

    def _victim_absolute(self, protected: Container[int]) -> int | None:
        for layers in _from_the_ends(self._occupied, self._layer):
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
