"""Claims about policies that look at the past only."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.study.found import (
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
from benchmarks.study.study import FORECAST, LITERAL, SHARED, USUAL

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


def _prefetching(found: Found, share: float, name: str, selection: str) -> Row:
    """Over the faster link, by the papers' own predictor."""
    rows = found.rows("prefetch", predictor=SHARED, share=share, eviction=name, prefetch=selection)
    return min(rows, key=lambda row: float(row["ratio"]))


def _rates(row: Row) -> str:
    return f"{percent(row['collision_rate'])} ({percent(row['collision_share'] or 0)})"


def _classic(row: Row) -> bool:
    return not row["eviction"].startswith(("belady", FORECAST))
