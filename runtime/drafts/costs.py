"""Costs and yield of drafting n tokens and verifying them, learned from a run's own cycles.

n drafted tokens, m = n + 1 verified ones, L MoE layers. Rows C3 to C5, with the bonus token (trap 1).
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
    """One cycle as it was run: n drafted positions, verified in one exact pass; a plain step where nothing drafts.

    All seconds are of the model's thread. B sequences.
    """

    draft: str | None
    """None: a plain exact step."""
    drafted: int = 0
    """n; fewer than were asked for where the governor stopped, or the draft had no more."""
    accepted: tuple[int, ...] = ()
    """[B] leading drafted positions that stay, 0 to n."""
    known: tuple[int, ...] = ()
    """[B] leading positions that were certain before, and are not judged; empty: none."""
    ended: bool = False
    """The draft had nothing to offer beyond its n positions, though more were asked for."""
    passes_s: tuple[float, ...] = ()
    """Each draft pass; one for all positions where they are proposed together. The first may feed several tokens."""
    verify_s: float = 0.0
    """The exact pass, with its waiting."""
    waited_s: float = 0.0
    """What the exact pass waited for copies."""
    growth: tuple[int, ...] = ()
    """New experts by position as the buffer counted them; fewer than n, or none, where routing is not known."""
    emitted: float = 1.0
    """New tokens, the mean over sequences."""
    seconds: float | None = None
    """The whole cycle, with what is neither drafting nor verifying; None: these two alone."""

    @property
    def total_s(self) -> float:
        """Seconds of the whole cycle."""
        return sum(self.passes_s) + self.verify_s if self.seconds is None else self.seconds

    @property
    def judged(self) -> list[tuple[int, int]]:
        """[B] positions that were certain before, and positions that stay."""
        return list(zip(self.known or (0,) * len(self.accepted), self.accepted, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Option):
    """A cycle of one draft at one length; tokens are E[N] of a sequence. The default is a plain exact step."""

    draft: str | None = None
    """None: a plain exact step."""
    length: int = 0
    """n, the number of positions expected to be best; 0 without a draft."""
    longest: int = 0
    """The draft may go on up to here."""
    reason: str = ""
    """One line with the numbers that decided."""
    trial: bool = False
    """Run to learn from it, not because it is best: exactly `length` tokens are drafted."""

    @property
    def name(self) -> str:
        """The draft's, or `none`."""
        return self.draft or NONE

    def __str__(self) -> str:
        ahead = f", {self.length} ahead" if self.draft else ""
        return f"{self.name}{ahead}: {self.tokens:.1f} tokens in {1e3 * self.seconds:.3g} ms ({self.rate:.3g}/s)"


PRIOR_ACCEPTANCE = 0.8
"""Share of drafted tokens that are taken to be accepted before any was verified."""
KEEP_SECONDS = 0.98
_KEEP_ACCEPTANCE, _KEEP_GROWTH = 0.985, 0.98
_FIRMNESS = 2.0
_RIDGE = 4.0
_STALE = 0.02
_COMPUTING = 0.8
"""Share of its drafting and verifying, as measured so far, that no cycle is taken to stay below."""


def expected_tokens(acceptance: Iterable[float]) -> list[float]:
    """E[N] of each length from 0: 1 + the sum over i <= n of the product over j <= i of p_j (row C4). The 1 is the
    token that verification gives by itself, whatever was accepted."""
    return list(accumulate(accumulate(acceptance, mul), initial=1.0))


def exposed_seconds(backlog_s: float, verify_s: float, layers: int) -> float:
    """What a verification of `verify_s` waits for copies that are still to come when it begins.

    They come in the order of their layers, evenly spread: those of layer l are there after (l + 1) / L of `backlog_s`
    and are needed after l / L of `verify_s`; the largest difference is at the first layer or at the last.
    """
    return max(backlog_s / layers, backlog_s - verify_s * (layers - 1) / layers)


class VerificationTimes:
    """Seconds of an exact pass over m tokens of each sequence, without its waiting; the same for all drafts.

    Between the numbers of tokens that were measured they are interpolated linearly, beyond them they go on with the
    slope of the nearest two (row C5). A number that was not measured for long is forgotten, but two are kept.
    """

    def __init__(self) -> None:
        self._means: dict[int, RunningMean] = {}

    def observe(self, tokens: int, seconds: float) -> None:
        """A pass over so many tokens of each sequence took so long without its waiting."""
        for other, mean in list(self._means.items()):
            if other != tokens:
                mean.fade(1 - (1 - KEEP_SECONDS) / 5)
                if mean.weight < _STALE * RunningMean.FIRST and len(self._means) > 2:
                    del self._means[other]
        self._means.setdefault(tokens, RunningMean(KEEP_SECONDS)).observe(seconds)

    def values(self, most: int) -> list[float]:
        """Of 0 to `most` tokens; nothing that was not measured makes more tokens cheaper."""
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
    """One draft's acceptance and costs.

    Args:
        layers: L
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self.cycles = 0
        """How many it has had."""
        self._acceptance = PositionMeans(PRIOR_ACCEPTANCE, keep=_KEEP_ACCEPTANCE, firmness=_FIRMNESS)
        self._growth = PositionMeans(0.0, keep=_KEEP_GROWTH, firmness=0.2)
        self._first_s, self._later_s = RunningMean(KEEP_SECONDS), RunningMean(KEEP_SECONDS)
        self._rest_s = RunningLine(KEEP_SECONDS, _RIDGE)
        """By n, what the other parts do not explain: the first fetch, experts that nobody foresaw, rolling back."""

    def observe(self, cycle: Cycle, verify_s: Sequence[float], copy_s: float) -> None:
        """Learn from a cycle; `verify_s` and `copy_s` as :meth:`seconds` takes them, for n tokens at least."""
        self.cycles += 1
        n = cycle.drafted
        self._acceptance.start_cycle()
        for certain, kept in cycle.judged:
            for position in range(certain, kept):
                self._acceptance.observe(position, 1.0)
            if kept < n or cycle.ended:
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
        """Limit the weight of all cycles so far, as they are of long ago."""
        for learnt in (self._acceptance, self._growth, self._rest_s, self._first_s, self._later_s):
            learnt.limit(weight)

    def draft_seconds(self, most: int) -> list[float]:
        """Of 0 to `most` drafted tokens: a n + b, and nothing for none (row C5)."""
        first = self._first_s.value or 0.0
        later = first if self._later_s.value is None else self._later_s.value
        return [0.0, *(first + later * n for n in range(most))]

    def tokens(self, most: int, doubt: float = 0.0) -> list[float]:
        """E[N] of 0 to `most` drafted tokens, with acceptance less `doubt` standard errors."""
        return expected_tokens(self._acceptance.values(most, doubt))

    def seconds(self, most: int, verify_s: Sequence[float], copy_s: float, known: Sequence[int] = ()) -> list[float]:
        """Of a cycle of 0 to `most` drafted tokens.

        Args:
            most: n of the last one.
            verify_s: of the exact pass over 0 to `most` + 1 tokens, without its waiting.
            copy_s: seconds of one expert's copy.
            known: new experts by position, of the positions that are drafted already; later ones are expected to bring
                what they brought of late.
        """
        rest = self._rest_s.at(range(most + 1))
        explained = self._explained(most, verify_s, copy_s, known)
        draft = self.draft_seconds(most)
        least = [_COMPUTING * (own + verify_s[n + 1]) for n, own in enumerate(draft)]
        return [max(1e-9, *of) for of in zip(least, map(add, explained, rest), strict=True)]

    def report(self, most: int) -> Json:
        """Cycles so far, and for drafts of 1 to `most` tokens: `acceptance` and `growth` of the last position, seconds
        of drafting, and `rest_s`, what a cycle takes beyond drafting, verifying and foreseen copies."""
        return {
            "cycles": self.cycles,
            "acceptance": self._acceptance.values(most),
            "growth": self._growth.values(most),
            "draft_s": self.draft_seconds(most)[1:],
            "rest_s": self._rest_s.at(range(1, most + 1)),
        }

    def _explained(self, most: int, verify_s: Sequence[float], copy_s: float, known: Sequence[int]) -> list[float]:
        """Drafting, verifying, and the waiting for copies of experts that the draft foresaw.

        The copies of a position are asked for while its pass runs, and are done one after another: what is left of them
        when verification begins hides behind its earlier layers.
        """
        draft = self.draft_seconds(most)
        new = [*known[:most], *self._growth.values(most)[len(known) :]]
        backlog, found = 0.0, [verify_s[1]]
        for n in range(1, most + 1):
            backlog = max(0.0, backlog + new[n - 1] * copy_s - (draft[n] - draft[n - 1]))
            found.append(draft[n] + verify_s[n + 1] + exposed_seconds(backlog, verify_s[n + 1], self._layers))
        return found
