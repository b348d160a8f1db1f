"""Batches of activations, from traces or from a running model, and the router states that predictors read.

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TypeAlias

import torch
from torch import Tensor

from expertcast.predictors.base import RouterState
from expertcast.predictors.view import MoEView

# One router call; B sequences of S tokens

RouterOutput: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Return value of a router: logits [T, E], weights [T, K] and ids [T, K]."""


@dataclass(slots=True, kw_only=True)
class RouterCall:
    """Input and output of one router."""

    layer: int
    """MoE layer index."""
    sequences: int
    """B"""
    tokens: int
    """S, tokens per sequence; 1 in a decode step."""
    residual_TD: Tensor
    """Input of the norm before the router."""
    router_input_TD: Tensor
    """Output of that norm."""
    logits_TE: Tensor
    weights_TK: Tensor
    ids_TK: Tensor


@dataclass(slots=True, kw_only=True)
class TraceBatch:
    """Any number of tokens as rows, not necessarily in the order of their documents."""

    residual_TLD: Tensor
    """Residual stream r_l before every MoE layer's norm, bf16 or the model's dtype."""
    logits_TLE: Tensor
    """Router logits of every layer, in the router's dtype or one that holds them exactly."""
    document_T: Tensor
    """Index of the token's document (int64)."""
    position_T: Tensor
    """Position of the token in its document (int64)."""
    token_T: Tensor | None = None
    """Id of the token (int64); None if unknown."""
    previous_TLE: Tensor | None = None
    """Router logits of the previous token in the document, NaN at its first token; None unless filled in."""
    early_TLD: Tensor | None = None
    """`RouterState.early_TD` by source layer, in the residuals' dtype; None without early attention."""

    def __len__(self) -> int:
        return int(self.document_T.shape[0])

    def __getitem__(self, rows: slice | Tensor) -> TraceBatch:
        return self._map(lambda column: column[rows])

    def to(self, device: torch.device | str) -> TraceBatch:
        """Return the same rows on a device."""
        return self._map(lambda column: column.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> TraceBatch:
        return TraceBatch._joined([self], lambda parts: change(parts[0]))

    @staticmethod
    def cat(batches: list[TraceBatch]) -> TraceBatch:
        """Concatenate batches; either all of them have `previous_TLE` or none."""
        return batches[0] if len(batches) == 1 else TraceBatch._joined(batches, torch.cat)

    @staticmethod
    def _joined(batches: list[TraceBatch], join: Callable[[list[Tensor]], Tensor]) -> TraceBatch:
        columns = {field.name: [getattr(batch, field.name) for batch in batches] for field in fields(TraceBatch)}
        return TraceBatch(**{name: join(parts) for name, parts in columns.items() if parts[0] is not None})

    def with_previous(self, before: TraceBatch | None = None) -> TraceBatch:
        """Return the same rows with `previous_TLE` from the row before each.

        Rows must be in order of document and position. The row before the first is the last row of `before`.
        """
        shifted = self.routing()._map(lambda column: column.roll(1, dims=0))
        if before is not None and len(before):
            shifted.logits_TLE[0] = before.logits_TLE[-1]
            shifted.document_T[0], shifted.position_T[0] = before.document_T[-1], before.position_T[-1]
        return self.with_previous_rows(shifted)

    def with_previous_rows(self, other: TraceBatch) -> TraceBatch:
        """Return the same rows with `previous_TLE` from the rows of `other`, NaN where these are not the tokens before.

        The logits of `other` are changed in place.
        """
        follows_T = (other.document_T == self.document_T) & (other.position_T + 1 == self.position_T)
        other.logits_TLE[~follows_T] = float("nan")
        return replace(self, previous_TLE=other.logits_TLE)

    def routing(self) -> TraceBatch:
        """Return the same rows without residuals."""
        return replace(self, residual_TLD=self.residual_TLD[:, :0], previous_TLE=None, early_TLD=None)

    def state(self, view: MoEView, layer: int) -> RouterState:
        """Return the router state at `layer`; recomputes s_l from r_l, and ids and weights from the logits."""
        residual_TD, logits_TE = self.residual_TLD[:, layer], self.logits_TLE[:, layer]
        ids_TK, weights_TK = view[layer].route(logits_TE)
        with torch.no_grad():
            router_input_TD = view[layer].router_input(residual_TD)
        return RouterState(
            layer=layer,
            residual_TD=residual_TD,
            router_input_TD=router_input_TD,
            logits_TE=logits_TE,
            topk_ids_TK=ids_TK,
            topk_weights_TK=weights_TK,
            previous_logits_TLE=self.previous_TLE,
            early_TD=None if self.early_TLD is None or layer + 1 >= len(view) else self.early_TLD[:, layer],
        )
