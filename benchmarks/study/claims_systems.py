"""Claims about miss handling, routing and published systems."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.study.found import (
    Changes,
    Found,
    Judgement,
    MissingRowError,
    Named,
    Row,
    change,
    changes_text,
    claim,
    ms,
    percent,
    share_text,
    signed,
    span,
    verdict,
)
from benchmarks.study.study import ACTIVE, BASELINES, SWAPPED
from expertcast.runtime.simulation.figures import frontier

SIMPLER = ("fetch", "fetch_priority", "drop")
"""Miss policies that the inconsistent ones are compared with."""


def best_of_both(rows: Sequence[Row]) -> list[Row]:
    """Rows that no other is at least as fast and as close to the exact model as, fastest first."""
    kept = set(frontier([(1 / row["tpot_mean_s"], row["kl"]) for row in rows]))
    return sorted(
        (row for row in rows if (1 / row["tpot_mean_s"], row["kl"]) in kept), key=lambda row: float(row["tpot_mean_s"])
    )


@claim("fetch_priority is always on the Pareto frontier of quality and speed", "SpecMD, 5.4, figure 7")
def priority_on_frontier(found: Found) -> Judgement:
    texts, held = [], []
    for share in found.shares("lossy"):
        kept = [row["miss"] for row in best_of_both(_measured(found, share))]
        own = kept.count("fetch_priority")
        held.append(own > 0)
        texts.append(f"{share_text(share)} {own} of {len(kept)}")
    return f"its places on the frontier: {'; '.join(texts)}", verdict(held)


@claim("drop is the fastest way to handle misses", "SpecMD, 5.4")
def drop_is_fastest(found: Found) -> Judgement:
    texts, fastest = [], []
    for share, rows in _misses(found):
        by_time = sorted(rows.values(), key=lambda row: float(row["tpot_mean_s"]))
        fastest.append(by_time[0]["miss"] == "drop")
        texts.append(
            f"{share_text(share)} " + ", ".join(f"{row['miss']} {ms(row['tpot_mean_s'])}" for row in by_time[:3])
        )
    return f"fastest with standard routing: {'; '.join(texts)} ms per token", verdict(fastest)


@claim("fetch_lowest and drop_cascade have no clear advantage over simpler strategies", "SpecMD, 5.4")
def nothing_gained(found: Found) -> Judgement:
    texts, off = [], []
    for share in found.shares("lossy"):
        rows = [row for row in _measured(found, share) if row["miss"] in (*SIMPLER, "fetch_lowest", "drop_cascade")]
        kept = [row["miss"] for row in best_of_both(rows)]
        off += [name not in kept for name in ("fetch_lowest", "drop_cascade")]
        texts.append(
            f"{share_text(share)} fetch_lowest {kept.count('fetch_lowest')}, drop_cascade {kept.count('drop_cascade')}"
        )
    text = f"places on the frontier beside {', '.join(SIMPLER)}: {'; '.join(texts)}"
    return text, verdict(off)


@claim("substitute fails everywhere (here: it diverges most)", "SpecMD, 5.4")
def substitution_fails(found: Found) -> Judgement:
    texts, worst = [], []
    for share, rows in _misses(found):
        by_loss = sorted(rows.values(), key=lambda row: -float(row["kl"]))
        own = rows["substitute"]
        place = by_loss.index(own) + 1
        worst.append(place == 1)
        texts.append(
            f"{share_text(share)} {_loss(own)} ({place}. of {len(by_loss)}; {by_loss[0]['miss']} {_loss(by_loss[0])})"
        )
    return f"perplexity, agreement, and place by KL from the worst: {'; '.join(texts)}", verdict(worst)


@claim(
    "Cache-aware routing works best with lambda 0.1 to 0.5: less does little, more harms; 10 to 20% of the speed",
    "SpecMD, 5.4",
)
def lambda_range(found: Found) -> Judgement:
    texts, held = [], []
    for share in found.shares("lossy"):
        rows = Named((row["routing"], row) for row in _measured(found, share) if row["miss"] == "fetch")
        plain = rows["standard"]
        each = []
        for name, row in rows.items():
            if name != "standard":
                faster = change(plain["tpot_mean_s"], row["tpot_mean_s"])
                worse = row["perplexity"] / plain["perplexity"] - 1
                strength = float(name.rpartition("=")[2]) if "=" in name else 0.2
                each.append(f"{strength:g}: {signed(faster)} speed, {signed(worse)} perplexity")
                good = faster >= 0.05 and worse <= 0.05
                held.append(good == (0.1 <= strength <= 0.5))
        texts.append(f"{share_text(share)} {', '.join(each)}")
    text = f"with fetch: {'; '.join(texts)} (good: 5% faster at no more than 5% perplexity)"
    return text, verdict(held)


@claim("Least-Stale in place of a system's own eviction lowers TTFT by 10 to 44%, at worst -4.3%", "SpecMD, table 2")
def drop_in_ttft(found: Found) -> Judgement:
    return _drop_in(found, "ttft_mean_s")


@claim("The same for the time per later token (the paper gives TTFT only)", "row A26, trap 10")
def drop_in_tpot(found: Found) -> Judgement:
    return _drop_in(found, "tpot_mean_s")


@claim("ActiveEvict blocks 31 to 46% less on copies than systems that prefetch", "ActiveEvict, 4.3")
def active_blocks_less(found: Found) -> Judgement:
    return _less_waiting(found, "presets")


@claim("The same where an evicted expert is copied back to a host that keeps no weights", "trap 7 under system D")
def active_blocks_less_with_write_back(found: Found) -> Judgement:
    return _less_waiting(found, "write_back")


@claim("ActiveEvict loses less than 1% of quality", "ActiveEvict, abstract and 4.4")
def active_keeps_quality(found: Found) -> Judgement:
    texts, held = [], []
    for row in found.rows("presets", preset=ACTIVE):
        if row["perplexity"] is None:
            raise MissingRowError
        exact = next(each for each in found.rows("presets", preset="on_demand") if each["perplexity"] is not None)
        loss = row["perplexity"] / exact["perplexity"] - 1
        held.append(loss < 0.01)
        text = f"{share_text(row['share'])} {signed(loss)} perplexity, {percent(row['agreement'])} agreement"
        texts += [text] if text not in texts else []
    return "; ".join(texts), verdict(held)


@claim("Its dynamic top-k blocks 7 to 13% less than a fixed one", "ActiveEvict, 4.4")
def dynamic_top_k(found: Found) -> Judgement:
    changes = _waiting(found, "presets", "activeevict_fixed_top_k")
    return f"waiting: {changes_text(changes)}", verdict([value <= -0.07 for _, value in changes])


@claim(
    "Its importance blocks 8 to 16% less than prediction alone, 13 to 32% less than hotness alone and LRU",
    "ActiveEvict, 4.4",
)
def importance_pays(found: Found) -> Judgement:
    texts, held = [], []
    for name, least in (("prediction_only", 0.08), ("hotness_only", 0.13), ("lru", 0.13)):
        changes = _waiting(found, "presets", f"activeevict_{name}")
        texts.append(f"{name} {span([value for _, value in changes])}")
        held += [value <= -least for _, value in changes]
    return f"waiting of the full policy against {'; '.join(texts)}", verdict(held)


@claim(
    "ActiveEvict makes 3.2 to 4.0% redundant copies, prefetching systems 12 to 20%; what it fetches is always needed "
    "(here: fewer than both)",
    "ActiveEvict, 4.2 and 4.3",
)
def redundant_copies(found: Found) -> Judgement:
    texts, held = [], []
    for row in found.rows("presets", preset=ACTIVE):
        others = [_beside(found, row, name) for name in BASELINES]
        held.append((row["redundant"] or 0) < min(other["redundant"] or 0 for other in others))
        held.append(not row["prefetched"])
        each = ", ".join(f"{other['preset']} {percent(other['redundant'] or 0)}" for other in others)
        texts.append(f"{_where(row)} {percent(row['redundant'] or 0)}, {each}")
    return f"redundant: {'; '.join(texts)}", verdict(held)


def _measured(found: Found, share: float) -> list[Row]:
    """Lossy rows whose quality is known."""
    rows = [row for row in found.rows("lossy", share=share) if row["kl"] is not None]
    if not rows:
        raise MissingRowError
    return rows


def _misses(found: Found) -> Iterator[tuple[float, Named]]:
    """Capacity, and rows with standard routing by miss policy."""
    for share in found.shares("lossy", routing="standard"):
        yield share, Named((row["miss"], row) for row in _measured(found, share) if row["routing"] == "standard")


def _beside(found: Found, row: Row, name: str) -> Row:
    """Another preset of the same stage, on the same link with the same slots."""
    return found.row(row["stage"], preset=name, share=row["share"], ratio=row["ratio"])


def _waiting(found: Found, stage: str, *names: str) -> Changes:
    """Waiting of ActiveEvict against that of other presets, by setting."""
    return [
        (_where(row) + f" against {name}" * (len(names) > 1), change(row["blocking_s"], other["blocking_s"]))
        for row in found.rows(stage, preset=ACTIVE)
        for name, other in ((name, _beside(found, row, name)) for name in names)
    ]


def _less_waiting(found: Found, stage: str) -> Judgement:
    changes = _waiting(found, stage, *BASELINES)
    return f"waiting: {changes_text(changes)}", verdict([value <= -0.31 for _, value in changes])


def _drop_in(found: Found, measure: str) -> Judgement:
    gains = []
    for name in SWAPPED:
        for row in found.rows("presets", preset=name):
            swapped = _beside(found, row, f"{name}+least_stale")
            gains.append((f"{name} {_where(row)}", -change(swapped[measure], row[measure])))
    better = [value for _, value in gains if value > 0.005]
    worse = [value for _, value in gains if value < -0.005]
    text = (
        f"{len(better)} of {len(gains)} settings better by more than 0.5%, {len(worse)} worse, "
        f"{span([value for _, value in gains])} less time"
    )
    return text, verdict([value >= 0.10 for _, value in gains])


def _loss(row: Row) -> str:
    return f"{row['perplexity']:.2f}, {percent(row['agreement'])}"


def _where(row: Row) -> str:
    return f"{share_text(row['share'])} {row['ratio']:g}x"
