"""Prefetch selection: which of a forecast's experts are asked for, and in which order.

T tokens, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

from expertcast.predictors.base import Forecast
from expertcast.runtime.policies.registry import Policy


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
