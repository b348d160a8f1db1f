"""From runs to results: medians over repetitions, and who is how many times as fast as whom."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from disk_sides.sides import DISK
from expertcast.predictors.messages import Json

_KEYS = ("side", "workload", "memory", "throttle")
_MEDIANS = ("tpot_s", "tpot_mean_s", "ttft_s", "bytes_read", "prompt_bytes_read", "hit_rate", "waited_s", "link_busy_s",
            "rate_waiting", "rate_busy", "rate", "same_tokens", "slots")  # fmt: skip


def summaries(runs: Sequence[Json]) -> list[Json]:
    """One row per side, workload, memory and rate, in the order of the first runs."""
    groups: dict[tuple[object, ...], list[Json]] = {}
    for run in runs:
        if "failed" not in run:
            groups.setdefault(tuple(run[name] for name in _KEYS), []).append(run)
    rates = {key[3]: statistics.median(run["rate"] for run in group) for key, group in groups.items() if key[0] == DISK}
    return [_summary(dict(zip(_KEYS, key, strict=True)), group, rates) for key, group in groups.items()]


def find(results: Sequence[Json], **wanted: object) -> Json | None:
    """The row with these values."""
    return next((row for row in results if all(row.get(key) == value for key, value in wanted.items())), None)


def ratio(results: Sequence[Json], row: Json, other: str, other_workload: str | None = None) -> float | None:
    """How many times as long the other side takes, at the same memory and rate."""
    found = find(
        results, side=other, workload=other_workload or row["workload"], memory=row["memory"], throttle=row["throttle"]
    )
    return None if found is None else found["tpot_s"] / row["tpot_s"]


def rate_name(row: Json) -> str:
    """The disk's rate, for people."""
    if row["throttle"] is not None:
        return f"Disk throttled to {row['throttle'] / 1e9:g} GB/s"
    measured = row["disk_bandwidth"]
    return "Disk as it is" + (f" ({measured / 1e9:.2f} GB/s)" if measured else "")


def _summary(key: Json, group: Sequence[Json], rates: Json) -> Json:
    row: Json = {**key, "disk_bandwidth": rates.get(key["throttle"], key["throttle"]), "repetitions": len(group)}
    for name in _MEDIANS:
        values = [run[name] for run in group if run.get(name) is not None]
        if values:
            row[name] = statistics.median(values)
    times = [run["tpot_s"] for run in group if "tpot_s" in run]
    if times:
        row["tpot_range_s"] = [min(times), max(times)]
    row["peak_bytes"] = max(run["peak_bytes"] for run in group)
    row["identical"] = all(run["identical"] for run in group) if "identical" in group[0] else None
    for name in ("limit_bytes", "capped", "throttled", "version"):
        if name in group[0]:
            row[name] = group[0][name]
    return row
