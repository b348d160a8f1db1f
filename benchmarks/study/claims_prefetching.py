"""Claims about prefetching the next layer's experts."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.study.found import (
    Changes,
    Found,
    Judgement,
    Named,
    Row,
    change,
    changes_text,
    claim,
    percent,
    share_text,
    verdict,
)
from benchmarks.study.study import SHARED


@claim("Top-k with factor 1.0 has the best precision and recall", "SpecMD, 5.3, figure 6")
def top_k_is_right(found: Found) -> Judgement:
    precise, complete, example = [], [], ""
    for share, _, by_selection in _selections(found):
        rows = [row for name, row in by_selection.items() if name.startswith(("top_k", "percentile"))]
        precise.append(max(rows, key=lambda row: row["prefetch_precision"] or 0)["prefetch"] == "top_k")
        complete.append(max(rows, key=lambda row: row["prefetch_recall"] or 0)["prefetch"] == "top_k")
        if not example:
            example = f"at {share_text(share)} " + ", ".join(
                f"{row['prefetch']} {row['prefetch_precision']:.2f}/{row['prefetch_recall']:.2f}" for row in rows
            )
    text = f"best precision in {sum(precise)}, best recall in {sum(complete)} of {len(precise)} settings; {example}"
    return text, verdict(precise + complete)


@claim("Percentile selection has more hits and less waiting than top-k with any factor", "SpecMD, 5.3")
def percentile_waits_less(found: Found) -> Judgement:
    hits, waits, example = [], [], []
    for share, ratio, rows in _selections(found):
        others = [row for name, row in rows.items() if name.startswith("top_k")]
        own = rows["percentile"]
        hits.append(own["hit_rate"] > max(row["hit_rate"] for row in others))
        waits.append(own["blocking_s"] < min(row["blocking_s"] for row in others))
        if share == found.shares("prefetch", eviction="least_stale", ratio=ratio, prefetch="top_k")[0]:
            each = ", ".join(f"{row['prefetch']} {_hits_and_wait(row)}" for row in (own, *others))
            example.append(f"{share_text(share)}, {ratio:g}x link: {each}")
    text = f"more hits in {sum(hits)}, less waiting in {sum(waits)} of {len(hits)} settings; {'; '.join(example)}"
    return text, verdict(hits + waits)


@claim("Prefetching alone lowers decode speed", "WiSP: -46 to -55%")
def prefetch_slows(found: Found) -> Judgement:
    changes = _prefetch_changes(found)
    text = f"time per token with top_k against on demand, LRU: {changes_text(changes)}"
    return text, verdict([value > 0 for _, value in changes])


@claim(
    "Prefetching alone raises decode speed by 5 to 20% (here: by 5% or more)",
    "DALI, HybriMoE, Speculating Experts, MoE-SpeQ ...",
)
def prefetch_speeds_up(found: Found) -> Judgement:
    changes = [(label, 1 / (1 + value) - 1) for label, value in _prefetch_changes(found)]
    return f"tokens per second: {changes_text(changes)}", verdict([value >= 0.05 for _, value in changes])


def _selections(found: Found) -> Iterator[tuple[float, float, Named]]:
    """Capacity, link and the rows of all selections under Least-Stale."""
    where = {"eviction": "least_stale", "predictor": SHARED}
    for ratio in sorted({row["ratio"] for row in found.rows("prefetch", **where)}):
        for share in found.shares("prefetch", ratio=ratio, **where):
            rows = found.rows("prefetch", share=share, ratio=ratio, **where)
            yield share, ratio, Named((row["prefetch"], row) for row in rows)


def _prefetch_changes(found: Found) -> Changes:
    """Setting, and time per token with top-k prefetching against none, under LRU."""
    changes = []
    for row in found.rows("prefetch", eviction="lru", prefetch="none"):
        where = {"eviction": "lru", "share": row["share"], "ratio": row["ratio"]}
        other = found.row("prefetch", predictor=SHARED, prefetch="top_k", **where)
        label = f"{share_text(row['share'])} {row['ratio']:g}x"
        changes.append((label, change(other["tpot_mean_s"], row["tpot_mean_s"])))
    return changes


def _hits_and_wait(row: Row) -> str:
    return f"{percent(row['hit_rate'])} {1e3 * row['blocking_s']:.1f} ms"
