"""Metrics of forecasts and of model runs, for training, evaluation and quality.

T tokens, K experts per token, E routed experts per layer, L target layers. States are sums and counts, so results of
parts of the data can be added.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torchmetrics import Metric

from expertcast.predictors.base import Forecast, LogOdds, RouterState, inclusion_probability
from expertcast.predictors.view import ModelShape, overfetched

# Comparison of a forecast with the true routing, computed once per layer for all metrics; M misses


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedRouting:
    """One layer's routing with the experts in order of combine weight."""

    ids_TK: Tensor
    """Expert ids, largest weight first; equal weights in order of logits."""
    weights_TK: Tensor
    """Combine weights in the same order, fp32."""
    member_TE: Tensor
    """Whether the expert is among the token's K (bool)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingComparison:
    """One layer's forecast and the true routing of the same tokens."""

    truth: RankedRouting
    forecast: RankedRouting
    place_TK: Tensor
    """Rank of each true expert among the forecast's candidates: 0..K-1 for its own ids, then the others by logit."""
    logits_TE: Tensor
    """The forecast's logits."""
    log_odds: LogOdds | None = None
    """Calibration of the logits; None if there is none."""
    cosine_T: Tensor | None = None
    """Cosine between the predictor's input vector and the true router input; None without an input vector."""

    @property
    def hit_TK(self) -> Tensor:
        """Whether each true expert is among the K forecast ones."""
        return self.place_TK < self.place_TK.shape[1]


def rank_routing(routing: RouterState | Forecast) -> RankedRouting:
    """Sort a routing's experts by combine weight."""
    ids_TK, logits_TE = routing.topk_ids_TK, routing.logits_TE
    # the second sort is stable: bf16 weights are often equal, then logits decide
    by_logit_TK = logits_TE.gather(1, ids_TK).argsort(dim=1, descending=True)
    weights_TK = routing.topk_weights_TK.float().gather(1, by_logit_TK)
    weights_TK, by_weight_TK = weights_TK.sort(dim=1, descending=True, stable=True)
    ids_TK = ids_TK.gather(1, by_logit_TK).gather(1, by_weight_TK)
    member_TE = torch.zeros(logits_TE.shape, dtype=torch.bool, device=ids_TK.device).scatter_(1, ids_TK, True)
    return RankedRouting(ids_TK=ids_TK, weights_TK=weights_TK, member_TE=member_TE)


def compare(forecast: Forecast, truth: RankedRouting, cosine_T: Tensor | None = None) -> RoutingComparison:
    """Compare a forecast with the true routing of the same tokens."""
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
    """Return the rank [T, K] of each true expert in the order in which a prefetcher fetches experts.

    The forecast's own ids come first, even if the router does not choose by logits alone (correction bias, groups), so
    recall never falls with the number of fetched experts. Equal logits are ordered by expert id.
    """
    same_TKK = true_ids_TK[:, :, None] == ranked.ids_TK[:, None, :]
    place_TK = same_TKK.to(torch.uint8).argmax(dim=2)
    # only the M misses need the order of the other experts; a full sort would cost several times more
    token_M, rank_M = (~same_TKK.any(dim=2)).nonzero(as_tuple=True)
    expert_M1 = true_ids_TK[token_M, rank_M][:, None]
    logits_ME = logits_TE[token_M]
    own_M1 = logits_ME.gather(1, expert_M1)
    earlier_ME = torch.arange(logits_TE.shape[1], device=logits_TE.device) < expert_M1
    ahead_ME = (logits_ME > own_M1) | ((logits_ME == own_M1) & earlier_ME)
    place_TK[token_M, rank_M] = ranked.ids_TK.shape[1] + (ahead_ME & ~ranked.member_TE[token_M]).sum(dim=1)
    return place_TK


def membership_probability(comparison: RoutingComparison, *, calibrated: bool) -> Tensor:
    """Return the forecast probability [T, E] that each expert is among the token's K.

    Uses the predictor's calibration if `calibrated` is set and there is one.
    """
    top_k = comparison.place_TK.shape[1]
    if calibrated and comparison.log_odds is not None:
        return comparison.log_odds.of(comparison.logits_TE, top_k).sigmoid()
    return inclusion_probability(comparison.logits_TE, top_k)


class ExpertRecall(Metric):  # type: ignore[misc]
    """Counts how often the router used each expert, and how often the forecast then contained it.

    An expert's recall is found / used. With both counts summed over a layer's experts, it is the layer's recall@k.
    """

    full_state_update = False
    used_LE: Tensor
    found_LE: Tensor

    def __init__(self, layers: int, experts: int) -> None:

        super().__init__(sync_on_compute=False)
        for name in ("used_LE", "found_LE"):
            self.add_state(name, default=torch.zeros(layers, experts, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, layer: int, comparison: RoutingComparison) -> None:
        """Add a batch at one target layer (0 = the first target layer)."""
        ids_TK, experts = comparison.truth.ids_TK, self.used_LE.shape[1]
        self.used_LE[layer] += torch.bincount(ids_TK.flatten(), minlength=experts)
        self.found_LE[layer] += torch.bincount(ids_TK[comparison.hit_TK], minlength=experts)

    def compute(self) -> dict[str, Tensor]:
        """Return `used` [L, E], the tokens routed to each expert, and `found` [L, E], those with a correct forecast."""
        return {"used": self.used_LE, "found": self.found_LE}


# Means over tokens: L rows (such as layers), R values per token, V vocabulary. Metrics of model runs use log
# probabilities, which do not underflow.


class TokenMean(Metric):  # type: ignore[misc]
    """Mean scores of tokens, one mean of `width` values per row; fp64 sums and counts, so parts of the data add up."""

    full_state_update = False
    total_LR: Tensor
    count_L: Tensor

    def __init__(self, rows: int = 1, width: int = 1) -> None:

        super().__init__(sync_on_compute=False)  # every rank scores the whole split
        self.add_state("total_LR", default=torch.zeros(rows, width, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count_L", default=torch.zeros(rows, dtype=torch.long), dist_reduce_fx="sum")

    def add(self, score_TR: Tensor, row: int = 0) -> None:
        """Add scores of tokens, [T] or [T, R], to one row."""
        self.total_LR[row] += score_TR.reshape(len(score_TR), -1).sum(dim=0, dtype=torch.float64)
        self.count_L[row] += len(score_TR)

    def means(self) -> Tensor:
        """Return the means [L, R] in fp64, NaN for empty rows."""
        return self.total_LR / self.count_L[:, None]

    def compute(self) -> Tensor:
        """Return the means; torchmetrics converts a single value to a scalar."""
        return self.means()


class Recall(TokenMean):
    """Share of a token's true experts that are among the forecast experts, one mean per row."""

    def update(self, row: int, forecast_ids_TK: Tensor, true_ids_TK: Tensor) -> None:
        """Add tokens to one row."""
        found_TK = (true_ids_TK.unsqueeze(-1) == forecast_ids_TK.unsqueeze(-2)).any(dim=-1)
        self.add(found_TK.float().mean(dim=-1), row)

    def per_row(self) -> Tensor:
        """Return the means [L]."""
        return self.means()[:, 0]


class Perplexity(TokenMean):
    """exp of the mean of -log p(token).

    torchmetrics' perplexity computes softmax and then log, which rounds twice and yields infinity for underflowing
    probabilities.
    """

    def update(self, log_probs_TV: Tensor, token_T: Tensor) -> None:
        """Add tokens [T] and the log probabilities [T, V] at their positions."""
        self.total_LR += functional.nll_loss(log_probs_TV, token_T, reduction="sum")
        self.count_L += len(token_T)

    def compute(self) -> Tensor:
        return super().compute().exp()


class Agreement(TokenMean):
    """Share of positions where two runs predict the same most likely token."""

    def update(self, log_probs_TV: Tensor, reference_TV: Tensor) -> None:
        """Add positions of a run and of the reference run."""
        self.add(log_probs_TV.argmax(dim=-1) == reference_TV.argmax(dim=-1))


class Divergence(TokenMean):
    """Mean KL(reference || run) in nats, clamped at 0.

    torchmetrics' version sums p log(p / q) in fp32 over all batches, and yields NaN where both probabilities are zero.
    """

    def update(self, log_probs_TV: Tensor, reference_TV: Tensor) -> None:
        """Add positions of a run and of the reference run; a run has no divergence from itself."""
        if log_probs_TV is not reference_TV:
            self.total_LR += functional.kl_div(log_probs_TV, reference_TV, reduction="sum", log_target=True)
        self.count_L += len(log_probs_TV)

    def compute(self) -> Tensor:
        return super().compute().clamp(min=0.0)


# Calibration error over (token, expert) pairs: B display bins, F fine bins, G groups of equal mass

BINS = 10
"""Number of equal-width bins of reliability diagrams."""
GROUPS = 15
"""Number of equal-mass groups for the calibration error."""
LIKELY = 0.05
"""Pairs above this probability are also scored separately: for most pairs, the probability is rightly near 0."""
_FINE, _PER_NAT = 1024, 32
_LIKELY_AT = _FINE // 2
"""First fine bin above `LIKELY`; a bin covers 1/32 nat of log-odds."""


class Calibration(Metric):  # type: ignore[misc]
    """Compares forecast probabilities of membership in the true top K with observed frequencies.

    The expected calibration error is the mean over pairs of |mean p - frequency| of their group. The 15 groups have
    equal numbers of pairs, in order of p. Group boundaries are multiples of 1/32 nat of log-odds, so sums suffice.

    Args:
        layers: number of target layers.
        calibrated: whether to use the predictor's calibration.
        bins: number of display bins.
    """

    full_state_update = False
    count_LB: Tensor
    confidence_LB: Tensor
    hits_LB: Tensor
    count_LF: Tensor
    confidence_LF: Tensor
    hits_LF: Tensor

    def __init__(self, layers: int, *, calibrated: bool = True, bins: int = BINS) -> None:

        super().__init__(sync_on_compute=False)
        self.calibrated, self.bins = calibrated, bins
        for name in ("count", "confidence", "hits"):
            for suffix, size in (("LB", bins), ("LF", _FINE)):
                zeros = torch.zeros(layers, size, dtype=torch.float64)
                self.add_state(f"{name}_{suffix}", default=zeros, dist_reduce_fx="sum")

    def update(self, layer: int, comparison: RoutingComparison) -> None:
        """Add a batch at one target layer (0 = the first target layer)."""
        # in fp64, which tells 1 - 1e-9 from 1: the log-odds of 1 would be infinite, and fall into the first bin
        p_N = membership_probability(comparison, calibrated=self.calibrated).flatten().double()
        hit_N = comparison.truth.member_TE.flatten()
        wide_N = (p_N * self.bins).long().clamp_(max=self.bins - 1)
        odds_N = torch.logit(p_N, eps=1e-9) - math.log(LIKELY / (1 - LIKELY))
        fine_N = (odds_N * _PER_NAT).floor_().long().add_(_LIKELY_AT).clamp_(0, _FINE - 1)
        for suffix, bin_N, size in (("LB", wide_N, self.bins), ("LF", fine_N, _FINE)):
            misses, hits = torch.bincount(2 * bin_N + hit_N, minlength=2 * size).view(-1, 2).unbind(1)
            getattr(self, f"count_{suffix}")[layer] += misses + hits
            getattr(self, f"hits_{suffix}")[layer] += hits
            getattr(self, f"confidence_{suffix}")[layer] += torch.bincount(bin_N, p_N, size)

    def compute(self) -> dict[str, Tensor]:
        """Return calibration errors and, per display bin, `count_B`, `confidence_B` and `frequency_B` (NaN if empty).

        `ece` pools all layers, `ece_likely` their pairs with p > .05 (NaN without such pairs), `ece_L` is per layer.
        """
        count_B, confidence_B, hits_B = self.count_LB.sum(0), self.confidence_LB.sum(0), self.hits_LB.sum(0)
        fine_L3F = torch.stack([self.count_LF, self.confidence_LF, self.hits_LF], dim=1)
        pooled_3F = fine_L3F.sum(0)
        return {
            "ece": calibration_error(*pooled_3F),
            "ece_likely": calibration_error(*pooled_3F[:, _LIKELY_AT:]),
            "ece_L": torch.stack([calibration_error(*layer_3F) for layer_3F in fine_L3F]),
            "count_B": count_B,
            "confidence_B": confidence_B / count_B,
            "frequency_B": hits_B / count_B,
        }


def calibration_error(count_F: Tensor, confidence_F: Tensor, hits_F: Tensor, groups: int = GROUPS) -> Tensor:
    """Return the calibration error over groups of nearly equal numbers of pairs; NaN without pairs.

    Args:
        count_F: pairs per bin, by ascending probability.
        confidence_F: sum of their probabilities.
        hits_F: number of pairs whose expert is in the true top K.
        groups: number of groups.
    """
    total = count_F.sum()
    if not total:
        return total.new_tensor(torch.nan)
    middle_F = (count_F.cumsum(0) - count_F / 2) / total
    group_F = (middle_F * groups).long().clamp_(0, groups - 1)
    gap_F = confidence_F - hits_F
    return torch.zeros(groups).to(gap_F).index_add_(0, group_F, gap_F).abs().sum() / total


# Scores of routing forecasts, one mean per target layer; R = K for rank alignment, else 1

BUDGETS = {"recall_at_k": 1.0, "recall_at_1.5k": 1.5, "recall_at_2k": 2.0}


Score = Callable[[RoutingComparison], Tensor | None]
"""Scores each token of a layer, [T] or [T, R]; None if the predictor lacks the input."""
RANK_ALIGNMENT = "rank_alignment"


def recall_at(size: int) -> Score:
    """Return the score: share of the true experts among the forecast's first `size` candidates."""
    return lambda comparison: (comparison.place_TK < size).float().mean(dim=1)


def weight_covered(comparison: RoutingComparison) -> Tensor:
    """Return the share of the true combine weight on the K forecast experts."""
    weights_TK = comparison.truth.weights_TK
    return (weights_TK * comparison.hit_TK).sum(dim=1) / weights_TK.sum(dim=1).clamp_min(1e-20)


def routing_scores(shape: ModelShape) -> dict[str, Score]:
    """Return the scores of an evaluation by name.

    Besides recall and :func:`weight_covered`: whether the K forecast experts are the true ones; whether the forecast
    expert of each rank is the true one; and the cosine between the predictor's input vector and the true router input.
    """
    return {
        **{name: recall_at(overfetched(factor, shape.top_k, shape.experts)) for name, factor in BUDGETS.items()},
        "exact_set": lambda comparison: comparison.hit_TK.all(dim=1),
        "weight_covered": weight_covered,
        RANK_ALIGNMENT: lambda comparison: comparison.forecast.ids_TK == comparison.truth.ids_TK,
        "cosine": lambda comparison: comparison.cosine_T,
    }


class ScoreMean(TokenMean):
    """Mean of a routing score, one per target layer; see :class:`TokenMean`."""

    def update(self, layer: int, score_TR: Tensor) -> None:
        """Add a batch at one target layer (0 = the first target layer)."""
        self.add(score_TR, layer)


class RoutingMeans:
    """Means over tokens of all routing scores, by name and target layer."""

    def __init__(self, shape: ModelShape, layers: int, device: torch.device | str = "cpu") -> None:
        self._scores = routing_scores(shape)
        widths = {name: shape.top_k if name == RANK_ALIGNMENT else 1 for name in self._scores}
        self._means = {name: ScoreMean(layers, width).to(device) for name, width in widths.items()}

    def update(self, layer: int, comparison: RoutingComparison) -> None:
        """Add a batch at one target layer (0 = the first target layer)."""
        for name, score in self._scores.items():
            score_TR = score(comparison)
            if score_TR is not None:
                self._means[name].update(layer, score_TR)

    def per_layer(self) -> dict[str, Tensor]:
        """Return the means by name: [L], or [L, K] for `rank_alignment`; NaN without tokens."""
        means = {name: mean.means().float() for name, mean in self._means.items()}
        return {name: mean_LR if name == RANK_ALIGNMENT else mean_LR[:, 0] for name, mean_LR in means.items()}

    def tokens(self) -> int:
        """Return the number of scored tokens."""
        return int(self._means["recall_at_k"].count_L[0])


def chance_levels(shape: ModelShape) -> dict[str, float]:
    """Return the expected scores of K random experts, by metric."""
    levels = {name: overfetched(factor, shape.top_k, shape.experts) / shape.experts for name, factor in BUDGETS.items()}
    return levels | {
        "exact_set": 1.0 / math.comb(shape.experts, shape.top_k),
        "weight_covered": shape.top_k / shape.experts,
        "rank_alignment": 1.0 / shape.experts,
    }
