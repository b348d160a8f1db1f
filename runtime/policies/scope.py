"""Which experts compete for a slot: those of all layers for all slots, or each layer's for its own share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

from torch import Tensor

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.policies.eviction.base import EvictionPolicy
from expertcast.runtime.policies.registry import CacheShape, Choice

SCOPES = ("global", "layer")


class Eviction:
    """The eviction policy over all slots (`global`), or one of its kind per layer over that layer's share (`layer`).

    Raises:
        ExpertcastError: a share that holds less than one token's experts.
    """

    def __init__(self, choice: Choice[EvictionPolicy], shape: CacheShape, scope: str = "global") -> None:
        self.shares: list[int] | None = None
        """Slots of each layer; None: all slots are everybody's."""
        if scope == "global":
            self.policies = [choice.make(shape)]
            self.by_layer = self.policies * shape.layers
        else:
            self.shares = layer_shares(shape)
            self.policies = self.by_layer = [
                choice.make(replace(shape, slots=share, sharing=1)) for share in self.shares
            ]
        self._hears(choice.cls)

    @classmethod
    def over_all(cls, policy: EvictionPolicy, layers: int) -> Self:
        """One that was made already, over all slots."""
        made = cls.__new__(cls)
        made.shares, made.policies = None, [policy]
        made.by_layer = made.policies * layers
        made._hears(type(policy))
        return made

    def _hears(self, policy: type[EvictionPolicy]) -> None:
        self.reads_scores = policy.reads_scores
        self.reads_routing = policy.reads_routing
        self.reads_forecasts = policy.reads_forecasts
        self.reads_tokens = policy.reads_tokens

    def start_pass(self, fresh: bool) -> None:
        """A forward starts."""
        for policy in self.policies:
            policy.start_pass(fresh)

    def see_scores(self, layer: int, probability_E: Sequence[float]) -> None:
        """Tell the layer's policy its router's probabilities."""
        self.by_layer[layer].see_scores(layer, probability_E)

    def see_routing(self, layer: int, experts: Sequence[Sequence[int]]) -> None:
        """Tell the layer's policy the experts of each token of a prompt."""
        self.by_layer[layer].see_routing(layer, experts)

    def see_forecast(self, layer: int, probability_E: Sequence[float]) -> None:
        """Tell the layer's policy a forecast's probabilities."""
        self.by_layer[layer].see_forecast(layer, probability_E)

    def see_tokens(self, probability_HLE: Tensor) -> None:
        """Tell every policy what is forecast of the next tokens."""
        for policy in self.policies:
            policy.see_tokens(probability_HLE)

    def clear(self) -> None:
        """No expert has a slot any more."""
        for policy in self.policies:
            policy.clear()


def layer_shares(shape: CacheShape) -> list[int]:
    """Slots of each layer, as equal as can be; the first layers get what is left over.

    Raises:
        ExpertcastError: a share holds less than one token's experts.
    """
    share, over = divmod(shape.slots, shape.layers)
    if share < shape.top_k:
        raise ExpertcastError(
            f"slots={shape.slots} in {shape.layers} layers' shares leave {share} each, one token needs {shape.top_k}: "
            f"give slots={shape.layers * shape.top_k} or more, or scope='global'"
        )
    return [share + (layer < over) for layer in range(shape.layers)]
