"""Advice: the chosen option, its expected speed and the reasons, as plain values and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Generic, TypeVar

from expertcast.predictors.messages import Json, aligned

WORTH = 0.02
"""Fraction of the time per token that a change must save to be advised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Base of options: settings to run the model with, and the results expected of them."""

    @property
    def cells(self) -> dict[str, str]:
        """The option's row in the table, by column; empty for advice without a table."""
        return {}


Opt = TypeVar("Opt", bound=Option)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice(Generic[Opt]):
    """The option chosen among several, with its reasons.

    Attributes:
        headline: the advice in one line.
        chosen: one of `options`.
        options: all options considered, the simplest first.
        reasons: one sentence each.
        levers: expected seconds per token of `chosen` with one change of the machine, by the change's name.
        facts: measured values, by name; part of the JSON result.
        notes: the measurements as text.
        left: number of the table's leading columns that are left-aligned.
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
        """Return plain values for JSON."""
        return {
            "chosen": asdict(self.chosen),
            "options": [asdict(option) for option in self.options],
            "reasons": list(self.reasons),
            "levers": self.levers,
            **self.facts,
        }

    def text(self) -> str:
        """Return the advice as text for the terminal."""
        rows = [option.cells for option in self.options]
        table = aligned([list(rows[0]), *(list(row.values()) for row in rows)], left=self.left) if rows[0] else ""
        reasons = "\n".join(f"- {reason}" for reason in self.reasons)
        return "\n\n".join(part for part in (self.headline, reasons, table, self.notes) if part)


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds."""
    return f"{1e3 * seconds:.3g} ms"
