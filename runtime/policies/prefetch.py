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
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field
from torch import Tensor

from expertcast.predictors.base import Forecast
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


class PrefetchPolicy(Policy):
    """Base class of prefetch policies, which select experts of a forecast.

    Selected experts that are resident are protected from eviction; the others are loaded.
    """

    first: int | None = None
    """For a forecast of one token: number of experts with the highest logits that the policy selects, in this order.
    None if the selection depends on logits or weights."""

    @abstractmethod
    def experts(self, candidates: Candidates) -> list[int]:
        """Return distinct experts (0..E-1) of the target layer, in the order in which to load them."""


def likeliest_first(chosen_TE: npt.NDArray[np.bool_], probability_TE: npt.NDArray[np.floating]) -> list[int]:
    """Return the experts chosen for any token, by falling sum of probabilities over tokens; ties by number."""
    experts = np.flatnonzero(chosen_TE.any(axis=0))
    order = np.argsort(-probability_TE.sum(axis=0)[experts], kind="stable")
    return [int(expert) for expert in experts[order]]


class NoPrefetch(PrefetchPolicy):
    """Loads nothing in advance."""

    name = "none"

    def experts(self, candidates: Candidates) -> list[int]:
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

    def experts(self, candidates: Candidates) -> list[int]:
        experts = by_weight(candidates.ids, candidates.weights)
        if self._budget > self.shape.top_k:
            probability_E = candidates.probability_TE.sum(dim=0).tolist()
            ranked = candidates.probability_TE.topk(self._budget, dim=-1).indices.reshape(-1).tolist()
            experts += sorted(set(ranked).difference(experts), key=lambda expert: -probability_E[expert])
        return experts


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
    """Percentile of the scores, of all layers and tokens so far, at or above which experts are loaded."""


class Percentile(PrefetchPolicy):
    """Loads the experts whose softmax score reaches a percentile for any token, likeliest first.

    A score is divided by that of the token's K-th expert, which makes layers and tokens comparable. On the
    reference model, at 12.8 experts per token, this gives recall .99; plain scores give .92.

    Source: Zhu et al. (2025), as in SpecMD; relative scores are this project's.
    """

    name = "percentile"
    config_class = PercentileConfig

    def __init__(self, config: PercentileConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._share = config.percentile / 100
        self._history = RunningQuantile()

    def experts(self, candidates: Candidates) -> list[int]:
        probability_TE = candidates.probability_TE.numpy()
        kth = self.shape.experts - self.shape.top_k
        boundary_T1 = np.partition(probability_TE, kth, axis=1)[:, kth : kth + 1]
        bins_TE = self._history.bins(probability_TE / boundary_T1.clip(min=_TINY))
        self._history.add(bins_TE)
        return likeliest_first(bins_TE >= self._history.bin_at(self._share), probability_TE)


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


PREFETCH: PolicyRegistry[PrefetchPolicy] = PolicyRegistry("prefetch policy", NoPrefetch, TopK, Percentile)
