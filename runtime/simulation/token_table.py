"""Forecasts of the next tokens' routing for a whole trace, made once and given in every simulation of it.

They depend on the recorded routing alone, and cost more than all policies together. L MoE layers, E routed experts per
layer, H rows of a forecast, N forecasts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm

from expertcast.runtime.engine.tokens_ahead import TokenForecasts
from expertcast.runtime.simulation.trace import Trace

START = -1
"""In the place of a layer: the start of a forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """All forecasts that a follower of the trace makes."""

    probability_NHLE: Tensor
    """In half precision: they are compared with each other, and there are many."""
    due: list[dict[int, int]]
    """Per forward, the number of the forecast that each layer triggers; -1 stands for the forward's start."""

    @classmethod
    def of(cls, trace: Trace, follower: TokenForecasts, *, progress: bool = False) -> TokenTable:
        """Follow the whole trace, which must hold its residuals."""
        made: list[Tensor] = []
        due: list[dict[int, int]] = []
        routes = trace.known_routes()
        for forward in tqdm(trace.forwards, desc="forecasts", unit="forward", disable=not progress):
            found = [(START, follower.start(forward.fresh, trace.token_ids(forward)))]
            for layer in range(trace.shape.layers):
                residual_TD, logits_TE = routes.residual[layer][forward.rows], routes.logits[layer][forward.rows]
                found.append((layer, follower.see(layer, residual_TD, logits_TE, forward.sequences)))
            due.append({})
            for layer, probability_HLE in found:
                if probability_HLE is not None:
                    due[-1][layer] = len(made)
                    made.append(probability_HLE.half())
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
        return self._made(START)

    def see(self, layer: int, residual_TD: Tensor, logits_TE: Tensor, sequences: int) -> Tensor | None:
        """The forecast that this layer triggers, whatever `residual_TD`, `logits_TE` and `sequences` are; or None."""
        return self._made(layer)

    def _made(self, layer: int) -> Tensor | None:
        row = self._table.due[self._forward].get(layer)
        return None if row is None else self._table.probability_NHLE[row].float()
