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
from expertcast.predictors.log_odds import LogOdds, inclusion_probability


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
    log_odds: LogOdds | None = None
    """How they are read as probabilities; None: as they stand."""
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
        log_odds=forecast.log_odds,
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


def membership_threshold(comparison: RoutingComparison) -> Tensor:
    """[T] halfway between the forecast's lowest logit inside its K and the highest outside: a first tau."""
    inside_TE = comparison.forecast.member_TE
    logits_TE = comparison.logits_TE.float()
    lowest_T = logits_TE.gather(1, comparison.forecast.ids_TK).amin(dim=1)
    highest_T = logits_TE.masked_fill(inside_TE, -math.inf).amax(dim=1)
    return torch.where(highest_T.isinf(), lowest_T, (lowest_T + highest_T) / 2)


def membership_probability(comparison: RoutingComparison, *, calibrated: bool) -> Tensor:
    """[T, E] that each expert is among the token's K, by the forecast: as its predictor was calibrated, where it was
    and that is asked for, else as the logits stand."""
    top_k = comparison.place_TK.shape[1]
    if calibrated and comparison.log_odds is not None:
        return comparison.log_odds.of(comparison.logits_TE, top_k).sigmoid()
    return inclusion_probability(comparison.logits_TE, top_k, membership_threshold(comparison))
