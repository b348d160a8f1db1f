"""ZipMoE's statements and what judges them: fixed rules over the rows that were measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.study.found import HELD, NOT, Claim, Found, Judgement, claim, percent, span, verdict

_POINT = 0.01
_CLOSE = 1e-9


@claim("The exponents of bf16 experts hold 2.55 to 2.65 bits of 8", "Fig. 2; row E1")
def entropy(found: Found) -> Judgement:
    rows = found.result["coding"]
    text = ", ".join(f"{row['weights']} {row['entropy']:.2f}" for row in rows)
    return text, verdict([2.55 <= round(row["entropy"], 2) <= 2.65 for row in rows])


@claim("So 66.0% to 66.6% of the bytes are the least", "section 2.3; row E1")
def bound(found: Found) -> Judgement:
    rows = found.result["coding"]
    text = ", ".join(f"{row['weights']} {percent(row['bound'])}" for row in rows)
    return text, verdict([0.660 <= round(row["bound"], 3) <= 0.666 for row in rows])


@claim("Entropies of 2.651, 2.563 and 2.554 bits give bounds of 66.02%, 65.96% and 66.52%", "section 2.3; trap 7")
def order_of_bounds(found: Found) -> Judgement:
    said = {2.651: 0.6602, 2.563: 0.6596, 2.554: 0.6652}
    made = {bits: (8 + bits) / 16 for bits in said}
    text = "(8 + H) / 16 is " + ", ".join(f"{100 * share:.2f}%" for share in made.values()) + " in that order"
    return text, verdict([abs(made[bits] - share) < 1e-4 for bits, share in said.items()])


@claim("Signs and mantissas do not compress", "section 2.3; row E2")
def mantissas(found: Found) -> Judgement:
    rows = found.result["coding"]
    text = "zstd leaves " + ", ".join(f"{100 * row['mantissas_zstd']:.2f}% ({row['weights']})" for row in rows)
    return text, verdict([row["mantissas_zstd"] > 1 - _POINT for row in rows])


@claim("ZSTD stores 68% of the bytes", "Fig. 3; row E3")
def zstd(found: Found) -> Judgement:
    rows = found.result["coding"]
    text = ", ".join(
        f"{row['weights']} {percent(row['zstd'])} at level 3 and {percent(row['zstd_19'])} at level 19 of split "
        f"planes, {percent(row['zstd_interleaved'])} of weights as they are, {percent(row['bitsplit'])} by `bitsplit`"
        for row in rows
    )
    return text, verdict([min(row["zstd"], row["zstd_19"]) < 0.68 + _POINT for row in rows])


@claim("LZ4HC stores 74% of the bytes", "Fig. 3; row E3")
def lz4hc(found: Found) -> Judgement:
    rows = found.result["coding"]
    text = ", ".join(
        f"{row['weights']} {percent(row['lz4hc'])} of split planes, {percent(row['lz4hc_interleaved'])} of weights as "
        "they are"
        for row in rows
    )
    return text, verdict([row["lz4hc"] < 0.74 + _POINT for row in rows])


@claim("The scheduler takes at most 3 - 1/L times the optimum", "Theorem 3.1; row E10")
def approximation(found: Found) -> Judgement:
    orders = found.result["orders"]
    text = (
        f"in none of {orders['instances']} small instances more; at most {orders['largest']:.2f} times, "
        f"{orders['mean']:.4f} in the mean, the optimum itself in {percent(orders['optimal'])} (tensor by tensor: "
        f"{orders['one_by_one_largest']:.2f} and {orders['one_by_one_mean']:.4f})"
    )
    return text if not orders["above_bound"] else f"{orders['above_bound']} above", _all(not orders["above_bound"])


@claim("No order is faster than Z, the longest that one tensor takes", "Lemma B.3; row E9")
def longest_path(found: Found) -> Judgement:
    orders = found.result["orders"]
    above, seen = orders["path_above_optimum"], orders["path_instances"]
    text = " and ".join(f"{above[kind]} of {seen[kind]} optima with {kind} are below it" for kind in above)
    mended = f"mended, it is above {orders['mended_above_optimum']} of all"
    return f"{text}: decoding may begin when the first shard has been read; {mended}", verdict(
        [not count for count in above.values()]
    )


@claim("A dynamic programme gives the hits of each pool, and of all pools given k", "Algorithm 2; rows E15, E16")
def hits(found: Found) -> Judgement:
    chances = found.result["chances"]
    errors = chances["binomial_error"], chances["pattern_error"]
    text = f"{chances['trials']} draws of {chances['ranks']} ranks, every subset: errors of {max(errors):.0e} at most"
    return text, _all(max(errors) < _CLOSE)


@claim("w <- w f / R(k, N) converges to the observed inclusion probabilities", "equation 23; row E17, trap 1")
def fitting(found: Found) -> Judgement:
    chances = found.result["chances"]
    text = (
        f"as printed in {chances['printed_converged']} of {chances['trials']} trials; w <- w f / f(w) in all, to "
        f"{chances['fit_error']:.0e}"
    )
    return text, _all(chances["printed_converged"] == chances["trials"])


@claim("The planner finds the best allocation (within 3% by replay)", "Algorithm 4; rows E18, E19")
def planner(found: Found) -> Judgement:
    rows = found.result["planned"]
    first = [row["first"] <= 1.03 for row in rows]
    eight = [row["of_first_eight"] for row in rows]
    text = (
        f"what it puts first, in {sum(first)} of {len(rows)} cases (at most {max(row['first'] for row in rows):.3f} "
        f"times); the best of its first eight by replay, in {sum(each <= 1.03 for each in eight)} (at most "
        f"{max(eight):.3f}); the worst allocation takes {span([row['worst'] for row in rows], '{:.2f}'.format)} times "
        "as long"
    )
    return text, verdict(first)


@claim("Planned pools wait less than the same memory in whole experts", "Fig. 10; row E19")
def planned_pools(found: Found) -> Judgement:
    rows = found.result["planned"]
    disks = sorted({row["bandwidth"] for row in rows}, reverse=True)
    text = ", ".join(
        f"{disk / 1e9:g} GB/s: the best allocation waits "
        f"{span([1 - 1 / row['only_full'] for row in rows if row['bandwidth'] == disk], percent)} less"
        for disk in disks
    )
    return text, verdict([row["only_full"] > 1 + _CLOSE for row in rows])


@claim("Pools whose overflow is evicted beat one pool of the same memory", "section 3.4; row E14")
def dropping(found: Found) -> Judgement:
    rows = found.result["dropped"]
    better = {
        name: [row[name] < min(row["only_full"], row["only_compressed"]) for row in rows]
        for name in ("dropped", "passed_on")
    }
    saved = [1 - row["passed_on"] / row["dropped"] for row in rows]
    text = (
        f"half F, half C waits less than the better of F and C alone in {sum(better['dropped'])} of {len(rows)} cases; "
        f"where an overflow goes on to the next pool, in {sum(better['passed_on'])}, and waits "
        f"{span(saved, percent)} less"
    )
    return text, verdict(better["dropped"])


@claim("FIFO, Marking and LRU perform similarly", "section 4.4; row E21")
def similar(found: Found) -> Judgement:
    rows = found.result["evicted"]
    spreads = [max(own) - min(own) for own in (_baselines(row) for row in rows)]
    text = "; ".join(_hits(row) for row in rows)
    return f"hits within {span(spreads, percent)} of each other: {text}", verdict([spread < 0.03 for spread in spreads])


@claim("Ranking experts by use outperforms all three", "section 4.4; row E21")
def ranking(found: Found) -> Judgement:
    rows = found.result["evicted"]
    gains = [row["hits"]["ranking"] - max(_baselines(row)) for row in rows]
    text = f"hits of a pool of whole experts by rank, beside the best of the three: {span(gains, _points)}"
    return text, verdict([gain > 0 for gain in gains])


CLAIMS = [value for value in list(globals().values()) if isinstance(value, Claim)]
"""In the order of the paper."""


def claims(result: Mapping[str, Any]) -> list[dict[str, str]]:
    """Each claim with where it is from, what was measured here and the verdict."""
    found = Found(result)
    return [each.judged(found) for each in CLAIMS]


def _all(held: bool) -> str:
    return HELD if held else NOT


def _baselines(row: Mapping[str, Any]) -> list[float]:
    return [row["hits"][name] for name in ("lru", "fifo", "marking")]


def _hits(row: Mapping[str, Any]) -> str:
    each = ", ".join(f"{name} {percent(row['hits'][name])}" for name in ("lru", "fifo", "marking"))
    return f"{row['routing']} at {100 * row['share']:g}% {each}"


def _points(value: float) -> str:
    return f"{100 * value:+.1f} points"
