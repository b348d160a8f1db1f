"""Advice: what to do, what to expect and why, as plain values and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Generic, TypeVar

from expertcast.predictors.messages import Json, aligned

WORTH = 0.02
"""Share of the time per token that a change must save before it is advised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to run the model, and what is expected of it."""

    @property
    def cells(self) -> dict[str, str]:
        """The option's row in the table, by column; empty: the advice shows no table."""
        return {}


Opt = TypeVar("Opt", bound=Option)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice(Generic[Opt]):
    """An option, chosen among several.

    Attributes:
        headline: the advice in one line.
        chosen: one of `options`.
        options: all that were considered, the plainest first.
        reasons: one sentence each.
        levers: expected seconds per token of `chosen` if one thing were different.
        facts: what was measured, by name; part of the JSON result.
        notes: the measurements in words.
        left: leading columns of the table that are aligned to the left.
    """

    headline: str
    chosen: Opt
    options: Sequence[Opt]
    reasons: Sequence[str] = ()
    levers: dict[str, float] = field(default_factory=dict)
    facts: Json
    notes: str = ""
    left: int = 0

    def as_dict(self) -> Json:
        """Plain values, for JSON."""
        return {
            "chosen": asdict(self.chosen),
            "options": [asdict(option) for option in self.options],
            "reasons": list(self.reasons),
            "levers": self.levers,
            **self.facts,
        }

    def text(self) -> str:
        """For the terminal."""
        rows = [option.cells for option in self.options]
        table = aligned([list(rows[0]), *(list(row.values()) for row in rows)], left=self.left) if rows[0] else ""
        reasons = "\n".join(f"- {reason}" for reason in self.reasons)
        return "\n\n".join(part for part in (self.headline, reasons, table, self.notes) if part)


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds, for a sentence."""
    return f"{1e3 * seconds:.3g} ms"
