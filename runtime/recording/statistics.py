"""Statistics of an offloaded run, per MoE layer and in total."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields

from expertcast.predictors.messages import Json


@dataclass(slots=True)
class LayerStatistics:
    """Statistics of one MoE layer."""

    requests: int = 0
    """Number of distinct experts that the layer needed, summed over steps."""
    hits: int = 0
    """Requests of experts that had a slot when the routing was known, including copies in flight for a forecast."""
    misses: int = 0
    """Requests whose copy started after the routing was known, or without a forecast, as a prefill loads the next
    layer; without dropped and substituted experts."""
    collisions: int = 0
    """Misses of experts that were evicted earlier in the same step."""
    evicted: int = 0
    """Number of evictions."""
    skipped: int = 0
    """Experts that the router chose and that a lossy policy dropped or substituted."""
    prefetched: int = 0
    """Copies requested by forecasts, without dropped ones."""
    prefetched_used: int = 0
    """Prefetched copies whose expert was requested before its eviction; each copy counts once."""
    prefetched_in_time: int = 0
    """Used prefetched copies that arrived before the layer waited for them."""
    dropped: int = 0
    """Copies requested by forecasts and cancelled before they started; not part of `prefetched`."""
    bytes_moved: int = 0
    """Bytes of this layer's experts copied from the store to slots."""
    waited_s: float = 0.0
    """Seconds that the layer waited for copies (host time; on CUDA the streams wait on the device, see the link).
    Includes copies and disk reads by the thread that runs the model."""
    steps: int = 0
    """Number of times the layer ran."""
    chunks: int = 0
    """Number of kernel calls; exceeds `steps` if the experts of a step did not fit the slots."""


class RunStatistics:
    """Statistics of a run: `layers[l]` for layer l, `total` for all layers.

    Args:
        layers: number of MoE layers.
    """

    reports: Sequence[Callable[[], Json]] = ()
    """Functions that return further entries of :meth:`as_dict`."""
    resets: int = 0
    """Number of resets."""

    def __init__(self, layers: int) -> None:
        self.layers = [LayerStatistics() for _ in range(layers)]

    def reset(self) -> None:
        """Set all counts to 0."""
        self.layers[:] = [LayerStatistics() for _ in self.layers]
        self.resets += 1

    def __repr__(self) -> str:
        """The counts of all layers."""
        total = self.total
        return (
            f"RunStatistics(requests={total.requests}, hits={total.hits} ({self.hit_rate:.1%}), "
            f"misses={total.misses}, bytes_moved={total.bytes_moved}, waited_s={total.waited_s:.3g})"
        )

    @property
    def total(self) -> LayerStatistics:
        """Sum over all layers."""
        return LayerStatistics(
            **{f.name: sum(getattr(layer, f.name) for layer in self.layers) for f in fields(LayerStatistics)}
        )

    @property
    def waited_s(self) -> float:
        """Seconds that all layers waited for copies."""
        return sum(layer.waited_s for layer in self.layers)

    @property
    def hit_rate(self) -> float:
        """hits / requests; 0 without requests."""
        total = self.total
        return total.hits / total.requests if total.requests else 0.0

    @property
    def prefetch_precision(self) -> float | None:
        """prefetched_used / (prefetched + dropped): share of the requested copies that a layer used; None without any.

        Dropped copies count, because layers cancel queued copies of experts that they do not need; on a slow link these
        are most of the wrong forecasts. Forecast experts that were resident, or that got no slot, do not count.
        """
        total = self.total
        return share(total.prefetched_used, total.prefetched + total.dropped)

    @property
    def issued_precision(self) -> float | None:
        """prefetched_used / prefetched: share of the executed copies that a layer used; None without any."""
        total = self.total
        return share(total.prefetched_used, total.prefetched)

    def as_dict(self) -> Json:
        """Return all statistics as plain values.

        - the totals, `hit_rate`, `prefetch_precision`, `issued_precision`, and `per_layer`
        - `drift` and `forecast_recall` of :class:`expertcast.runtime.engine.drift.DriftMonitor`; None without
          forecasts, `drift` also for a predictor without metrics
        - `forecasts`: how many were made, by sequences; empty where no choice was made, as over the link `instant`
        """
        values = {
            **asdict(self.total),
            "hit_rate": self.hit_rate,
            "prefetch_precision": self.prefetch_precision,
            "issued_precision": self.issued_precision,
            "drift": None,
            "forecast_recall": None,
            "forecasts": {},
        }
        for report in self.reports:
            values |= report()
        return {**values, "per_layer": [asdict(layer) for layer in self.layers]}


def share(part: int, whole: int) -> float | None:
    """Return part / whole, or None if `whole` is 0."""
    return part / whole if whole else None
