"""Giving slots up before a layer's routing is known (rows D6 to D8).

E routed experts per layer, k distinct experts that a forecast predicts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.policies.registry import Policy, PolicyConfig, PolicyRegistry


class PreEviction(Policy):
    """How many slots should be free when a layer's routing becomes known; which experts go is the eviction policy's."""

    active: ClassVar[bool] = True
    """Whether `release_target` can be above 0."""

    @abstractmethod
    def release_target(self, probability_E: Sequence[float], predicted: Collection[int], resident: int) -> int:
        """Slots that should be free, those that are free already among them.

        Args:
            probability_E: a forecast's softmax over the layer's experts, mean over the step's tokens.
            predicted: the forecast's own experts, distinct.
            resident: how many of these have a slot.
        """


class NoPreEviction(PreEviction):
    """Slots are given up only for an expert that takes them."""

    name = "none"
    active = False

    def release_target(self, probability_E: Sequence[float], predicted: Collection[int], resident: int) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class GapConfig(PolicyConfig):
    """How many more slots than the forecast asks for are freed."""

    tau: float = 0.02
    """Neighbouring probabilities that differ by less than this are a tie: one slot more."""
    r_max: int = 2
    """Most slots kept free because of ties at the boundary."""
    literal: bool = False
    """Count every tie among the r_max gaps after the boundary, as the paper's equation does; false stops at the first
    gap that is none."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.tau <= 1.0:
            raise ExpertcastError(f"tau={self.tau}: give a difference of probabilities, from 0 to 1")
        if self.r_max < 0:
            raise ExpertcastError(f"r_max={self.r_max}: give 0 or more slots")


class Gap(PreEviction):
    """The predicted experts that have no slot, and one slot more for every near tie at the boundary (eq. 14 to 17).

    For one token k is the router's K. For several tokens k is the number of distinct experts that they are predicted to
    use, and the boundary lies after the k-th expert by mean probability.
    """

    name = "gap"
    config_class = GapConfig
    config: GapConfig

    def release_target(self, probability_E: Sequence[float], predicted: Collection[int], resident: int) -> int:
        return len(predicted) - resident + self._redundancy(probability_E, len(predicted))

    def _redundancy(self, probability_E: Sequence[float], k: int) -> int:
        config = self.config
        boundary = sorted(probability_E, reverse=True)[k - 1 : k + config.r_max] if k else []
        ties = 0
        for higher, lower in pairwise(boundary):
            if higher - lower < config.tau:
                ties += 1
            elif not config.literal:
                break
        return ties


PRE_EVICTION: PolicyRegistry[PreEviction] = PolicyRegistry("pre-eviction policy", NoPreEviction, Gap)
