"""A row of the result from the runs of one side in one setting."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import zip_longest

from draft_sides.sides import GOVERNED, NONE, Setting, Side
from expertcast.predictors.messages import Json


def row(setting: Setting, side: Side, ratio: float, slots: int, memory_bytes: int, runs: Sequence[Json]) -> Json:
    """What the runs of a side come to.

    Args:
        setting: where.
        side: who.
        ratio: copy over compute, as measured where the link is the disk.
        slots: experts that fit.
        memory_bytes: device memory beside the slots.
        runs: as :meth:`.runs.Runner.run` has them, with `prompt`, `round`, and in place of `ids` their number `tokens`,
            `distinct` ones, and `same`: those of plain decoding before the first other one.

    Returns:
        a row; `tpot_s` is the mean over prompts of the medians over rounds, `range_s` the same of the extremes.
    """
    by_prompt: dict[int, list[float]] = {}
    for run in runs:
        by_prompt.setdefault(run["prompt"], []).append(run["tpot_s"])
    tpots = [[kind(own) for own in by_prompt.values()] for kind in (statistics.median, min, max)]
    tpot_s, least_s, most_s = (sum(own) / len(own) for own in tpots)
    hits, requests = (sum(run["lookups"][place] for run in runs) for place in (0, 1))
    found: Json = {
        "model": setting.model, "link": setting.link, "copy_over_compute": ratio,
        "capacity": setting.capacity, "slots": slots, "draft": side.draft,
        "length": None if side.draft == NONE else side.length or GOVERNED, "forecasts": side.forecasts,
        "same_memory": side.same_memory, "ablation": side.ablation, "tpot_s": tpot_s,
        "ms_per_token": 1e3 * tpot_s, "range_s": [least_s, most_s],
        "kb_per_token": statistics.mean(run["bytes"] for run in runs) / 1e3, "memory_bytes": memory_bytes,
        "tokens_per_cycle": 1.0, "drafted_per_cycle": 0.0, "plain_share": 1.0, "acceptance": [], "exact_set": None,
        "coverage": hits / requests if requests else None,
        "identical": all(run["same"] == run["tokens"] for run in runs),
        "same_tokens": [run["same"] for run in runs],
        "distinct": statistics.mean(run["distinct"] / run["tokens"] for run in runs),
        "repetitions": min(map(len, by_prompt.values())), "prompts": len(by_prompt),
    }  # fmt: skip
    if side.draft != NONE:
        found |= _drafted(runs)
    return found


def _drafted(runs: Sequence[Json]) -> Json:
    cycles = sum(run["cycles"] for run in runs)
    kept, judged = (
        [sum(column) for column in zip_longest(*(run[name] for run in runs), fillvalue=0)]
        for name in ("kept", "judged")
    )
    sets = [sum(run["sets"][place] for run in runs) for place in range(3)]
    held, needed = (sum(run["needed"][place] for run in runs) for place in (0, 1))
    names = ("hard", "soft", "mismatch")
    return {
        "tokens_per_cycle": sum(run["emitted"] for run in runs) / cycles,
        "drafted_per_cycle": sum(run["drafted"] for run in runs) / cycles,
        "plain_share": sum(run["plain"] for run in runs) / cycles,
        "acceptance": [own / all_ for own, all_ in zip(kept, judged, strict=True) if all_],
        "exact_set": dict(zip(names, (own / sum(sets) for own in sets), strict=True)) if sum(sets) else None,
        "coverage": held / needed if needed else None,
    }


def same_tokens(ids: Sequence[int], truth: Sequence[int]) -> int:
    """Leading ones that are equal."""
    return next((at for at, (one, other) in enumerate(zip(ids, truth, strict=True)) if one != other), len(ids))
