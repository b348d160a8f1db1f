"""From what was measured of servers to the figures of the tables."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Sequence
from dataclasses import asdict

from expertcast.predictors.messages import Json
from serving_sides.clients import Load
from serving_sides.sides import BATCHED, EXACT, ON_DEMAND, ONE_BY_ONE, RESIDENT, place

Speeds = dict[str, dict[int, dict[int, float]]]
"""Requests per second by side, clients and round."""
OTHERS = ("resident", "on_demand", "one_by_one")
"""Sides that a side's requests per second are compared with."""


def kept(load: Load, clients: int, before: tuple[float, float] | None, after: tuple[float, float] | None) -> Json:
    """What a file keeps of a load.

    Args:
        load: it.
        clients: that asked at once.
        before, after: the server's counts of hits and misses; None where experts are resident.
    """
    found = {"clients": clients, "seconds": load.seconds, "lost": load.lost, "hits": None, "misses": None}
    if before is not None and after is not None:
        found |= {"hits": after[0] - before[0], "misses": after[1] - before[1]}
    return {**found, "answers": [{**asdict(answer), "text": _digest(answer.text)} for answer in load.answers]}


def figures(result: Json) -> Json:
    """What a result's runs come to: `rows`, `ratios`, `memory` and `ends`.

    Args:
        result: with `runs`, one for each side and round: `side`, `round`, `loads` as :func:`kept` has them,
            `memory_bytes` before and behind these, `end` as :func:`.ending.ended` says it. Without `runs`, one of an
            earlier form: its `rows` are of one round, and say the memory.
    """
    if "runs" not in result:
        rows = result["rows"]
        speeds: Speeds = {}
        for row in rows:
            speeds.setdefault(row["side"], {})[row["clients"]] = {0: row["requests_per_s"]}
        memory = {row["side"]: row["memory_bytes"] for row in rows}
        return {"rows": rows, "ratios": _ratios(speeds), "memory": _memory(memory), "ends": []}
    loads: dict[str, dict[int, dict[int, Json]]] = {}
    own: dict[str, list[Json]] = {}
    for run in sorted(result["runs"], key=lambda run: (place(run["side"]), run["round"])):
        own.setdefault(run["side"], []).append(run)
        for load in sorted(run["loads"], key=lambda load: load["clients"]):
            loads.setdefault(run["side"], {}).setdefault(load["clients"], {})[run["round"]] = load
    rows = [_row(side, clients, by_round, loads) for side, each in loads.items() for clients, by_round in each.items()]
    speeds = {
        side: {
            clients: {number: _speed(load) for number, load in by_round.items()} for clients, by_round in each.items()
        }
        for side, each in loads.items()
    }
    return {
        "rows": rows, "ratios": _ratios(speeds),
        "memory": _memory({side: [run["memory_bytes"] for run in runs] for side, runs in own.items()}),
        "ends": [_end(side, [run["end"] for run in runs]) for side, runs in own.items()],
    }  # fmt: skip


def _row(side: str, clients: int, by_round: dict[int, Json], loads: dict[str, dict[int, dict[int, Json]]]) -> Json:
    own = list(by_round.values())
    answers = [answer for load in own for answer in load["answers"]]
    first = [answer["first_s"] for answer in answers]
    each = [
        (answer["seconds"] - answer["first_s"]) / (answer["tokens"] - 1) for answer in answers if answer["tokens"] > 1
    ] or [0.0]
    expected: dict[int, set[str]] = {}  # in batches a resident side need not agree with itself
    for like in loads.get(f"{side.rpartition(': ')[0]}: {RESIDENT}", {}).values():
        for answer in (answer for load in like.values() for answer in load["answers"]):
            expected.setdefault(answer["prompt"], set()).add(answer["text"])
    hits, misses = (sum(load[name] or 0 for load in own) for name in ("hits", "misses"))
    return {
        "side": side, "clients": clients, "rounds": len(own), "answers": len(answers),
        "lost": sum(load["lost"] for load in own),
        "same": sum(answer["text"] in expected.get(answer["prompt"], ()) for answer in answers),
        "requests_per_s": statistics.median(map(_speed, own)),
        "first_s": statistics.median(first), "first_s_p95": _p95(first),
        "per_token_s": statistics.median(each), "per_token_s_p95": _p95(each),
        "hit_rate": hits / (hits + misses) if hits + misses else None,
    }  # fmt: skip


def _ratios(speeds: Speeds) -> list[Json]:
    """How many times a side's requests per second are those of others, by round."""
    rows = list[Json]()
    for side, by_clients in speeds.items():
        server, _, kind = side.rpartition(": ")
        others = {
            "resident": None if kind == RESIDENT else f"{server}: {RESIDENT}",
            "on_demand": f"{server}: {ON_DEMAND}" if kind == EXACT else None,
            "one_by_one": f"{ONE_BY_ONE}: {kind}" if server == BATCHED else None,
        }
        for clients, own in by_clients.items():
            row: Json = {"side": side, "clients": clients}
            for name, other in others.items():
                theirs = {} if other is None else speeds.get(other, {}).get(clients, {})
                row[name] = [own[number] / theirs[number] for number in own if number in theirs]
            if any(row[name] for name in OTHERS):
                rows.append(row)
    return rows


def _memory(pairs: dict[str, Sequence[Sequence[int]]]) -> list[Json]:
    return [
        {"side": side, "before_bytes": statistics.median(before), "after_bytes": statistics.median(after)}
        for side, own in pairs.items()
        for before, after in [list(zip(*own, strict=True))]
    ]


def _end(side: str, own: Sequence[Json]) -> Json:
    seconds = [end["seconds"] for end in own]
    return {
        "side": side, "seconds": statistics.median(seconds), "most_s": max(seconds),
        "killed": sum(end["killed"] for end in own), "statuses": [end["status"] for end in own],
        "answers": [end["answer"] for end in own],
    }  # fmt: skip


def _speed(load: Json) -> float:
    return len(load["answers"]) / float(load["seconds"])


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
