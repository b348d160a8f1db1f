"""Metrics of forecasts and of runs of a model, for training, evaluation and quality.

T tokens, K experts per token, E routed experts per layer, L target layers. States are plain sums and
counts, so that parts of the data add up to the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torchmetrics import Metric

from expertcast.predictors.base import Forecast, LogOdds, RouterState, inclusion_probability
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import ModelShape, overfetched

# Comparison of a forecast with the true routing, made once per layer for all metrics; M misses.


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

    @property
    def hit_TK(self) -> Tensor:
        """Whether each true expert is among the K forecast ones."""
        return self.place_TK < self.place_TK.shape[1]

    @property
    def aligned_TK(self) -> Tensor:
        """Whether the forecast expert of each rank is the true one."""
        return self.forecast.ids_TK == self.truth.ids_TK


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


class ExpertRecall(Metric):  # type: ignore[misc]
    """How often the router used each expert, and how often it was then among the K forecast ones.

    An expert's recall is found / used; summed over a layer's experts first, the same quotient is the layer's recall@k.
    """

    full_state_update = False
    used_LE: Tensor
    found_LE: Tensor

    def __init__(self, layers: int, experts: int) -> None:
        """Count for so many target layers of `experts` experts."""
        super().__init__(sync_on_compute=False)
        for name in ("used_LE", "found_LE"):
            self.add_state(name, default=torch.zeros(layers, experts, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, layer: int, comparison: RoutingComparison) -> None:
        """Add the tokens of one batch at one target layer (0 = the first target layer)."""
        ids_TK, experts = comparison.truth.ids_TK, self.used_LE.shape[1]
        self.used_LE[layer] += torch.bincount(ids_TK.flatten(), minlength=experts)
        self.found_LE[layer] += torch.bincount(ids_TK[comparison.hit_TK], minlength=experts)

    def compute(self) -> dict[str, Tensor]:
        """`used` and `found` [L, E]: tokens that needed the expert, and those of them whose forecast named it."""
        return {"used": self.used_LE, "found": self.found_LE}


# Means over tokens: L rows (such as layers), R numbers per token, V vocabulary. The metrics of a run of a model take
# log probabilities, which do not underflow.


class TokenMean(Metric):  # type: ignore[misc]
    """Mean scores of tokens, kept as sums in fp64 and counts: ranks, and parts of the data, add up to the whole."""

    full_state_update = False
    total_LR: Tensor
    count_L: Tensor

    def __init__(self, rows: int = 1, width: int = 1) -> None:
        """Keep `rows` means apart, such as one per layer, each of `width` numbers."""
        super().__init__(sync_on_compute=False)  # every rank scores the whole split
        self.add_state("total_LR", default=torch.zeros(rows, width, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count_L", default=torch.zeros(rows, dtype=torch.long), dist_reduce_fx="sum")

    def add(self, score_TR: Tensor, row: int = 0) -> None:
        """Add the scores of some tokens, [T] or [T, R], to one row."""
        self.total_LR[row] += score_TR.reshape(len(score_TR), -1).sum(dim=0, dtype=torch.float64)
        self.count_L[row] += len(score_TR)

    def means(self) -> Tensor:
        """The means [L, R] in fp64, NaN where nothing was scored."""
        return self.total_LR / self.count_L[:, None]

    def compute(self) -> Tensor:
        """The means; torchmetrics makes a single one a scalar."""
        return self.means()


class Recall(TokenMean):
    """Share of a token's true experts that are among its forecast ones, one mean per row."""

    def update(self, row: int, forecast_ids_TK: Tensor, true_ids_TK: Tensor) -> None:
        """Add some tokens to one row."""
        found_TK = (true_ids_TK.unsqueeze(-1) == forecast_ids_TK.unsqueeze(-2)).any(dim=-1)
        self.add(found_TK.float().mean(dim=-1), row)

    def per_row(self) -> Tensor:
        """The means [L], also of a single row."""
        return self.means()[:, 0]


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


# Calibration error over (token, expert) pairs: B display bins, F fine bins, G groups of equal mass.

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

    def __init__(self, layers: int, *, calibrated: bool = True, bins: int = BINS) -> None:
        """
        Args:
            layers: target layers.
            calibrated: score the probabilities of the predictor's calibration; else those of its logits as they stand.
            bins: for display.
        """
        super().__init__(sync_on_compute=False)
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


# Scores of routing forecasts, one mean per target layer; R ranks or 1.

BUDGETS = {"recall_at_k": 1.0, "recall_at_1.5k": 1.5, "recall_at_2k": 2.0}


def budget(factor: float, shape: ModelShape) -> int:
    """Experts fetched at an overfetch factor: what the runtime would ask for (:func:`overfetched`)."""
    return overfetched(factor, shape.top_k, shape.experts)


Score = Callable[[RoutingComparison], Tensor | None]
"""Score of each token of one layer, [T] or [T, R]; None where the predictor has nothing to score."""
RANK_ALIGNMENT = "rank_alignment"


def recall_at(size: int) -> Score:
    """Share of the true experts that are among the forecast's first `size` experts."""
    return lambda comparison: (comparison.place_TK < size).float().mean(dim=1)


def exact_set(comparison: RoutingComparison) -> Tensor:
    """Whether the K forecast experts are the true ones."""
    return comparison.hit_TK.all(dim=1)


def hard_match(comparison: RoutingComparison) -> Tensor:
    """Whether they are the true ones in the same order by weight."""
    return comparison.aligned_TK.all(dim=1)


def soft_match(comparison: RoutingComparison) -> Tensor:
    """Whether they are the true ones in another order."""
    return exact_set(comparison) & ~hard_match(comparison)


def mismatch(comparison: RoutingComparison) -> Tensor:
    """Whether at least one expert is wrong."""
    return ~exact_set(comparison)


def weight_covered(comparison: RoutingComparison) -> Tensor:
    """Share of the true combine weight that falls on the K forecast experts."""
    weights_TK = comparison.truth.weights_TK
    return (weights_TK * comparison.hit_TK).sum(dim=1) / weights_TK.sum(dim=1).clamp_min(1e-20)


def rank_alignment(comparison: RoutingComparison) -> Tensor:
    """[T, K] per rank by weight: whether the forecast expert is the true one."""
    return comparison.aligned_TK


def cosine(comparison: RoutingComparison) -> Tensor | None:
    """Cosine between the predictor's input vector and the true router input s_{l+ahead}."""
    return comparison.cosine_T


def routing_scores(shape: ModelShape, windows: Windows) -> dict[str, Score]:
    """The scores of an evaluation by name: both forms of timely recall for each of the `windows`, and the others."""
    scores: dict[str, Score] = {name: recall_at(budget(factor, shape)) for name, factor in BUDGETS.items()}
    for score in (exact_set, hard_match, soft_match, mismatch, weight_covered, rank_alignment, cosine):
        scores[score.__name__] = score
    for name, copies in windows.items():
        scores[TIMELY + name] = timely_recall(copies)
        scores[TIMELY_BYTES + name] = timely_recall(copies, whole=False)
    return scores


class ScoreMean(TokenMean):
    """Mean of a routing score, one per target layer."""

    def update(self, layer: int, score_TR: Tensor) -> None:
        """Add the tokens of one batch at one target layer (0 = the first target layer)."""
        self.add(score_TR, layer)


class RoutingMeans:
    """Means over tokens of the routing scores, by name and target layer."""

    def __init__(self, shape: ModelShape, layers: int, windows: Windows, device: torch.device | str = "cpu") -> None:
        """Keep means for so many target layers; `windows` are those of timely recall."""
        self._scores = routing_scores(shape, windows)
        widths = {name: shape.top_k if name == RANK_ALIGNMENT else 1 for name in self._scores}
        self._means = {name: ScoreMean(layers, width).to(device) for name, width in widths.items()}

    def update(self, layer: int, comparison: RoutingComparison) -> None:
        """Add the tokens of one batch at one target layer (0 = the first target layer)."""
        for name, score in self._scores.items():
            score_TR = score(comparison)
            if score_TR is not None:
                self._means[name].update(layer, score_TR)

    def per_layer(self) -> dict[str, Tensor]:
        """Mean scores by name, [L], of `rank_alignment` [L, K]; NaN where nothing was scored."""
        means = {name: mean.means().float() for name, mean in self._means.items()}
        return {name: mean_LR if name == RANK_ALIGNMENT else mean_LR[:, 0] for name, mean_LR in means.items()}

    def tokens(self) -> int:
        """Tokens scored."""
        return int(self._means["recall_at_k"].count_L[0])


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


# Timely recall: the share of experts that arrive in time over a link, as a closed form.
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


def timely_recall(copies: float, *, whole: bool = True) -> Score:
    """Share of a token's true experts that a forecast has brought when their layer's router has run.

    Wrong experts among the forecast's take their time on the link too.

    Args:
        copies: made in the window.
        whole: count experts whose copy is finished; else a copy under way counts by the part that has arrived, which is
            the share of needed bytes.
    """

    def score(comparison: RoutingComparison) -> Tensor:
        arrived_TK = (copies + _ROUNDING - comparison.place_TK.float()).clamp(0, 1)
        if whole:
            arrived_TK = arrived_TK.floor()
        return (arrived_TK * comparison.hit_TK).mean(dim=1)

    return score
