"""Running estimates of costs and values, and a budget for trials of options that are not the best.

The governors of drafts and of forecasts share this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OUTLIER = 3.0
"""Longer times count as so many times the expected one: a disturbance has little weight, and lasting changes show."""


class RunningSums:
    """A mean of observations, each of which counts `keep` times as much as the one after it.

    It holds two numbers and no list: every layer of every step reads it.

    Args:
        keep: above 0, below 1.
        weight: of the value before the first observation.
        total: that value times its weight.
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
        """Add an observation, with its value times its weight as `total`; earlier observations do not fade."""
        self.weight, self.total = self.weight + weight, self.total + total


class RunningMean(RunningSums):
    """A mean of numbers above 0.

    The first observation has little weight: first runs take longer. From the third on, a value counts as at most
    `OUTLIER` times the mean.
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
        """The mean; None without observations."""
        return self.total / self.weight if self.weight else None


class Share(RunningSums):
    """A running mean of shares with a prior that fades like an observation.

    Args:
        prior: initial share.
        firmness: weight of the prior, in wholes.
        keep: as of :class:`RunningSums`.
    """

    def __init__(self, prior: float, *, firmness: float = 1.0, keep: float = 0.99) -> None:
        super().__init__(keep, firmness, firmness * prior)

    def observe(self, part: float, whole: float = 1.0) -> None:
        """Add a `part` of a `whole`."""
        self.fade(self._keep)
        self.add(whole, part)

    @property
    def value(self) -> float:
        """Weighted mean of part / whole."""
        return self.total / self.weight


class RunningLine:
    """A least-squares line through points, with its slope shrunk to 0.

    Args:
        keep: as of :class:`RunningSums`.
        ridge: added to the squared spread of x.
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
        """Limit the weight of all observations so far."""
        own = self._sums[0]
        if own > weight:
            self._sums = [total * (weight / own) for total in self._sums]

    def at(self, xs: Sequence[float]) -> list[float]:
        """Return y at each x; 0 without points."""
        weight, x, y, xx, xy = self._sums
        if not weight:
            return [0.0] * len(xs)
        slope = (xy - x * y / weight) / (xx - x * x / weight + self._ridge)
        return [y / weight + slope * (own - x / weight) for own in xs]


class PositionMeans:
    """Means by position, each shrunk towards that of the position before it, the first towards a prior.

    Observations fade with every cycle, at all positions: a position without new ones returns to the mean before it.

    Args:
        prior: of position 0.
        keep: factor of a cycle on the weight of earlier observations.
        firmness: weight of the mean of the position before.
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
        """Add an observation at a position."""
        while len(self._means) <= position:
            self._means.append(RunningSums(self._keep))
        self._means[position].add(1.0, value)

    def values(self, count: int, doubt: float = 0.0) -> list[float]:
        """Return the means of the first `count` positions, which are shares, less `doubt` standard errors each."""
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
    """An option for the next cycle, with its expected tokens and seconds."""

    tokens: float = 1.0
    doubt: float = 0.0
    """Standard error of `tokens`: large where little was measured."""
    seconds: float = 0.0
    """0: not known yet."""

    @property
    def name(self) -> str:
        """Name that all variations of an option share."""
        raise NotImplementedError

    @property
    def rate(self) -> float:
        """Tokens per second; 0 where the seconds are not known."""
        return self.rate_within(0.0)

    def rate_within(self, errors: float) -> float:
        """Return tokens per second with `errors` standard errors added to the tokens."""
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
"""Standard errors that an option's estimate may be wrong by: if it then is the best, its trial needs no pause."""


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
        """Count a cycle of any option."""
        self.seconds += seconds
        self._cycle += 1

    def next(self, best: Option, others: Mapping[str, Option]) -> str | None:
        """Return the key of the option to try now; None: no trial is due.

        Trials that are expected to gain are free, and so are trials of options that may be as good as the best within
        the error of measurement: bad luck in its first cycles must not exclude the better option.

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
        """End a trial.

        Args:
            key: of the option.
            gain: tokens per second over those expected before the trial.
            lost_s: seconds beyond those of the best option; below 0 for a better one.
        """
        longer = min(2 * self._pauses.get(key, FIRST_PAUSE), LONGEST_PAUSE)
        pause = FIRST_PAUSE if gain >= BETTER else longer
        self._pauses[key], self._due[key] = pause, self._cycle + pause
        self.lost_s = max(0.0, self.lost_s + lost_s)

    def won(self, key: str) -> None:
        """Make an option the best: its pause begins anew afterwards."""
        self._pauses.pop(key, None)
        self._due.pop(key, None)
