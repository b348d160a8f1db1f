"""What changes while it is measured: means, means by position and a line, in which old observations fade."""

from __future__ import annotations

from collections.abc import Sequence

OUTLIER = 3.0
"""What takes longer than so many times what was expected counts as that: a disturbance says nothing of the next time,
and what has really changed is found out all the same."""


class RunningMean:
    """A mean of numbers above 0, in which each observation counts `keep` times as much as the one after it.

    The very first counts little as soon as there is a second: what runs for the first time is not what it will be. From
    the third on none counts as more than `OUTLIER` times the mean.

    Args:
        keep: above 0, below 1.
    """

    _FIRST = 0.2

    def __init__(self, keep: float = 0.9) -> None:
        self._keep = keep
        self.weight = 0.0
        """How many observations of today the mean is worth."""
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """One more."""
        if not self.weight:
            self.weight, self._sum = self._FIRST, self._FIRST * value
            return
        if self.weight > 2 * self._FIRST:
            value = min(value, OUTLIER * self._sum / self.weight)
        self.fade(self._keep)
        self.weight += 1.0
        self._sum += value

    def fade(self, share: float) -> None:
        """What was observed so far counts so much less."""
        self.weight *= share
        self._sum *= share

    def limit(self, weight: float) -> None:
        """What was observed so far counts as so many observations of today at most."""
        if self.weight > weight:
            self.fade(weight / self.weight)

    @property
    def value(self) -> float | None:
        """None before there was an observation."""
        return self._sum / self.weight if self.weight else None


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
        self._sums: list[float] = []
        self._weights: list[float] = []

    def start_cycle(self) -> None:
        """What was observed before this cycle counts a little less."""
        self._fade(self._keep)

    def limit(self, weight: float) -> None:
        """What was observed so far counts as so many observations of today at most, at each position."""
        if max(self._weights, default=0.0) > weight:
            self._fade(weight / max(self._weights))

    def _fade(self, share: float) -> None:
        self._sums = [total * share for total in self._sums]
        self._weights = [own * share for own in self._weights]

    def observe(self, position: int, value: float) -> None:
        """One observation at a position."""
        missing = position + 1 - len(self._sums)
        self._sums.extend([0.0] * missing)
        self._weights.extend([0.0] * missing)
        self._sums[position] += value
        self._weights[position] += 1.0

    def values(self, count: int) -> list[float]:
        """Of the first `count` positions."""
        known, value, firmness = len(self._sums), self._prior, self._firmness
        found = []
        for position in range(count):
            if position < known:
                value = (self._sums[position] + firmness * value) / (self._weights[position] + firmness)
            found.append(value)
        return found

    def weights(self, count: int) -> list[float]:
        """How many observations of today each of the first `count` positions is worth, what it is drawn to included."""
        return [self._firmness + own for own in [*self._weights, *[0.0] * count][:count]]


class RunningLine:
    """A least-squares line through points of which the older ones fade; flat where they do not say otherwise.

    Args:
        keep: what a point leaves of the weight of those before it.
        ridge: how much evidence a slope needs, in squared steps of x.
    """

    def __init__(self, keep: float, ridge: float) -> None:
        self._keep, self._ridge = keep, ridge
        self._sums = [0.0] * 5
        """Of the weights, x, y, xx and xy."""

    def observe(self, x: float, y: float) -> None:
        """One more point."""
        new = (1.0, x, y, x * x, x * y)
        self._sums = [self._keep * old + add for old, add in zip(self._sums, new, strict=True)]

    def limit(self, weight: float) -> None:
        """The points so far count as so many of today at most."""
        if self._sums[0] > weight:
            self._sums = [total * weight / self._sums[0] for total in self._sums]

    def at(self, xs: Sequence[float]) -> list[float]:
        """y at each x; 0 before there was a point."""
        weight, x, y, xx, xy = self._sums
        if not weight:
            return [0.0] * len(xs)
        slope = (xy - x * y / weight) / (xx - x * x / weight + self._ridge)
        return [y / weight + slope * (own - x / weight) for own in xs]
