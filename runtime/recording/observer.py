"""What a run tells of itself while it goes on: engine, flow, residency and link call it, and nothing depends on it.

T tokens, D hidden size, E routed experts per layer. An expert's key is layer * E + expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

State = Literal["compute", "forecast", "wait", "policy"]
STATES: tuple[State, ...] = ("compute", "forecast", "wait", "policy")


class Observer:
    """Does nothing with all it is told; subclasses take what they are for.

    All calls but :meth:`copied` come from the thread that runs the model, in the order of events. What is handed over
    belongs to the runtime: copy what is to be kept.
    """

    def attached(self, experts: int) -> None:
        """An offload of a model with E routed experts per layer begins."""

    def enter(self, state: State, layer: int) -> None:
        """From here on the compute stream is in `state`, for `layer`."""

    def routed(self, layer: int, residual_TD: Tensor, logits_TE: Tensor) -> None:
        """A router has run; no policy has had its word."""

    def needed(self, layer: int, keys: Sequence[int]) -> None:
        """What a layer executes is known and about to be requested (distinct keys)."""

    def asked(self, layer: int, keys: Sequence[int]) -> None:
        """A forecast asks for experts of a later layer, most needed first; or the last layer, for the next token."""

    def copied(self, key: int, layer: int, start: float, end: float, urgent: bool) -> None:
        """A copy was under way from `start` to `end` (`time.perf_counter`, or :meth:`device_time` on CUDA)."""

    def expanded(self, key: int, seconds: float) -> None:
        """A copy in lower precision was expanded to the full block, in so many seconds of the model's thread."""

    def device_time(self, event: torch.cuda.Event) -> float:
        """Seconds of a finished CUDA event on this observer's clock; 0 where it keeps none."""
        del event
        return 0.0


class Observers(Observer):
    """Several at once, told in their order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = tuple(observers)

    def attached(self, experts: int) -> None:
        for observer in self._observers:
            observer.attached(experts)

    def enter(self, state: State, layer: int) -> None:
        for observer in self._observers:
            observer.enter(state, layer)

    def routed(self, layer: int, residual_TD: Tensor, logits_TE: Tensor) -> None:
        for observer in self._observers:
            observer.routed(layer, residual_TD, logits_TE)

    def needed(self, layer: int, keys: Sequence[int]) -> None:
        for observer in self._observers:
            observer.needed(layer, keys)

    def asked(self, layer: int, keys: Sequence[int]) -> None:
        for observer in self._observers:
            observer.asked(layer, keys)

    def copied(self, key: int, layer: int, start: float, end: float, urgent: bool) -> None:
        for observer in self._observers:
            observer.copied(key, layer, start, end, urgent)

    def expanded(self, key: int, seconds: float) -> None:
        for observer in self._observers:
            observer.expanded(key, seconds)

    def device_time(self, event: torch.cuda.Event) -> float:
        return max((observer.device_time(event) for observer in self._observers), default=0.0)
