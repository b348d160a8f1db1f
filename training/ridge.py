"""Closed-form ridge regression from sums that one pass over the tokens gathers; no token is stored.

T tokens, P layer pairs, F features (D for `linear`), E routed experts, S ridge strengths.

With X the features and Y the targets of a pair, both about their means, the map is
W = (X'X + n s V)^-1 X'Y and b = mean(Y) - mean(X) W, where n is the number of tokens, s the strength and V the diagonal
of the features' variances: s is a plain number, whatever the scale of each feature.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from expertcast.data.distributed import sum_over_ranks, training_share


class RidgeStatistics:
    """Sums over tokens per layer pair: products in fp32, one batch at a time, added up in fp64."""

    def __init__(self, pairs: int, features: int, experts: int, device: torch.device | str = "cpu") -> None:
        """The sums take 8 P F (F + E) bytes."""

        def zeros(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.float64, device=device)

        self.count_P = zeros(pairs)
        self.x_PF = zeros(pairs, features)
        self.y_PE = zeros(pairs, experts)
        self.xx_PFF = zeros(pairs, features, features)
        self.xy_PFE = zeros(pairs, features, experts)

    def update(self, pair: int, x_TF: Tensor, y_TE: Tensor) -> None:
        """Add the tokens of one batch to the sums of one pair."""
        x_TF, y_TE = x_TF.float(), y_TE.float()
        # products about the batch's own mean: in fp32 a mean far above the spread would drown it
        near_F, near_E = x_TF.mean(dim=0), y_TE.mean(dim=0)
        x_TF, y_TE = x_TF - near_F, y_TE - near_E
        near_F, near_E, count = near_F.double(), near_E.double(), x_TF.shape[0]
        rest_F, rest_E = x_TF.sum(dim=0, dtype=torch.float64), y_TE.sum(dim=0, dtype=torch.float64)
        sum_F, sum_E = rest_F + count * near_F, rest_E + count * near_E
        self.count_P[pair] += count
        self.x_PF[pair] += sum_F
        self.y_PE[pair] += sum_E
        self.xx_PFF[pair] += (x_TF.T @ x_TF).double() + torch.outer(near_F, sum_F) + torch.outer(rest_F, near_F)
        self.xy_PFE[pair] += (x_TF.T @ y_TE).double() + torch.outer(near_F, sum_E) + torch.outer(rest_F, near_E)

    def all_reduce(self) -> None:
        """Add up the sums of all ranks; nothing happens outside a process group."""
        sum_over_ranks(training_share(), [self.count_P, self.x_PF, self.y_PE, self.xx_PFF, self.xy_PFE])

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation [P, F] of the features."""
        mean_PF = self.x_PF / self.count_P[:, None]
        second_PF = self.xx_PFF.diagonal(dim1=1, dim2=2) / self.count_P[:, None]
        return mean_PF.float(), (second_PF - mean_PF.square()).clamp(min=0).sqrt().float()

    def solve(self, strengths: Sequence[float], features: int | None = None) -> tuple[Tensor, Tensor]:
        """Weights [S, P, F, E] and biases [S, P, E] in fp32, of the first `features` features or, if None, of all."""
        width = self.x_PF.shape[1] if features is None else features
        solved = [
            [self._solve_pair(pair, strength, width) for pair in range(len(self.count_P))] for strength in strengths
        ]
        weights = torch.stack([torch.stack([weight_FE for weight_FE, _ in row]) for row in solved])
        biases = torch.stack([torch.stack([bias_E for _, bias_E in row]) for row in solved])
        return weights, biases

    def _solve_pair(self, pair: int, strength: float, width: int) -> tuple[Tensor, Tensor]:
        count = self.count_P[pair]
        mean_F, mean_E = self.x_PF[pair, :width] / count, self.y_PE[pair] / count
        covariance_FF = self.xx_PFF[pair, :width, :width] / count - torch.outer(mean_F, mean_F)
        cross_FE = self.xy_PFE[pair, :width] / count - torch.outer(mean_F, mean_E)
        weight_FE = _solve_spd(covariance_FF, cross_FE, strength)
        return weight_FE.float(), (mean_E - mean_F @ weight_FE).float()


def _solve_spd(covariance_FF: Tensor, cross_FE: Tensor, strength: float) -> Tensor:
    variance_F = covariance_FF.diagonal()
    # a feature that never varies (an expert never routed to) would leave a zero pivot
    floor = (1e-6 * variance_F.mean()).clamp(min=torch.finfo(torch.float32).tiny)
    penalty_FF = variance_F.clamp(min=floor).diag()
    while True:
        factor_FF, failed = torch.linalg.cholesky_ex(covariance_FF + strength * penalty_FF)
        if not failed:
            return torch.cholesky_solve(cross_FE, factor_FF)
        # rounding of the fp32 products can leave repeated features short of positive definite
        strength *= 10
