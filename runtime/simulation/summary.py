"""What a simulation is reported as: one flat row of numbers, and a table of rows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from expertcast.predictors.plain import Json
from expertcast.runtime.recording.statistics import RunStatistics, share
from expertcast.runtime.simulation.machine import Simulation


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
