"""Configuration and results of a simulation."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.runtime.policies.settings import Policies
from expertcast.runtime.recording.recorder import RunStatistics, share
from expertcast.runtime.simulation.link import VirtualLink


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds of the parts of a step, one entry per MoE layer."""

    before_s: list[float]
    """Until the misses are requested."""
    forecast_s: list[float]
    """Computation of a forecast, until its experts are requested."""
    experts_s: list[float]
    """From the arrival of the copies until the experts of one token are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Layer times and link of a simulated machine."""

    times: LayerTimes
    """Times of a decode step of one sequence, and of a prefill. The time of experts grows with their number, since it
    is bound by reading their weights."""
    block_bytes: Mapping[str, int]
    """Bytes of one expert by precision, including `full`."""
    bandwidth: float
    """Bandwidth of the link, bytes per second."""
    latency: float = 0.0
    """Seconds per copy."""
    expand_s: float = 0.0
    """Seconds to expand a copy of lower precision, in the thread that runs the model."""

    def link(self) -> VirtualLink:
        """Return a new idle link.

        Raises:
            ExpertcastError: the bandwidth is not positive, or the latency is negative.
        """
        return VirtualLink(self.block_bytes, self.bandwidth, self.latency, expand_s=self.expand_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Configuration of one simulation."""

    policies: Policies
    slots: int
    """Number of slots."""
    machine: Machine
    predictor: str | None = None
    """Name of the forecasts in the trace; None: load on demand."""
    cache: bool = True
    """Keep experts until their slot is needed; false: free slots as soon as a layer has run."""


@dataclass(slots=True, kw_only=True)
class Simulation:
    """Result of one simulation."""

    decode: RunStatistics
    """Statistics of decode steps."""
    prefill: RunStatistics
    """Statistics of prefills."""
    steps_s: list[float] = field(default_factory=list)
    """Seconds of each decode step, of all sequences."""
    prefills_s: list[float] = field(default_factory=list)
    """Seconds of each prefill."""
    policy_s: list[float] = field(default_factory=list)
    """Seconds that policies and cache computed in this process, of each decode step."""

    @property
    def tpot_s(self) -> float:
        """Median seconds of a decode step (time per output token)."""
        return statistics.median(self.steps_s)

    @property
    def ttft_s(self) -> float:
        """Median seconds of a prefill (time to first token)."""
        return statistics.median(self.prefills_s)


def constant_times(layers: int, layer_s: float | Sequence[float]) -> LayerTimes:
    """Return layer times from the total seconds of each layer: half before the routing is known, half in the experts.

    Args:
        layers: number of MoE layers, L.
        layer_s: seconds of every layer, or of each layer [L].

    Raises:
        ExpertcastError: the number of values is neither 1 nor L, or a value is not positive.
    """
    each = [layer_s] * layers if isinstance(layer_s, (int, float)) else list(layer_s)
    each = each * layers if len(each) == 1 else each
    if len(each) != layers or not all(seconds > 0 for seconds in each):
        raise ExpertcastError(
            f"layer times {each}: give one number of seconds above 0, or one for each of {layers} layers"
        )
    half = [seconds / 2 for seconds in each]
    return LayerTimes(before_s=half, forecast_s=[0.0] * layers, experts_s=half)


def summary(done: Simulation) -> Json:
    """Return the counts and times of a simulation as plain values.

    All entries are of decode steps, except `prefill` and `ttft_*`.

    - `collision_rate`, `collision_share`: misses of experts evicted in the same step, relative to requests and misses
    - `prefetch_precision`: share of the copies requested by forecasts that a layer used; `issued_precision`: the same
      without copies that were dropped before they started
    - `prefetch_recall`: share of all used copies that were prefetched
    - `redundant`: share of copies that were never used, or that replaced an eviction in the same step (ActiveEvict)
    - `policy_s`: median processor seconds per step of policies and cache
    """
    total, steps = done.decode.total, max(1, len(done.steps_s))
    used = total.prefetched_used
    return {
        **_counts(done.decode),
        "evicted": total.evicted,
        "skipped": total.skipped,
        "bytes_per_step": total.bytes_moved / steps,
        "tpot_s": done.tpot_s,
        "tpot_mean_s": statistics.fmean(done.steps_s),
        "ttft_s": done.ttft_s,
        "ttft_mean_s": statistics.fmean(done.prefills_s),
        "blocking_s": total.waited_s / steps,
        "policy_s": statistics.median(done.policy_s) if done.policy_s else None,
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
    ("eviction", "eviction", "{}", 1),
    ("predictor", "predictor", "{}", 1),
    ("prefetch", "prefetch", "{}", 1),
    ("miss", "miss", "{}", 1),
    ("routing", "routing", "{}", 1),
    ("pre_eviction", "pre-eviction", "{}", 1),
    ("scope", "scope", "{}", 1),
    ("slots", "slots", "{}", 1),
    ("capacity", "capacity", "{:.1%}", 1),
    ("bandwidth", "GB/s", "{:.3g}", 1e-9),
    ("hit_rate", "hits", "{:.1%}", 1),
    ("collision_rate", "collisions", "{:.1%}", 1),
    ("bytes_per_step", "MB/step", "{:.2f}", 1e-6),
    ("tpot_s", "TPOT ms", "{:.3f}", 1e3),
    ("ttft_s", "TTFT ms", "{:.2f}", 1e3),
    ("blocking_s", "waiting ms", "{:.3f}", 1e3),
    ("policy_s", "policy ms", "{:.3f}", 1e3),
    ("redundant", "redundant", "{:.1%}", 1),
    ("prefetch_precision", "precision", "{:.3f}", 1),
    ("prefetch_recall", "recall", "{:.3f}", 1),
    ("perplexity", "perplexity", "{:.3f}", 1),
    ("agreement", "agreement", "{:.1%}", 1),
    ("kl", "KL", "{:.4f}", 1),
)
_OMITTED = {
    "prefetch": "none", "miss": "fetch", "routing": "standard", "pre_eviction": "none", "scope": "global",
}  # fmt: skip


def table(results: Sequence[Json]) -> list[tuple[str, ...]]:
    """Return the rows of a text table, headings first; columns with default values only are left out.

    Args:
        results: rows of :func:`.sweep.sweep`.
    """
    shown = [own for own in COLUMNS if any(each.get(own[0]) not in (None, _OMITTED.get(own[0])) for each in results)]
    rows = [tuple(title for _, title, _, _ in shown)]
    rows += [tuple(_cell(result.get(key), form, unit) for key, _, form, unit in shown) for result in results]
    return rows


def _cell(value: Any, form: str, unit: float) -> str:
    return "-" if value is None else form.format(value * unit)
