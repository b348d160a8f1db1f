"""Forecasts at work: whether one pays, how much time a prefetch has, and what forecasts of whole tokens are good for.

A forecast of whole tokens is made when a token begins, for all of its layers and for the tokens after it. Evictions go
by it, and experts that it finds likely are asked for some layers before theirs: earlier than by any forecast of a
layer, and where no layer comes before.

L MoE layers, E routed experts per layer, B sequences, S tokens of each in a pass, H rows of a forecast, D hidden size.
A key is layer * E + expert.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import Tensor

from expertcast.predictors.view import ModelShape
from expertcast.runtime.engine.cache import ExpertCache
from expertcast.runtime.links.base import Link
from expertcast.runtime.policies.eviction import Eviction
from expertcast.runtime.policies.prefetch import Transfer

_MEMORY = 0.1
"""Weight of the newest observation in running means."""
FOUND = 0.6
"""Share of what is missing that a forecast is expected to find in time."""
FORGET = 0.99
"""What a forecast is taken to cost shrinks by this with every one that is not made: a price that was measured at a bad
moment does not stand for ever."""


def _running(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _MEMORY * (value - mean)


class Pace:
    """Running means over decode steps, per layer. Waiting for copies is left out: it is what prefetching changes.

    Args:
        residency: keeps how busy the link is from now on.
        layers: MoE layers of the model.
    """

    def __init__(self, residency: ExpertCache, layers: int) -> None:
        self._link, self._residency = residency.link, residency
        self._experts = experts = residency.experts
        self._interval_s: list[float | None] = [None] * layers
        """From the moment the layer before was reached to the moment this one is."""
        self._rate_LE = np.zeros((layers, experts))
        """Share of recent steps that used the expert."""
        self._fresh = True
        self._layer = -1
        self._reached_s = self._waited_s = 0.0
        """When the running layer was reached, and what had been waited for until then."""
        residency.paced = True

    def start_pass(self, fresh: bool) -> None:
        """A forward starts; `fresh`: with new texts."""
        self._fresh, self._layer = fresh, -1

    def reached(self, layer: int, experts: list[int]) -> None:
        """The layer's experts are known and about to be requested."""
        now, waited_s, before = self._link.clock(), self._residency.waited_s, self._layer
        if before == layer - 1 >= 0 and not self._fresh:
            interval_s = now - self._reached_s - (waited_s - self._waited_s)
            self._interval_s[layer] = _running(self._interval_s[layer], interval_s)
        self._layer, self._reached_s, self._waited_s = layer, now, waited_s
        self._rate_LE[layer] *= 1 - _MEMORY
        self._rate_LE[layer, experts] += _MEMORY

    def transfer(self, target: int) -> Transfer:
        """What a selection for a later layer may count with."""
        residency, first, now = self._residency, target * self._experts, self._link.clock()
        copy_s = self._link.copy_s
        intervals = self._interval_s[self._layer + 1 : target + 1]
        left_s = copy_s if None in intervals else sum(value for value in intervals if value is not None)
        backlog_s = residency.backlog_s(now)
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

    def _worth(self, victim: int | None) -> float:
        if victim is None:
            return 0.0
        layer, expert = divmod(victim, self._experts)
        known = self._residency.eviction.by_layer[layer].worth(victim)
        return float(self._rate_LE[layer, expert]) if known is None else known


class ForecastGate:
    """Weighs waiting that a forecast may save against what forecasts have cost so far.

    A forecast takes the thread of the model a set time, whatever it finds. Where most experts of a layer are in slots
    already, there is little that it could find.

    What a layer will miss comes from a forecast of the whole token where there is one; else it is the mean number of
    its experts in recent steps that had no slot before a forecast, or at all.

    Args:
        link: says what a copy takes.
        layers: MoE layers of the model.
        tokens_ahead: says how many of a layer's experts will be missing, where something forecasts whole tokens.
    """

    def __init__(self, link: Link, layers: int, tokens_ahead: TokensAhead | None) -> None:
        self._link, self._tokens_ahead = link, tokens_ahead
        self._missing: list[float | None] = [None] * layers
        self._cost_s: float | None = None

    def missed(self, layer: int, count: int) -> None:
        """So many of the experts that a layer requested had no slot before a forecast, or at all."""
        self._missing[layer] = _running(self._missing[layer], count)

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
        self._cost_s = _running(self._cost_s, seconds)


# Forecasts of whole tokens

LIKELY = 0.2
"""Experts that are at least so likely to be used are asked for. A miss keeps the model waiting for a whole copy, and a
wrong copy that has not begun when its layer runs is dropped."""
REACH = 4
"""Layers that experts are asked for before theirs: copies come in the order in which layers need them, and what a later
forecast asks for has few of them before it."""
_THINKABLE = 0.03
"""Less likely experts are not counted among those that may be missing."""


class TokenForecasts(Protocol):
    """What follows a run and forecasts the routing of the next tokens."""

    def start(self, fresh: bool, token_BS: Tensor | None = None) -> Tensor | None:
        """A forward starts; `fresh`: with new texts; `token_BS`: the ids of its tokens, where they are known.

        Returns:
            New probabilities [H, L, E], where a forecast is due: of the token that starts and of those after it.
        """

    def see(self, layer: int, residual_TD: Tensor, logits_TE: Tensor, sequences: int) -> None:
        """A router has run: `residual_TD`, `logits_TE` and `sequences` as for
        :meth:`expertcast.runtime.engine.engine.LayerFlow.see`."""


class TokensAhead:
    """Passes what a forecaster sees on to the eviction policy and the residency.

    Args:
        forecasts: makes them.
        residency: books and rules.
        eviction: goes by the forecasts where it takes them.
        shape: of the model.
        layers: the first so many layers' experts are loaded early.
        likely: the least probability at which one is.
    """

    def __init__(
        self, forecasts: TokenForecasts, residency: ExpertCache, eviction: Eviction, shape: ModelShape, *, layers: int,
        likely: float = LIKELY,
    ) -> None:  # fmt: skip
        self._forecasts, self._residency, self._eviction = forecasts, residency, eviction
        self._shape, self._layers, self._least = shape, layers, likely
        self._likely: list[list[tuple[float, int]]] | None = None
        """Per layer of the token under way, probability and key of the experts that can be thought of; None where
        nothing is known of it."""

    def start(self, fresh: bool, token_BS: Tensor | None) -> None:
        """A forward starts; arguments are those of :meth:`TokenForecasts.start`."""
        self._likely = None
        probability_HLE = self._forecasts.start(fresh, token_BS)
        if probability_HLE is None:
            return
        if self._eviction.reads_tokens:
            self._eviction.see_tokens(probability_HLE)
        self._likely = self._sorted(probability_HLE[0])
        for layer in range(min(REACH, self._layers)):
            self._ask(layer)

    def see(self, layer: int, residual_TD: Tensor, logits_TE: Tensor, sequences: int) -> None:
        """A router has run; arguments are those of :meth:`TokenForecasts.see`."""
        self._forecasts.see(layer, residual_TD, logits_TE, sequences)

    def finish(self, layer: int) -> None:
        """All forecasts of a layer have been asked for."""
        if layer + REACH < self._layers:
            self._ask(layer + REACH)
        if self._eviction.reads_tokens and self._residency.idle:
            self._load_idle(layer)

    def missing(self, layer: int) -> float | None:
        """Expected number of experts that a layer needs and that have no slot; None: unknown."""
        if self._likely is None:
            return None
        slots = self._residency.pool.slots
        return sum(probability for probability, key in self._likely[layer] if key not in slots)

    def _sorted(self, probability_LE: Tensor) -> list[list[tuple[float, int]]]:
        probability_N = probability_LE.detach().cpu().numpy().ravel()
        keys = np.flatnonzero(probability_N >= _THINKABLE)
        found: list[list[tuple[float, int]]] = [[] for _ in range(self._shape.layers)]
        for key, probability in zip(keys.tolist(), probability_N[keys].tolist(), strict=True):
            found[key // self._shape.experts].append((probability, key))
        return found

    def _ask(self, layer: int) -> None:
        """Load what a layer is likely to need and has not, and keep what it has; nothing where all of it is there."""
        if self._likely is None:
            return
        slots = self._residency.pool.slots
        sure = [entry for entry in self._likely[layer] if entry[0] >= self._least]
        if any(key not in slots for _, key in sure):
            self._residency.prefetch([key for _, key in sorted(sure, reverse=True)])

    def _load_idle(self, layer: int) -> None:
        """The link has nothing to do: experts of coming tokens that are likelier than those they replace."""
        residency, by_layer = self._residency, self._eviction.by_layer
        for key, worth in by_layer[layer].wanted():
            victim = residency.victim(key // self._shape.experts)
            lost = 0.0 if victim is None else by_layer[victim // self._shape.experts].worth(victim) or 0.0
            if worth > lost:
                residency.load_idle(key)


def early_layers(shape: ModelShape, *, keep: bool, loads: bool, forecast_from: int | None) -> int:
    """How many of a model's first layers are loaded by forecasts of whole tokens.

    Args:
        shape: of the model.
        keep: experts stay in their slots.
        loads: whether anything is loaded early at all.
        forecast_from: the first layer that a forecast by another layer is made for; None: there are no such forecasts.
            Without a cache such a forecast, which is surer, has the link to itself.
    """
    if not loads:
        return 0
    return shape.layers if keep or forecast_from is None else min(forecast_from, shape.layers)
