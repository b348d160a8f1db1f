"""Forecasts of the next tokens' routing for a whole trace, made once and given in every simulation of it.

They depend on the recorded routing alone, and cost more than all policies together. L MoE layers, E routed experts per
layer, H rows of a forecast, N forecasts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from expertcast.predictors.progress import Progress
from expertcast.runtime.engine.tokens_ahead import TokenForecasts
from expertcast.runtime.simulation.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """All forecasts that a follower of the trace makes."""

    probability_NHLE: Tensor
    """In half precision: they are compared with each other, and there are many."""
    due: list[int | None]
    """Per forward, the number of the forecast that is made when it starts."""

    @classmethod
    def of(cls, trace: Trace, follower: TokenForecasts, *, progress: bool = False) -> TokenTable:
        """Follow the whole trace, which must hold its residuals."""
        made: list[Tensor] = []
        due: list[int | None] = []
        routes = trace.known_routes()
        for forward in Progress("forecasts", unit="forward", steps=trace.forwards, shown=progress):
            probability_HLE = follower.start(forward.fresh, trace.token_ids(forward))
            due.append(None if probability_HLE is None else len(made))
            if probability_HLE is not None:
                made.append(probability_HLE.half())
            for layer in range(trace.shape.layers):
                residual_TD, logits_TE = routes.residual[layer][forward.rows], routes.logits[layer][forward.rows]
                follower.see(layer, residual_TD, logits_TE, forward.sequences)
        shape = trace.shape
        table = torch.stack(made) if made else torch.zeros(0, 1, shape.layers, shape.experts, dtype=torch.half)
        return cls(probability_NHLE=table, due=due)

    def replay(self) -> ReplayedTokens:
        """For one simulation of the trace, from its beginning."""
        return ReplayedTokens(self)


class ReplayedTokens:
    """Gives the forecasts of a table, forward by forward."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._forward = -1

    def start(self, fresh: bool, token_BS: Tensor | None = None) -> Tensor | None:
        """A forward starts: its forecast, whatever `fresh` and `token_BS` are; or None."""
        self._forward += 1
        row = self._table.due[self._forward]
        return None if row is None else self._table.probability_NHLE[row].float()

    def see(self, layer: int, residual_TD: Tensor, logits_TE: Tensor, sequences: int) -> None:
        """All that follows from `layer`, `residual_TD`, `logits_TE` and `sequences` stands in the table."""
