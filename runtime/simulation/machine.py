"""What a simulation runs on, and what it took."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.runtime.links.virtual import Stored, VirtualDisk, VirtualLink
from expertcast.runtime.policies.settings import Policies
from expertcast.runtime.recording.recorder import LayerTimes
from expertcast.runtime.recording.statistics import RunStatistics, share
from expertcast.runtime.storage.layout import FULL


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What computes and what copies."""

    times: LayerTimes
    """Of a decode step of one text. More experts than K, of a prefill or a batch, take their part longer: a layer's
    experts are bound by reading their weights."""
    block_bytes: Mapping[str, int]
    """Of one expert, by precision; `full` is among them."""
    bandwidth: float
    """Bytes per second."""
    latency: float = 0.0
    """Seconds per copy."""
    expand_s: float = 0.0
    """Seconds of the model's thread per copy in lower precision."""
    write_back: float = 0.0
    """Share of a copy that giving up an expert takes on the link; 0 where the host keeps all weights, as the runtime's
    store does."""
    window: int = 1
    """Forecasts' copies that have been handed to the link and can no longer be overtaken; a disk knows its own."""
    blocking: bool = False
    """The link copies in the model's own thread, as the instant link does."""
    prefill: LayerTimes | None = None
    """Of prefills; None: as of a decode step."""
    base: str = FULL
    """What the experts are that `block_bytes` calls full: the model's own precision, or packed ones."""
    stored: Stored | None = None
    """Experts lie on a disk, whose rate `bandwidth` is; None: in memory behind a link."""

    @property
    def copy_s(self) -> float:
        """Seconds of one expert among others back to back."""
        if self.stored is not None:
            return self.latency + self.stored.copy_s(self.bandwidth)
        return self.latency + self.block_bytes[FULL] / self.bandwidth

    def link(self) -> VirtualLink:
        """A link at which nothing has been asked for.

        Raises:
            ExpertcastError: no bandwidth, or a negative latency.
        """
        if self.stored is not None:
            return VirtualDisk(self.stored, self.bandwidth, self.latency, block_bytes=self.block_bytes)
        return VirtualLink(
            self.block_bytes, self.bandwidth, self.latency, expand_s=self.expand_s, write_back=self.write_back,
            window=self.window, blocking=self.blocking,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One simulation."""

    policies: Policies
    slots: int
    """Experts that fit on the device."""
    machine: Machine
    predictor: str | None = None
    """Whose hints of the trace are given; None loads on demand."""
    bypass: bool = False
    """Belady's bound without forced admission, in place of the eviction policy."""
    cache: bool = True
    """Keep experts until their slot is needed; else slots are given back as soon as a layer has run."""
    carry: bool = True
    """Without a cache, ask at the last layer for what the first layers needed, on behalf of the next token."""

    @property
    def pooled(self) -> bool:
        """Whether pools decide who stays in a slot, and not the eviction policy."""
        return self.machine.stored is not None and any(self.machine.stored.pools.values())

    def timed(self, times: LayerTimes) -> Case:
        """The same with other layer times."""
        return replace(self, machine=replace(self.machine, times=times))


@dataclass(slots=True, kw_only=True)
class Simulation:
    """What a trace took."""

    decode: RunStatistics
    prefill: RunStatistics
    steps_s: list[float] = field(default_factory=list)
    """Seconds of each decode step, of whatever text."""
    prefills_s: list[float] = field(default_factory=list)
    """Seconds of each prefill: until the first token."""
    waits_s: list[list[float]] = field(default_factory=list)
    """[step][L] seconds that each layer waited for copies, where they were asked for."""
    bytes_read: int = 0
    """From the disk in decode steps."""
    prefill_bytes_read: int = 0

    @property
    def tpot_s(self) -> float:
        """Median over the decode steps, as the benchmark reports it."""
        return statistics.median(self.steps_s)

    @property
    def ttft_s(self) -> float:
        """Median over the prefills."""
        return statistics.median(self.prefills_s)

    @property
    def wait_s(self) -> float:
        """Seconds of waiting per decode step, median."""
        return statistics.median(map(sum, self.waits_s))

    @property
    def hit_rate(self) -> float:
        """Of the decode steps."""
        return self.decode.hit_rate

    @property
    def copies(self) -> float:
        """Experts copied per decode step."""
        total = self.decode.total
        return (total.misses + total.prefetched) / len(self.steps_s)


def check_slots(slots: int, top_k: int) -> None:
    """Refuse a cache that cannot hold what one token needs of a layer.

    Raises:
        ExpertcastError: fewer slots than one token needs (trap 12 of the definitions).
    """
    if slots < top_k:
        raise ExpertcastError(
            f"slots={slots} is fewer than the {top_k} experts one token needs: give slots={top_k} or more"
        )


def constant_times(layers: int, layer_s: float | Sequence[float]) -> LayerTimes:
    """Layer times from nothing but each layer's own seconds: half before its experts are known, half in them.

    Raises:
        ExpertcastError: neither one number nor one per layer, or one that is not above 0.
    """
    each = [layer_s] * layers if isinstance(layer_s, (int, float)) else list(layer_s)
    each = each * layers if len(each) == 1 else each
    if len(each) != layers or not all(seconds > 0 for seconds in each):
        raise ExpertcastError(
            f"layer times {each}: give one number of seconds above 0, or one for each of {layers} layers"
        )
    half = [seconds / 2 for seconds in each]
    return replace(no_times(layers), before_s=half, experts_s=half)


def no_times(layers: int) -> LayerTimes:
    """Layers that take no time."""
    nothing = [0.0] * layers
    return LayerTimes(
        before_s=nothing, request_s=nothing, forecast_s=nothing, prefetch_s=nothing, launch_s=nothing,
        experts_s=nothing, tail_s=0.0,
    )  # fmt: skip


def summary(done: Simulation) -> Json:
    """Counts and times of a run, of its decode steps unless they say `prefill` or `ttft`.

    `collision_rate` is over all accesses, `collision_share` over misses (trap 8 of the definitions);
    `prefetch_precision` is the share of the copies that forecasts asked for which a layer used, whether they were made
    or `dropped`; `issued_precision` the same of those that were made (`prefetched`). `prefetch_recall` is the share of
    all used copies that came by prefetch; `redundant` the share of copies that need not have been made: prefetched and
    never used, or loaded again in the pass that had evicted them (row D11). `read_per_step` are
    bytes from the disk, None where there is none.
    """
    total, steps = done.decode.total, max(1, len(done.steps_s))
    used = total.prefetched_used
    return {
        **_counts(done.decode),
        "evicted": total.evicted,
        "skipped": total.skipped,
        "bytes_per_step": total.bytes_moved / steps,
        "read_per_step": done.bytes_read / steps if done.bytes_read + done.prefill_bytes_read else None,
        "tpot_s": done.tpot_s,
        "tpot_mean_s": statistics.fmean(done.steps_s),
        "ttft_s": done.ttft_s,
        "ttft_mean_s": statistics.fmean(done.prefills_s),
        "blocking_s": total.waited_s / steps,
        "prefetched": total.prefetched,
        "dropped": total.dropped,
        "prefetch_precision": done.decode.prefetch_precision,
        "issued_precision": done.decode.issued_precision,
        "prefetch_recall": share(used, used + total.misses) if total.prefetched else None,
        "redundant": share(total.prefetched - used + total.collisions, total.misses + total.prefetched),
        "prefill": _counts(done.prefill),
        "per_layer": {
            "misses": [layer.misses for layer in done.decode.layers],
            "collision_rate": [share(layer.collisions, layer.requests) for layer in done.decode.layers],
            "collision_share": [share(layer.collisions, layer.misses) for layer in done.decode.layers],
        },
    }


def _counts(stats: RunStatistics) -> Json:
    total = stats.total
    return {
        "requests": total.requests,
        "hits": total.hits,
        "misses": total.misses,
        "collisions": total.collisions,
        "hit_rate": stats.hit_rate,
        "collision_rate": share(total.collisions, total.requests),
        "collision_share": share(total.collisions, total.misses),
        "bytes": total.bytes_moved,
    }


COLUMNS = (
    ("eviction", "eviction", "{}"),
    ("prefetch", "prefetch", "{}"),
    ("miss", "miss", "{}"),
    ("routing", "routing", "{}"),
    ("pre_eviction", "pre-eviction", "{}"),
    ("scope", "scope", "{}"),
    ("slots", "slots", "{}"),
    ("capacity", "capacity", "{:.1%}"),
    ("base_precision", "experts", "{}"),
    ("bandwidth", "GB/s", "{:.3g}"),
    ("hit_rate", "hits", "{:.1%}"),
    ("collision_rate", "collisions", "{:.1%}"),
    ("codec", "codec", "{}"),
    ("pools", "pools", "{}"),
    ("bytes_per_step", "MB/step", "{:.2f}"),
    ("read_per_step", "MB read", "{:.2f}"),
    ("tpot_s", "TPOT ms", "{:.3f}"),
    ("ttft_s", "TTFT ms", "{:.2f}"),
    ("blocking_s", "waiting ms", "{:.3f}"),
    ("redundant", "redundant", "{:.1%}"),
    ("prefetch_precision", "precision", "{:.3f}"),
    ("prefetch_recall", "recall", "{:.3f}"),
    ("perplexity", "perplexity", "{:.3f}"),
    ("agreement", "agreement", "{:.1%}"),
    ("kl", "KL", "{:.4f}"),
)
_UNITS = {
    "bandwidth": 1e-9, "bytes_per_step": 1e-6, "read_per_step": 1e-6, "tpot_s": 1e3, "ttft_s": 1e3, "blocking_s": 1e3,
}  # fmt: skip
_DULL = {
    "prefetch": "none", "miss": "fetch", "routing": "standard", "pre_eviction": "none", "scope": "global",
    "base_precision": "full",
}  # fmt: skip


def table(results: Sequence[Json]) -> list[tuple[str, ...]]:
    """Rows of text, headings first; columns in which nothing is said are left out."""
    shown = [
        (key, title, form)
        for key, title, form in COLUMNS
        if any(result.get(key) not in (None, _DULL.get(key)) for result in results)
    ]
    rows = [tuple(title for _, title, _ in shown)]
    rows += [tuple(_cell(result, key, form) for key, _, form in shown) for result in results]
    return rows


def _cell(result: Json, key: str, form: str) -> str:
    value = result.get(key)
    return "-" if value is None else form.format(value * _UNITS[key] if key in _UNITS else value)
