"""Asking the rows of a policy study, and the form of a claim that they are to judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HELD, PART, NOT, UNKNOWN = "held", "held in part", "did not hold", "cannot be judged here"
VERDICTS = (HELD, PART, NOT, UNKNOWN)

Row = Mapping[str, Any]


class MissingRowError(Exception):
    """The study holds no row of the kind that is asked for."""


class Named(dict[str, Row]):
    """Rows by name.

    Raises:
        MissingRowError: a name that has none.
    """

    def __missing__(self, name: str) -> Row:
        raise MissingRowError


@dataclass(frozen=True, slots=True)
class Found:
    """The rows of a study."""

    result: Mapping[str, Any]

    def rows(self, stage: str, **where: Any) -> list[Row]:
        """
        Raises:
            MissingRowError: there is none.
        """
        source = self.result["replay"] if stage == "replay" else self.result["results"]
        rows = [row for row in source if row["stage"] == stage and all(row.get(k) == v for k, v in where.items())]
        if not rows:
            raise MissingRowError
        return rows

    def row(self, stage: str, **where: Any) -> Row:
        return self.rows(stage, **where)[0]

    def shares(self, stage: str, **where: Any) -> list[float]:
        """Capacities at which there are such rows, rising."""
        return sorted({row["share"] for row in self.rows(stage, **where)})

    def best_classic(self, share: float) -> Row:
        """The policy that looks at the past only with the fewest misses over the whole test split."""
        rows = self.rows("headline", share=share)
        classic = [row for row in rows if not row["eviction"].startswith(("belady", "forecast"))]
        return min(classic, key=lambda row: float(row["misses"]))  # the first of equals: lfu before lhu

    def closed(self, share: float, name: str) -> float:
        """Part of the misses between the best classic policy and belady that another policy avoids."""
        best = self.best_classic(share)["misses"]
        bound, own = (self.row("headline", share=share, eviction=each)["misses"] for each in ("belady", name))
        return float((best - own) / max(1, best - bound))


Judgement = tuple[str, str]
"""What was measured, in words with the counts, and the verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A published statement and what judges it."""

    text: str
    source: str
    judge: Callable[[Found], Judgement]

    def judged(self, found: Found) -> dict[str, str]:
        """A line of the page; what there are no rows for is said to be unknown."""
        try:
            measured, verdict = self.judge(found)
        except MissingRowError:
            measured, verdict = "not measured in this run", UNKNOWN
        return {"claim": self.text, "source": self.source, "measured": measured, "verdict": verdict}


def claim(text: str, source: str) -> Callable[[Callable[[Found], Judgement]], Claim]:
    """Make a claim of the function that judges it."""
    return lambda judge: Claim(text=text, source=source, judge=judge)


def verdict(held: Sequence[bool]) -> str:
    """Held everywhere, nowhere, or in between.

    Raises:
        MissingRowError: there is nothing to judge by.
    """
    if not held:
        raise MissingRowError
    return HELD if all(held) else PART if any(held) else NOT


def percent(value: float) -> str:
    return f"{100 * value:.1f}%"


def signed(value: float) -> str:
    return f"{100 * value:+.1f}%"


def change(new: float, old: float) -> float:
    """Relative change; 0 where there was nothing."""
    return new / old - 1 if old else 0.0


Changes = list[tuple[str, float]]
"""Where, and the relative change there."""


def changes_text(changes: Changes) -> str:
    """Every change with where it is of."""
    return ", ".join(f"{label} {signed(value)}" for label, value in changes)


def ms(seconds: float) -> str:
    """Milliseconds."""
    return f"{1e3 * seconds:.1f}"


def span(values: Sequence[float], text: Callable[[float], str] = signed) -> str:
    """Lowest to highest."""
    low, high = text(min(values)), text(max(values))
    return low if low == high else f"{low} to {high}"


def share_text(share: float) -> str:
    """A capacity."""
    return f"{100 * share:g}%"
