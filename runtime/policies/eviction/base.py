"""Eviction: which expert gives up its slot. A policy owns no tensor and starts no copy.

L MoE layers, E routed experts per layer, K experts per token. An expert's key is layer * E + expert.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container, Sequence
from typing import ClassVar

from torch import Tensor

from expertcast.runtime.policies.registry import Policy

PROMPT_ROWS = 64
"""Tokens of a prompt whose routing is told one by one."""


class EvictionPolicy(Policy):
    """The order in which resident experts are given up.

    The caller says what happens; `victim` only decides. For each layer of each forward the calls come in this order:

        start_pass      once per forward, before its first layer
        see_scores      the router's probabilities, only to policies that read them
        see_routing     what each token of a prompt was given, only to policies that read it
        start_layer     the layer's experts are known: the event that all of them belong to
        insert, remove  experts get and lose slots: this layer's misses, then what is prefetched
        touch           a forecast wants experts that have a slot already
        use             the layer computes with its experts
    """

    offline: ClassVar[bool] = False
    """Whether it must be told the future first: a bound for simulations, nothing to run a model with."""
    reads_scores: ClassVar[bool] = False
    """Whether `see_scores` is called (costs a copy to the host on a device)."""
    reads_routing: ClassVar[bool] = False
    """Whether `see_routing` is called."""
    reads_forecasts: ClassVar[bool] = False
    """Whether `see_forecast` is called."""
    reads_tokens: ClassVar[bool] = False
    """Whether `see_tokens` is called, where there is a forecaster of the next tokens."""

    def start_pass(self, fresh: bool) -> None:
        """A forward starts; `fresh`: with new texts (a prefill)."""

    def start_layer(self, layer: int, keys: Sequence[int]) -> None:
        """Layer `layer` computes with `keys` next (distinct; chosen experts after routing and misses are settled)."""

    def see_scores(self, layer: int, probability_E: Sequence[float]) -> None:
        """The router's softmax over all experts of a layer, mean over the step's tokens."""

    def see_routing(self, layer: int, experts: Sequence[Sequence[int]]) -> None:
        """Experts (0..E-1) of each of a prompt's last `PROMPT_ROWS` tokens, whose union `start_layer` names next."""

    def see_forecast(self, layer: int, probability_E: Sequence[float]) -> None:
        """A forecast's softmax over all experts of a layer that has not run yet, mean over the step's tokens."""

    def see_tokens(self, probability_HLE: Tensor) -> None:
        """A token begins, and this is forecast: probability that an expert is used by it (h = 0) and by the h-th token
        after it, [H, L, E]."""

    @abstractmethod
    def insert(self, key: int, full: bool = True) -> None:
        """The expert got a slot; `full`: in the model's own precision."""

    @abstractmethod
    def use(self, keys: Sequence[int]) -> None:
        """A layer computes with these resident experts."""

    def touch(self, keys: Sequence[int]) -> None:
        """A forecast wants these resident experts."""

    @abstractmethod
    def remove(self, key: int) -> None:
        """The expert lost its slot."""

    @abstractmethod
    def clear(self) -> None:
        """No expert has a slot any more. What was learnt of experts' use stays."""

    @abstractmethod
    def victim(self, protected: Container[int]) -> int | None:
        """The resident expert to give up next, none of the protected ones; None when all are protected."""

    def wanted(self) -> list[tuple[int, float]]:
        """Experts without a slot to load while the link is idle, with their worth, best first."""
        return []

    def worth(self, key: int) -> float | None:
        """Probability that the expert is used when its layer runs next; None: this policy does not know."""
        return None
