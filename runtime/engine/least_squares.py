"""Recursive least squares about a frozen map: what to add to it, from the errors that it makes.

Sums are kept in information form: with rows x (a 1 behind the features) and errors e of the frozen map,

    gram  <- memory gram  + sum of x' x        cross <- memory cross + sum of x' e
    change = (gram + prior penalty)^-1 cross

so that the frozen map is the answer as long as nothing was seen, and stays the prior however long the run is: what is
forgotten is data, never the prior. The textbook form, which updates the inverse, forgets both, and its inverse grows
without bound in directions that a text does not visit.

N rows, F features, E outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RecursiveRidge:
    """The sums, and what they say.

    Args:
        features: F.
        outputs: E.
        prior: how many tokens the frozen map counts for, in every direction of features of unit variance.
        device: where the rows are.
    """

    def __init__(self, features: int, outputs: int, *, prior: float, device: torch.device | str = "cpu") -> None:
        self._prior = prior
        self._gram_GG = torch.zeros(features + 1, features + 1, device=device)
        self._cross_GE = torch.zeros(features + 1, outputs, device=device)
        self._ones_N1 = torch.ones(0, 1, device=device)

    def add(self, x_NF: Tensor, error_NE: Tensor, keep: float = 1.0) -> None:
        """Take rows.

        Args:
            x_NF: features of about unit variance.
            error_NE: what the frozen map lacks for them.
            keep: share of all earlier rows' weight that is left.
        """
        if len(self._ones_N1) != len(x_NF):
            self._ones_N1 = x_NF.new_ones(len(x_NF), 1)
        x_NG = torch.cat([x_NF, self._ones_N1], dim=1)
        self._gram_GG.addmm_(x_NG.T, x_NG, beta=keep)
        self._cross_GE.addmm_(x_NG.T, error_NE, beta=keep)

    def solve(self) -> Tensor | None:
        """What to add to the frozen map [F + 1, E], its bias last; None where the sums have no answer in fp32."""
        penalised_GG = self._gram_GG.clone()
        penalised_GG.diagonal().add_(self._prior)
        factor_GG, failed = torch.linalg.cholesky_ex(penalised_GG)
        return None if failed else torch.cholesky_solve(self._cross_GE, factor_GG)
