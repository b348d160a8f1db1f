"""The tables of the page, a function per stage. Each shows what the stage is about; all else is in the JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence

from benchmarks.study.claims_systems import best_of_both
from benchmarks.study.found import Found, MissingRowError, Row, change, ms, percent, share_text, signed
from benchmarks.study.study import EVICT_ONLY, FORECAST

Section = Callable[[Found], str]
_SHOWN = ("lru", "least_stale", FORECAST)
"""Evictions whose times with prefetching are shown."""


def forecasting(found: Found) -> str:
    rows = []
    for share in found.shares("headline"):
        best, bound = found.best_classic(share), found.row("headline", share=share, eviction="belady")
        bypass = found.row("headline", share=share, eviction="belady_bypass")
        line = [share_text(share), f"`{best['eviction']}`", percent(best["hit_rate"])]
        try:
            own, idle = (found.row("headline", share=share, eviction=name) for name in (EVICT_ONLY, FORECAST))
            line += [percent(own["hit_rate"]), percent(found.closed(share, EVICT_ONLY)), percent(idle["hit_rate"])]
        except MissingRowError:
            line += ["-", "-", "-"]
        rows.append([*line, percent(bound["hit_rate"]), percent(bypass["hit_rate"])])
    headings = [
        "capacity", "best classic policy", "its hits", "`forecast`, evicts only", "gap closed", "`forecast`, loads too",
        "belady", "belady, bypass",
    ]  # fmt: skip
    text = """Hits with one cache for all layers, without prefetching for the next layer. The gap is that of
        misses between the best policy that looks at the past only and belady with forced admission. *Loads too*: the
        same forecasts load experts while the link is idle, here the fast one."""
    return f"{wrapped(text)}\n\n{markdown(headings, rows)}"


def eviction(found: Found) -> str:
    parts = []
    for scope, title in (("global", "One cache for all layers"), ("layer", "An equal share for each layer")):
        rows = found.rows("eviction", scope=scope)
        shares = sorted({row["share"] for row in rows})
        cells = {(row["eviction"], row["share"]): row for row in rows}
        names = dict.fromkeys(row["eviction"] for row in rows)
        lines = [[f"`{name}`", *(_hits(cells.get((name, share)), scope) for share in shares)] for name in names]
        parts.append(f"{title}:\n\n{markdown(['policy', *map(share_text, shares)], lines)}")
    text = "\n\n".join(parts)
    words = f"""Hits and, in brackets, collisions as a share of accesses; between layers' shares there are none. Belady
        bounds what loads on demand; `{FORECAST}` also loads while the link is idle, `{EVICT_ONLY}` does not."""
    return f"""{wrapped(words)}

{text}

![Hits against capacity](results/policies-hit-rate.png)"""


def prefetching(found: Found) -> str:
    slow = max(float(row["ratio"]) for row in found.rows("prefetch"))
    shares = found.shares("prefetch", ratio=slow, eviction="lru", prefetch="none")
    evictions = [name for name in _SHOWN if any(row["eviction"] == name for row in found.rows("prefetch", ratio=slow))]
    ways = dict.fromkeys(
        (row["predictor"], row["prefetch"])
        for row in sorted(found.rows("prefetch", ratio=slow), key=lambda row: row["predictor"] is not None)
        if row["share"] in shares
    )
    middle, lines = shares[len(shares) // 2], []
    for predictor, selection in ways:
        way = {"ratio": slow, "predictor": predictor, "prefetch": selection}
        cells = [[_cell(found, **way, share=share, eviction=name) for name in evictions] for share in shares]
        example = found.row("prefetch", **way, share=middle, eviction="least_stale")
        lines.append([
            f"`{selection}`", "-" if predictor is None else f"`{predictor}`", *(" / ".join(each) for each in cells),
            _two(example["prefetch_precision"]), _two(example["prefetch_recall"]),
            f"{example['bytes_per_step'] / 1e3:.0f}",
        ])  # fmt: skip
    place = share_text(middle)
    headings = ["selection", "predictor", *map(share_text, shares), "precision", "recall", "kB per token"]
    names = " / ".join(f"`{name}`" for name in evictions)
    return f"""Time per token in ms over the {slow:g}x link with {names} eviction. *Precision* is the
share of prefetched copies that a layer used, *recall* the share of all used copies that came by prefetch; both and the
bytes are of `least_stale` at {place}.

{markdown(headings, lines)}

![Time per token](results/policies-tpot.png)

![Collisions per layer](results/policies-collisions.png)"""


def lossy(found: Found) -> str:
    shares = found.shares("lossy")
    best: set[tuple[float, str, str]] = set()
    for share in shares:
        known = [row for row in found.rows("lossy", share=share) if row["kl"] is not None]
        best |= {(share, row["miss"], row["routing"]) for row in (best_of_both(known) if known else ())}
    lines = []
    for miss, routing in dict.fromkeys((row["miss"], row["routing"]) for row in found.rows("lossy")):
        if miss == "fetch" or routing == "standard" or any((share, miss, routing) in best for share in shares):
            cells = [_trade(found, share, miss, routing, (share, miss, routing) in best) for share in shares]
            lines.append([f"`{miss}`", f"`{routing}`", *cells])
    figure = "\n\n![Quality against speed](results/policies-pareto.png)" if best else ""
    text = """Tokens per second against fetching every miss, agreement, and KL. Bold: on the frontier, that is no
        other row is at least as fast and as close to the exact model. Rows that are on it nowhere are left
        out unless they change one thing only."""
    return f"{wrapped(text)}\n\n{markdown(['misses', 'routing', *map(share_text, shares)], lines)}{figure}"


def presets(found: Found) -> str:
    rows = found.rows("presets")
    places = sorted({(row["ratio"], row["share"]) for row in rows})
    names = dict.fromkeys(row["preset"] for row in sorted(rows, key=lambda row: -float(row["share"])))
    cells = {(row["preset"], row["ratio"], row["share"]): row for row in rows}
    times = [[f"`{name}`", *(_time(cells.get((name, *place))) for place in places)] for name in names]
    shares = found.shares("presets")
    ratio, share = max(places)[0], shares[len(shares) // 2]
    details = [
        [
            f"`{row['preset']}`", ms(row["ttft_mean_s"]), ms(row["blocking_s"]), f"{row['bytes_per_step'] / 1e3:.0f}",
            percent(row["hit_rate"]), _number(row["redundant"], ".1%"), _two(row["prefetch_precision"]),
            _two(row["prefetch_recall"]), _number(row["perplexity"], ".2f"), _number(row["agreement"], ".1%"),
        ]
        for row in found.rows("presets", ratio=ratio, share=share)
    ]  # fmt: skip
    headings = ["system", "TTFT ms", "waiting ms", "kB per token", "hits", "redundant", "precision", "recall",
                "perplexity", "agreement"]  # fmt: skip
    return f"""Time per token in ms; `+least_stale` changes the eviction policy and nothing else.

{markdown(["system", *(f"{share_text(each)}, {link:g}x" for link, each in places)], times)}

The same at {share_text(share)} over the {ratio:g}x link. *Redundant* copies were prefetched and never used, or loaded
again in the pass that had evicted them. Routing within a budget executes fewer experts in prefills too.

{markdown(headings, details)}"""


def replay(found: Found) -> str:
    rows = found.rows("replay")
    names = list(dict.fromkeys(row["eviction"] for row in rows))
    settings = dict.fromkeys((row["scope"], row["batch"], row["share"]) for row in rows)
    lines = []
    for scope, batch, share in settings:
        own = (found.row("replay", scope=scope, batch=batch, share=share, eviction=name) for name in names)
        cells = [f"{row['misses']} -> {row['misses_per_access']} ({signed(row['inflation'] or 0.0)})" for row in own]
        lines.append([scope, str(batch), share_text(share), *cells])
    text = """Misses with a layer's experts as one event, as the runtime needs them, and with each expert of each token
        as an event of its own, as many cache studies replay them."""
    headings = ["scope", "texts at once", "capacity", *(f"`{name}`" for name in names)]
    return f"{wrapped(text)}\n\n{markdown(headings, lines)}"


def wrapped(text: str, indent: str = "") -> str:
    """Lines of the page's width; `indent` goes before all but the first."""
    words = " ".join(text.split())
    return textwrap.fill(words, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def markdown(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = ["| " + " | ".join(cells) + " |" for cells in (headings, *lines)]
    return "\n".join([rows[0], "|" + "---|" * len(headings), *rows[1:]])


def _hits(row: Row | None, scope: str) -> str:
    if row is None:
        return "-"
    collisions = f" ({percent(row['collision_rate'])})" if scope == "global" else ""
    return percent(row["hit_rate"]) + collisions


def _cell(found: Found, **where: object) -> str:
    try:
        return _time(found.row("prefetch", **where))
    except MissingRowError:
        return "-"


def _trade(found: Found, share: float, miss: str, routing: str, bold: bool) -> str:
    plain = found.row("lossy", share=share, miss="fetch", routing="standard")
    try:
        row = found.row("lossy", share=share, miss=miss, routing=routing)
    except MissingRowError:
        return "-"
    faster = signed(change(plain["tpot_mean_s"], row["tpot_mean_s"]))
    text = faster if row["kl"] is None else f"{faster}, {percent(row['agreement'])}, {row['kl']:.3f}"
    return f"**{text}**" if bold else text


def _time(row: Row | None) -> str:
    return "-" if row is None else ms(row["tpot_mean_s"])


def _two(value: float | None) -> str:
    return _number(value, ".2f")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
