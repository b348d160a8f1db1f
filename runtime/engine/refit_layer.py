"""Refitting the forecasts of one layer: a test on every block of tokens before it is learned from.

The frozen map and the refitted one, which has not seen the block, both forecast it. The refitted one is used from the
block on after which the running difference in recall is above `MARGIN` and above `ERRORS` of its standard errors, until
that is no longer above nothing or the recent one is below `-LOSS`.

T tokens, R directions (:mod:`expertcast.runtime.engine.refit_part`), E routed experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expertcast.predictors.base import RouterState
from expertcast.predictors.plain import Json
from expertcast.predictors.view import MoELayer
from expertcast.runtime.engine.fading import FadingMean
from expertcast.runtime.engine.least_squares import RecursiveRidge
from expertcast.runtime.engine.refit_part import RidgePart, changed

BLOCK = 32
"""Tokens that are learned from at once."""
SOLVE_EVERY = 4
"""Blocks between two solutions of a layer; the first ones come after 1 and 2."""
PRIOR = 50.0
"""Tokens that the frozen map counts for."""
MEMORY = 1000
"""Tokens over which what was learned fades to 1/e."""
MARGIN = 0.005
"""Recall that the refitted map must be better by to be used."""
ERRORS = 3.0
"""Standard errors that it must be better by."""
FIRST = 6
"""Blocks before it may be used."""
TESTED = 16
"""Blocks over which the running difference fades to 1/e."""
RECENT = 4
"""The same, of a difference that notices soon when the text is as it was again."""
LOSS = 0.01
"""Recall that the refitted map may lack of late before it is left."""

_TENSORS = (
    "residual_TD", "router_input_TD", "logits_TE", "topk_ids_TK", "topk_weights_TK", "previous_logits_TLE", "early_TD"
)  # fmt: skip
"""A state's tensors; the last two may be missing."""


@dataclass(slots=True)
class Example:
    """Some tokens at one layer: what their forecast was made from, and what came."""

    state: RouterState
    logits_TE: Tensor
    ids_TK: Tensor


class LayerRefit:
    """Refits the forecasts of one layer.

    Args:
        part: what is changed.
        target: the layer whose routing is forecast.
    """

    def __init__(self, part: RidgePart, target: MoELayer) -> None:
        self.part, self._target = part, target
        self._ridge: RecursiveRidge | None = None
        self._change_GE: Tensor | None = None
        """The refitted map, less the frozen one."""
        self._examples: list[Example] = []
        self._rows = self._blocks = self.tokens = 0
        self._solves = False
        """What is left to do of a block is to solve for the change."""
        self.guard = Guard()

    @property
    def full(self) -> bool:
        """Whether a block waits to be learned from."""
        return self._rows >= BLOCK

    @property
    def due(self) -> bool:
        """Whether the refitted map is to be solved for after as many blocks as were learned from."""
        return self._blocks in (1, 2) or self._blocks % SOLVE_EVERY == 0

    def takes(self, state: RouterState) -> bool:
        """Whether a token of this state can join the block."""
        known = state.previous_logits_TLE is not None or not self.part.predictor.uses_previous_token
        return known and not self.full

    def collect(self, example: Example) -> None:
        """Take some tokens."""
        self._examples.append(example)
        self._rows += len(example.logits_TE)

    def work(self) -> bool:
        """Half of what there is to do about a block; whether that was all."""
        if not self._solves:
            self.learn(_joined(self._examples))
            self._examples.clear()
            self._solves = self.due
        else:
            self.solve()
            self._solves = False
        if not self._solves:
            self._rows = 0
        return not self._solves

    def learn(self, block: Example) -> tuple[Tensor, Tensor]:
        """Test both maps on tokens that they have not seen, and learn from them.

        Returns:
            Ids [T, K] that the frozen map and the refitted one forecast.
        """
        x_TR = self.part.directions_of(block.state)
        frozen_TE = self.part.frozen_logits(block.state, x_TR)
        frozen_TK = refitted_TK = self._target.route(frozen_TE)[0]
        if self._change_GE is not None:
            refitted_TK = self._target.route(frozen_TE + changed(x_TR, self._change_GE))[0]
            gain = _found(refitted_TK, block.ids_TK) - _found(frozen_TK, block.ids_TK)
            was = self.guard.used
            if self.guard.add(gain / block.ids_TK.numel()) != was:
                self.part.apply(None if was else self._change_GE)
        error_TE = block.logits_TE.float() - frozen_TE
        if self._ridge is None:
            self._ridge = RecursiveRidge(x_TR.shape[1], error_TE.shape[1], prior=PRIOR, device=x_TR.device)
        self._ridge.add(x_TR, error_TE, keep=max(0.0, 1 - len(x_TR) / MEMORY))
        self.tokens += len(x_TR)
        self._blocks += 1
        return frozen_TK, refitted_TK

    def solve(self) -> None:
        """The refitted map from all that was learned."""
        assert self._ridge is not None
        solved_GE = self._ridge.solve()
        if solved_GE is not None:
            self._change_GE = solved_GE
            if self.guard.used:
                self.part.apply(solved_GE)

    def as_dict(self) -> Json:
        """See :meth:`OnlineRefit.as_dict`."""
        return {"tokens": self.tokens, "used": self.guard.used, "gain": self.guard.gain.mean}


class Guard:
    """Says whether what is tried may be used, from its gain on one block after another."""

    def __init__(self) -> None:
        self.used = False
        self.gain = FadingMean(TESTED)
        self._recent = FadingMean(RECENT)

    def add(self, gain: float) -> bool:
        """Take the gain on a block that what is tried had not seen; whether it may be used from now on."""
        self.gain.add(gain)
        self._recent.add(gain)
        mean, recent = self.gain.mean, self._recent.mean
        if self.used:
            self.used = mean > 0 and recent > -LOSS
        else:
            self.used = self.gain.count >= FIRST and recent > 0 and mean > max(MARGIN, ERRORS * self.gain.error)
        return self.used


def _joined(examples: Sequence[Example]) -> Example:
    """All tokens of some examples of one layer."""
    states = [example.state for example in examples]
    tensors = {name: [getattr(state, name) for state in states] for name in _TENSORS}
    known = {name: torch.cat(parts) for name, parts in tensors.items() if all(part is not None for part in parts)}
    return Example(
        RouterState(layer=states[0].layer, **known),
        torch.cat([each.logits_TE for each in examples]),
        torch.cat([each.ids_TK for each in examples]),
    )


def _found(forecast_TK: Tensor, ids_TK: Tensor) -> int:
    """How many of the experts were forecast."""
    return int((forecast_TK[:, :, None] == ids_TK[:, None, :]).sum())
