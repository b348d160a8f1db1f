"""In which directions a layer's input varies most.

T tokens, D hidden size, R rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EXACT = 512
"""Up to so many dimensions all of a covariance's directions are computed: 2048 would take seconds."""
_MORE, _ITERATIONS = 8, 6
"""Of the iteration beyond: columns beside those that are asked for, and rounds."""


class Moments:
    """Mean and covariance of a layer's input."""

    def __init__(self) -> None:
        self.count = 0
        self.sum_D: Tensor | float = 0.0
        self.product_DD: Tensor | float = 0.0

    def add(self, hidden_TD: Tensor) -> None:
        """The layer's inputs of one batch."""
        hidden_TD = hidden_TD.float()
        self.count += len(hidden_TD)
        self.sum_D = self.sum_D + hidden_TD.sum(dim=0)
        self.product_DD = self.product_DD + hidden_TD.T @ hidden_TD

    def principal(self, rank: int) -> tuple[Tensor, Tensor]:
        """The mean [D], and the `rank` directions [D, R] of the largest variance, orthonormal."""
        assert isinstance(self.sum_D, Tensor)
        assert isinstance(self.product_DD, Tensor)
        mean_D = self.sum_D.double() / self.count
        covariance_DD = self.product_DD.double() / self.count - torch.outer(mean_D, mean_D)
        return mean_D.float(), largest(covariance_DD, rank).float()


def largest(covariance_DD: Tensor, rank: int) -> Tensor:
    """The `rank` directions [D, R] of the largest variance, largest first."""
    dimensions = len(covariance_DD)
    if dimensions <= _EXACT or rank + _MORE > dimensions // 4:
        _, vectors_DD = torch.linalg.eigh(covariance_DD)  # rising
        return torch.flip(vectors_DD[:, dimensions - rank :], (1,))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vectors_DR, _, _ = torch.svd_lowrank(covariance_DD.cpu(), q=rank + _MORE, niter=_ITERATIONS)
    return vectors_DR[:, :rank].to(covariance_DD.device)
