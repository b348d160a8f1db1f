"""Ways of decoding, settings in which they are compared, and the result row of a way in a setting."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from expertcast.predictors.messages import Json

NONE, AUTO, INT4 = "none", "auto", "int4"
REFERENCE, WIDENED = "reference", "widened"
EMULATED, DISK = "emulated", "disk"
MAIN_RATIO, MAIN_CAPACITY = 5.0, 0.25
LENGTHS = (1, 2, 4, 8)
GOVERNED = "governed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way of decoding."""

    draft: str = NONE
    length: int | None = None
    """None: the governor's; nothing for `none`."""
    forecasts: str | None = None
    """Predictor that the offload loads experts by; also what `speculate` executes."""
    same_memory: bool = False
    """The bytes of int4 copies are slots, too (SM); else the cache is the same (SC)."""

    @property
    def governed(self) -> bool:
        """Whether a governor decides: it learns before it is measured."""
        return self.draft != NONE and self.length is None

    @property
    def group(self) -> tuple[bool, str]:
        """Sides with the same one share an offload."""
        return self.same_memory, self.forecasts or ""

    @property
    def beside(self) -> tuple[str, ...]:
        """Drafts that take memory and must be there before."""
        return (INT4,) if self.draft == AUTO else ()

    @property
    def name(self) -> str:
        """One for each side."""
        words = [self.draft]
        if self.draft != NONE:
            words.append(GOVERNED if self.length is None else str(self.length))
        words += [self.forecasts] if self.forecasts else []
        words += ["same memory"] if self.same_memory else []
        return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model, a link and a cache."""

    model: str
    link: str
    ratio: float | None
    """Copying K experts takes so many times as long as computing one layer; None: as the disk has it."""
    capacity: float
    """Share of the experts that have a slot; 0: no cache."""

    @property
    def main(self) -> bool:
        """Whether all sides are run here."""
        return (self.model, self.ratio, self.capacity) == (REFERENCE, MAIN_RATIO, MAIN_CAPACITY)

    @property
    def name(self) -> str:
        """One for each setting."""
        where = self.link if self.ratio is None else f"{self.link} {self.ratio:g}"
        return f"{self.model}, {where}, {self.capacity:.0%}" if self.capacity else f"{self.model}, {where}, no cache"


BASELINES = tuple(
    Side(forecasts=forecasts, same_memory=same) for same in (False, True) for forecasts in (None, "next_norm")
)
FEW = (
    *BASELINES, Side(draft=INT4, length=4), Side(draft=INT4), Side(draft="resident"), Side(draft="prompt_lookup"),
    Side(draft=AUTO),
)  # fmt: skip
"""Everywhere."""
ALL = (
    *BASELINES,
    *(Side(draft=INT4, length=n) for n in (*LENGTHS, None)),
    *(Side(draft=draft, length=n) for draft in ("resident", "prompt_lookup") for n in (2, 4, None)),
    *(Side(draft=draft, length=n)
      for draft in ("int8", "drop:fetched=1", "cache_aware", "drop_cascade", "early_exit")
      for n in (2, None)),
    Side(draft="speculate", length=2, forecasts="next_norm"), Side(draft="speculate", forecasts="next_norm"),
    Side(draft=AUTO),
)  # fmt: skip
"""In the main setting."""


def settings(small: bool) -> list[Setting]:
    """The main one first, then what says most."""
    main = Setting(model=REFERENCE, link=EMULATED, ratio=MAIN_RATIO, capacity=MAIN_CAPACITY)
    real = Setting(model=WIDENED, link=DISK, ratio=None, capacity=MAIN_CAPACITY)
    if small:
        return [main, real]
    wide = [Setting(model=WIDENED, link=EMULATED, ratio=MAIN_RATIO, capacity=MAIN_CAPACITY), real]
    others = [
        Setting(model=REFERENCE, link=EMULATED, ratio=ratio, capacity=capacity)
        for capacity in (0.25, 0.1, 0.0)
        for ratio in (5.0, 2.0, 10.0, 1.0)
    ]
    return [main, *wide, *(each for each in others if each != main)]


def sides(setting: Setting, only: Sequence[str]) -> list[Side]:
    """Those of a setting; `only`: drafts, beside which the baselines stay."""
    chosen = ALL if setting.main else FEW
    return [side for side in chosen if not only or side.draft in (NONE, *only)]


def grouped(sides: Sequence[Side]) -> list[Side]:
    """Those of a group together, the same cache first: it says what int4 copies take."""
    return sorted(sides, key=lambda side: side.group)


def row(setting: Setting, side: Side, ratio: float, slots: int, memory_bytes: int, runs: Sequence[Json]) -> Json:
    """What the runs of a side come to.

    Args:
        setting: where.
        side: who.
        ratio: copy over compute, as measured where the link is the disk.
        slots: experts that fit.
        memory_bytes: device memory beside the slots.
        runs: as :meth:`.draft_runs.Runner.run` has them, with `prompt`, `round`, and in place of `ids` their number
            `tokens`, `distinct` ones, and `same`: those of plain decoding before the first other one.

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
        "same_memory": side.same_memory, "tpot_s": tpot_s,
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
