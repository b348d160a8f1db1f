"""Claims about eviction and prefetching."""

from __future__ import annotations

from collections.abc import Iterator

from policy_study.found import (
    NOT,
    PART,
    Found,
    Judgement,
    MissingRowError,
    Named,
    Row,
    change,
    claim,
    percent,
    share_text,
    signed,
    verdict,
)
from policy_study.study import EVICT_ONLY, FORECAST, LITERAL, SHARED, USUAL

FEWEST, FEW = 0.01, 0.05
"""Capacities that SpecMD's numbers are of, most of them of the second."""
_COLLIDING = ("fld", "score", "lru", "least_stale")
"""The four of SpecMD's figures 4 and 8."""
_UP_TO = 85


@claim("Least-Stale has up to 85 times fewer collision misses than LRU", "SpecMD, abstract and 5.2")
def stale_collisions(found: Found) -> Judgement:
    settings = list(_settings(found))
    pairs = [(rows["lru"]["collisions"], rows["least_stale"]["collisions"]) for _, rows in settings]
    fewer = [stale < lru for lru, stale in pairs]
    most = max(lru / max(stale, 1) for lru, stale in pairs)
    texts = [f"{label} {lru}/{stale}" for (label, _), (lru, stale) in zip(settings, pairs, strict=True)]
    judged = verdict([*fewer, most >= _UP_TO])
    return f"collisions of LRU/Least-Stale: {'; '.join(texts)}", judged


@claim(
    "At 5% Least-Stale collides in 1.6 to 1.9%, LRU in 4.5 to 12.6%, score in 42.6 to 60.9% (of what is not said)",
    "SpecMD, 5.2",
)
def collision_rates(found: Found) -> Judgement:
    published = {"least_stale": (0.016, 0.019), "lru": (0.045, 0.126), "score": (0.426, 0.609)}
    texts, within, ordered = [], [], []
    for selection in USUAL:
        rows = {name: _prefetching(found, FEW, name, selection) for name in published}
        rates = [row["collision_rate"] for row in rows.values()]
        within += [low <= rate <= high for rate, (low, high) in zip(rates, published.values(), strict=True)]
        ordered.append(rates == sorted(rates))
        texts.append(f"{selection}: " + ", ".join(f"{name} {_rates(row)}" for name, row in rows.items()))
    judged = verdict(within)
    text = f"of accesses (of misses), prefetching by {'; by '.join(texts)}"
    return text, PART if judged == NOT and any(ordered) else judged


@claim("FLD has slightly fewer collisions than LRU", "SpecMD, 5.2")
def fld_collisions(found: Found) -> Judgement:
    fewer, texts = [], []
    for label, rows in _settings(found):
        lru, fld = rows["lru"], rows["fld"]
        fewer.append(fld["collisions"] < lru["collisions"])
        texts.append(
            f"{label} {lru['collisions']}/{fld['collisions']} ({signed(change(fld['misses'], lru['misses']))} misses)"
        )
    return f"collisions of LRU/FLD (misses of FLD against LRU): {'; '.join(texts)}", verdict(fewer)


@claim("Score-based eviction collides most of all", "SpecMD, 5.2")
def score_collisions(found: Found) -> Judgement:
    most = [max(_COLLIDING, key=lambda name: rows[name]["collisions"]) for _, rows in _settings(found)]
    counts = ", ".join(f"{name} in {most.count(name)}" for name in dict.fromkeys(most))
    text = f"most collisions of {', '.join(_COLLIDING)}, in {len(most)} settings: {counts}"
    return text, verdict([name == "score" for name in most])


@claim("Least-Stale in the literal order of its queues (FIFO by layer) is LRU at 5%", "row A17, trap 2")
def literal_is_lru(found: Found) -> Judgement:
    texts, same, elsewhere = [], [], []
    for label, rows in _settings(found):
        lru, literal = rows["lru"], rows[LITERAL]
        equal = (lru["misses"], lru["collisions"]) == (literal["misses"], literal["collisions"])
        if label.startswith(share_text(FEW)):
            same.append(equal)
            texts.append(f"{label} {lru['misses']}/{literal['misses']}")
        else:
            elsewhere.append(equal)
    text = f"misses of LRU/literal order: {'; '.join(texts)}; at other capacities the same in {sum(elsewhere)} of"
    return f"{text} {len(elsewhere)} settings", verdict(same)


@claim("Without prefetching and with a share for each layer Least-Stale is LRU", "2608.07911")
def stale_is_lru_by_layer(found: Found) -> Judgement:
    same, texts = [], []
    for share in found.shares("eviction", scope="layer", eviction="lru"):
        lru, stale = (
            found.row("eviction", scope="layer", share=share, eviction=name) for name in ("lru", "least_stale")
        )
        same.append(lru["misses"] == stale["misses"])
        texts.append(f"{share_text(share)} {lru['misses']}/{stale['misses']}")
    return f"misses of LRU/Least-Stale: {'; '.join(texts)}", verdict(same)


@claim("Least-Stale hits 88 to 92% at 5% of experts", "SpecMD, abstract and 1")
def stale_hits(found: Found) -> Judgement:
    rates = {selection: _prefetching(found, FEW, "least_stale", selection)["hit_rate"] for selection in USUAL}
    bare = found.row("eviction", scope="global", share=FEW, eviction="least_stale")["hit_rate"]
    text = ", ".join(f"{selection} {percent(rate)}" for selection, rate in rates.items())
    return f"prefetching by {text}; without {percent(bare)}", verdict([rate >= 0.88 for rate in rates.values()])


@claim("The best eviction policy at 1% differs from that at 5 and 25%", "SpecMD, 1 and 5.1")
def rankings_shift(found: Found) -> Judgement:
    best, orders = {}, set()
    for share in found.shares("eviction", scope="global"):
        rows = [row for row in found.rows("eviction", scope="global", share=share) if _classic(row)]
        ranked = sorted(rows, key=lambda row: row["misses"])
        best[share] = ranked[0]["eviction"]
        orders.add(tuple(row["eviction"] for row in ranked))
    text = ", ".join(f"{share_text(share)} {name}" for share, name in best.items())
    if FEWEST not in best:
        raise MissingRowError
    judged = verdict([best[FEWEST] != best[share] for share in (0.05, 0.25) if share in best])
    return f"fewest misses: {text}; {len(orders)} different orders of all policies", judged


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
    text = f"time per token with top_k against on demand, LRU: {_changes(changes)}"
    return text, verdict([value > 0 for _, value in changes])


@claim(
    "Prefetching alone raises decode speed by 5 to 20% (here: by 5% or more)",
    "DALI, HybriMoE, Speculating Experts, MoE-SpeQ ...",
)
def prefetch_speeds_up(found: Found) -> Judgement:
    changes = [(label, 1 / (1 + value) - 1) for label, value in _prefetch_changes(found)]
    return f"tokens per second: {_changes(changes)}", verdict([value >= 0.05 for _, value in changes])


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


CACHING = (
    stale_collisions, collision_rates, fld_collisions, score_collisions, literal_is_lru, stale_is_lru_by_layer,
    stale_hits, rankings_shift, top_k_is_right, percentile_waits_less, prefetch_slows, prefetch_speeds_up,
    forecast_avoids, forecast_closes, replay_inflates,
)  # fmt: skip


def _settings(found: Found) -> Iterator[tuple[str, Named]]:
    """Every eviction policy's row at each capacity: without prefetching, and prefetching by each usual selection over
    the faster link."""
    stages = [("eviction", {"scope": "global"}, "")]
    first = min(row["ratio"] for row in found.rows("prefetch"))
    stages += [("prefetch", {"predictor": SHARED, "prefetch": name, "ratio": first}, f" {name}") for name in USUAL]
    for stage, where, name in stages:
        for share in found.shares(stage, **where):
            yield (
                share_text(share) + name,
                Named((row["eviction"], row) for row in found.rows(stage, share=share, **where)),
            )


def _selections(found: Found) -> Iterator[tuple[float, float, Named]]:
    """Capacity, link and the rows of all selections under Least-Stale."""
    where = {"eviction": "least_stale", "predictor": SHARED}
    for ratio in sorted({row["ratio"] for row in found.rows("prefetch", **where)}):
        for share in found.shares("prefetch", ratio=ratio, **where):
            rows = found.rows("prefetch", share=share, ratio=ratio, **where)
            yield share, ratio, Named((row["prefetch"], row) for row in rows)


def _prefetching(found: Found, share: float, name: str, selection: str) -> Row:
    """Over the faster link, by the papers' own predictor."""
    rows = found.rows("prefetch", predictor=SHARED, share=share, eviction=name, prefetch=selection)
    return min(rows, key=lambda row: float(row["ratio"]))


def _prefetch_changes(found: Found) -> list[tuple[str, float]]:
    """Setting, and time per token with top-k prefetching against none, under LRU."""
    changes = []
    for row in found.rows("prefetch", eviction="lru", prefetch="none"):
        where = {"eviction": "lru", "share": row["share"], "ratio": row["ratio"]}
        other = found.row("prefetch", predictor=SHARED, prefetch="top_k", **where)
        label = f"{share_text(row['share'])} {row['ratio']:g}x"
        changes.append((label, change(other["tpot_mean_s"], row["tpot_mean_s"])))
    return changes


def _changes(changes: list[tuple[str, float]]) -> str:
    return ", ".join(f"{label} {signed(value)}" for label, value in changes)


def _gain(best: Row, own: Row) -> str:
    return f"{best['eviction']} {percent(best['hit_rate'])}, forecast {percent(own['hit_rate'])} hits"


def _rates(row: Row) -> str:
    return f"{percent(row['collision_rate'])} ({percent(row['collision_share'] or 0)})"


def _hits_and_wait(row: Row) -> str:
    return f"{percent(row['hit_rate'])} {1e3 * row['blocking_s']:.1f} ms"


def _classic(row: Row) -> bool:
    return not row["eviction"].startswith(("belady", FORECAST))
