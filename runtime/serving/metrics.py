"""Prometheus metrics of a run and of its requests.

The page is read from another thread than the one that runs. Nothing here stops or slows a forward: counters are read as
they stand, a device's are copied to the host.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakMethod

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    make_asgi_app,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from expertcast.runtime.drafts.governor import Tally
from expertcast.runtime.engine.drift import DriftMonitor
from expertcast.runtime.experimental.kernel_link import KernelLink, held_by_tables
from expertcast.runtime.links.base import Link
from expertcast.runtime.recording.statistics import RunStatistics
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore

if TYPE_CHECKING:
    from expertcast.runtime.offloading import OffloadedModel


# All metrics: docs/metrics.md has the same table, and a test compares them.

Kind = Literal["counter", "gauge", "histogram", "info"]
PREFIX = "expertcast_"


@dataclass(frozen=True, slots=True)
class Described:
    """One metric."""

    kind: Kind
    name: str
    """Without the prefix, and without what its kind appends (`_total`, `_bucket`, `_info`)."""
    help: str
    labels: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """The name that prometheus_client makes samples' names from."""
        return (PREFIX + self.name).rstrip("_")

    @property
    def shown(self) -> str:
        """The name by which queries ask for it."""
        return self.family + {"counter": "_total", "info": "_info"}.get(self.kind, "")


_LAYER = ("layer",)


def _per_layer(name: str, text: str) -> Described:
    return Described("counter", name, text, _LAYER)


LAYER = {
    "requests": _per_layer("expert_requests", "Distinct experts that steps of the layer needed."),
    "hits": _per_layer("expert_hits", "Requests whose expert had a slot, arrived or on its way."),
    "misses": _per_layer("expert_misses", "Requests whose copy was started only when the layer's routing was known."),
    "collisions": _per_layer("expert_collisions", "Misses of experts that were evicted earlier in the same forward."),
    "evicted": _per_layer("experts_evicted", "Experts that gave their slot to another one."),
    "skipped": _per_layer("experts_skipped", "Experts that a lossy policy left out or replaced."),
    "prefetched": _per_layer("experts_prefetched", "Copies asked for by forecasts, the dropped ones left out."),
    "prefetched_used": _per_layer("prefetches_used", "Of these, requested before they lost their slot."),
    "prefetched_in_time": _per_layer("prefetches_in_time", "Of the used ones, arrived before compute waited for them."),
    "dropped": _per_layer("prefetches_dropped", "Copies asked for by forecasts and taken back before they started."),
    "bytes_moved": _per_layer("moved_bytes", "Bytes of experts copied into slots, and of copies that are queued."),
    "waited_s": _per_layer("waiting_seconds", "Seconds that the layer's compute was blocked on copies."),
    "steps": _per_layer("layer_steps", "Times that the layer ran."),
    "chunks": _per_layer("layer_chunks", "Kernel calls; more than steps where a step's experts did not fit the slots."),
}
"""By field of :class:`expertcast.runtime.recording.statistics.LayerStatistics`."""

COPIES = Described("counter", "link_copies", "Copies of experts that have arrived in slots.")
BUSY = Described("counter", "link_busy_seconds", "Seconds in which the link had a copy under way.")
READS = Described("counter", "disk_reads", "Experts read from the disk; only where the link is the disk.")
READ_SECONDS = Described("counter", "disk_read_seconds", "Seconds in which any of these reads was under way.")

RECALL = Described("gauge", "forecast_recall", "Running share of a router's experts that its forecast named.", _LAYER)
EXPECTED = Described("gauge", "forecast_recall_expected", "The same by the checkpoint's own test.", _LAYER)
DRIFT = Described("gauge", "forecast_drift", "Mean over layers of the expected recall less the running one.")

EXPERTS = Described("gauge", "experts", "Routed experts of the model, all layers together.")
SLOTS = Described("gauge", "slots", "Experts that fit on the device.")
HELD = Described("gauge", "slots_held", "Slots that an expert has, arrived or on its way.")
SLOT_BYTES = Described("gauge", "slots_bytes", "Memory of the slots.")
STORE_BYTES = Described("gauge", "store_bytes", "What all experts take, in memory or on disk.", ("store",))

_DRAFT = ("draft",)
DRAFT_BYTES = Described("gauge", "draft_bytes", "Device memory that a draft holds beside the slots.", _DRAFT)
CYCLES = Described("counter", "draft_cycles", "Cycles of drafting and verifying.", _DRAFT)
DRAFTED = Described("counter", "draft_tokens", "Drafted tokens that were verified.", _DRAFT)
ACCEPTED = Described("counter", "draft_tokens_accepted", "Drafted tokens that stood.", _DRAFT)

REQUESTS = Described("counter", "http_requests", "Requests that ended, by route and status.", ("route", "status"))
IN_FLIGHT = Described("gauge", "http_requests_in_flight", "Requests that have not ended.")
GONE = Described("counter", "http_disconnects", "Requests whose client went away before their end.")
PROMPT_TOKENS = Described("counter", "prompt_tokens", "Tokens of prompts.")
GENERATED_TOKENS = Described("counter", "generated_tokens", "Tokens generated.")
SECONDS = Described("histogram", "http_request_seconds", "Seconds from arrival to the end.")
FIRST_TOKEN = Described("histogram", "time_to_first_token_seconds", "Seconds from arrival to the first token.")

INFO = Described("info", "", "What is served: model, predictor, mode, policies, link, versions.")

FAMILIES = (
    *LAYER.values(), COPIES, BUSY, READS, READ_SECONDS, RECALL, EXPECTED, DRIFT, EXPERTS, SLOTS, HELD, SLOT_BYTES,
    STORE_BYTES, DRAFT_BYTES, CYCLES, DRAFTED, ACCEPTED, REQUESTS, IN_FLIGHT, GONE, PROMPT_TOKENS, GENERATED_TOKENS,
    SECONDS, FIRST_TOKEN, INFO,
)  # fmt: skip
"""All of them, in the order of the page."""


class RequestMetrics:
    """What clients ask for, counted since the server started. Routes are known paths, or `other`."""

    BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
    """Seconds."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry(auto_describe=False)
        self.ended = Counter(REQUESTS.family, REQUESTS.help, REQUESTS.labels, registry=self.registry)
        """By route and status; 499 where the client left."""
        self.in_flight = Gauge(IN_FLIGHT.family, IN_FLIGHT.help, registry=self.registry)
        self.disconnected = Counter(GONE.family, GONE.help, registry=self.registry)
        self.prompt_tokens = Counter(PROMPT_TOKENS.family, PROMPT_TOKENS.help, registry=self.registry)
        self.generated_tokens = Counter(GENERATED_TOKENS.family, GENERATED_TOKENS.help, registry=self.registry)
        self.seconds = Histogram(SECONDS.family, SECONDS.help, registry=self.registry, buckets=self.BUCKETS)
        """From arrival to end."""
        self.first_token = Histogram(FIRST_TOKEN.family, FIRST_TOKEN.help, registry=self.registry, buckets=self.BUCKETS)
        """From arrival to the first token, of requests that had one."""

    @staticmethod
    def total(counter: Counter) -> int:
        """A counter's value, the sum over its labels."""
        return int(sum(sample.value for family in counter.collect() for sample in family.samples))


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
    """

    def __init__(self, source: Source) -> None:
        self._source = source
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
        info = InfoMetricFamily(INFO.family, INFO.help)
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
            for name, described in LAYER.items():
                if name not in source.stats.uncounted:
                    yield described, (str(layer),), getattr(counts, name)
        link = source.link
        yield COPIES, (), link.copies
        yield BUSY, (), link.busy_s
        if link.name == "disk":
            yield READS, (), link.copies
            yield READ_SECONDS, (), link.busy_s

    def _gauges(self) -> Iterator[tuple[Described, Labels, float]]:
        source = self._source
        store, pool, drift = source.store, source.pool, source.drift
        yield EXPERTS, (), store.layers * store.experts
        yield SLOTS, (), pool.count
        yield HELD, (), _held(source)
        yield SLOT_BYTES, (), pool.nbytes
        yield STORE_BYTES, (store.name,), store.stored_nbytes
        if drift is not None:
            for layer, recall in drift.recall.items():
                yield RECALL, (str(layer),), recall
            for layer, recall in (drift.expected or {}).items():
                yield EXPECTED, (str(layer),), recall
            if drift.drift is not None:
                yield DRIFT, (), drift.drift

    def _drafts(self) -> Iterator[tuple[Described, Labels, float]]:
        for draft, nbytes in self._source.draft_bytes().items():
            yield DRAFT_BYTES, (draft,), nbytes
        tally = self._source.tally
        for draft, count in () if tally is None else list(tally.by_draft.items()):
            yield CYCLES, (draft,), count.cycles
            yield DRAFTED, (draft,), count.drafted
            yield ACCEPTED, (draft,), count.accepted


def metrics_app(offloaded: OffloadedModel, requests: RequestMetrics, name: str = "") -> Any:
    """An ASGI application whose one page is that of Prometheus.

    Args:
        offloaded: what is served.
        requests: of its clients.
        name: by which it is served; by default its own.
    """
    requests.registry.register(ExpertMetrics(Source.of(offloaded, name)))
    return make_asgi_app(requests.registry)


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
