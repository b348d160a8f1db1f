"""Means over tokens as torchmetrics metrics, and recall, the mean that choices are made by.

T tokens, K experts per token, L rows (layers, or whatever is scored side by side), R numbers per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


def share_found(forecast_ids_TK: Tensor, true_ids_TK: Tensor) -> Tensor:
    """Share [T] of each token's true experts that are among its forecast ones (row B6 of the definitions)."""
    return (true_ids_TK.unsqueeze(-1) == forecast_ids_TK.unsqueeze(-2)).any(dim=-1).float().mean(dim=-1)


class TokenMean(Metric):  # type: ignore[misc]
    """Mean scores of tokens, kept as sums in fp64 and counts: ranks, and parts of the data, add up to the whole."""

    full_state_update = False
    higher_is_better = True
    total_LR: Tensor
    count_L: Tensor

    def __init__(self, rows: int = 1, width: int = 1, **kwargs: Any) -> None:
        """
        Args:
            rows: means that are kept apart, such as one per layer.
            width: numbers per token in a score.
            kwargs: torchmetrics' own (sync_on_compute, process_group, ...).
        """
        super().__init__(**kwargs)
        self.add_state("total_LR", default=torch.zeros(rows, width, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count_L", default=torch.zeros(rows, dtype=torch.long), dist_reduce_fx="sum")

    def add(self, score_TR: Tensor, row: int = 0) -> None:
        """Add the scores of some tokens, [T] or [T, R], to one row."""
        self.total_LR[row] += score_TR.reshape(len(score_TR), -1).sum(dim=0, dtype=torch.float64)
        self.count_L[row] += len(score_TR)

    def compute(self) -> Tensor:
        """The means [L, R] in fp64, NaN where nothing was scored; torchmetrics makes a single one a scalar."""
        return self.total_LR / self.count_L[:, None]


class Recall(TokenMean):
    """Share of the true experts among the forecast ones, one mean per row."""

    def update(self, row: int, forecast_ids_TK: Tensor, true_ids_TK: Tensor) -> None:
        """Add some tokens to one row."""
        self.add(share_found(forecast_ids_TK, true_ids_TK), row)

    def per_row(self) -> Tensor:
        """The means [L], also of a single row."""
        recall_L: Tensor = self.compute()
        return recall_L.reshape(-1)
