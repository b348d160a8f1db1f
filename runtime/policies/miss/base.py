"""Miss handling: what happens to experts that a layer needs and the device does not hold.

T tokens, E routed experts per layer, K experts per token. Experts are numbered 0..E-1 within their layer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from expertcast.runtime.policies.registry import Policy


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

    def rank(self, missing: set[int]) -> dict[int, int]:
        """Best rank by weight (0: heaviest) that each of some experts has with any token."""
        best: dict[int, int] = {}
        for row, weights in zip(self.ids, self.weights, strict=True):
            order = sorted(range(len(row)), key=lambda place: -weights[place])
            for rank, place in enumerate(order):
                if row[place] in missing:
                    best[row[place]] = min(rank, best.get(row[place], rank))
        return best

    def weight(self, missing: set[int]) -> dict[int, float]:
        """Largest combine weight that each of some experts has with any token."""
        best: dict[int, float] = {}
        for row, weights in zip(self.ids, self.weights, strict=True):
            for expert, value in zip(row, weights, strict=True):
                if expert in missing:
                    best[expert] = max(value, best.get(expert, value))
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
