"""Counts of one offloaded run, per MoE layer and in total."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(slots=True)
class LayerStatistics:
    """What happened at one MoE layer. A request is one distinct expert that a step of the layer needs."""

    requests: int = 0
    hits: int = 0
    """Requests whose expert had a slot, arrived or on its way, when the layer's routing was known."""
    misses: int = 0
    """Requests whose copy was started only then; dropped and substituted experts are none."""
    collisions: int = 0
    """Misses of experts that were evicted earlier in the same forward."""
    evicted: int = 0
    """Experts that gave their slot to another one."""
    skipped: int = 0
    """Experts that the router chose and a lossy policy left out or replaced."""
    prefetched: int = 0
    """Copies asked for by a forecast, the dropped ones left out."""
    prefetched_used: int = 0
    """Of these, requested before they lost their slot (counted once per copy)."""
    prefetched_in_time: int = 0
    """Of the used ones, arrived before compute came to wait for them."""
    dropped: int = 0
    """Prefetches that were taken back before they started."""
    bytes_moved: int = 0
    """Bytes of this layer's experts, store to slots."""
    waited_s: float = 0.0
    """Seconds the layer's compute was blocked on copies (host time; CUDA streams wait on the device, see the link)."""
    steps: int = 0
    """Times the layer ran."""
    chunks: int = 0
    """Kernel calls; more than steps when a step's experts did not fit the slots."""


class RunStatistics:
    """`layers[l]` counts layer l; `as_dict` adds totals."""

    def __init__(self, layers: int) -> None:
        self.layers = [LayerStatistics() for _ in range(layers)]

    def reset(self) -> None:
        """Set everything to zero."""
        self.layers[:] = [LayerStatistics() for _ in self.layers]

    @property
    def total(self) -> LayerStatistics:
        return LayerStatistics(
            **{f.name: sum(getattr(layer, f.name) for layer in self.layers) for f in fields(LayerStatistics)}
        )

    @property
    def hit_rate(self) -> float:
        """hits / requests; 0 when nothing ran."""
        total = self.total
        return total.hits / total.requests if total.requests else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Totals and `hit_rate`, with `per_layer` beside them."""
        return {
            **asdict(self.total),
            "hit_rate": self.hit_rate,
            "per_layer": [asdict(layer) for layer in self.layers],
        }
