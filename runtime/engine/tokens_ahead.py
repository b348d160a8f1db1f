"""What is done with forecasts of whole tokens: evict by them, load early and on an idle link, say what will be missing.

A forecast is made when a token begins, for all of its layers and for the tokens after it. Experts that it finds likely
are asked for some layers before theirs: earlier than by any forecast of a layer, and where no layer comes before.

L MoE layers, E routed experts per layer, B sequences, S tokens of each in a pass, H rows of a forecast, D hidden size.
A key is layer * E + expert.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import Tensor

from expertcast.predictors.view import ModelShape
from expertcast.runtime.engine.cache import ExpertCache
from expertcast.runtime.policies.eviction import Eviction

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
        """How many of the experts that a layer will need have no slot, as far as can be expected; None: unknown."""
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
