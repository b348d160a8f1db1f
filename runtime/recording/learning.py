"""Costs and values learned while they change, and how much of the time may go into trying what is not the best.

Drafts and forecasts are both chosen by what they cost and gave so far; nothing here knows of either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OUTLIER = 3.0
"""Longer times count as so many times the expected one: a disturbance says nothing of the next cycle, and a lasting
change is learned all the same."""


class RunningSums:
    """A mean of observations, each of which counts `keep` times as much as the one after it.

    It is asked at every layer of every step: two numbers, no list.

    Args:
        keep: above 0, below 1.
        weight: of what is known before the first observation.
        total: what is known then, times its weight.
    """

    __slots__ = ("_keep", "total", "weight")

    def __init__(self, keep: float, weight: float = 0.0, total: float = 0.0) -> None:
        self._keep, self.weight, self.total = keep, weight, total

    def fade(self, share: float) -> None:
        """Multiply the weight of all observations so far."""
        self.weight, self.total = self.weight * share, self.total * share

    def limit(self, weight: float) -> None:
        """Limit the weight of all observations so far."""
        if self.weight > weight:
            self.fade(weight / self.weight)

    def add(self, weight: float, total: float) -> None:
        """One observation more, its value times its weight as `total`; earlier ones do not fade by it."""
        self.weight, self.total = self.weight + weight, self.total + total


class RunningMean(RunningSums):
    """A mean of numbers above 0.

    The very first counts little as soon as there is a second: what runs for the first time is not what it will be. From
    the third on none counts as more than `OUTLIER` times the mean.
    """

    FIRST = 0.2
    """Weight of the first."""

    def __init__(self, keep: float = 0.9) -> None:
        super().__init__(keep)

    def observe(self, value: float) -> None:
        """One more."""
        weight = self.weight
        if not weight:
            self.weight, self.total = self.FIRST, self.FIRST * value
            return
        if weight > 2 * self.FIRST:
            value = min(value, OUTLIER * self.total / weight)
        self.fade(self._keep)
        self.add(1.0, value)

    @property
    def value(self) -> float | None:
        """None before there was an observation."""
        return self.total / self.weight if self.weight else None


class Share(RunningSums):
    """A running mean of shares; a prior stands for the first observations, and fades as they do.

    Args:
        prior: of the share.
        firmness: what the prior counts for, in wholes.
        keep: as of :class:`RunningSums`.
    """

    def __init__(self, prior: float, *, firmness: float = 1.0, keep: float = 0.99) -> None:
        super().__init__(keep, firmness, firmness * prior)

    def observe(self, part: float, whole: float = 1.0) -> None:
        """One more `part` of a `whole`."""
        self.fade(self._keep)
        self.add(whole, part)

    @property
    def value(self) -> float:
        """part / whole."""
        return self.total / self.weight


class RunningLine:
    """A least-squares line through points; flat where they do not say otherwise.

    Args:
        keep: as of :class:`RunningSums`.
        ridge: how much evidence a slope needs, in squared steps of x.
    """

    def __init__(self, keep: float, ridge: float) -> None:
        self._keep, self._ridge = keep, ridge
        self._sums = [0.0] * 5
        """Weighted sums of 1, x, y, x^2 and x y."""

    def observe(self, x: float, y: float) -> None:
        """One more point."""
        point = (1.0, x, y, x * x, x * y)
        self._sums = [self._keep * total + new for total, new in zip(self._sums, point, strict=True)]

    def limit(self, weight: float) -> None:
        """Limit the weight of all observations so far."""
        own = self._sums[0]
        if own > weight:
            self._sums = [total * (weight / own) for total in self._sums]

    def at(self, xs: Sequence[float]) -> list[float]:
        """y at each x; 0 before there was a point."""
        weight, x, y, xx, xy = self._sums
        if not weight:
            return [0.0] * len(xs)
        slope = (xy - x * y / weight) / (xx - x * x / weight + self._ridge)
        return [y / weight + slope * (own - x / weight) for own in xs]


class PositionMeans:
    """Means by position, each drawn towards that of the position before it, the first towards a prior.

    Old observations fade with every cycle, at all positions: one that is not reached any more falls back to what the
    one before it does.

    Args:
        prior: of position 0.
        keep: what a cycle leaves of the observations before it.
        firmness: observations that the value of the position before counts for.
    """

    def __init__(self, prior: float, *, keep: float, firmness: float) -> None:
        self._prior, self._keep, self._firmness = prior, keep, firmness
        self._means: list[RunningSums] = []

    def start_cycle(self) -> None:
        """Let the observations of earlier cycles fade."""
        for mean in self._means:
            mean.fade(self._keep)

    def limit(self, weight: float) -> None:
        """Limit the weight of all observations so far, at each position."""
        heaviest = max((mean.weight for mean in self._means), default=0.0)
        for mean in self._means:
            mean.fade(min(1.0, weight / heaviest))

    def observe(self, position: int, value: float) -> None:
        """One observation at a position."""
        while len(self._means) <= position:
            self._means.append(RunningSums(self._keep))
        self._means[position].add(1.0, value)

    def values(self, count: int, doubt: float = 0.0) -> list[float]:
        """Means of the first `count` positions, which are shares, less `doubt` standard errors each."""
        value, found = self._prior, []
        for position in range(count):
            mean = self._means[position] if position < len(self._means) else RunningSums(self._keep)
            weight = mean.weight
            value = (mean.total + self._firmness * value) / (weight + self._firmness)
            error = (value * (1 - value) / (weight + self._firmness)) ** 0.5 if doubt else 0.0
            found.append(max(0.0, value - doubt * error))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What could be done next, and what it is expected to give."""

    tokens: float = 1.0
    doubt: float = 0.0
    """How far `tokens` falls one standard error lower: large where little was measured."""
    seconds: float = 0.0
    """0: not known yet."""

    @property
    def name(self) -> str:
        """What is varied has the same name in all variations."""
        raise NotImplementedError

    @property
    def rate(self) -> float:
        """Tokens per second; 0 before anything is known."""
        return self.rate_within(0.0)

    def rate_within(self, errors: float) -> float:
        """Tokens per second with `errors` standard errors added to the tokens."""
        return (self.tokens + errors * self.doubt) / self.seconds if self.seconds else 0.0


LOSS = 0.0075
"""Share of all seconds that trying again may lose; the first cycles, when nothing is known, are not counted."""
FIRST_PAUSE = 8
"""Cycles from one trial to the next; twice as many after every trial that found nothing better than was known."""
LONGEST_PAUSE = 1024
"""Cycles from one trial to the next, at most."""
BETTER = 1.1
"""A trial that finds so much more than was known is followed by another soon."""
NEAR = 0.1
"""Another option that may be better than the best, and loses this share of its seconds at most, costs nothing."""
HOPE = 0.5
"""Standard errors by which an option may be better than measured: if it then is the best, it waits for no pause."""


class Trials:
    """Decides which option that is not the best is tried again, and keeps the account of what trials cost."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Seconds that all cycles took so far."""
        self.lost_s = 0.0
        """Seconds that trials took beyond what the best would have taken for the same tokens."""
        self._cycle = 0
        self._pauses: dict[str, int] = {}
        self._due: dict[str, int] = {}

    def spent(self, seconds: float) -> None:
        """A cycle was run, of whatever kind."""
        self.seconds += seconds
        self._cycle += 1

    def next(self, best: Option, others: Mapping[str, Option]) -> str | None:
        """The key of the option to try now; None: no trial is due.

        A trial that is expected to gain is free. So is another option that may be as good as the best within the error
        of what was measured: bad luck in its first cycles must not keep the better one out.

        Args:
            best: the best option.
            others: all others, and variations of the best.
        """
        losses = {key: own.seconds - own.tokens / best.rate for key, own in others.items()}
        for key in sorted(others, key=losses.__getitem__):
            own, loss_s = others[key], losses[key]
            if key not in self._due:
                self._due[key] = self._cycle + self._pauses.setdefault(key, FIRST_PAUSE)
            hopeful = own.rate_within(HOPE) > best.rate
            free = loss_s < 0 or (hopeful and own.name != best.name and loss_s <= NEAR * own.seconds)
            due = hopeful or self._cycle >= self._due[key]
            if due and (free or self.lost_s + loss_s <= LOSS * (self.seconds + own.seconds)):
                return key
        return None

    def tried(self, key: str, gain: float, lost_s: float) -> None:
        """A trial is over.

        Args:
            key: what was tried.
            gain: tokens per second that it is believed to give now, over what it was believed to give before.
            lost_s: seconds that it took more than the best would have; below 0 if it was better.
        """
        longer = min(2 * self._pauses.get(key, FIRST_PAUSE), LONGEST_PAUSE)
        pause = FIRST_PAUSE if gain >= BETTER else longer
        self._pauses[key], self._due[key] = pause, self._cycle + pause
        self.lost_s = max(0.0, self.lost_s + lost_s)

    def won(self, key: str) -> None:
        """It is the best: when it no longer is, its pause begins anew."""
        self._pauses.pop(key, None)
        self._due.pop(key, None)
