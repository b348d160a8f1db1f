"""Whether a forecast or a prefetch pays: times until a layer needs its experts, use of experts, cost of forecasts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from expertcast.runtime.engine.cache import ExpertCache
from expertcast.runtime.engine.tokens_ahead import TokensAhead
from expertcast.runtime.links.driver import CudaDevice
from expertcast.runtime.policies.prefetch import Transfer
from expertcast.runtime.recording.recorder import Observer

_MEMORY = 0.1
"""Weight of the newest observation in running means."""
FOUND = 0.6
"""Share of what is missing that a forecast is expected to find in time."""
FORGET = 0.99
"""What a forecast is taken to cost shrinks by this with every one that is not made: a price that was measured at a bad
moment does not stand for ever."""


class Pace(Observer):
    """Running means over decode steps, per layer. Waiting for copies is left out: it is what prefetching changes.

    Args:
        residency: tells it what is loaded and waited for.
        layers: MoE layers of the model.
    """

    def __init__(self, residency: ExpertCache, layers: int) -> None:
        self._link, self._residency = residency.link, residency
        self._experts = experts = residency.experts
        self._block_bytes = residency.pool.layout.block_bytes
        self._busy_until_s = 0.0
        """When the link will have done what it has been given, by what copies take on average."""
        self._interval_s: list[float | None] = [None] * layers
        """From the moment the layer before was reached to the moment this one is."""
        self._rate_LE = np.zeros((layers, experts))
        """Share of recent steps that used the expert."""
        self._fresh = True
        self._layer = -1
        self._reached_s = 0.0
        self._waited_s = 0.0
        """Since then."""
        residency.tell(self)

    def loading(self, layer: int, nbytes: int, urgent: bool) -> None:
        self._busy_until_s = max(self._busy_until_s, self._link.clock()) + self._seconds(nbytes)

    def dropped(self, layer: int, nbytes: int, forecast: bool) -> None:
        self._busy_until_s -= self._seconds(nbytes)

    def waited(self, layer: int, seconds: float, in_time: int) -> None:
        self._waited_s += seconds

    def start_pass(self, fresh: bool) -> None:
        """A forward starts; `fresh`: with new texts."""
        self._fresh, self._layer = fresh, -1

    def reached(self, layer: int, experts: list[int]) -> None:
        """The layer's experts are known and about to be requested."""
        now, before = self._link.clock(), self._layer
        if before == layer - 1 >= 0 and not self._fresh:
            interval, known = now - self._reached_s - self._waited_s, self._interval_s[layer]
            self._interval_s[layer] = interval if known is None else known + _MEMORY * (interval - known)
        self._layer, self._reached_s, self._waited_s = layer, now, 0.0
        self._rate_LE[layer] *= 1 - _MEMORY
        self._rate_LE[layer, experts] += _MEMORY

    def transfer(self, target: int) -> Transfer:
        """What a selection for a later layer may count with."""
        residency, first, now = self._residency, target * self._experts, self._link.clock()
        copy_s = self._link.copy_s
        intervals = self._interval_s[self._layer + 1 : target + 1]
        left_s = copy_s if None in intervals else sum(value for value in intervals if value is not None)
        backlog_s = min(len(residency.copies) * copy_s, max(0.0, self._busy_until_s - now))
        # the layer at work waits for its copies too, and so does what follows
        awaited_s = 0.0 if residency.running.isdisjoint(residency.copies) else backlog_s
        return Transfer(
            copy_s=copy_s,
            backlog_s=backlog_s,
            left_s=max(0.0, left_s - (now - self._reached_s)) + awaited_s,
            free=residency.free(target),
            resident=lambda expert: residency.holds(first + expert),
            victim_worth=lambda: self._worth(residency.victim(target)),
            seconds_of=None if self._link.pools is None else lambda expert: self._link.seconds(first + expert),
        )

    def _seconds(self, nbytes: int) -> float:
        return self._link.copy_s * nbytes / self._block_bytes

    def _worth(self, victim: int | None) -> float:
        if victim is None:
            return 0.0
        layer, expert = divmod(victim, self._experts)
        known = self._residency.eviction.by_layer[layer].worth(victim)
        return float(self._rate_LE[layer, expert]) if known is None else known


class ForecastGate(Observer):
    """Weighs waiting that a forecast may save against what forecasts have cost so far.

    A forecast takes the thread of the model a set time, whatever it finds. Where most experts of a layer are in slots
    already, there is little that it could find.

    What a layer will miss comes from a forecast of the whole token where there is one; else it is the mean number of
    its experts in recent steps that had no slot before a forecast, or at all.

    Args:
        residency: tells it what was missing.
        layers: MoE layers of the model.
        tokens_ahead: says how many of a layer's experts will be missing, where something forecasts whole tokens.
    """

    def __init__(self, residency: ExpertCache, layers: int, tokens_ahead: TokensAhead | None) -> None:
        self._link, self._tokens_ahead = residency.link, tokens_ahead
        self._missing: list[float | None] = [None] * layers
        self._cost_s: float | None = None
        residency.tell(self)

    def requested(self, layer: int, keys: Sequence[int], missing: Sequence[int], again: int, forecast: int) -> None:
        count, known = float(len(missing) + forecast), self._missing[layer]
        self._missing[layer] = count if known is None else known + _MEMORY * (count - known)

    def pays(self, layer: int) -> bool:
        """Whether a forecast for `layer` is expected to save more waiting than it costs."""
        if self._cost_s is None:
            return True
        missing = None if self._tokens_ahead is None else self._tokens_ahead.missing(layer)
        if missing is None:
            missing = self._missing[layer]
        if missing is None or missing * FOUND * self._link.copy_s > self._cost_s:
            return True
        self._cost_s *= FORGET
        return False

    def took(self, seconds: float) -> None:
        """A forecast, with all that was asked for by it, took the model's thread so long."""
        cost_s = self._cost_s
        self._cost_s = seconds if cost_s is None else cost_s + _MEMORY * (seconds - cost_s)


class Beside:
    """A second stream of the device that computes.

    What runs on it reads tensors of the first one, a cache among them, that the next block may free: whoever made a
    forecast there reads it back, which comes last, before that block starts.
    """

    def __init__(self, driver: CudaDevice) -> None:
        self._driver, self._stream = driver, driver.new_stream()

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is launched inside runs behind what has been launched so far, and beside what follows."""
        self._stream.wait_stream(self._driver.current_stream())
        with self._driver.use(self._stream):
            yield
