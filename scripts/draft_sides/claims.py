"""What MoE-SpeQ says, beside what was measured: each with the rows that speak of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draft_sides.sides import AUTO, INT4, MAIN_CAPACITY, MAIN_RATIO, NONE, REFERENCE
from expertcast.predictors.messages import Json

Rows = Sequence[Json]


def claims(result: Json) -> list[str]:
    """A line for each claim that there are rows for: what is said, what was found, whether it held."""
    rows = result["results"]
    found = []
    for said, judge in _CLAIMS:
        told = judge(result, rows)
        if told is not None:
            found.append(f"- **{said}** {told}")
    return ["", "## What the paper says", "", *found] if found else []


def _exact_sets(result: Json, _rows: Rows) -> str | None:
    sets = result.get("exact_sets", {}).get(INT4)
    if sets is None:
        return None
    held = "held" if sets["exact"] >= 0.9 else "did not hold"
    return f"Here, same inputs: {sets['hard']:.3f} + {sets['soft']:.3f} = {sets['exact']:.3f}: {held}."


def _accepted(_result: Json, rows: Rows) -> str | None:
    shares = [
        row["acceptance"][0] for row in rows if row["draft"] == INT4 and row["acceptance"] and not row["ablation"]
    ]
    return _range(shares, "of first tokens", lambda share: share > 0.9)


def _same_memory(_result: Json, rows: Rows) -> str | None:
    return _range(
        list(_against_exact(rows).values()), "times the best exact side, by setting", lambda gain: gain >= 2.16
    )


def _prefetch(_result: Json, rows: Rows) -> str | None:
    return _ablation(rows, "prefetch")


def _reordering(_result: Json, rows: Rows) -> str | None:
    return _ablation(rows, "reordering")


def _coverage(_result: Json, rows: Rows) -> str | None:
    shares = {
        row["capacity"]: row["coverage"]
        for row in rows
        if row["model"] == REFERENCE and row["draft"] == INT4 and row["length"] == 4 and row["coverage"] is not None
    }
    if not shares:
        return None
    text = ", ".join(f"{share:.3f} at {capacity:.0%}" for capacity, share in sorted(shares.items()))
    return f"Here, 4 ahead, experts with a slot when their layer is reached (arrived or on their way): {text}."


def _sharing(_result: Json, rows: Rows) -> str | None:
    shared = next((row for row in _main(rows) if row["draft"] == INT4), None)
    alone = next((row for row in _main(rows) if row["draft"] == "assistant"), None)
    if shared is None or alone is None:
        return None
    share = 1 - shared["memory_bytes"] / alone["memory_bytes"]
    memory = [f"{row['memory_bytes'] / 1e6:.1f} MB" for row in (shared, alone)]
    times = [f"{row['ms_per_token']:.1f}" for row in (shared, alone)]
    return (
        f"Here, beside the slots: {memory[0]} in place of {memory[1]} ({share:.0%} less); a second model's routing is "
        f"not seen, and it takes {times[1]} ms per token at best, the shared one {times[0]}."
    )


def _ungoverned(_result: Json, rows: Rows) -> str | None:
    worst = [
        max(own, key=lambda row: row["tpot_s"])["tpot_s"] / plain["tpot_s"]
        for plain in rows
        if plain["draft"] == NONE and not plain["same_memory"] and plain["forecasts"] is None
        if (own := [row for row in rows if row["setting"] == plain["setting"] and isinstance(row["length"], int)])
    ]
    return _range(
        worst, "times plain decoding's time, the worst fixed length of any draft, by setting", lambda lost: lost > 1
    )


def _governed(_result: Json, rows: Rows) -> str | None:
    lost = [
        row["tpot_s"] / best
        for row in rows
        if row["draft"] == AUTO
        if (best := min((other["tpot_s"] for other in rows if _beside(other, row)), default=0.0))
    ]
    return _range(
        lost, "times the time of the best of all sides without forecasts, by setting", lambda most: most <= 1.03
    )


def _beside(other: Json, row: Json) -> bool:
    """Whether a side is among those that auto could have been."""
    same = other["setting"] == row["setting"] and not other["same_memory"] and other["forecasts"] is None
    return bool(same and other["draft"] not in (AUTO, "assistant") and other["ablation"] is None)


def _against_exact(rows: Rows) -> dict[str, float]:
    """By setting, the best exact side in the memory of int4 copies over int4's best."""
    found = {}
    for setting in dict.fromkeys(row["setting"] for row in rows):
        own = [row for row in rows if row["setting"] == setting and row["ablation"] is None]
        exact = [row["tpot_s"] for row in own if row["draft"] == NONE and row["same_memory"]]
        drafted = [row["tpot_s"] for row in own if row["draft"] == INT4]
        if exact and drafted:
            found[setting] = min(exact) / min(drafted)
    return found


def _ablation(rows: Rows, name: str) -> str | None:
    without = next((row for row in _main(rows) if row["ablation"] == name), None)
    whole = next((row for row in _main(rows) if row["draft"] == INT4 and row["length"] == "governed"), None)
    if without is None or whole is None:
        return None
    share = without["tpot_s"] / whole["tpot_s"]
    ms, less = whole["ms_per_token"], without["ms_per_token"]
    return f"Here without it: {less:.1f} ms per token, with it {ms:.1f} ({share:.2f})."


def _main(rows: Rows) -> list[Json]:
    where = (REFERENCE, MAIN_RATIO, MAIN_CAPACITY)
    own = [row for row in rows if (row["model"], row["copy_over_compute"], row["capacity"]) == where]
    return sorted(
        (row for row in own if not row["same_memory"]), key=lambda row: (row["ablation"] or "", row["tpot_s"])
    )


def _range(values: Sequence[float], of: str, holds: Callable[[float], bool]) -> str | None:
    if not values:
        return None
    count = sum(map(holds, values))
    held = "held" if count == len(values) else "did not hold" if not count else f"held in {count} of {len(values)}"
    return f"Here {min(values):.3f} to {max(values):.3f} {of}: {held}."


_CLAIMS: tuple[tuple[str, Callable[[Json, Rows], str | None]], ...] = (
    (
        "An INT4 draft chooses the exact set of experts in 90.9% of cases, 44.1% in the same order (C1, C2).",
        _exact_sets,
    ),
    ("More than 90% of drafted tokens are accepted (C18).", _accepted),
    ("2.16 times the throughput of offloading in the same memory (C16; the headline says 2.34).", _same_memory),
    ("Without asynchronous prefetching throughput falls by 5% (C15).", _prefetch),
    ("Verification reads each expert once for all tokens (C14).", _reordering),
    ("96 to 99.9% of the experts needed at a step are there, fewer with more slots (C17).", _coverage),
    ("Sharing weights and cache saves 43% of memory (C11).", _sharing),
    ("Speculation that nobody governs makes MoE models slower, up to 1.5 times (Cascade).", _ungoverned),
    ("A governor finds the best length, none included (C7; asked here: at most 3% slower).", _governed),
)
