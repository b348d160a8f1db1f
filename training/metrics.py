"""What forecasts and runs are scored by, each a torchmetrics Metric: for training, evaluation and quality alike."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional
from torchmetrics import Metric

from expertcast.predictors.base import Forecast, LogOdds, RouterState, inclusion_probability
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import ModelShape, overfetched

# A forecast beside what the router really did: the shared work under every metric, done once per layer.
#
# T tokens, K experts per token, E routed experts per layer, M misses.
# Everything is a fixed number of tensor operations; nothing loops over tokens.


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


# Recall of each expert for itself, as a torchmetrics metric over (token, expert) pairs.
#
# T tokens, K experts per token, E routed experts per layer, L target layers.
# States are plain counts, so that two ranks (or two halves of the data) add up to exactly the whole.


class ExpertRecall(Metric):  # type: ignore[misc]
    """How often the router used each expert, and how often it was then among the K forecast ones.

    An expert's recall is found / used; summed over a layer's experts first, the same quotient is the layer's recall@k.
    """

    full_state_update = False
    used_LE: Tensor
    found_LE: Tensor

    def __init__(self, layers: int, experts: int, **kwargs: Any) -> None:
        """
        Args:
            layers: target layers.
            experts: E.
            kwargs: torchmetrics' own.
        """
        super().__init__(**kwargs)
        for name in ("used_LE", "found_LE"):
            self.add_state(name, default=torch.zeros(layers, experts, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, layer: int, comparison: RoutingComparison) -> None:
        """Add the tokens of one batch at one target layer (0 = the first target layer)."""
        ids_TK, experts = comparison.truth.ids_TK, self.used_LE.shape[1]
        found_TK = comparison.place_TK < comparison.place_TK.shape[1]
        self.used_LE[layer] += torch.bincount(ids_TK.flatten(), minlength=experts)
        self.found_LE[layer] += torch.bincount(ids_TK[found_TK], minlength=experts)

    def compute(self) -> dict[str, Tensor]:
        """`used` and `found` [L, E]: tokens that needed the expert, and those of them whose forecast named it."""
        return {"used": self.used_LE, "found": self.found_LE}


# Means over tokens as torchmetrics metrics: recall, by which choices are made, and what a run of a model is scored by.
#
# T tokens, K experts per token, L rows (layers, or whatever is scored side by side), R numbers per token, V vocabulary.
# The metrics of a run take log probabilities, in which no probability is too small to be told from zero.


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


# Whether forecast probabilities mean what they say, as a torchmetrics metric over (token, expert) pairs.
#
# T tokens, E routed experts per layer, L target layers, B display bins, F fine bins, G groups of equal mass.
# States are plain sums, so that two ranks (or two halves of the data) add up to exactly the whole.

BINS = 10
"""Of equal width, for reliability diagrams."""
GROUPS = 15
"""Of equal mass, for the error."""
LIKELY = 0.05
"""Pairs above this probability are scored for themselves too: most pairs are experts that are rightly near 0."""
_FINE, _PER_NAT = 1024, 32
_LIKELY_AT = _FINE // 2
"""The fine bin that begins at `LIKELY`; a bin is 1/32 nat of log-odds wide."""


class Calibration(Metric):  # type: ignore[misc]
    """How often experts given a probability p of being in the true top-K are there.

    The expected calibration error is the mean over pairs of |mean p - share that is there| of their group, in 15 groups
    of equally many pairs by rising p. Groups are cut at 1/32 nat of log-odds, so that sums are enough.
    """

    full_state_update = False
    count_LB: Tensor
    confidence_LB: Tensor
    hits_LB: Tensor
    count_LF: Tensor
    confidence_LF: Tensor
    hits_LF: Tensor

    def __init__(self, layers: int, *, calibrated: bool = True, bins: int = BINS, **kwargs: Any) -> None:
        """
        Args:
            layers: target layers.
            calibrated: score the probabilities of the predictor's calibration; else those of its logits as they stand.
            bins: for display.
            kwargs: torchmetrics' own.
        """
        super().__init__(**kwargs)
        self.calibrated, self.bins = calibrated, bins
        for name in ("count", "confidence", "hits"):
            for suffix, size in (("LB", bins), ("LF", _FINE)):
                zeros = torch.zeros(layers, size, dtype=torch.float64)
                self.add_state(f"{name}_{suffix}", default=zeros, dist_reduce_fx="sum")

    def update(self, layer: int, comparison: RoutingComparison) -> None:
        """Add the tokens of one batch at one target layer (0 = the first target layer)."""
        p_N = membership_probability(comparison, calibrated=self.calibrated).flatten()
        hit_N = comparison.truth.member_TE.flatten()
        wide_N = (p_N * self.bins).long().clamp_(max=self.bins - 1)
        odds_N = torch.logit(p_N, eps=1e-9) - math.log(LIKELY / (1 - LIKELY))
        fine_N = (odds_N * _PER_NAT).floor_().long().add_(_LIKELY_AT).clamp_(0, _FINE - 1)
        weight_N = p_N.double()
        for suffix, bin_N, size in (("LB", wide_N, self.bins), ("LF", fine_N, _FINE)):
            misses, hits = torch.bincount(2 * bin_N + hit_N, minlength=2 * size).view(-1, 2).unbind(1)
            getattr(self, f"count_{suffix}")[layer] += misses + hits
            getattr(self, f"hits_{suffix}")[layer] += hits
            getattr(self, f"confidence_{suffix}")[layer] += torch.bincount(bin_N, weight_N, size)

    def compute(self) -> dict[str, Tensor]:
        """`ece` and `ece_likely` (all layers pooled; the latter of pairs with p > .05, NaN without any), `ece_L`, and
        per display bin `count_B`, `confidence_B`, `frequency_B` (NaN if empty)."""
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
    """The error over `groups` of equally many pairs, as nearly as whole bins allow; NaN without pairs.

    Args:
        count_F: pairs of each bin, by rising probability.
        confidence_F: the sum of their probabilities.
        hits_F: how many of them are there.
        groups: how many.
    """
    total = count_F.sum()
    if not total:
        return total.new_tensor(torch.nan)
    middle_F = (count_F.cumsum(0) - count_F / 2) / total
    group_F = (middle_F * groups).long().clamp_(0, groups - 1)
    gap_F = confidence_F - hits_F
    return torch.zeros(groups).to(gap_F).index_add_(0, group_F, gap_F).abs().sum() / total


# torchmetrics metrics of routing forecasts, one value per target layer.
#
# T tokens, K experts per token, E routed experts per layer, L target layers, R ranks or 1.
# States are plain sums, so that two ranks (or two halves of the data) add up to exactly the whole. Sources:
# rows B6 (recall, cosine), B7 (rank alignment), A20 (budgets) and C2 (hard and soft match) of the definitions.

BUDGETS = {"recall_at_k": 1.0, "recall_at_1.5k": 1.5, "recall_at_2k": 2.0}


def budget(factor: float, shape: ModelShape) -> int:
    """Experts fetched at an overfetch factor: what the runtime would ask for (:func:`overfetched`)."""
    return overfetched(factor, shape.top_k, shape.experts)


class PerLayerMetric(TokenMean, ABC):
    """Mean over tokens of some score, kept per target layer; a subclass only says what the score is."""

    per_rank: ClassVar[bool] = False
    """Whether a token's score is one number per rank."""

    def update(self, layer: int, comparison: RoutingComparison) -> None:
        """Add the tokens of one batch at one target layer (0 = the first target layer)."""
        score_TR = self.score(comparison)
        if score_TR is not None:
            self.add(score_TR, layer)

    def compute(self) -> Tensor:
        """Mean score per layer: [L], or [L, R] for a score per rank; NaN where nothing was scored.

        torchmetrics turns a result of one element into a scalar: :meth:`per_layer` keeps the shape.
        """
        mean_LR = super().compute().float()
        return mean_LR if self.per_rank else mean_LR[:, 0]

    def per_layer(self) -> Tensor:
        """What :meth:`compute` gives, [L] or [L, R] also for one layer."""
        result: Tensor = self.compute()
        return result.reshape(self.total_LR.shape if self.per_rank else self.count_L.shape)

    @abstractmethod
    def score(self, comparison: RoutingComparison) -> Tensor | None:
        """Score of each token, [T] or [T, R]; None where the predictor has nothing to score."""


class RecallAtBudget(PerLayerMetric):
    """|candidates and true experts| / K, with the forecast's first `budget` experts as candidates (B6, A20)."""

    def __init__(self, layers: int, budget: int, **kwargs: Any) -> None:
        super().__init__(layers, **kwargs)
        self.budget = budget

    def score(self, comparison: RoutingComparison) -> Tensor:
        return (comparison.place_TK < self.budget).float().mean(dim=1)


class Match(PerLayerMetric):
    """Share of tokens whose K forecast experts match the true ones in a certain way (C2).

    `exact_set`: the same experts; `hard_match`: in the same order by weight; `soft_match`: in another order;
    `mismatch`: at least one wrong expert.
    """

    KINDS = ("exact_set", "hard_match", "soft_match", "mismatch")

    def __init__(self, layers: int, kind: str, **kwargs: Any) -> None:
        super().__init__(layers, **kwargs)
        self.kind = kind

    def score(self, comparison: RoutingComparison) -> Tensor:
        same_set_T = (comparison.place_TK < comparison.place_TK.shape[1]).all(dim=1)
        same_order_T = (comparison.forecast.ids_TK == comparison.truth.ids_TK).all(dim=1)
        matches_T = (same_set_T, same_order_T, same_set_T & ~same_order_T, ~same_set_T)
        return matches_T[self.KINDS.index(self.kind)].float()


class WeightCovered(PerLayerMetric):
    """Share of the true combine weight that falls on the K forecast experts."""

    def score(self, comparison: RoutingComparison) -> Tensor:
        weights_TK, top_k = comparison.truth.weights_TK, comparison.place_TK.shape[1]
        covered_T = (weights_TK * (comparison.place_TK < top_k)).sum(dim=1)
        return covered_T / weights_TK.sum(dim=1).clamp_min(1e-20)


class RankAlignment(PerLayerMetric):
    """Per rank r by weight: P[forecast expert at rank r is the true expert at rank r] (B7, Fig. 5)."""

    per_rank = True

    def __init__(self, layers: int, top_k: int, **kwargs: Any) -> None:
        super().__init__(layers, width=top_k, **kwargs)

    def score(self, comparison: RoutingComparison) -> Tensor:
        return (comparison.forecast.ids_TK == comparison.truth.ids_TK).float()


class InputCosine(PerLayerMetric):
    """Mean cosine between the predictor's input vector and the true router input s_{l+ahead} (B6)."""

    def score(self, comparison: RoutingComparison) -> Tensor | None:
        return comparison.cosine_T


def routing_metrics(shape: ModelShape, layers: int, **kwargs: Any) -> dict[str, PerLayerMetric]:
    """The metrics of an evaluation of so many target layers by name, fresh; `kwargs` are torchmetrics' own."""
    metrics: dict[str, PerLayerMetric] = {
        name: RecallAtBudget(layers, budget(factor, shape), **kwargs) for name, factor in BUDGETS.items()
    }
    metrics |= {kind: Match(layers, kind, **kwargs) for kind in Match.KINDS}
    metrics["weight_covered"] = WeightCovered(layers, **kwargs)
    metrics["rank_alignment"] = RankAlignment(layers, shape.top_k, **kwargs)
    metrics["cosine"] = InputCosine(layers, **kwargs)
    return metrics


def chance_levels(shape: ModelShape) -> dict[str, float]:
    """What forecasting K experts at random scores, by metric name."""
    exact = 1.0 / math.comb(shape.experts, shape.top_k)
    hard = exact / math.factorial(shape.top_k)
    levels = {name: budget(factor, shape) / shape.experts for name, factor in BUDGETS.items()}
    return levels | {
        "exact_set": exact,
        "hard_match": hard,
        "soft_match": exact - hard,
        "mismatch": 1.0 - exact,
        "weight_covered": shape.top_k / shape.experts,
        "rank_alignment": 1.0 / shape.experts,
    }


# Timely recall: what a forecast is worth on a link, as a closed form over its ranks.
#
# T tokens, K experts per token.
#
# A decode step without a cache: when layer l's router has run, the K forecast experts of layer l + 1 are copied one
# after another, the heaviest first, behind whatever layer l itself still waits for. Layer l waits for the same copies
# before it computes, so the link is free for the forecast for one layer's computation, whatever came before. In that
# window (layer time - the forecast's own time) / (time of a copy) copies are made; the simulator's link counts the same
# (`tests/runtime/simulation/test_timely.py`).

RATIOS = (1.0, 2.0, 5.0)
"""Copies of a token's K experts over the computation of a layer, where nothing is said of the link."""
TIMELY, TIMELY_BYTES = "timely@", "timely_bytes@"
_ROUNDING = 1e-9

Windows = Mapping[str, float]
"""By name, how many copies are made between a forecast and its layer."""


def copies_in_time(layer_s: float, copy_s: float, forecast_s: float = 0.0) -> float:
    """Copies made between a forecast and its layer, the last one in part.

    Args:
        layer_s: seconds that a layer computes.
        copy_s: seconds that one expert's copy takes.
        forecast_s: seconds that the forecast itself takes of these.

    Raises:
        ExpertcastError: a time that is not above 0, or a negative one of the forecast.
    """
    if not (layer_s > 0 and copy_s > 0 and forecast_s >= 0):
        raise ExpertcastError(
            f"layer time {layer_s:g} s, copy {copy_s:g} s, forecast {forecast_s:g} s: give seconds above 0"
        )
    return max(0.0, layer_s - forecast_s) / copy_s


def ratio_windows(top_k: int, ratios: Sequence[float] = RATIOS, forecast_share: float = 0.0) -> dict[str, float]:
    """Windows by how many times as long as a layer's computation the copies of a token's K experts take.

    Args:
        top_k: K.
        ratios: those times.
        forecast_share: the forecast's own time as a share of the layer's.
    """
    return {f"R{ratio:g}": copies_in_time(1.0, ratio / top_k, forecast_share) for ratio in ratios}


class TimelyRecall(PerLayerMetric):
    """Share of a token's true experts that a forecast has brought when their layer's router has run.

    `whole` counts experts whose copy is finished; else a copy that is under way counts by the part that has arrived,
    which is the share of needed bytes. Wrong experts among the forecast's take their time on the link too.
    """

    def __init__(self, layers: int, copies: float, *, whole: bool = True, **kwargs: Any) -> None:
        super().__init__(layers, **kwargs)
        self.copies, self.whole = copies, whole

    def score(self, comparison: RoutingComparison) -> Tensor:
        place_TK = comparison.place_TK.float()
        arrived_TK = (self.copies + _ROUNDING - place_TK).clamp(0, 1)
        if self.whole:
            arrived_TK = arrived_TK.floor()
        return (arrived_TK * (comparison.place_TK < comparison.place_TK.shape[1])).mean(dim=1)


def timely_metrics(layers: int, windows: Windows, **kwargs: Any) -> dict[str, PerLayerMetric]:
    """Both forms of timely recall for each window, by name, fresh.

    Args:
        layers: target layers.
        windows: copies by name.
        kwargs: torchmetrics' own.
    """
    metrics: dict[str, PerLayerMetric] = {}
    for name, copies in windows.items():
        metrics[TIMELY + name] = TimelyRecall(layers, copies, **kwargs)
        metrics[TIMELY_BYTES + name] = TimelyRecall(layers, copies, whole=False, **kwargs)
    return metrics
