"""The batch that traces and the online stream both yield, and the router states made from it.

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

# What a router has done, as it is told to collection and the runtime; B sequences of S tokens

RouterOutput: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""What a router returns: logits [T, E], weights [T, K] and ids [T, K]."""


@dataclass(slots=True, kw_only=True)
class RouterCall:
    """One router has just run."""

    layer: int
    """MoE layer index."""
    sequences: int
    """B"""
    tokens: int
    """S, tokens per sequence: 1 in a decode step."""
    residual_TD: Tensor
    """What entered the layer's norm."""
    router_input_TD: Tensor
    """What the norm made of it."""
    logits_TE: Tensor
    weights_TK: Tensor
    ids_TK: Tensor


def capturing() -> bool:
    """Whether this forward becomes a CUDA graph: always a decode step, and no value can be looked at."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@dataclass(slots=True, kw_only=True)
class TraceBatch:
    """Rows (tokens) in any number; neighbours in a document need not be neighbours here unless in order."""

    residual_TLD: Tensor
    """r_l of every layer, bf16 or the model's dtype."""
    logits_TLE: Tensor
    """Router logits of every layer, in the dtype the router gave or one that holds them exactly."""
    document_T: Tensor
    """Index of the document the token belongs to (int64)."""
    position_T: Tensor
    """Position of the token inside its document (int64)."""
    token_T: Tensor | None = None
    """The token's own id (int64); None where it is not known."""
    previous_TLE: Tensor | None = None
    """Router logits of the previous token of the text, NaN at a document's first; only where asked for."""
    early_TLD: Tensor | None = None
    """[T, L - 1, D] by source layer: `RouterState.early_TD`, in the residuals' dtype; where it was collected."""

    def __len__(self) -> int:
        return int(self.document_T.shape[0])

    def __getitem__(self, rows: slice | Tensor) -> TraceBatch:
        return self._map(lambda column: column[rows])

    def to(self, device: torch.device | str) -> TraceBatch:
        """The same rows on a device."""
        return self._map(lambda column: column.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> TraceBatch:
        return TraceBatch._joined([self], lambda parts: change(parts[0]))

    @staticmethod
    def cat(batches: list[TraceBatch]) -> TraceBatch:
        """All rows of some batches, which either all have `previous_TLE` or all have not."""
        return TraceBatch._joined(batches, torch.cat)

    @staticmethod
    def _joined(batches: list[TraceBatch], join: Callable[[list[Tensor]], Tensor]) -> TraceBatch:
        columns = {field.name: [getattr(batch, field.name) for batch in batches] for field in fields(TraceBatch)}
        return TraceBatch(**{name: join(parts) for name, parts in columns.items() if parts[0] is not None})

    def with_previous(self, before: TraceBatch | None = None) -> TraceBatch:
        """The same rows, in order of document and position, with `previous_TLE` filled in from the row before each: for
        the first one that is the last of `before`."""
        shifted = self.routing()._map(lambda column: column.roll(1, dims=0))
        if before is not None and len(before):
            shifted.logits_TLE[0] = before.logits_TLE[-1]
            shifted.document_T[0], shifted.position_T[0] = before.document_T[-1], before.position_T[-1]
        return self.with_previous_rows(shifted)

    def with_previous_rows(self, other: TraceBatch) -> TraceBatch:
        """The same rows with `previous_TLE` from the rows of `other` (changed here): NaN where one is not the token
        before its partner."""
        follows_T = (other.document_T == self.document_T) & (other.position_T + 1 == self.position_T)
        other.logits_TLE[~follows_T] = float("nan")
        return replace(self, previous_TLE=other.logits_TLE)

    def routing(self) -> TraceBatch:
        """The same rows without residuals."""
        return replace(self, residual_TLD=self.residual_TLD[:, :0], previous_TLE=None, early_TLD=None)

    def state(self, view: MoEView, layer: int) -> RouterState:
        """The router state at `layer`, recomputed: s_l from r_l, ids and weights from the logits."""
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
