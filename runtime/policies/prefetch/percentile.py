"""Experts whose score lies above a percentile (row A21, traps 6 and 13).

T tokens, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from expertcast.predictors.base import Forecast
from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.policies.prefetch.base import PrefetchPolicy, Transfer, Wanted, likeliest_first
from expertcast.runtime.policies.registry import CacheShape, PolicyConfig

OVER = ("history", "token", "mass")

_BINS_PER_OCTAVE = 32
_LOWEST, _HIGHEST = -22, 10
"""Octaves between which relative scores are told apart."""
_TINY = 1e-30


@dataclass(frozen=True, kw_only=True)
class PercentileConfig(PolicyConfig):
    """The percentile, and the scores that it is taken over."""

    percentile: float = 80.0
    """Scores above this percentile are loaded."""
    over: str = "history"
    """Scores it is taken over: those of all layers and tokens so far (history), or one token's E scores in one layer,
    which always gives the same count (token). With `mass` it is the share of a token's probability to cover, in %."""

    def __post_init__(self) -> None:
        if not 0.0 < self.percentile < 100.0:
            raise ExpertcastError(f"percentile={self.percentile}: give a number between 0 and 100, such as 80")
        if self.over not in OVER:
            raise ExpertcastError(f"unknown over={self.over!r}: choose from {', '.join(OVER)}")


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
