"""Whether forecast probabilities mean what they say, as a torchmetrics metric over (token, expert) pairs.

T tokens, E routed experts per layer, L target layers, B display bins, F fine bins, G groups of equal mass.
States are plain sums, so that two ranks (or two halves of the data) add up to exactly the whole.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from expertcast.training.comparison import RoutingComparison, membership_probability

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
