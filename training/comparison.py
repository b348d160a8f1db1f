"""A forecast beside what the router really did: the shared work under every metric, done once per layer.

T tokens, K experts per token, E routed experts per layer, M misses.
Everything is a fixed number of tensor operations; nothing loops over tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from expertcast.predictors.base import Forecast, RouterState

NEWTON_STEPS = 40
NEWTON_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedRouting:
    """One layer's routing with its experts in order of combine weight."""

    ids_TK: Tensor
    """Expert ids, the heaviest first; ties go to the higher logit."""
    weights_TK: Tensor
    """Combine weights in the same order, fp32."""
    member_TE: Tensor
    """Whether the expert is among the token's K (bool)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingComparison:
    """One layer's forecast against the true routing of the same tokens."""

    truth: RankedRouting
    forecast: RankedRouting
    place_TK: Tensor
    """Place of each true expert among the forecast's candidates: 0..K-1 its own ids, then the others by logit."""
    logits_TE: Tensor
    """The forecast's logits."""
    cosine_T: Tensor | None = None
    """Cosine between the predictor's input vector and the true router input; None where it has none."""


def rank_routing(routing: RouterState | Forecast) -> RankedRouting:
    """Order a routing's experts by combine weight; routers return them unsorted, or sorted by something else."""
    ids_TK, logits_TE = routing.topk_ids_TK, routing.logits_TE
    # two sorts, the second stable: bf16 weights tie often, and the logit behind them decides then
    by_logit_TK = logits_TE.gather(1, ids_TK).argsort(dim=1, descending=True)
    weights_TK = routing.topk_weights_TK.float().gather(1, by_logit_TK)
    weights_TK, by_weight_TK = weights_TK.sort(dim=1, descending=True, stable=True)
    ids_TK = ids_TK.gather(1, by_logit_TK).gather(1, by_weight_TK)
    member_TE = torch.zeros(logits_TE.shape, dtype=torch.bool, device=ids_TK.device).scatter_(1, ids_TK, True)
    return RankedRouting(ids_TK=ids_TK, weights_TK=weights_TK, member_TE=member_TE)


def compare(forecast: Forecast, truth: RankedRouting, cosine_T: Tensor | None = None) -> RoutingComparison:
    """Set a forecast against the ranked true routing of the same tokens."""
    ranked = rank_routing(forecast)
    return RoutingComparison(
        truth=truth,
        forecast=ranked,
        place_TK=_candidate_places(forecast.logits_TE, ranked, truth.ids_TK),
        logits_TE=forecast.logits_TE,
        cosine_T=cosine_T,
    )


def _candidate_places(logits_TE: Tensor, ranked: RankedRouting, true_ids_TK: Tensor) -> Tensor:
    """Place of each true expert in the order in which a prefetcher would take the experts.

    The forecast's own ids come first even where the router chooses by something else than the logit (a
    correction bias, groups), so that a wider budget always holds the narrower one. Equal logits go by expert id.
    """
    same_TKK = true_ids_TK[:, :, None] == ranked.ids_TK[:, None, :]
    place_TK = same_TKK.to(torch.uint8).argmax(dim=2)
    # only the misses, M of T * K, need the order of the other experts: a full sort would cost several times more
    token_M, rank_M = (~same_TKK.any(dim=2)).nonzero(as_tuple=True)
    expert_M1 = true_ids_TK[token_M, rank_M][:, None]
    logits_ME = logits_TE[token_M]
    own_M1 = logits_ME.gather(1, expert_M1)
    earlier_ME = torch.arange(logits_TE.shape[1], device=logits_TE.device) < expert_M1
    ahead_ME = (logits_ME > own_M1) | ((logits_ME == own_M1) & earlier_ME)
    place_TK[token_M, rank_M] = ranked.ids_TK.shape[1] + (ahead_ME & ~ranked.member_TE[token_M]).sum(dim=1)
    return place_TK


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
    for _ in range(NEWTON_STEPS):
        p_TE = torch.sigmoid(logits_TE - tau_T1)
        sum_T1 = p_TE.sum(dim=1, keepdim=True)
        excess_T1 = sum_T1 - top_k
        open_T1 = excess_T1.abs() > NEWTON_TOLERANCE
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


def membership_threshold(comparison: RoutingComparison) -> Tensor:
    """[T] halfway between the forecast's lowest logit inside its K and the highest outside: a first tau."""
    inside_TE = comparison.forecast.member_TE
    logits_TE = comparison.logits_TE.float()
    lowest_T = logits_TE.gather(1, comparison.forecast.ids_TK).amin(dim=1)
    highest_T = logits_TE.masked_fill(inside_TE, -math.inf).amax(dim=1)
    return torch.where(highest_T.isinf(), lowest_T, (lowest_T + highest_T) / 2)
