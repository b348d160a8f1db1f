"""What the disk store was to reach, and whether it did."""

from __future__ import annotations

from collections.abc import Sequence

from disk_sides.figures import find, ratio
from disk_sides.sides import ACCELERATE, DIRECT, LLAMA, OWN
from expertcast.predictors.messages import Json

CODED = ("bitsplit", "pools")
OURS = ("mapped", DIRECT, *CODED)
LEAST_ACCELERATE, LEAST_LLAMA, LEAST_RATE, LEAST_CODED, MOST_SLOWER = 10.0, 2.0, 0.9, 1.3, 0.03
LLAMA_MEMORY, CODED_RATE = 0.15, 5e8


def targets(result: Json) -> list[str]:
    """A line for each, as items of a list."""
    rows = [row for row in result.get("results", ()) if row["workload"] == OWN and "tpot_s" in row]
    best = _best(rows)
    at = [row for row in best if row["memory"] == LLAMA_MEMORY]
    direct = [row for row in rows if row["side"] == DIRECT]
    rates = [_pair(row, row["rate_waiting"] / row["disk_bandwidth"]) for row in direct if _has_rate(row)]
    coded = [
        (*_pair({**row, "side": side}, 1 / value), row["throttle"])
        for row in direct
        for side in CODED
        if (value := _over(rows, row, side))
    ]
    slow = [(where, value) for where, value, throttle in coded if throttle == CODED_RATE]
    full = [(where, value) for where, value, throttle in coded if throttle is None]
    lossless = [row for row in result.get("results", ()) if row.get("identical") is not None and "slots" in row]
    differ = sorted({row["side"] for row in lossless if not row["identical"]})
    faster = [_pair(row, value) for row in best if (value := ratio(rows, row, ACCELERATE))]
    than_llama = [_pair(row, value) for row in at if (value := ratio(rows, row, LLAMA))]
    said = "not measured" if not lossless else f"**no**, {', '.join(differ)}" if differ else "**yes**, everywhere"
    return [
        _line(f"{LEAST_ACCELERATE:g} times accelerate", faster, LEAST_ACCELERATE),
        _line(f"{LEAST_LLAMA:g} times llama.cpp at {LLAMA_MEMORY:.0%}", than_llama, LEAST_LLAMA),
        _line(f"{LEAST_RATE:g} of the disk's sequential rate while waiting (direct)", rates, LEAST_RATE),
        _line(f"compressed {LEAST_CODED:g} times raw at {CODED_RATE / 1e9:g} GB/s", slow, LEAST_CODED),
        _line(f"compressed at most {MOST_SLOWER:.0%} slower than raw at full speed", full, 1 / (1 + MOST_SLOWER)),
        f"- logits of our lossless sides are the resident model's bits: {said}",
    ]


def _best(rows: Sequence[Json]) -> list[Json]:
    """Our fastest side at each memory and rate."""
    found: dict[tuple[object, object], Json] = {}
    for row in rows:
        key = row["memory"], row["throttle"]
        if row["side"] in OURS and (key not in found or row["tpot_s"] < found[key]["tpot_s"]):
            found[key] = row
    return list(found.values())


def _over(rows: Sequence[Json], row: Json, side: str) -> float | None:
    """How many times as long the other side takes."""
    other = find(rows, side=side, workload=row["workload"], memory=row["memory"], throttle=row["throttle"])
    return None if other is None else other["tpot_s"] / row["tpot_s"]


def _has_rate(row: Json) -> bool:
    return bool(row.get("rate_waiting") and row["disk_bandwidth"])


def _pair(row: Json, value: float) -> tuple[str, float]:
    rate = "as it is" if row["throttle"] is None else f"{row['throttle'] / 1e9:g} GB/s"
    return f"{row['side']}, {row['memory']:.0%}, {rate}", value


def _line(wanted: str, found: Sequence[tuple[str, float]], least: float) -> str:
    if not found:
        return f"- {wanted}: not measured"
    reached = [where for where, value in found if value >= least]
    said = (
        "**yes**"
        if len(reached) == len(found)
        else f"**{'partly' if reached else 'no'}**, {len(reached)} of {len(found)}"
    )
    return f"- {wanted}: {said} (" + "; ".join(f"{where}: {value:.2f}" for where, value in found) + ")"
