"""Miss handling: what happens to experts that a layer needs and the device does not hold.

T tokens, E routed experts per layer, K experts per token. Experts are numbered 0..E-1 within their layer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.policies.registry import Policy
from expertcast.runtime.storage.precision import FULL, PRECISIONS, is_better


@dataclass(slots=True, kw_only=True)
class Lookup:
    """One layer's routing against the cache."""

    layer: int
    ids: Sequence[Sequence[int]]
    """T rows of K experts, in the router's order."""
    weights: Sequence[Sequence[float]]
    """Combine weights beside them."""
    probabilities: Callable[[], Sequence[Sequence[float]]]
    """T rows of E: the router's softmax over all experts; a call costs a copy to the host on a device."""
    held: Mapping[int, str]
    """Experts of this layer that have a slot, with the precision of what lies in it."""
    free: int
    """Slots that hold nothing."""

    def missing(self) -> set[int]:
        """The experts that are routed to and have no slot."""
        return {expert for row in self.ids for expert in row if expert not in self.held}

    def shares(self) -> dict[int, float]:
        """The largest part of any token's combine weights that each routed expert has, times K: 1 is a token's mean.

        Models scale their combine weights differently, or not at all; parts of a token's sum are alike in all of them.
        """
        best: dict[int, float] = {}
        for row, weights in zip(self.ids, self.weights, strict=True):
            scale = len(row) / (sum(weights) or 1.0)
            for expert, weight in zip(row, weights, strict=True):
                best[expert] = max(weight * scale, best.get(expert, 0.0))
        return best


@dataclass(slots=True, kw_only=True)
class Verdict:
    """What becomes of a layer's missing experts. Those that are not named are fetched in full precision."""

    precision: dict[int, str] = field(default_factory=dict)
    """Fetched at this precision; naming a held expert asks for it again unless what it holds is as good."""
    dropped: set[int] = field(default_factory=set)
    """Not executed: their weight becomes 0, that of the others stays."""
    substitute: dict[int, int] = field(default_factory=dict)
    """Executed in their place, with the weight that the missing expert had; held ones only."""


class MissPolicy(Policy):
    """Decides per layer, once its routing is known."""

    lossy: ClassVar[bool] = True
    """Whether the output may differ from the resident model's."""

    @property
    def precisions(self) -> tuple[str, ...]:
        """Copies beside the full ones that the store must hold."""
        return ()

    @abstractmethod
    def decide(self, lookup: Lookup) -> Verdict:
        """Called when at least one expert that a layer needs is missing, or is held in less than full precision."""


def check_levels(levels: Sequence[str], least: int, most: int = 1 + len(PRECISIONS)) -> None:
    """Refuse precisions that a policy cannot choose among.

    Raises:
        ExpertcastError: an unknown precision, an order other than best first, or too few or too many of them.
    """
    text, allowed = "/".join(levels), "/".join((FULL, *PRECISIONS))
    known = all(level in (FULL, *PRECISIONS) for level in levels)
    if not known or not all(is_better(*pair) for pair in pairwise(levels)):
        raise ExpertcastError(f"levels={text}: give precisions of {allowed}, best first")
    if not least <= len(levels) <= most:
        raise ExpertcastError(f"levels={text}: give {least} to {most} of {allowed}, best first")


def copies_of(levels: Sequence[str]) -> tuple[str, ...]:
    """The levels that are copies beside the full experts."""
    return tuple(level for level in levels if level != FULL)
