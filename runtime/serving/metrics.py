"""Prometheus metrics of a run and of its requests.

A scrape runs in another thread than the model. It neither stops nor slows a forward pass: it reads the counters as they
are, and copies those on a device to the host.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

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

import expertcast
from expertcast.runtime.drafts.governor import DraftCount
from expertcast.runtime.links.base import Link
from expertcast.runtime.recording.recorder import RunStatistics
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore

if TYPE_CHECKING:
    from expertcast.runtime.offloading import OffloadedModel


# All metrics. docs/metrics.md has the same table, and a test compares the two.

Kind = Literal["counter", "gauge", "histogram", "info"]
PREFIX = "expertcast_"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """Name, kind, help text and labels of one metric."""

    kind: Kind
    name: str
    """Name without the prefix and without the suffix of its kind (`_total`, `_bucket`, `_info`)."""
    help: str
    labels: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """Name of the family in prometheus_client."""
        return (PREFIX + self.name).rstrip("_")


_LAYER = {
    "requests": ("expert_requests", "Distinct experts that steps of the layer needed."),
    "hits": ("expert_hits", "Requests whose expert had a slot, arrived or in flight for a forecast."),
    "misses": ("expert_misses", "Requests whose copy began once the routing was known, or without a forecast."),
    "on_host": ("experts_on_host", "Misses that the host computed."),
    "collisions": ("expert_collisions", "Misses of experts that were evicted earlier in the same forward."),
    "evicted": ("experts_evicted", "Experts that lost their slot to another expert."),
    "skipped": ("experts_skipped", "Experts that a lossy policy left out or replaced."),
    "prefetched": ("experts_prefetched", "Prefetches, without those dropped before they started."),
    "prefetched_used": ("prefetches_used", "Prefetches whose expert was needed before it lost its slot."),
    "prefetched_in_time": ("prefetches_in_time", "Used prefetches that arrived before compute waited for them."),
    "dropped": ("prefetches_dropped", "Prefetches dropped before they started."),
    "bytes_moved": ("moved_bytes", "Bytes of experts copied into slots, and of queued copies."),
    "waited_s": (
        "waiting_seconds",
        "Seconds that the layer's compute was blocked on copies and on experts of the host.",
    ),
    "steps": ("layer_steps", "Times that the layer ran."),
    "chunks": ("layer_chunks", "Kernel calls; more than steps if a step's experts did not fit the slots."),
}
LAYER = {field: MetricSpec("counter", *named, ("layer",)) for field, named in _LAYER.items()}
"""Metrics by field of :class:`expertcast.runtime.recording.recorder.LayerStatistics`."""

COPIES = MetricSpec("counter", "link_copies", "Copies of experts that have arrived in slots.")
BUSY = MetricSpec("counter", "link_busy_seconds", "Seconds in which the link had a copy in flight.")

EXPERTS = MetricSpec("gauge", "experts", "Routed experts of the model, all layers together.")
SLOTS = MetricSpec("gauge", "slots", "Experts that fit on the device.")
HELD = MetricSpec("gauge", "slots_held", "Slots with an expert, arrived or in flight.")
SLOT_BYTES = MetricSpec("gauge", "slots_bytes", "Bytes of all slots.")
STORE_BYTES = MetricSpec("gauge", "store_bytes", "Bytes of all experts in the store, in memory or on disk.", ("store",))

_DRAFT = ("draft",)
DRAFT_BYTES = MetricSpec("gauge", "draft_bytes", "Device memory of a draft beside the slots, in bytes.", _DRAFT)
CYCLES = MetricSpec("counter", "draft_cycles", "Cycles of drafting and verifying.", _DRAFT)
DRAFTED = MetricSpec("counter", "draft_tokens", "Drafted tokens that were verified.", _DRAFT)
ACCEPTED = MetricSpec("counter", "draft_tokens_accepted", "Drafted tokens that the model accepted.", _DRAFT)

REQUESTS = MetricSpec("counter", "http_requests", "Finished requests by route and status.", ("route", "status"))
IN_FLIGHT = MetricSpec("gauge", "http_requests_in_flight", "Requests that have not ended.")
GONE = MetricSpec("counter", "http_disconnects", "Requests whose client disconnected before their end.")
PROMPT_TOKENS = MetricSpec("counter", "prompt_tokens", "Tokens of prompts.")
GENERATED_TOKENS = MetricSpec("counter", "generated_tokens", "Tokens generated.")
SECONDS = MetricSpec("histogram", "http_request_seconds", "Seconds from arrival to the end.")
FIRST_TOKEN = MetricSpec("histogram", "time_to_first_token_seconds", "Seconds from arrival to the first token.")

INFO = MetricSpec("info", "", "Labels of the served model: model, predictor, mode, policies, link, versions.")


class RequestMetrics:
    """Counters of HTTP requests since the server started. The route label is a known path or `other`."""

    BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
    """Upper bounds of the buckets in seconds."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry(auto_describe=False)
        self.ended = Counter(REQUESTS.family, REQUESTS.help, REQUESTS.labels, registry=self.registry)
        """Finished requests by route and status; status 499 for clients that left."""
        self.in_flight = Gauge(IN_FLIGHT.family, IN_FLIGHT.help, registry=self.registry)
        self.disconnected = Counter(GONE.family, GONE.help, registry=self.registry)
        self.prompt_tokens = Counter(PROMPT_TOKENS.family, PROMPT_TOKENS.help, registry=self.registry)
        self.generated_tokens = Counter(GENERATED_TOKENS.family, GENERATED_TOKENS.help, registry=self.registry)
        self.seconds = Histogram(SECONDS.family, SECONDS.help, registry=self.registry, buckets=self.BUCKETS)
        self.first_token = Histogram(FIRST_TOKEN.family, FIRST_TOKEN.help, registry=self.registry, buckets=self.BUCKETS)

    @staticmethod
    def total(counter: Counter) -> int:
        """Return a counter's value, summed over its labels."""
        return int(sum(sample.value for family in counter.collect() for sample in family.samples))


Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSource:
    """Parts of one run that the metrics read; None or empty for a missing part."""

    stats: RunStatistics
    link: Link
    pool: SlotPool
    store: ExpertStore
    drafts: Mapping[str, DraftCount] = field(default_factory=dict)
    draft_bytes: Callable[[], Mapping[str, int]] = field(default=dict)
    """Device memory of drafts in bytes, by name."""
    info: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, offloaded: OffloadedModel, name: str = "") -> MetricSource:
        """Return the parts of an offloaded model.

        Args:
            offloaded: the model.
            name: the served name; empty: the model's id.
        """
        drafting = offloaded.drafting
        return cls(
            stats=offloaded.stats, link=offloaded.link, pool=offloaded.pool, store=offloaded.store,
            drafts=drafting.counts, draft_bytes=lambda: drafting.memory, info=run_info(offloaded, name),
        )  # fmt: skip


class ExpertMetrics(Collector):
    """Collects the metrics of one run at every scrape. Counters begin at 0 again when the run's statistics are reset.

    Args:
        source: the parts of the run.
    """

    def __init__(self, source: MetricSource) -> None:
        self._source = source
        self._shown: dict[tuple[str, Labels], float] = {}
        """Values of the last scrape, by name and labels."""
        self._resets = 0

    def collect(self) -> Iterator[Metric]:
        """Yield all families with at least one sample."""
        resets = self._source.stats.resets
        if resets != self._resets:
            self._resets, self._shown = resets, {}
        yield from _families(
            (spec, labels, self._grown(spec, labels, now)) for spec, labels, now in self._run_counters()
        )
        yield from _families(self._gauges())
        yield from _families(self._drafts())
        info = InfoMetricFamily(INFO.family, INFO.help)
        info.add_metric((), dict(self._source.info))
        yield info

    def _grown(self, spec: MetricSpec, labels: Labels, now: float) -> float:
        """Return a counter, never less than before: a cancelled copy leaves the run's count again."""
        place = spec.name, labels
        shown = self._shown[place] = max(self._shown.get(place, 0), now)
        return shown

    def _run_counters(self) -> Iterator[tuple[MetricSpec, Labels, float]]:
        source = self._source
        for layer, counts in enumerate(list(source.stats.layers)):
            for name, spec in LAYER.items():
                yield spec, (str(layer),), getattr(counts, name)
        link = source.link
        yield COPIES, (), link.copies
        yield BUSY, (), link.busy_s

    def _gauges(self) -> Iterator[tuple[MetricSpec, Labels, float]]:
        source = self._source
        store, pool = source.store, source.pool
        yield EXPERTS, (), store.layers * store.experts
        yield SLOTS, (), pool.count
        yield HELD, (), len(source.pool.slots)
        yield SLOT_BYTES, (), pool.nbytes
        yield STORE_BYTES, (store.name,), store.stored_nbytes

    def _drafts(self) -> Iterator[tuple[MetricSpec, Labels, float]]:
        for draft, nbytes in self._source.draft_bytes().items():
            yield DRAFT_BYTES, (draft,), nbytes
        for draft, count in list(self._source.drafts.items()):
            yield CYCLES, (draft,), count.cycles
            yield DRAFTED, (draft,), count.drafted
            yield ACCEPTED, (draft,), count.accepted


def metrics_app(offloaded: OffloadedModel, requests: RequestMetrics, name: str = "") -> Any:
    """Return the ASGI application of the Prometheus page.

    Args:
        offloaded: the served model.
        requests: counters of its HTTP requests.
        name: the served name; empty: the model's id.
    """
    requests.registry.register(ExpertMetrics(MetricSource.of(offloaded, name)))
    return make_asgi_app(requests.registry)


def run_info(offloaded: OffloadedModel, name: str = "") -> dict[str, str]:
    """Return the labels of `expertcast_info`: `model`, `predictor`, `mode`, `policy`, `link`, `store` and versions.

    Args:
        offloaded: the served model.
        name: the served name; empty: the model's id.
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
        "expertcast": expertcast.__version__,
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def _families(values: Any) -> Iterator[Metric]:
    """Group samples by name, as the exposition format requires."""
    made: dict[str, Any] = {}
    for spec, labels, value in values:
        if spec.name not in made:
            kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
            made[spec.name] = kind(spec.family, spec.help, labels=spec.labels)
        made[spec.name].add_metric(labels, value)
    yield from made.values()
