"""What a run counts, as a page for Prometheus: read when it is asked for, from another thread than the one that runs.

Nothing here stops or slows a forward: counters are read as they stand, a device's are copied to the host.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

from prometheus_client import CollectorRegistry, make_asgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from expertcast.runtime.drafts.tally import Tally
from expertcast.runtime.engine.drift import DriftMonitor
from expertcast.runtime.engine.filling import held_by_tables
from expertcast.runtime.links.base import Link
from expertcast.runtime.links.kernel import KernelLink
from expertcast.runtime.recording.statistics import RunStatistics
from expertcast.runtime.serving import families as named
from expertcast.runtime.serving.families import Described
from expertcast.runtime.serving.request_metrics import Requests, request_metrics
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore

if TYPE_CHECKING:
    from expertcast.runtime.offloaded import OffloadedModel

_VERSIONS = ("expertcast", "torch", "transformers")

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What is read: parts of one run, whatever runs it. None, or nothing, where a part is missing."""

    stats: RunStatistics
    link: Link
    pool: SlotPool
    store: ExpertStore
    drift: DriftMonitor | None = None
    tally: Tally | None = None
    draft_bytes: Callable[[], Mapping[str, int]] = field(default=dict)
    """Device memory that drafts hold, by name."""
    info: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, offloaded: OffloadedModel, name: str = "") -> Source:
        """The parts of an offloaded model.

        Args:
            offloaded: the model.
            name: by which it is served; by default its own.
        """
        drafting = offloaded.drafting

        def draft_bytes() -> Mapping[str, int]:
            return {} if drafting is None else dict(drafting.memory)

        return cls(
            stats=offloaded.stats, link=offloaded.link, pool=offloaded.pool, store=offloaded.store,
            drift=offloaded.drift, tally=None if drafting is None else drafting.tally, draft_bytes=draft_bytes,
            info=described(offloaded, name),
        )  # fmt: skip


class ExpertMetrics(Collector):
    """Reads one run whenever the page is asked for. Counters go on where the run's statistics are set to zero.

    Args:
        source: of what the experts do.
        counts: of what clients ask for; None: nothing is known of them.
    """

    def __init__(self, source: Source, counts: Requests | None = None) -> None:
        self._source, self._counts = source, counts
        self._lock = threading.RLock()
        self._before: dict[tuple[str, Labels], float] = {}
        """What was counted before statistics were last set to zero."""
        self._shown: dict[tuple[str, Labels], float] = {}
        self._setting_back = False
        living = [keeper for keeper in source.stats.keepers if keeper() is not None]
        source.stats.keepers = [*living, WeakMethod(self._kept)]

    def collect(self) -> Iterator[Metric]:
        """All families that there is something to say of."""
        with self._lock:
            counted = list(self._run_counters())
            counters = [
                (described, labels, self._since_start(described, labels, now)) for described, labels, now in counted
            ]
        yield from _families(counters)
        yield from _families(self._gauges())
        yield from _families(self._drafts())
        if self._counts is not None:  # sums of counters that grow meanwhile may be one request apart
            yield from request_metrics(self._counts)
        info = InfoMetricFamily(named.INFO.family, named.INFO.help)
        info.add_metric((), dict(self._source.info))
        yield info

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """The run's counters, or some of them, are set to zero inside."""
        with self._lock:
            if self._setting_back:
                yield
                return
            self._setting_back = True
            before = self._totals()
            try:
                yield
            finally:
                self._before = {}
                zeroed = self._totals()
                self._before = {place: total - zeroed.get(place, 0) for place, total in before.items()}
                self._setting_back = False

    def _totals(self) -> dict[tuple[str, Labels], float]:
        return {
            (what.name, labels): self._before.get((what.name, labels), 0) + now
            for what, labels, now in self._run_counters()
        }

    def _since_start(self, described: Described, labels: Labels, now: float) -> float:
        """A copy that is taken back is counted no more: until others make up for it the counter stands still."""
        place = described.name, labels
        shown = self._shown[place] = max(self._shown.get(place, 0), self._before.get(place, 0) + now)
        return shown

    def _run_counters(self) -> Iterator[tuple[Described, Labels, float]]:
        source = self._source
        for layer, counts in enumerate(list(source.stats.layers)):
            for name, described in named.LAYER.items():
                if name not in source.stats.uncounted:
                    yield described, (str(layer),), getattr(counts, name)
        link = source.link
        yield named.COPIES, (), link.copies
        yield named.BUSY, (), link.busy_s
        if link.name == "disk":
            yield named.READS, (), link.copies
            yield named.READ_SECONDS, (), link.busy_s

    def _gauges(self) -> Iterator[tuple[Described, Labels, float]]:
        source = self._source
        store, pool, drift = source.store, source.pool, source.drift
        yield named.EXPERTS, (), store.layers * store.experts
        yield named.SLOTS, (), pool.count
        yield named.HELD, (), _held(source)
        yield named.SLOT_BYTES, (), pool.nbytes
        yield named.STORE_BYTES, (store.name,), store.stored_nbytes
        if drift is not None:
            for layer, recall in drift.recall.items():
                yield named.RECALL, (str(layer),), recall
            for layer, recall in (drift.expected or {}).items():
                yield named.EXPECTED, (str(layer),), recall
            if drift.drift is not None:
                yield named.DRIFT, (), drift.drift

    def _drafts(self) -> Iterator[tuple[Described, Labels, float]]:
        for draft, nbytes in self._source.draft_bytes().items():
            yield named.DRAFT_BYTES, (draft,), nbytes
        tally = self._source.tally
        for draft, count in () if tally is None else list(tally.by_draft.items()):
            yield named.CYCLES, (draft,), count.cycles
            yield named.DRAFTED, (draft,), count.drafted
            yield named.ACCEPTED, (draft,), count.accepted


def metrics_app(offloaded: OffloadedModel, counts: Requests | None = None, name: str = "") -> Any:
    """An ASGI application whose one page is that of Prometheus.

    Args:
        offloaded: what is served.
        counts: of its requests.
        name: by which it is served; by default its own.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ExpertMetrics(Source.of(offloaded, name), counts))
    return make_asgi_app(registry)


def described(offloaded: OffloadedModel, name: str = "") -> dict[str, str]:
    """What is said of an offloaded model on its page: `model`, `predictor`, `mode`, `policy`, `link`, `store`, and
    versions.

    Args:
        offloaded: the model.
        name: by which it is served; by default its own.
    """
    executed, layers = offloaded.executed_layers, len(offloaded.view)
    predictor = offloaded.predictor
    mode = "exact"
    if executed:
        mode = "speculate" if len(executed) >= layers - 1 else "hybrid"
    return {
        "model": name or offloaded.view.model_id,
        "predictor": "none" if predictor is None else predictor.name,
        "mode": mode,
        "policy": ",".join(f"{kind}={text}" for kind, text in offloaded.policies.as_dict().items()),
        "link": offloaded.link.name,
        "store": offloaded.store.name,
        "python": platform.python_version(),
        **{package: _version(package) for package in _VERSIONS},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _held(source: Source) -> int:
    if isinstance(source.link, KernelLink):
        return len(held_by_tables(source.link))
    return len(source.pool.slots)


def _families(values: Any) -> Iterator[Metric]:
    """Samples of one name together, as the format wants them."""
    made: dict[str, Any] = {}
    for described, labels, value in values:
        if described.name not in made:
            kind = CounterMetricFamily if described.kind == "counter" else GaugeMetricFamily
            made[described.name] = kind(described.family, described.help, labels=described.labels)
        made[described.name].add_metric(labels, value)
    yield from made.values()
