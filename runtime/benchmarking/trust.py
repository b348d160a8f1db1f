"""Whether a measured ratio can be believed: it must lie where such a figure can lie, by more than its own noise.

A benchmark's figures compare medians of runs that took turns on one machine. Where the machine's own noise is larger
than what they differ by, their ratio is an accident: 125 times what can be hidden was hidden, or a run takes .42 of the
least time that any can take. Such figures are not given, but why.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MOST_NOISE = 0.5
"""A figure that is no more certain than by so much is none: all that it can say lies between 0 and 1, or near 1."""
_MEDIAN = 1.2533
"""Standard error of a median over that of a mean, of normal numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A median with what is known of its error, in seconds."""

    value: float
    error: float
    """Standard error."""
    repetitions: int

    @classmethod
    def of(cls, repetitions: Sequence[Sequence[float]]) -> Timing:
        """The median over all steps of all repetitions.

        Its error comes from how far the repetitions' own medians lie apart, for a machine is slow for longer than a
        step; of one repetition, and where it is more, from how far the steps do.

        Args:
            repetitions: seconds of each decode step of each, one or more.
        """
        steps = [seconds for own in repetitions for seconds in own]
        medians = [statistics.median(own) for own in repetitions]
        within = statistics.stdev(steps) / math.sqrt(len(steps)) if len(steps) > 1 else 0.0
        between = statistics.stdev(medians) / math.sqrt(len(medians)) if len(medians) > 1 else 0.0
        return cls(value=statistics.median(steps), error=_MEDIAN * max(within, between), repetitions=len(repetitions))


@dataclass(frozen=True, slots=True)
class Figure:
    """A ratio, or why it is not given."""

    value: float | None = None
    reason: str | None = None


def figure(value: float, error: float, *, repetitions: int, least: float = -math.inf, most: float = math.inf) -> Figure:
    """A ratio as far as it can be believed.

    Args:
        value: as measured.
        error: its standard error, in the same units.
        repetitions: of the run with the fewest.
        least, most: between which such a ratio lies, if it is right. What lies outside by no more than two standard
            errors is taken to lie on the border.
    """
    inside = min(max(value, least), most)
    if error > MOST_NOISE or abs(value - inside) > 2 * error:
        return Figure(reason=f"too noisy: {repetitions} repetition{'s' * (repetitions != 1)}, spread {error:.2g}")
    return Figure(inside)
