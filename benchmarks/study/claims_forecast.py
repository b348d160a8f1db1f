"""Claims about evicting by forecast, and about how misses are counted."""

from __future__ import annotations

from benchmarks.study.found import Found, Judgement, Row, change, claim, percent, share_text, signed, verdict
from benchmarks.study.study import EVICT_ONLY, FORECAST


@claim(
    "Eviction by forecast of the next tokens avoids 68 and 74% of the best classic policy's misses at 25 and 45% (hits "
    "91.7 for 74.2%, 97.0 for 88.5%)",
    "SeqMoE 2609.12978",
)
def forecast_avoids(found: Found) -> Judgement:
    texts, held = [], []
    for share, least in ((0.25, 0.68), (0.45, 0.74)):
        best = found.best_classic(share)
        for name, words in ((EVICT_ONLY, "evicting only"), (FORECAST, "loading too")):
            own = found.row("headline", share=share, eviction=name)
            avoided = -change(own["misses"], best["misses"])
            held.append(avoided >= least)
            texts.append(f"{share_text(share)} {words} {percent(avoided)} ({_gain(best, own)})")
    return f"misses of the best classic policy avoided: {'; '.join(texts)}", verdict(held)


@claim(
    "It closes half of the misses between the best classic policy and belady at 10 and 25%", "this project's own mark"
)
def forecast_closes(found: Found) -> Judgement:
    texts, half = [], []
    for share in found.shares("headline", eviction=EVICT_ONLY):
        best, bound = found.best_classic(share), found.row("headline", share=share, eviction="belady")
        own, closed = found.row("headline", share=share, eviction=EVICT_ONLY), found.closed(share, EVICT_ONLY)
        counts = "/".join(str(row["misses"]) for row in (best, own, bound))
        texts.append(f"{share_text(share)} {percent(closed)} ({best['eviction']}/forecast/belady {counts})")
        if share in (0.10, 0.25):
            half.append(closed >= 0.5)
    return f"misses, evicting only: {'; '.join(texts)}", verdict(half)


@claim("Replaying each access as an event of its own gives LRU 27 to 29% more misses", "2608.07911")
def replay_inflates(found: Found) -> Judgement:
    rows = found.rows("replay", eviction="lru")
    texts = [
        f"{row['scope']}, {row['batch']} at once, {share_text(row['share'])} "
        f"{row['misses']}/{row['misses_per_access']} ({signed(row['inflation'] or 0.0)})"
        for row in rows
    ]
    held = [(row["inflation"] or 0.0) >= 0.27 for row in rows]
    return f"LRU's misses by layer/by access: {'; '.join(texts)}", verdict(held)


def _gain(best: Row, own: Row) -> str:
    return f"{best['eviction']} {percent(best['hit_rate'])}, forecast {percent(own['hit_rate'])} hits"
