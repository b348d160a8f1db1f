"""The tables of a result, in Markdown: what they say comes from its figures alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from expertcast.predictors.messages import Json
from serving_sides.figures import OTHERS, figures
from serving_sides.servers import ENDS_S

_LOADS = ("server", "clients", "requests/s", "ms to first token", "p95", "ms per token", "p95", "hits", "same texts",
          "lost")  # fmt: skip


def tables(result: Json) -> str:
    """All tables, each below what its columns mean."""
    found = figures(result)
    parts = [_loads(result, found["rows"])]
    if found["ratios"]:
        parts.append(_ratios(found["ratios"]))
    parts.append(_servers(found["memory"], found["ends"]))
    return "\n\n".join(parts)


def _loads(result: Json, rows: Sequence[Json]) -> str:
    settings = result["settings"]
    numbers = sorted({row.get("rounds", settings.get("rounds")) for row in rows})
    rounds = " to ".join(map(str, numbers)) + (" round" if numbers == [1] else " rounds")
    seen = "under that load" if "runs" in result else "over all loads of the last round"
    lines = [
        f"    python scripts/{result['command']}", "",
        f"Bundled model in fp32, {settings['threads']} threads, {settings['slots']} slots for 768 experts, emulated",
        f"link of {settings['bandwidth'] / 1e6:.0f} MB/s; {settings['requests']} requests of {settings['new_tokens']}",
        f"tokens under each load, {rounds}, medians. *Hits*: of the experts asked for, those that had a slot,",
        f"{seen}. *Same texts*: as the server's resident side.", "",
    ]  # fmt: skip
    cells = []
    for row in rows:
        times = [f"{row[name] * 1e3:.0f}" for name in ("first_s", "first_s_p95", "per_token_s", "per_token_s_p95")]
        hits = "" if row["hit_rate"] is None else f"{row['hit_rate']:.2f}"
        own = [row["side"], str(row["clients"]), f"{row['requests_per_s']:.2f}", *times, hits]
        cells.append([*own, f"{row['same']} of {row['answers']}", str(row["lost"])])
    return "\n".join([*lines, *_table(_LOADS, cells)])


def _ratios(rows: Sequence[Json]) -> str:
    lines = [
        "How many times the requests per second of another side, under the same load and in the same round: medians,",
        "and the least and the most where there were several rounds.", "",
    ]  # fmt: skip
    others = [name for name in OTHERS if any(row[name] for row in rows)]
    head = ("server", "clients", *(f"of {name.replace('_', ' ')}" for name in others))
    cells = [[row["side"], str(row["clients"]), *(_spread(row[name]) for name in others)] for row in rows]
    return "\n".join([*lines, *_table(head, cells)])


def _servers(memory: Sequence[Json], ends: Sequence[Json]) -> str:
    lines = [
        "*Memory*: that is the processes' own, in MB, before the loads (two short requests were answered) and after."
    ]
    head = ["server", "memory before", "after"]
    rows = [[row["side"], f"{row['before_bytes'] / 1e6:.0f}", f"{row['after_bytes'] / 1e6:.0f}"] for row in memory]
    if ends:
        lines += [
            "*Seconds to end*: from SIGTERM, while one client reads a long answer, until all processes are gone; with",
            f"the exit status; those still there after {ENDS_S:.0f} are killed. *Its answer*: *told* by an error that",
            "it ends there, *cut off* with the connection, *whole* to the last token asked for, or *half* of one that",
            "looks whole.",
        ]  # fmt: skip
        head += ["seconds to end", "most", "status", "its answer"]
        by_side = {end["side"]: end for end in ends}
        rows = [[*row, *_end(by_side[row[0]])] for row in rows]
    return "\n".join([*lines, "", *_table(head, rows)])


def _end(end: Json) -> list[str]:
    statuses = [f"{status}" for status in dict.fromkeys(end["statuses"])]
    killed = f", {end['killed']} killed" if end["killed"] else ""
    words = [f"{end['seconds']:.1f}", f"{end['most_s']:.1f}", ", ".join(statuses) + killed]
    return [*words, ", ".join(dict.fromkeys(end["answers"]))]


def _spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return "".join(f"{value:.2f}" for value in values)
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]
