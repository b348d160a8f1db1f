"""What is compared: who drafts, how far ahead, in which memory; and over which links, in which caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NONE, AUTO, INT4 = "none", "auto", "int4"
ASSISTANT = "assistant"
"""The model's own int4 version as another model: it shares neither cache nor weights, and nobody sees its routing."""
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
    ablation: str | None = None
    """What is left out: `prefetch` or `reordering`."""

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
        words += [f"no {self.ablation}"] if self.ablation else []
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
    Side(draft=ASSISTANT, length=4), Side(draft=ASSISTANT), Side(draft=AUTO),
    Side(draft=INT4, ablation="prefetch"), Side(draft=INT4, ablation="reordering"),
)  # fmt: skip
"""In the main setting. Without the governor a draft is 4 ahead; without sharing it is the assistant."""


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
