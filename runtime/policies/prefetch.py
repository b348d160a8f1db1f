"""Prefetch policies: the experts of a forecast to load, and their order.

T tokens, E routed experts per layer, K experts per token, N experts in all.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field
from torch import Tensor

from expertcast.predictors.base import FARTHEST, Forecast, LogOdds
from expertcast.predictors.view import overfetched
from expertcast.runtime.policies.base import CacheShape, Policy, PolicyConfig, PolicyRegistry


class Candidates:
    """A forecast whose ids and weights are on the host.

    Args:
        forecast: the forecast.
        ids: experts that it names [T][K].
        weights: their combine weights [T][K].
        to_host: copies a tensor to the host. On a GPU the engine's lets copies of experts go on meanwhile.
    """

    def __init__(
        self, forecast: Forecast, ids: Sequence[Sequence[int]], weights: Sequence[Sequence[float]],
        to_host: Callable[[Tensor], Tensor] = Tensor.cpu,
    ) -> None:  # fmt: skip
        self.forecast, self.ids, self.weights = forecast, ids, weights
        self._to_host = to_host

    @property
    def layer(self) -> int:
        """Target layer."""
        return self.forecast.layer

    @cached_property
    def logits_TE(self) -> Tensor:
        """Logits, float32 on the host. The first access costs a copy from the device."""
        return self._to_host(self.forecast.logits_TE.float())

    @cached_property
    def probability_TE(self) -> Tensor:
        """Softmax of the logits, float32 on the host."""
        return self.logits_TE.softmax(dim=-1)


@dataclass(slots=True, kw_only=True)
class LinkState:
    """State of the link and the cache at the time of a prefetch decision."""

    copy_s: float
    """Seconds to copy one expert."""
    backlog_s: float
    """Seconds until the link can start another copy."""
    deadline_s: float
    """Seconds until the target layer is expected to need its experts."""
    free: int
    """Number of empty slots."""
    resident: Callable[[int], bool]
    """Returns whether an expert of the target layer (0..E-1) is resident."""
    victim_worth: Callable[[], float]
    """Returns the probability that the next victim is used in the next run of its layer; 0 if a slot is empty."""
    seconds_of: Callable[[int], float] | None = None
    """Returns the seconds to load an expert of the target layer, where this differs between experts because parts of
    them are in memory."""

    def seconds(self, expert: int) -> float:
        """Return the seconds to load an expert of the target layer."""
        return self.copy_s if self.seconds_of is None else self.seconds_of(expert)


class PrefetchPolicy(Policy):
    """Base class of prefetch policies, which select experts of a forecast.

    Selected experts that are resident are protected from eviction; the others are loaded.
    """

    reads_link: ClassVar[bool] = False
    """Whether :meth:`experts` receives the state of the link."""
    first: int | None = None
    """For a forecast of one token: number of experts with the highest logits that the policy selects, in this order.
    None if the selection depends on logits or weights."""

    @abstractmethod
    def experts(self, candidates: Candidates, link: LinkState | None) -> list[int]:
        """Return distinct experts (0..E-1) of the target layer, in the order in which to load them."""

    def see_routing(self, layer: int, ids: Sequence[int]) -> None:
        """Learn from the distinct experts that a layer needed, after a forecast for this layer."""


def likeliest_first(chosen_TE: npt.NDArray[np.bool_], probability_TE: npt.NDArray[np.floating]) -> list[int]:
    """Return the experts chosen for any token, by falling sum of probabilities over tokens; ties by number."""
    experts = np.flatnonzero(chosen_TE.any(axis=0))
    order = np.argsort(-probability_TE.sum(axis=0)[experts], kind="stable")
    return [int(expert) for expert in experts[order]]


class NoPrefetch(PrefetchPolicy):
    """Loads nothing in advance."""

    name = "none"

    def experts(self, candidates: Candidates, link: LinkState | None) -> list[int]:
        return []


MAX_OVERFETCH = 65_536


@dataclass(frozen=True, kw_only=True)
class TopKConfig(PolicyConfig):
    """Options of :class:`TopK`."""

    overfetch: Annotated[float, Field(ge=1, le=MAX_OVERFETCH)] = 1.0
    """Number of experts per token, as a multiple of K, rounded up; 1.0: exactly the experts that the forecast names."""


class TopK(PrefetchPolicy):
    """Loads the likeliest experts of each token, a multiple of K.

    The K experts that the forecast names come first, by falling sum of weights over tokens. Further experts follow by
    falling sum of probabilities.

    Source: SpecMD, top-k prefetch with an overfetch factor.
    """

    name = "top_k"
    config_class = TopKConfig

    def __init__(self, config: TopKConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self.first = self._budget = overfetched(config.overfetch, shape.top_k, shape.experts)

    def experts(self, candidates: Candidates, link: LinkState | None) -> list[int]:
        experts = by_weight(candidates.ids, candidates.weights)
        if self._budget > self.shape.top_k:
            experts += self._further(candidates, set(experts))
        return experts

    def _further(self, candidates: Candidates, chosen: set[int]) -> list[int]:
        probability_E = candidates.probability_TE.sum(dim=0).tolist()
        ranked = candidates.probability_TE.topk(self._budget, dim=-1).indices.reshape(-1).tolist()
        return sorted(set(ranked) - chosen, key=lambda expert: -probability_E[expert])


def by_weight(ids: Sequence[Sequence[int]], weights: Sequence[Sequence[float]]) -> list[int]:
    """Return the experts by falling sum of weights over tokens."""
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
"""Range of relative scores that the histogram resolves, in octaves."""
_TINY = 1e-30


@dataclass(frozen=True, kw_only=True)
class PercentileConfig(PolicyConfig):
    """Options of :class:`Percentile`."""

    percentile: Annotated[float, Field(gt=0, lt=100)] = 80.0
    """Percentile of the scores at or above which experts are loaded."""
    over: Literal["history", "token", "mass"] = "history"
    """Scores that the percentile refers to. `history`: all layers and tokens so far. `token`: the E scores of one
    token, which selects a constant number of experts. `mass`: the percentage of a token's probability to cover."""


class Percentile(PrefetchPolicy):
    """Loads the experts whose softmax score reaches a percentile for any token, likeliest first.

    With `over=history` a score is divided by that of the token's K-th expert, which makes layers and tokens
    comparable. On the reference model, at 12.8 experts per token, this gives recall .99; plain scores give .92.

    Source: Zhu et al. (2025), as in SpecMD; relative scores and `over=mass` are this project's.
    """

    name = "percentile"
    config_class = PercentileConfig
    config: PercentileConfig

    def __init__(self, config: PercentileConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._share = config.percentile / 100
        self._history = RunningQuantile()
        # number of scores at or above the linearly interpolated quantile of E distinct scores
        self._count = shape.experts - math.ceil(round(self._share * (shape.experts - 1), 9))

    def experts(self, candidates: Candidates, link: LinkState | None) -> list[int]:
        probability_TE = candidates.probability_TE.numpy()
        if self.config.over == "history":
            chosen_TE = self._above_history(probability_TE)
        else:
            chosen_TE = self._of_each_token(probability_TE)
        return likeliest_first(chosen_TE, probability_TE)

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
            ranks_TE = np.broadcast_to(np.arange(self.shape.experts) < self._count, order_TE.shape)
        else:
            ranked_TE = np.take_along_axis(probability_TE, order_TE, axis=1)
            ranks_TE = ranked_TE.cumsum(axis=1) - ranked_TE < self._share
        chosen_TE = np.zeros(order_TE.shape, dtype=bool)
        np.put_along_axis(chosen_TE, order_TE, ranks_TE, axis=1)
        return chosen_TE


class RunningQuantile:
    """Quantiles of all scores so far, with a relative resolution of 2.2% (1/32 octave).

    The scores are counted in a histogram of 1024 logarithmic bins. Adding a score is O(1).
    """

    def __init__(self) -> None:
        self._counts = np.zeros((_HIGHEST - _LOWEST) * _BINS_PER_OCTAVE, dtype=np.int64)

    def bins(self, scores: npt.NDArray[np.floating]) -> npt.NDArray[np.int64]:
        """Return the bin of each score; scores of 0 get the lowest bin."""
        with np.errstate(divide="ignore"):
            octaves = np.log2(scores).clip(_LOWEST, _HIGHEST)
        bins = np.floor((octaves - _LOWEST) * _BINS_PER_OCTAVE).astype(np.int64)
        clipped: npt.NDArray[np.int64] = bins.clip(0, len(self._counts) - 1)
        return clipped

    def add(self, bins: npt.NDArray[np.int64]) -> None:
        """Count the scores of these bins."""
        self._counts += np.bincount(bins.ravel(), minlength=len(self._counts))

    def bin_at(self, share: float) -> int:
        """Return the bin of the smallest score at or above a quantile (0 to 1, linearly interpolated)."""
        below = self._counts.cumsum()
        rank = math.ceil(round(share * (int(below[-1]) - 1), 9))
        return int(np.searchsorted(below, rank, side="right"))


Array = npt.NDArray[np.float64]

_MEMORY = 0.999
"""Factor by which the weight of earlier outcomes decays per layer."""
_PRIOR = 1.0
"""Weight of the initial slope and offset, in units of Fisher information."""
_MIN_PROBABILITY = 1e-12


class Calibration:
    """Online calibration of forecast logits to the probability that a step uses an expert.

    The log-odds of a token are slope * margin + offset. The margin is the expert's logit minus the boundary, which is
    the mean of the K-th and K+1-th logit. A step uses an expert if any of its tokens does; tokens count as independent.
    Slope and offset are shared by all layers. They start at 1 and 0 and take one Newton step of logistic regression
    per layer, in O(T E).

    If the predictor was calibrated on validation data, its log-odds replace the margin, and slope and offset adapt them
    to the current input.

    On the reference model with a distilled estimator, the margin gives a Brier score of .0082; log-odds whose
    probabilities sum to K give .0113.

    Args:
        top_k: experts per token, K.
    """

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k
        self.fit = np.array([1.0, 0.0])
        """Slope and offset."""
        self._information = np.zeros((2, 2))
        self._margins: dict[int, Array] = {}
        """Margins of forecasts whose outcome is unknown [T, E], by layer."""

    def probability(self, layer: int, logits_TE: Tensor, log_odds: LogOdds | None = None) -> Array:
        """Return the probability that at least one token uses each expert [E], and keep the forecast for `learn`.

        Args:
            layer: target layer of the forecast.
            logits_TE: logits of the forecast, float32 on the host.
            log_odds: calibration of the predictor for these logits.
        """
        margin_TE = _margin(logits_TE.numpy().astype(np.float64), self._top_k)
        if log_odds is not None:
            root_TE = np.sign(margin_TE) * np.sqrt(np.abs(margin_TE))
            margin_TE = log_odds.slope * margin_TE + log_odds.root * root_TE + log_odds.offset
            margin_TE = margin_TE.clip(-FARTHEST, FARTHEST)
        self._margins[layer] = margin_TE
        return _any(self._of_tokens(margin_TE))

    def learn(self, layer: int, ids: Sequence[int]) -> None:
        """Update slope and offset with the distinct experts that a layer used, if there was a forecast for it."""
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
    """Return the probability that any token uses each expert [E]; exact for one token."""
    p_E: Array = p_TE[0] if len(p_TE) == 1 else 1 - np.prod(1 - p_TE, axis=0)
    return p_E.clip(_MIN_PROBABILITY, 1.0)


@dataclass(frozen=True, kw_only=True)
class ValueConfig(PolicyConfig):
    """Options of :class:`Value`."""

    least: Annotated[float, Field(gt=0, lt=1)] = 0.02
    """Probability below which an expert is never loaded."""
    eviction: Literal["wrong", "always"] = "wrong"
    """Copies that are charged for the evicted expert. `wrong`: only copies of experts that are not used, since a miss
    evicts as well. `always`: every copy."""


class Value(PrefetchPolicy):
    """Loads the likeliest experts while the expected saving of waiting time exceeds the expected cost.

    A copy takes `copy_s` seconds and starts after `backlog_s`; the layer needs the expert in `deadline_s`. If the
    expert is used, the copy saves copy_s - max(0, backlog_s + copy_s - deadline_s) seconds, at least 0. The costs are

    - the eviction: copy_s times the probability that the victim is used; 0 for an empty slot;
    - the delay of misses: a copy in flight cannot be cancelled, so an unused one blocks the link for the rest of its
      time after `deadline_s`. Queued copies are dropped without cost.

    No expert is loaded if no copy can start within `deadline_s`. The estimate ignores delays of the layers in between,
    for forecasts several layers ahead, and uses of an expert after this step. Each expert has its own copy time where
    parts of experts are in memory.

    The result includes resident experts that the forecast names, to protect them.
    """

    name = "value"
    config_class = ValueConfig
    config: ValueConfig
    reads_link = True

    def __init__(self, config: ValueConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._calibration = Calibration(shape.top_k)

    def see_routing(self, layer: int, ids: Sequence[int]) -> None:
        self._calibration.learn(layer, ids)

    def experts(self, candidates: Candidates, link: LinkState | None) -> list[int]:
        assert link is not None, "required by reads_link"
        p_E = self._calibration.probability(candidates.layer, candidates.logits_TE, candidates.forecast.log_odds)
        named = {expert for row in candidates.ids for expert in row}
        selected = [expert for expert in named if link.resident(expert)]
        selected += self._worth_loading(p_E, link)
        return sorted(selected, key=lambda expert: (-p_E[expert], expert))

    def _worth_loading(self, p_E: Array, link: LinkState) -> list[int]:
        if link.deadline_s <= link.backlog_s:
            return []
        likely = [int(expert) for expert in np.argsort(-p_E, kind="stable") if p_E[expert] >= self.config.least]
        absent = [expert for expert in likely if not link.resident(expert)]
        worth = link.victim_worth() if len(absent) > link.free else 0.0
        chosen: list[int] = []
        backlog_s = link.backlog_s
        for expert in absent:
            p, copy_s = float(p_E[expert]), link.seconds(expert)
            lost_s = worth * link.copy_s if len(chosen) >= link.free else 0.0
            if self.config.eviction == "wrong":
                lost_s *= 1.0 - p
            if saved_s(p, backlog_s, copy_s, link.deadline_s) > lost_s:
                chosen.append(expert)
                backlog_s += copy_s
            elif link.seconds_of is None:
                break  # probabilities fall and the backlog grows, so no later expert pays either
        return chosen


def saved_s(p: float, backlog_s: float, copy_s: float, deadline_s: float) -> float:
    """Return the expected reduction of waiting time by a copy, in seconds; negative if it delays other copies more.

    Args:
        p: probability that the expert is used.
        backlog_s: seconds until the copy starts.
        copy_s: seconds that the copy takes.
        deadline_s: seconds until the layer needs the expert.
    """
    if backlog_s >= deadline_s:
        return 0.0
    late_s = max(0.0, backlog_s + copy_s - deadline_s)
    return p * (copy_s - late_s) - (1.0 - p) * late_s


PREFETCH: PolicyRegistry[PrefetchPolicy] = PolicyRegistry("prefetch policy", NoPrefetch, TopK, Percentile, Value)
