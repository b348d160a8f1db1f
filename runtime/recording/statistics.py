"""Counts of one offloaded run, per MoE layer and in total."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from weakref import WeakMethod

from expertcast.predictors.messages import Json


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
    """Copies asked for by a forecast that were taken back before they started: `prefetched` does not count them."""
    bytes_moved: int = 0
    """Bytes of this layer's experts, store to slots."""
    waited_s: float = 0.0
    """Seconds the layer's compute was blocked on copies, those that its own thread makes, with pages read from a disk,
    among them (host time; CUDA streams wait on the device, see the link)."""
    steps: int = 0
    """Times the layer ran."""
    chunks: int = 0
    """Kernel calls; more than steps when a step's experts did not fit the slots."""


class RunStatistics:
    """Counts that the engine and its cache keep: `layers[l]` of layer l, `as_dict` with totals.

    Args:
        layers: MoE layers of the model.
    """

    reports: Sequence[Callable[[], Json]] = ()
    """Further entries for :meth:`as_dict`, from those who keep them."""
    uncounted: frozenset[str] = frozenset()
    """Fields of a layer's statistics that stay 0, for nobody sees what they count."""
    keepers: Sequence[WeakMethod[Callable[[], AbstractContextManager[None]]]] = ()
    """Entered around whatever is set to zero, for those who count on, as long as they live; see :meth:`resetting`."""

    def __init__(self, layers: int) -> None:
        self.layers = [LayerStatistics() for _ in range(layers)]

    @contextmanager
    def resetting(self) -> Iterator[None]:
        """Inside, counters of the run are set to zero: `keepers` have seen what they were."""
        with ExitStack() as told:
            for keeper in filter(None, (reference() for reference in self.keepers)):
                told.enter_context(keeper())
            yield

    def reset(self) -> None:
        """Set everything to zero."""
        with self.resetting():
            self.layers[:] = [LayerStatistics() for _ in self.layers]

    @property
    def total(self) -> LayerStatistics:
        """All layers together."""
        return LayerStatistics(
            **{f.name: sum(getattr(layer, f.name) for layer in self.layers) for f in fields(LayerStatistics)}
        )

    @property
    def waited_s(self) -> float:
        """Seconds that compute was blocked on copies, at all layers."""
        return sum(layer.waited_s for layer in self.layers)

    @property
    def hit_rate(self) -> float:
        """hits / requests; 0 when nothing ran."""
        total = self.total
        return total.hits / total.requests if total.requests else 0.0

    @property
    def prefetch_precision(self) -> float | None:
        """prefetched_used / (prefetched + dropped): of the copies that forecasts asked for, those a layer used.

        What is dropped counts, for it was asked for: a layer takes a queued copy back when it does not need the expert,
        so that without it most wrong forecasts on a slow link would be left out. Experts that a forecast named and that
        had a slot already, or for which no slot could be had, are no copies. None where nothing was asked for.
        """
        total = self.total
        return share(total.prefetched_used, total.prefetched + total.dropped)

    @property
    def issued_precision(self) -> float | None:
        """prefetched_used / prefetched: the same of the copies that were made; the wrong ones cost the link time."""
        total = self.total
        return share(total.prefetched_used, total.prefetched)

    def as_dict(self) -> Json:
        """Totals, `hit_rate`, `prefetch_precision` and `issued_precision`, with `per_layer` beside them; `drift` and
        `forecast_recall` of :class:`expertcast.runtime.engine.drift.DriftMonitor` (`drift` is None where nothing can be
        said: no forecasts, a predictor without metrics, books on the device), and `refit` where they are refitted."""
        values = {
            **asdict(self.total),
            "hit_rate": self.hit_rate,
            "prefetch_precision": self.prefetch_precision,
            "issued_precision": self.issued_precision,
            "drift": None,
        }
        for report in self.reports:
            values |= report()
        return {**values, "per_layer": [asdict(layer) for layer in self.layers]}


def share(part: int, whole: int) -> float | None:
    """None where there is nothing to have a share of."""
    return part / whole if whole else None
