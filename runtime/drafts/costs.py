"""Model of the time and the tokens of a cycle that drafts n tokens and verifies them, learned from a run's cycles.

n drafted tokens, m = n + 1 verified positions, L MoE layers, B sequences.

Source: MoE-SpeQ (throughput P(n) = E[N(n)] / T(n)); the token that verification adds by itself is included here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add, mul

from expertcast.predictors.messages import Json
from expertcast.runtime.drafts.names import NONE
from expertcast.runtime.recording.learning import OUTLIER, Option, PositionMeans, RunningLine, RunningMean


@dataclass(slots=True, kw_only=True)
class Cycle:
    """Measurements of one cycle: n drafted positions and one exact pass, or a plain exact step without a draft.

    Seconds are those of the thread that runs the model.
    """

    draft: str | None
    """Name of the draft; None: a plain exact step."""
    drafted: int = 0
    """Number of drafted positions, n."""
    accepted: tuple[int, ...] = ()
    """Number of accepted positions of each sequence [B], 0 to n."""
    known: tuple[int, ...] = ()
    """Number of leading positions of each sequence that were settled before the cycle [B]; empty: 0."""
    passes_s: tuple[float, ...] = ()
    """Seconds of each draft pass."""
    verify_s: float = 0.0
    """Seconds of the exact pass, including its waiting."""
    waited_s: float = 0.0
    """Seconds that the exact pass waited for copies."""
    needed: int = 0
    """Number of experts that the layers of the exact pass needed."""
    covered: int = 0
    """Number of these that had a slot when their layer was reached, arrived or on their way."""
    waited_bytes: int = 0
    """Bytes of the others, whose copies began only then."""
    matches: Sequence[int] = (0, 0, 0)
    """:attr:`.prefetch.Schedule.matches`"""
    growth: tuple[int, ...] = ()
    """Number of new experts by position (:attr:`.prefetch.LookaheadBuffer.growth`); shorter than n without routing."""
    emitted: float = 1.0
    """Number of new tokens, mean over sequences."""
    seconds: float | None = None
    """Seconds of the whole cycle; None: the sum of drafting and verifying."""

    @property
    def total_s(self) -> float:
        """Seconds of the whole cycle."""
        return sum(self.passes_s) + self.verify_s if self.seconds is None else self.seconds

    @property
    def judged(self) -> list[tuple[int, int]]:
        """Number of settled and of accepted positions of each sequence [B]."""
        return list(zip(self.known or (0,) * len(self.accepted), self.accepted, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Option):
    """A draft with its length for the next cycle; the default is a plain exact step."""

    draft: str | None = None
    """Name of the draft; None: a plain exact step."""
    length: int = 0
    """Number of positions with the best expected rate; 0 without a draft."""
    longest: int = 0
    """Maximum number of positions that the draft may reach."""
    reason: str = ""
    """One line with the numbers behind the choice."""
    trial: bool = False
    """Whether the cycle is a measurement rather than the best choice; it drafts exactly `length` tokens."""

    @property
    def name(self) -> str:
        """Name of the draft, or `none`."""
        return self.draft or NONE

    def __str__(self) -> str:
        ahead = f", {self.length} ahead" if self.draft else ""
        return f"{self.name}{ahead}: {self.tokens:.1f} tokens in {1e3 * self.seconds:.3g} ms ({self.rate:.3g}/s)"


PRIOR_ACCEPTANCE = 0.8
"""Acceptance of drafted tokens assumed before the first verification."""
KEEP_SECONDS = 0.98
_KEEP_ACCEPTANCE, _KEEP_GROWTH = 0.985, 0.98
_FIRMNESS = 2.0
_RIDGE = 4.0
_STALE = 0.02
_COMPUTING = 0.8
"""Lower bound of a cycle's estimated time, as a share of the measured drafting and verifying."""


def expected_tokens(acceptance: Iterable[float]) -> list[float]:
    """Return E[N(n)] = 1 + sum over i <= n of product over j <= i of p_j, for n = 0, 1, ... (MoE-SpeQ).

    The 1 is the token that verification adds whatever it accepts.

    Args:
        acceptance: probability p_j that position j is accepted if all before it are.
    """
    return list(accumulate(accumulate(acceptance, mul), initial=1.0))


def exposed_seconds(backlog_s: float, verify_s: float, layers: int) -> float:
    """Return the seconds that a verification waits for copies that are outstanding when it starts.

    Copies arrive in the order of their layers at a constant rate: those of layer l arrive after (l + 1) / L of
    `backlog_s` and are needed after l / L of `verify_s`. The largest difference is at the first or the last layer.

    Args:
        backlog_s: seconds of outstanding copies.
        verify_s: seconds of the verification without waiting.
        layers: number of MoE layers, L.
    """
    return max(backlog_s / layers, backlog_s - verify_s * (layers - 1) / layers)


class VerificationTimes:
    """Running means of the seconds of an exact pass over m positions per sequence, without waiting for copies.

    Values between measured numbers of positions are interpolated linearly and beyond them extrapolated (MoE-SpeQ).
    Old measurements are forgotten, but two numbers of positions are always kept.
    """

    def __init__(self) -> None:
        self._means: dict[int, RunningMean] = {}

    def observe(self, tokens: int, seconds: float) -> None:
        """Add a measurement: seconds of a pass over `tokens` positions per sequence, without waiting."""
        for other, mean in list(self._means.items()):
            if other != tokens:
                mean.fade(1 - (1 - KEEP_SECONDS) / 5)
                if mean.weight < _STALE * RunningMean.FIRST and len(self._means) > 2:
                    del self._means[other]
        self._means.setdefault(tokens, RunningMean(KEEP_SECONDS)).observe(seconds)

    def values(self, most: int) -> list[float]:
        """Return the seconds for 0 to `most` positions; the measured points are made non-decreasing first."""
        points = sorted((tokens, mean.value or 0.0) for tokens, mean in self._means.items())
        if not points:
            return [0.0] * (most + 1)
        seconds = list(accumulate((value for _, value in points), max))
        if len(points) == 1:
            return [seconds[0]] * (most + 1)
        counts = [count for count, _ in points]
        found = []
        for tokens in range(most + 1):
            after = min(max(bisect_left(counts, tokens), 1), len(points) - 1)
            slope = (seconds[after] - seconds[after - 1]) / (counts[after] - counts[after - 1])
            found.append(max(0.0, seconds[after] + slope * (tokens - counts[after])))
        return found


class DraftModel:
    """Acceptance and costs of one draft.

    Args:
        layers: number of MoE layers, L.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self.cycles = 0
        """Number of observed cycles."""
        self._acceptance = PositionMeans(PRIOR_ACCEPTANCE, keep=_KEEP_ACCEPTANCE, firmness=_FIRMNESS)
        self._growth = PositionMeans(0.0, keep=_KEEP_GROWTH, firmness=0.2)
        self._first_s, self._later_s = RunningMean(KEEP_SECONDS), RunningMean(KEEP_SECONDS)
        self._rest_s = RunningLine(KEEP_SECONDS, _RIDGE)
        """Remaining seconds by n: the first fetch, experts that the draft did not predict, rolling back."""

    def observe(self, cycle: Cycle, verify_s: Sequence[float], copy_s: float) -> None:
        """Learn from a cycle.

        Args:
            cycle: the measured cycle with n drafted positions.
            verify_s: seconds of the exact pass over 0 to n + 1 positions or more, without waiting.
            copy_s: seconds to copy one expert.
        """
        self.cycles += 1
        n = cycle.drafted
        self._acceptance.start_cycle()
        for known, kept in cycle.judged:
            for position in range(known, kept):
                self._acceptance.observe(position, 1.0)
            if kept < n:
                self._acceptance.observe(kept, 0.0)
        if cycle.growth:
            self._growth.start_cycle()
            for position, count in enumerate(cycle.growth):
                self._growth.observe(position, float(count))
        if cycle.passes_s:
            self._first_s.observe(cycle.passes_s[0])
        if n > 1:
            self._later_s.observe(sum(cycle.passes_s[1:]) / (n - 1))
        explained = self._explained(n, verify_s, copy_s, cycle.growth)[n]
        total_s = cycle.total_s
        if self.cycles > 2:
            total_s = min(total_s, OUTLIER * (explained + max(0.0, self._rest_s.at([n])[0])))
        self._rest_s.observe(n, total_s - explained)

    def limit(self, weight: float) -> None:
        """Limit the total weight of all cycles so far, because they are outdated."""
        for mean in (self._acceptance, self._growth, self._rest_s, self._first_s, self._later_s):
            mean.limit(weight)

    def draft_seconds(self, most: int) -> list[float]:
        """Return the seconds to draft n = 0 to `most` tokens: a n + b, and 0 for n = 0 (MoE-SpeQ)."""
        first = self._first_s.value or 0.0
        later = first if self._later_s.value is None else self._later_s.value
        return [0.0, *(first + later * n for n in range(most))]

    def tokens(self, most: int, doubt: float = 0.0) -> list[float]:
        """Return E[N(n)] for n = 0 to `most`, with the acceptance reduced by `doubt` standard errors."""
        return expected_tokens(self._acceptance.values(most, doubt))

    def seconds(self, most: int, verify_s: Sequence[float], copy_s: float, known: Sequence[int] = ()) -> list[float]:
        """Return the expected seconds of a cycle that drafts n = 0 to `most` tokens.

        Args:
            most: maximum n.
            verify_s: seconds of the exact pass over 0 to `most` + 1 positions, without waiting.
            copy_s: seconds to copy one expert.
            known: number of new experts at the positions drafted so far; later positions use recent means.
        """
        rest = self._rest_s.at(range(most + 1))
        explained = self._explained(most, verify_s, copy_s, known)
        draft = self.draft_seconds(most)
        least = [_COMPUTING * (own + verify_s[n + 1]) for n, own in enumerate(draft)]
        return [max(1e-9, *of) for of in zip(least, map(add, explained, rest), strict=True)]

    def report(self, most: int) -> Json:
        """Return the model as plain values.

        `cycles` is the number of cycles. The lists are for drafts of 1 to `most` tokens: `acceptance` and `growth` of
        the last position, `draft_s`, and `rest_s`, the seconds that drafting, verifying and predicted copies leave
        unexplained.
        """
        return {
            "cycles": self.cycles,
            "acceptance": self._acceptance.values(most),
            "growth": self._growth.values(most),
            "draft_s": self.draft_seconds(most)[1:],
            "rest_s": self._rest_s.at(range(1, most + 1)),
        }

    def _explained(self, most: int, verify_s: Sequence[float], copy_s: float, known: Sequence[int]) -> list[float]:
        """Return the seconds of drafting, verifying, and waiting for experts that the draft predicted.

        The copies of a position start while its pass runs and follow one another. The remaining copies overlap with the
        earlier layers of the verification.
        """
        draft = self.draft_seconds(most)
        new = [*known[:most], *self._growth.values(most)[len(known) :]]
        backlog, found = 0.0, [verify_s[1]]
        for n in range(1, most + 1):
            backlog = max(0.0, backlog + new[n - 1] * copy_s - (draft[n] - draft[n - 1]))
            found.append(draft[n] + verify_s[n + 1] + exposed_seconds(backlog, verify_s[n + 1], self._layers))
        return found
