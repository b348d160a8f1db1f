"""Means over tokens as torchmetrics metrics: recall, by which choices are made, and what a run of a model is scored by.

T tokens, K experts per token, L rows (layers, or whatever is scored side by side), R numbers per token, V vocabulary.
The metrics of a run take log probabilities, in which no probability is too small to be told from zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torchmetrics import Metric


class TokenMean(Metric):  # type: ignore[misc]
    """Mean scores of tokens, kept as sums in fp64 and counts: ranks, and parts of the data, add up to the whole."""

    full_state_update = False
    total_LR: Tensor
    count_L: Tensor

    def __init__(self, rows: int = 1, width: int = 1, **kwargs: Any) -> None:
        """Keep `rows` means apart, such as one per layer, each of `width` numbers; `kwargs` are torchmetrics' own."""
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
    """Share of a token's true experts that are among its forecast ones (row B6), one mean per row."""

    def update(self, row: int, forecast_ids_TK: Tensor, true_ids_TK: Tensor) -> None:
        """Add some tokens to one row."""
        found_TK = (true_ids_TK.unsqueeze(-1) == forecast_ids_TK.unsqueeze(-2)).any(dim=-1)
        self.add(found_TK.float().mean(dim=-1), row)

    def per_row(self) -> Tensor:
        """The means [L], also of a single row."""
        recall_L: Tensor = self.compute()
        return recall_L.reshape(-1)


class Perplexity(TokenMean):
    """exp of the mean of -log p(token).

    torchmetrics' own takes softmax and then log: from log probabilities that rounds twice, and gives infinity for a
    token whose probability underflows.
    """

    def update(self, log_probs_TV: Tensor, token_T: Tensor) -> None:
        """Add the tokens that came where these distributions stood."""
        self.total_LR += functional.nll_loss(log_probs_TV, token_T, reduction="sum")
        self.count_L += len(token_T)

    def compute(self) -> Tensor:
        return super().compute().exp()


class Agreement(TokenMean):
    """Share of positions at which two runs hold the same token for the likeliest.

    torchmetrics' accuracy counts per class and wants to know their number; this is one mean.
    """

    def update(self, log_probs_TV: Tensor, reference_TV: Tensor) -> None:
        """Add some positions of a run and of the one it is compared with."""
        self.add(log_probs_TV.argmax(dim=-1) == reference_TV.argmax(dim=-1))


class Divergence(TokenMean):
    """Mean KL(reference || run) in nats.

    torchmetrics' own sums p log(p / q) in fp32 over all batches and, from log probabilities, is NaN where both
    probabilities are zero; a sum below zero by rounding is zero here.
    """

    def update(self, log_probs_TV: Tensor, reference_TV: Tensor) -> None:
        """Add some positions of a run and of the one it is compared with; a run does not diverge from itself."""
        if log_probs_TV is not reference_TV:
            self.total_LR += functional.kl_div(log_probs_TV, reference_TV, reduction="sum", log_target=True)
        self.count_L += len(log_probs_TV)

    def compute(self) -> Tensor:
        return super().compute().clamp(min=0.0)
