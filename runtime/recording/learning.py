"""Running estimates of changing quantities, and the schedule of trials of options that are not the best.

The governors of drafts and of forecasts both use these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OUTLIER = 3.0
"""Maximum value of an observation as a multiple of its expected value: bounds the effect of single disturbances."""


class RunningSums:
    """Weighted sum of observations and their total weight, for exponentially decaying means.

    Args:
        keep: factor by which earlier weights decay per observation, in (0, 1).
        weight: weight of the prior.
        total: value of the prior times its weight.
    """

    __slots__ = ("_keep", "total", "weight")

    def __init__(self, keep: float, weight: float = 0.0, total: float = 0.0) -> None:
        self._keep, self.weight, self.total = keep, weight, total

    def fade(self, share: float) -> None:
        """Multiply the weight of all observations so far by `share`."""
        self.weight, self.total = self.weight * share, self.total * share

    def limit(self, weight: float) -> None:
        """Reduce the total weight of all observations to `weight` at most."""
        if self.weight > weight:
            self.fade(weight / self.weight)

    def add(self, weight: float, total: float) -> None:
        """Add an observation without decaying earlier ones; `total` is its value times its weight."""
        self.weight, self.total = self.weight + weight, self.total + total


class RunningMean(RunningSums):
    """Decaying mean of positive numbers, robust against outliers.

    The first observation has a small weight, since first runs are slow. From the third on, values are limited to
    `OUTLIER` times the mean.

    Args:
        keep: factor by which earlier weights decay per observation, in (0, 1).
    """

    FIRST = 0.2
    """Weight of the first observation."""

    def __init__(self, keep: float = 0.9) -> None:
        super().__init__(keep)

    def observe(self, value: float) -> None:
        """Add an observation."""
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
        """Mean; None before the first observation."""
        return self.total / self.weight if self.weight else None


class Share(RunningSums):
    """Decaying mean of a share, with a prior that decays like an observation.

    Args:
        prior: prior value of the share.
        firmness: weight of the prior.
        keep: factor by which earlier weights decay per observation, in (0, 1).
    """

    def __init__(self, prior: float, *, firmness: float = 1.0, keep: float = 0.99) -> None:
        super().__init__(keep, firmness, firmness * prior)

    def observe(self, part: float, whole: float = 1.0) -> None:
        """Add an observation of `part` out of `whole`."""
        self.fade(self._keep)
        self.add(whole, part)

    @property
    def value(self) -> float:
        """Mean share."""
        return self.total / self.weight


class RunningLine:
    """Least-squares line through decaying points, with a ridge penalty on the slope.

    Args:
        keep: factor by which earlier weights decay per point, in (0, 1).
        ridge: penalty of the slope, in squared units of x.
    """

    def __init__(self, keep: float, ridge: float) -> None:
        self._keep, self._ridge = keep, ridge
        self._sums = [0.0] * 5
        """Weighted sums of 1, x, y, x^2 and x y."""

    def observe(self, x: float, y: float) -> None:
        """Add a point."""
        point = (1.0, x, y, x * x, x * y)
        self._sums = [self._keep * total + new for total, new in zip(self._sums, point, strict=True)]

    def limit(self, weight: float) -> None:
        """Reduce the total weight of all points to `weight` at most."""
        own = self._sums[0]
        if own > weight:
            self._sums = [total * (weight / own) for total in self._sums]

    def at(self, xs: Sequence[float]) -> list[float]:
        """Return y at each x; 0 before the first point."""
        weight, x, y, xx, xy = self._sums
        if not weight:
            return [0.0] * len(xs)
        slope = (xy - x * y / weight) / (xx - x * x / weight + self._ridge)
        return [y / weight + slope * (own - x / weight) for own in xs]


class PositionMeans:
    """Decaying means by position; the prior of each position is the mean of the previous one.

    Every cycle decays all positions, so a position that is no longer reached returns to the mean of the previous one.

    Args:
        prior: prior value of position 0.
        keep: factor by which earlier weights decay per cycle, in (0, 1).
        firmness: weight of the prior.
    """

    def __init__(self, prior: float, *, keep: float, firmness: float) -> None:
        self._prior, self._keep, self._firmness = prior, keep, firmness
        self._means: list[RunningSums] = []

    def start_cycle(self) -> None:
        """Decay the observations of earlier cycles."""
        for mean in self._means:
            mean.fade(self._keep)

    def limit(self, weight: float) -> None:
        """Scale all weights so that none exceeds `weight`."""
        heaviest = max((mean.weight for mean in self._means), default=0.0)
        for mean in self._means:
            mean.fade(min(1.0, weight / heaviest))

    def observe(self, position: int, value: float) -> None:
        """Add an observation at a position."""
        while len(self._means) <= position:
            self._means.append(RunningSums(self._keep))
        self._means[position].add(1.0, value)

    def values(self, count: int, doubt: float = 0.0) -> list[float]:
        """Return the means of the first `count` positions, each reduced by `doubt` standard errors of a share."""
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
    """Expected yield and time of a possible next cycle."""

    tokens: float = 1.0
    """Expected number of tokens."""
    doubt: float = 0.0
    """Standard error of `tokens`."""
    seconds: float = 0.0
    """Expected seconds; 0: unknown."""

    @property
    def name(self) -> str:
        """Name of the option; variations of an option share it."""
        raise NotImplementedError

    @property
    def rate(self) -> float:
        """Tokens per second; 0 if the time is unknown."""
        return self.rate_within(0.0)

    def rate_within(self, errors: float) -> float:
        """Return the tokens per second with `errors` standard errors added to the tokens."""
        return (self.tokens + errors * self.doubt) / self.seconds if self.seconds else 0.0


LOSS = 0.0075
"""Share of all seconds that trials may lose."""
FIRST_PAUSE = 8
"""Cycles from one trial to the next; doubled after every trial without a gain over the estimate."""
LONGEST_PAUSE = 1024
"""Most cycles from one trial to the next."""
BETTER = 1.1
"""Gain over the estimate from which the next trial follows soon."""
NEAR = 0.1
"""Largest expected loss, as a share of its seconds, at which a promising option is tried outside the budget."""
HOPE = 0.5
"""An option within this many standard errors of the best is tried without waiting."""


class Trials:
    """Decides when an option that is not the best is tried, and accounts for the cost of trials."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Seconds of all cycles."""
        self.lost_s = 0.0
        """Seconds of trials beyond those of the best option for the same tokens."""
        self._cycle = 0
        self._pauses: dict[str, int] = {}
        self._due: dict[str, int] = {}

    def spent(self, seconds: float) -> None:
        """Add the seconds of a cycle."""
        self.seconds += seconds
        self._cycle += 1

    def next(self, best: Option, others: Mapping[str, Option]) -> str | None:
        """Return the key of the option to try now, or None.

        A trial with an expected gain is free. So is a trial of another option that may equal the best within the error
        of measurement, so that bad luck in its first cycles does not exclude it.

        Args:
            best: the best option.
            others: all other options, and variations of the best, by key.
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
        """Record the result of a trial.

        Args:
            key: key of the tried option.
            gain: ratio of its estimated rates after and before the trial.
            lost_s: seconds beyond the time of the best option for the same tokens; negative for a gain.
        """
        longer = min(2 * self._pauses.get(key, FIRST_PAUSE), LONGEST_PAUSE)
        pause = FIRST_PAUSE if gain >= BETTER else longer
        self._pauses[key], self._due[key] = pause, self._cycle + pause
        self.lost_s = max(0.0, self.lost_s + lost_s)

    def won(self, key: str) -> None:
        """Note that an option is the best; this resets its pause."""
        self._pauses.pop(key, None)
        self._due.pop(key, None)
