"""Experts whose probability exceeds a fixed one.

T tokens, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.policies.prefetch.base import PrefetchPolicy, Transfer, Wanted, likeliest_first
from expertcast.runtime.policies.prefetch.calibration import Calibration
from expertcast.runtime.policies.registry import CacheShape, PolicyConfig

OF = ("use", "softmax")


@dataclass(frozen=True, kw_only=True)
class ThresholdConfig(PolicyConfig):
    """The threshold, and the probability that is compared with it."""

    above: float = 0.4
    """Experts with a higher probability than this are loaded (for softmax, .04 was best on the reference model)."""
    of: str = "use"
    """Probability that the step uses the expert, calibrated while the model runs (use), or the forecast's softmax with
    any token, which depends on E and K (softmax)."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.above < 1.0:
            raise ExpertcastError(f"above={self.above}: give a probability, 0 or more and under 1")
        if self.of not in OF:
            raise ExpertcastError(f"unknown of={self.of!r}: choose from {', '.join(OF)}")


class Threshold(PrefetchPolicy):
    """Experts above a probability, the likeliest first.

    Defaults are where precision and recall balance (highest F1) on the reference model: .83 and .91 with forecasts of
    quasi-hidden states and of a distilled estimator; by softmax the best are .74 and .77, for a sharp router leaves
    little to the experts that it takes last.
    """

    name = "threshold"
    config_class = ThresholdConfig
    config: ThresholdConfig
    reads_transfer = True  # the flow calls see_routing only beside it

    def __init__(self, config: ThresholdConfig, shape: CacheShape) -> None:
        super().__init__(config, shape)
        self._calibration = Calibration(shape.top_k)

    def experts(self, wanted: Wanted, transfer: Transfer | None) -> list[int]:
        if self.config.of == "softmax":
            probability_TE = wanted.probability_TE.numpy()
        else:
            probability_TE = self._calibration.probability(
                wanted.layer, wanted.forecast.logits_TE, wanted.forecast.log_odds
            )[None]
        return likeliest_first(probability_TE > self.config.above, probability_TE)

    def see_routing(self, layer: int, ids: Sequence[int]) -> None:
        self._calibration.learn(layer, ids)
