"""The batch that traces and the online stream both yield, and the router states made from it.

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from expertcast.predictors.base import RouterState
from expertcast.predictors.view import MoEView


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

    def __len__(self) -> int:
        return int(self.residual_TLD.shape[0])

    def __getitem__(self, rows: slice | Tensor) -> TraceBatch:
        return TraceBatch(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def to(self, device: torch.device | str) -> TraceBatch:
        return TraceBatch(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    @staticmethod
    def cat(batches: list[TraceBatch]) -> TraceBatch:
        return TraceBatch(**{f.name: torch.cat([getattr(b, f.name) for b in batches]) for f in fields(TraceBatch)})

    def previous_logits(self) -> Tensor:
        """[T, L, E] router logits of the row before, NaN where that row is not the previous token of the text.

        Rows must be in order of document and position for this to find anything.
        """
        follows_T = torch.zeros(len(self), dtype=torch.bool, device=self.document_T.device)
        follows_T[1:] = (self.document_T[1:] == self.document_T[:-1]) & (
            self.position_T[1:] == self.position_T[:-1] + 1
        )
        shifted = self.logits_TLE.roll(1, dims=0).clone()
        shifted[~follows_T] = float("nan")
        return shifted

    def state(self, view: MoEView, layer: int, *, previous_logits_TLE: Tensor | None = None) -> RouterState:
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
            previous_logits_TLE=previous_logits_TLE,
        )
