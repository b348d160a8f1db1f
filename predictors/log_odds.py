"""How likely an expert is among a token's K, read from forecast logits: calibrated, or as the logits stand.

T tokens, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

FARTHEST = 12.0
"""Margins are cut here: what lies farther from the boundary is as good as certain, and one outlier must not outweigh
all other tokens where slopes are learnt."""
_NEWTON_STEPS = 40
_NEWTON_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class LogOdds:
    """A calibrated reading of one layer pair's logits: log-odds = slope x m + root x sign(m) sqrt|m| + offset.

    The margin m is how far an expert's logit lies above the boundary, halfway between the token's K-th and K+1-th
    logit; the slope is one over the temperature, and the root lets the odds rise fast near the boundary and slowly far
    from it, as forecasts with a few large errors need. Fitted on validation by the least cross-entropy, so that the
    probabilities sum to K in the mean, though not for every token: the distance to the boundary tells more than the
    place in a sum. (Bundled model, error over likely pairs of the test split with a temperature and an offset alone
    .008 to .019, with the root .007 to .014.)
    """

    slope: float
    root: float
    offset: float

    def of(self, logits_TE: Tensor, top_k: int) -> Tensor:
        """Log-odds [T, E], fp32."""
        margin_TE = margin(logits_TE, top_k)
        return self.slope * margin_TE + self.root * signed_root(margin_TE) + self.offset


def margin(logits_TE: Tensor, top_k: int) -> Tensor:
    """How far each logit lies above its token's boundary [T, E], fp32, cut at 12 on both sides."""
    logits_TE = logits_TE.float()
    if top_k >= logits_TE.shape[1]:
        return torch.full_like(logits_TE, FARTHEST)
    boundary_T1 = logits_TE.topk(top_k + 1, dim=1).values[:, -2:].mean(dim=1, keepdim=True)
    return (logits_TE - boundary_T1).clamp(-FARTHEST, FARTHEST)


def signed_root(margin_TE: Tensor) -> Tensor:
    """sign(m) sqrt|m|."""
    return margin_TE.sign() * margin_TE.abs().sqrt()


def probability(logits_TE: Tensor, top_k: int, log_odds: LogOdds | None) -> Tensor:
    """[T, E] that each expert is among the token's K, fp32.

    Args:
        logits_TE: of a forecast.
        top_k: K.
        log_odds: how they are read; None: as they stand, by :func:`inclusion_probability`.
    """
    if log_odds is None:
        return inclusion_probability(logits_TE, top_k)
    return log_odds.of(logits_TE, top_k).sigmoid()


def inclusion_probability(logits_TE: Tensor, top_k: int, start_T: Tensor | None = None) -> Tensor:
    """Probability [T, E] that each expert is among the token's K, read from forecast logits.

    p = sigmoid(z - tau), with one tau per token such that the probabilities sum to K. It is the maximiser of
    <z, p> + sum of the binary entropies of p over all p in [0, 1]^E that sum to K: what softmax is to the best
    one of E, this is to the best K. Unlike K * softmax clipped at 1 it always sums to K. It ignores whatever
    else a router chooses by (correction bias, groups), which the logits do not hold.

    tau is found by Newton's method on log(sum of p) = log K, which is nearly straight where the logits are flat
    and most of the p small, kept inside a bracket that bisection shrinks.

    Args:
        start_T: a first tau, best halfway between the K-th and the K+1-th logit; found by sorting if not given.
    """
    logits_TE = logits_TE.float()
    experts = logits_TE.shape[1]
    if top_k >= experts:
        return torch.ones_like(logits_TE)
    tau_T1 = logits_TE.topk(top_k + 1, dim=1).values[:, -2:].mean(dim=1) if start_T is None else start_T.float()
    tau_T1 = tau_T1[:, None]
    margin = math.log(top_k / (experts - top_k))  # at tau = z - margin, sigmoid(z - tau) = K / E
    low_T1, high_T1 = logits_TE.amin(dim=1, keepdim=True) - margin, logits_TE.amax(dim=1, keepdim=True) - margin
    for _ in range(_NEWTON_STEPS):
        p_TE = torch.sigmoid(logits_TE - tau_T1)
        sum_T1 = p_TE.sum(dim=1, keepdim=True)
        excess_T1 = sum_T1 - top_k
        open_T1 = excess_T1.abs() > _NEWTON_TOLERANCE
        if not open_T1.any():
            return p_TE
        low_T1 = torch.where(excess_T1 > 0, tau_T1, low_T1)
        high_T1 = torch.where(excess_T1 < 0, tau_T1, high_T1)
        # sum of p (1 - p) = sum of p - sum of p^2: one pass less over [T, E]
        slope_T1 = sum_T1 - torch.linalg.vecdot(p_TE, p_TE)[:, None]
        newton_T1 = tau_T1 + (sum_T1 / top_k).log() * sum_T1 / slope_T1.clamp_min(1e-12)
        inside_T1 = (newton_T1 > low_T1) & (newton_T1 < high_T1)
        # rows that are done stay: rounding would send them out of their closed bracket and away by bisection
        tau_T1 = torch.where(open_T1, torch.where(inside_T1, newton_T1, (low_T1 + high_T1) / 2), tau_T1)
    return torch.sigmoid(logits_TE - tau_T1)
