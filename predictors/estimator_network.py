"""The estimator's network: what it adds to the ridge solution.

T tokens, P layer pairs, F features, E routed experts, G groups of pairs that share a projection and a head, W width and
H hidden units of the residual MLP: x = A q + pos_l; h = x + C SiLU(B x); theta = W_head LN(h).
Source: Speculating Experts, section 4 (rows B12 and B13).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from expertcast.predictors.errors import ExpertcastError

WIDTH_STEP = 8


class EstimatorNetwork(nn.Module):
    """One network for all layer pairs, sized by a parameter budget.

    Shared, everything but the layer embedding pos_l serves every pair, as in the paper. Otherwise each pair has its own
    projection A and head, which start the head at zero, and only the residual MLP between them is shared.
    """

    def __init__(
        self, pairs: int, features: int, experts: int, *, parameters: int, expansion: float, shared: bool
    ) -> None:
        """Takes what :func:`fitting_width` takes, and raises what it raises."""
        super().__init__()
        groups = 1 if shared else pairs
        width = fitting_width(pairs, features, experts, parameters=parameters, expansion=expansion, shared=shared)
        hidden = round(expansion * width)
        self.projection_GFW = nn.Parameter(torch.randn(groups, features, width) / features**0.5)
        self.position_PW = nn.Parameter(0.02 * torch.randn(pairs, width))
        self.up_WH = nn.Parameter(torch.randn(width, hidden) / width**0.5)
        self.down_HW = nn.Parameter(torch.randn(hidden, width) / hidden**0.5)
        self.norm = nn.LayerNorm(width)
        # a residual network must begin as the map it adds to; the paper's needs logits of some size to learn from
        scale = width**-0.5 if shared else 0.0
        self.head_GWE = nn.Parameter(scale * torch.randn(groups, width, experts))

    def forward(self, x_PTF: Tensor) -> Tensor:
        """Logits [P, T, E] of all pairs at once, for training."""
        x_PTW = _apply(x_PTF, self.projection_GFW) + self.position_PW[:, None]
        return _apply(self._trunk(x_PTW), self.head_GWE)

    def one(self, x_TF: Tensor, pair: int) -> Tensor:
        """Logits [T, E] of one pair: the same row of :meth:`forward`, without the other pairs' work."""
        group = pair if len(self.projection_GFW) > 1 else 0
        x_TW = torch.addmm(self.position_PW[pair], x_TF, self.projection_GFW[group])
        return self._trunk(x_TW) @ self.head_GWE[group]

    def _trunk(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(x + functional.silu(x @ self.up_WH) @ self.down_HW)
        return hidden


def fitting_width(pairs: int, features: int, experts: int, *, parameters: int, expansion: float, shared: bool) -> int:
    """The largest multiple of 8 for W that keeps the network within the parameter budget.

    Args:
        pairs: P.
        features: F.
        experts: E.
        parameters: the budget.
        expansion: H as a multiple of W.
        shared: one projection and head for all pairs, rather than one for each.

    Raises:
        ExpertcastError: not even 8 fits.
    """
    groups = 1 if shared else pairs

    def count(width: int) -> int:
        return width * (groups * (features + experts) + pairs + 2) + 2 * width * round(expansion * width)

    if count(WIDTH_STEP) > parameters:
        raise ExpertcastError(
            f"parameters={parameters}: too few for {pairs} layer pairs of {features} inputs and {experts} experts, "
            f"give at least {count(WIDTH_STEP)}"
        )
    fits, exceeds = 1, 2  # in steps of the width
    while count(exceeds * WIDTH_STEP) <= parameters:
        fits, exceeds = exceeds, 2 * exceeds
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        fits, exceeds = (middle, exceeds) if count(middle * WIDTH_STEP) <= parameters else (fits, middle)
    return fits * WIDTH_STEP


def _apply(x_PTF: Tensor, map_GFE: Tensor) -> Tensor:
    return x_PTF @ map_GFE[0] if len(map_GFE) == 1 else torch.bmm(x_PTF, map_GFE)
