"""Prefetch policies: which of a forecast's experts are requested, and in which order.

T tokens, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from expertcast.predictors.base import FARTHEST, Forecast, LogOdds
from expertcast.predictors.view import overfetched
from expertcast.runtime.policies.base import CacheShape, Policy, PolicyConfig, PolicyRegistry, number, one_of


class Wanted:
    """A forecast with what a selection may look at; `probability_TE` costs a softmax and, on a device, a copy."""

    def __init__(self, forecast: Forecast, ids: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]) -> None:
        self.forecast = forecast
        self.ids = ids
        """The forecast's own experts, T rows of K, on the host."""
        self.weights = weights

    @property
    def layer(self) -> int:
        """Target layer."""
        return self.forecast.layer

    @cached_property
    def probability_TE(self) -> Tensor:
        """Softmax of the forecast's logits, float32 on the host."""
        return self.forecast.logits_TE.float().softmax(dim=-1).cpu()


@dataclass(slots=True, kw_only=True)
class Transfer:
    """What a selection may know of the link and the cache when it chooses."""

    copy_s: float
    """Seconds that one expert's copy takes where nothing is said of it alone."""
    backlog_s: float
    """Seconds until the link would begin a copy that is asked for now."""
    left_s: float
    """Seconds until the target layer is expected to ask for its experts."""
    free: int
    """Slots that hold nothing."""
    resident: Callable[[int], bool]
    """Whether an expert of the target layer (0..E-1) has a slot."""
    victim_worth: Callable[[], float]
    """Probability that the expert which would be evicted next is used when its layer runs next; 0 for a free slot."""
    seconds_of: Callable[[int], float] | None = None
    """Seconds that the copy of an expert of the target layer takes, where they differ: parts of it are in memory."""

    def seconds(self, expert: int) -> float:
        """That the copy of an expert of the target layer takes."""
        return self.copy_s if self.seconds_of is None else self.seconds_of(expert)


class PrefetchPolicy(Policy):
    """Chooses among a forecast's experts. Those that are resident already are protected, not copied."""

    reads_transfer: ClassVar[bool] = False
    """Whether `transfer` is given to :meth:`experts`."""
    first: int | None = None
    """Number of experts with the highest logits that are all it reads of one token's forecast, in their order; None: it
    reads logits or weights."""

    @abstractmethod
    def experts(self, wanted: Wanted, transfer: Transfer | None) -> list[int]:
        """Distinct experts (0..E-1) of the target layer, the one to copy first in front."""

    def device_ids(self, forecast: Forecast) -> Tensor | None:
        """Experts [N] chosen by tensor operations alone, for the link whose decisions are made on the device: each
        token's first, each one's second ...; some may come twice. None: this policy cannot."""
        return None

    def see_routing(self, layer: int, ids: Sequence[int]) -> None:
        """What a layer really needed (distinct experts), after a forecast for it: calibration is learnt from this."""


def likeliest_first(chosen_TE: npt.NDArray[np.bool_], probability_TE: npt.NDArray[np.floating]) -> list[int]:
    """Experts that are chosen for any token, by falling probability summed over tokens; equal ones by number."""
    experts = np.flatnonzero(chosen_TE.any(axis=0))
    order = np.argsort(-probability_TE.sum(axis=0)[experts], kind="stable")
    return [int(expert) for expert in experts[order]]


class NoPrefetch(PrefetchPolicy):
    """Asks for nothing."""

    name = "none"

    def experts(self, wanted: Wanted, transfer: Transfer | None) -> list[int]:
        return []


MOST_OVERFETCH = 65_536


@dataclass(frozen=True, kw_only=True)
class TopKConfig(PolicyConfig):
    """How many experts are asked for."""

    overfetch: float = number(1.0, f"[1, {MOST_OVERFETCH}]")
    """Experts asked for per token, as a multiple of K, rounded up (1.0: the forecast's own only)."""


class TopK(PrefetchPolicy):
    """The forecast's own ids by falling weight, then those within any token's budget by falling probability."""

    name = "top_k"
    config_class = TopKConfig

    def __init__(self, config: TopKConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self.first = self._budget = overfetched(config.overfetch, shape.top_k, shape.experts)

    def experts(self, wanted: Wanted, transfer: Transfer | None) -> list[int]:
        experts = by_weight(wanted.ids, wanted.weights)
        if self._budget > self.shape.top_k:
            experts += self._further(wanted, set(experts))
        return experts

    def device_ids(self, forecast: Forecast) -> Tensor:
        ids_N = forecast.topk_ids_TK.t().reshape(-1)
        if self._budget <= self.shape.top_k:
            return ids_N
        further_N = forecast.logits_TE.topk(self._budget, dim=-1).indices.t().reshape(-1)
        return torch.cat([ids_N, further_N])

    def _further(self, wanted: Wanted, chosen: set[int]) -> list[int]:
        probability_E = wanted.probability_TE.sum(dim=0).tolist()
        ranked = wanted.probability_TE.topk(self._budget, dim=-1).indices.reshape(-1).tolist()
        return sorted(set(ranked) - chosen, key=lambda expert: -probability_E[expert])


def by_weight(ids: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]) -> list[int]:
    """Experts by falling weight, summed over tokens."""
    weight: dict[int, float] = {}
    for row_ids, row_weights in zip(ids, weights, strict=True):
        for expert, value in zip(row_ids, row_weights, strict=True):
            weight[expert] = weight.get(expert, 0.0) + value
    return sorted(weight, key=weight.__getitem__, reverse=True)


def by_rank(ids: Sequence[Sequence[int]]) -> list[int]:
    """Return the experts of T rows, those in front that are early in many rows."""
    if len(ids) == 1:
        return list(ids[0])
    score: Counter[int] = Counter()
    for row in ids:
        score.update(dict(zip(row, range(len(row), 0, -1), strict=True)))
    return [expert for expert, _ in score.most_common()]


_BINS_PER_OCTAVE = 32
_LOWEST, _HIGHEST = -22, 10
"""Octaves between which relative scores are told apart."""
_TINY = 1e-30


@dataclass(frozen=True, kw_only=True)
class PercentileConfig(PolicyConfig):
    """The percentile, and the scores that it is taken over."""

    percentile: float = number(80.0, "(0, 100)")
    """Scores above this percentile are loaded."""
    over: str = one_of("history", "token", "mass")
    """Scores it is taken over: those of all layers and tokens so far (history), or one token's E scores in one layer,
    which always gives the same count (token). With `mass` it is the share of a token's probability to cover, in %."""


class Percentile(PrefetchPolicy):
    """Experts at or above a percentile of softmax scores, for any token, the likeliest first.

    Over the history scores are relative to that of the same forecast's K-th expert, so that 1 is the boundary in every
    layer and for every token. By plain scores a sharp router's last experts count less than a flat one's fortieth.
    (Reference model, 12.8 experts per token in the mean: recall .99 so, .92 with plain scores.)
    """

    name = "percentile"
    config_class = PercentileConfig
    config: PercentileConfig

    def __init__(self, config: PercentileConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._share = config.percentile / 100
        self._history = RunningQuantile()
        # as many as lie at or above the linearly interpolated quantile of E distinct scores
        self._count = shape.experts - math.ceil(round(self._share * (shape.experts - 1), 9))

    def experts(self, wanted: Wanted, transfer: Transfer | None) -> list[int]:
        probability_TE = wanted.probability_TE.numpy()
        if self.config.over == "history":
            chosen_TE = self._above_history(probability_TE)
        else:
            chosen_TE = self._of_each_token(probability_TE)
        return likeliest_first(chosen_TE, probability_TE)

    def device_ids(self, forecast: Forecast) -> Tensor | None:
        if self.config.over != "token":
            return None
        return forecast.logits_TE.topk(self._count, dim=-1).indices.t().reshape(-1)

    def _above_history(self, probability_TE: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
        kth = self.shape.experts - self.shape.top_k
        boundary_T1 = np.partition(probability_TE, kth, axis=1)[:, kth : kth + 1]
        bins_TE = self._history.bins(probability_TE / boundary_T1.clip(min=_TINY))
        self._history.add(bins_TE)
        above_TE: npt.NDArray[np.bool_] = bins_TE >= self._history.bin_at(self._share)
        return above_TE

    def _of_each_token(self, probability_TE: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
        order_TE = np.argsort(-probability_TE, axis=1, kind="stable")
        if self.config.over == "token":
            taken_TE = np.broadcast_to(np.arange(self.shape.experts) < self._count, order_TE.shape)
        else:
            ranked_TE = np.take_along_axis(probability_TE, order_TE, axis=1)
            taken_TE = ranked_TE.cumsum(axis=1) - ranked_TE < self._share
        chosen_TE = np.zeros(order_TE.shape, dtype=bool)
        np.put_along_axis(chosen_TE, order_TE, taken_TE, axis=1)
        return chosen_TE


class RunningQuantile:
    """Quantiles of all scores so far, to 2.2% of the score (1/32 octave).

    A histogram over the scores' logarithm: adding a score is O(1), a quantile one sum over its 1024 bins.
    """

    def __init__(self) -> None:
        self._counts = np.zeros((_HIGHEST - _LOWEST) * _BINS_PER_OCTAVE, dtype=np.int64)

    def bins(self, scores: npt.NDArray[np.floating]) -> npt.NDArray[np.int64]:
        """Bin of each score (above 0; others count as the smallest)."""
        with np.errstate(divide="ignore"):
            octaves = np.log2(scores).clip(_LOWEST, _HIGHEST)
        bins = np.floor((octaves - _LOWEST) * _BINS_PER_OCTAVE).astype(np.int64)
        clipped: npt.NDArray[np.int64] = bins.clip(0, len(self._counts) - 1)
        return clipped

    def add(self, bins: npt.NDArray[np.int64]) -> None:
        """Count scores, each given by its bin."""
        self._counts += np.bincount(bins.ravel(), minlength=len(self._counts))

    def bin_at(self, share: float) -> int:
        """Bin of the smallest score at or above the quantile (0..1, linearly interpolated) of the scores so far."""
        below = self._counts.cumsum()
        rank = math.ceil(round(share * (int(below[-1]) - 1), 9))
        return int(np.searchsorted(below, rank, side="right"))


Array = npt.NDArray[np.float64]

_MEMORY = 0.999
"""What is kept, from one layer to the next, of the weight of earlier outcomes."""
_PRIOR = 1.0
"""Weight of the start (slope 1, offset 0), in units of Fisher information."""
_LEAST = 1e-12


class Calibration:
    """Turns forecast logits into the probability that a step needs an expert.

    A token's log-odds are slope * margin + offset, where the margin is how far the expert's logit lies above the
    boundary, halfway between the forecast's K-th and K+1-th; a step needs what any of its tokens needs, taken as
    independent. Slope and offset, one pair for the whole model, start as 1 and 0 and follow each layer's outcome by one
    Newton step of logistic regression: it costs one pass over T x E and keeps no history.

    Forecasts of a predictor that was calibrated on validation bring a reading of their own for each layer pair: the
    margin is then its log-odds, and what is learnt here is how the text at hand differs from the validation's.

    On the reference model the margin tells more than the log-odds whose probabilities sum to K (Brier score .0082
    against .0113 after calibration, a distilled estimator's forecasts) and costs no search for their sum.
    """

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self.fit = np.array([1.0, 0.0])
        """Slope and offset: log-odds per unit of margin, and of an expert at the boundary."""
        self._information = np.zeros((2, 2))
        self._margins: dict[int, Array] = {}
        """[T, E] of the forecasts whose outcome is not known yet, by layer."""

    def probability(self, layer: int, logits_TE: Tensor, log_odds: LogOdds | None = None) -> Array:
        """[E] probability that at least one of the tokens needs the expert; remembered until `learn` says what came.

        Args:
            layer: the forecast's.
            logits_TE: its logits.
            log_odds: how its predictor's calibration reads them.
        """
        margin_TE = _margin(logits_TE.float().cpu().numpy().astype(np.float64), self._top_k)
        if log_odds is not None:
            root_TE = np.sign(margin_TE) * np.sqrt(np.abs(margin_TE))
            margin_TE = log_odds.slope * margin_TE + log_odds.root * root_TE + log_odds.offset
            margin_TE = margin_TE.clip(-FARTHEST, FARTHEST)
        self._margins[layer] = margin_TE
        return _any(self._of_tokens(margin_TE))

    def learn(self, layer: int, ids: Sequence[int]) -> None:
        """The layer needed these experts (distinct); nothing is learnt without a forecast for it."""
        margin_TE = self._margins.pop(layer, None)
        if margin_TE is None:
            return
        p_TE = self._of_tokens(margin_TE)
        p_E = _any(p_TE)
        needed_E = np.zeros_like(p_E)
        needed_E[list(ids)] = 1.0
        # d p_E = (1 - p_E) * sum over tokens of p_TE * (margin, 1) per unit of (slope, offset)
        step_E2 = np.stack([(p_TE * margin_TE).sum(axis=0), p_TE.sum(axis=0)], axis=1) / p_E[:, None]
        gradient = (p_E - needed_E) @ step_E2
        self._information *= _MEMORY
        self._information += (step_E2 * (p_E * (1 - p_E))[:, None]).T @ step_E2
        self.fit -= np.linalg.solve(self._information + _PRIOR * np.eye(2), gradient)

    def _of_tokens(self, margin_TE: Array) -> Array:
        log_odds_TE = (self.fit[0] * margin_TE + self.fit[1]).clip(-30.0, 30.0)
        probability_TE: Array = 1 / (1 + np.exp(-log_odds_TE))
        return probability_TE


def _margin(logits_TE: Array, top_k: int) -> Array:
    experts = logits_TE.shape[1]
    if top_k >= experts:
        return np.full_like(logits_TE, FARTHEST)
    ranked_TE = np.partition(logits_TE, (experts - top_k - 1, experts - top_k), axis=1)
    boundary_T1 = ranked_TE[:, experts - top_k - 1 : experts - top_k + 1].mean(axis=1, keepdims=True)
    margin_TE: Array = (logits_TE - boundary_T1).clip(-FARTHEST, FARTHEST)
    return margin_TE


def _any(p_TE: Array) -> Array:
    """[E]; exact for one token."""
    p_E: Array = p_TE[0] if len(p_TE) == 1 else 1 - np.prod(1 - p_TE, axis=0)
    return p_E.clip(_LEAST, 1.0)


@dataclass(frozen=True, kw_only=True)
class ThresholdConfig(PolicyConfig):
    """The threshold, and the probability that is compared with it."""

    above: float = number(0.4, "[0, 1)")
    """Experts with a higher probability than this are loaded (for softmax, .04 was best on the reference model)."""
    of: str = one_of("use", "softmax")
    """Probability that the step uses the expert, calibrated while the model runs (use), or the forecast's softmax with
    any token, which depends on E and K (softmax)."""


class Calibrated(PrefetchPolicy):
    """Base of policies that go by the calibrated probability that a step uses an expert."""

    reads_transfer = True  # the flow calls see_routing only beside it

    def __init__(self, config: PolicyConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._calibration = Calibration(shape.top_k)

    def probability(self, wanted: Wanted) -> Array:
        """[E] probability that the step uses an expert."""
        return self._calibration.probability(wanted.layer, wanted.forecast.logits_TE, wanted.forecast.log_odds)

    def see_routing(self, layer: int, ids: Sequence[int]) -> None:
        self._calibration.learn(layer, ids)


class Threshold(Calibrated):
    """Experts above a probability, the likeliest first.

    Defaults are where precision and recall balance (highest F1) on the reference model: .83 and .91 with forecasts of
    quasi-hidden states and of a distilled estimator; by softmax the best are .74 and .77, for a sharp router leaves
    little to the experts that it takes last.
    """

    name = "threshold"
    config_class = ThresholdConfig
    config: ThresholdConfig

    def experts(self, wanted: Wanted, transfer: Transfer | None) -> list[int]:
        if self.config.of == "softmax":
            probability_TE = wanted.probability_TE.numpy()
        else:
            probability_TE = self.probability(wanted)[None]
        return likeliest_first(probability_TE > self.config.above, probability_TE)


@dataclass(frozen=True, kw_only=True)
class ValueConfig(PolicyConfig):
    """What is never worth a copy, and what an eviction costs."""

    least: float = number(0.02, "(0, 1)")
    """Experts that are less likely to be used than this are never loaded, whatever room there is."""
    eviction: str = one_of("wrong", "always")
    """When the evicted expert is charged for: for a wrong one only, as a miss would have evicted as well (wrong), or
    for every copy (always)."""


class Value(Calibrated):
    """Loads the likeliest experts first, for as long as the next one's copy is worth it.

    A copy of `copy_s` seconds that begins after a backlog of b seconds, for a layer that asks in `left_s`, saves
    copy_s - max(0, b + copy_s - left_s) seconds of waiting (at least 0: a copy that has not begun by then is no worse
    than a miss, which overtakes it) if the expert is used. All copies move equally many bytes, so seconds per copy rank
    them as seconds per byte do. Against the expected saving stand

    - the expert that is evicted: the probability that it is used times copy_s where the copy is wrong, nothing for a
      free slot;
    - a copy that is wrong and still under way when the layer asks: the link cannot be taken from it, and it holds up
      whatever is missed next by what is left of it. This is charged in full: a copy longer than a layer goes on into
      the layers after it, whose misses nobody has forecast yet. A copy that is only queued is dropped.

    On a link too slow for the time that is left nothing but near certainties are worth it, and nothing at all where
    `left_s` is over before a copy could begin. What is not counted: with forecasts several layers ahead, a copy may
    also hold up the layers in between; and the use of an expert after this step.

    Where parts of experts are kept in memory, each has seconds of its own: one that only has to be decoded is worth it
    where one that must be read is not.

    The forecast's own experts that are resident are named as well, so that they are protected.
    """

    name = "value"
    config_class = ValueConfig
    config: ValueConfig

    def experts(self, wanted: Wanted, transfer: Transfer | None) -> list[int]:
        assert transfer is not None, "reads_transfer asks for it"
        p_E = self.probability(wanted)
        own = {expert for row in wanted.ids for expert in row}
        named = [expert for expert in own if transfer.resident(expert)]
        named += self._worth_loading(p_E, transfer)
        return sorted(named, key=lambda expert: (-p_E[expert], expert))

    def _worth_loading(self, p_E: Array, transfer: Transfer) -> list[int]:
        if transfer.left_s <= transfer.backlog_s:
            return []
        likely = [int(expert) for expert in np.argsort(-p_E, kind="stable") if p_E[expert] >= self.config.least]
        absent = [expert for expert in likely if not transfer.resident(expert)]
        worth = transfer.victim_worth() if len(absent) > transfer.free else 0.0
        chosen: list[int] = []
        backlog_s = transfer.backlog_s
        for expert in absent:
            p, copy_s = float(p_E[expert]), transfer.seconds(expert)
            lost_s = worth * transfer.copy_s if len(chosen) >= transfer.free else 0.0
            if self.config.eviction == "wrong":
                lost_s *= 1.0 - p
            if saved_s(p, backlog_s, copy_s, transfer.left_s) > lost_s:
                chosen.append(expert)
                backlog_s += copy_s
            elif transfer.seconds_of is None:
                break  # probabilities fall and the backlog grows: none after it is worth it
        return chosen


def saved_s(p: float, backlog_s: float, copy_s: float, left_s: float) -> float:
    """Seconds of waiting that a copy is expected to save.

    Args:
        p: probability that the expert is used.
        backlog_s: until the copy would begin.
        copy_s: that it takes.
        left_s: until its layer asks.
    """
    if backlog_s >= left_s:
        return 0.0
    late_s = max(0.0, backlog_s + copy_s - left_s)
    return p * (copy_s - late_s) - (1.0 - p) * late_s


PREFETCH: PolicyRegistry[PrefetchPolicy] = PolicyRegistry(
    "prefetch policy", NoPrefetch, TopK, Percentile, Threshold, Value
)
