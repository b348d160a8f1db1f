"""What a run tells of itself while it goes on: engine, flow, residency and link call it, and nothing depends on it.

T tokens, D hidden size, E routed experts per layer. An expert's key is layer * E + expert.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Sequence
from inspect import isfunction
from typing import Literal

import torch
from torch import Tensor

from expertcast.predictors.errors import ExpertcastError

State = Literal["compute", "forecast", "wait", "policy"]


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

    def skipped(self, layer: int, experts: int) -> None:
        """A lossy policy left out or replaced so many experts that the router chose."""

    def requested(self, layer: int, keys: Sequence[int], missing: Sequence[int], again: int, forecast: int) -> None:
        """A layer that runs asks for experts, all at once or in chunks.

        Args:
            layer: whose experts they are.
            keys: all that it asks for.
            missing: those of them that have no slot.
            again: how many of the missing ones were evicted earlier in this forward.
            forecast: how many of the others a forecast brought in and no layer has asked for before.
        """

    def asked(self, layer: int, keys: Sequence[int]) -> None:
        """A forecast asks for experts of a later layer, most needed first; or the last layer, for the next token."""

    def loading(self, layer: int, nbytes: int, urgent: bool) -> None:
        """The link has been given the copy of an expert; `urgent`: the layer at work asked for it, no forecast."""

    def dropped(self, layer: int, nbytes: int, forecast: bool) -> None:
        """A copy was taken back before it began; `forecast`: one that no layer has asked for."""

    def waited(self, layer: int, seconds: float, in_time: int) -> None:
        """Compute was made to wait for requested experts (host time), or for a copy in the model's own thread.

        Args:
            layer: whose experts they are.
            seconds: how long the model's thread was held up.
            in_time: how many of the experts that a forecast brought in had arrived before.
        """

    def ran(self, layer: int, chunks: int) -> None:
        """A layer's experts run in so many kernel calls."""

    def copied(self, key: int, layer: int, start: float, end: float, urgent: bool) -> None:
        """A copy was under way.

        Args:
            key: the expert; -1 for a call of the device's own link, which moves several.
            layer: whose expert it is.
            start: when it began, by `time.perf_counter`, or by :meth:`device_time` on CUDA.
            end: when it had arrived.
            urgent: a layer was waiting for it, no forecast.
        """

    def expanded(self, key: int, seconds: float) -> None:
        """A copy in lower precision was expanded to the full block, in so many seconds of the model's thread."""

    def device_time(self, event: torch.cuda.Event) -> float:
        """Seconds of a finished CUDA event on this observer's clock; 0 where it keeps none."""
        del event
        return 0.0


def check_observers(given: object) -> None:
    """
    Raises:
        ExpertcastError: not a list of observers.
    """
    if not isinstance(given, Sequence) or not all(isinstance(each, Observer) for each in given):
        raise ExpertcastError(
            f"observers={reprlib.repr(given)}: give a list of Observer objects, such as [Recorder('cpu')]"
        )


class Observers(Observer):
    """Several at once, told in their order.

    An event goes straight to those that listen to it: to one of them it is a plain call, to none of them next to
    nothing.
    """

    def __init__(self, observers: Iterable[Observer]) -> None:
        self._observers = tuple(observers)
        for event in _EVENTS:
            hear = [hears for observer in self._observers if (hears := heard(observer, event)) is not None]
            if hear:
                self.__dict__[event] = hear[0] if len(hear) == 1 else _each(hear)

    def device_time(self, event: torch.cuda.Event) -> float:
        return max((observer.device_time(event) for observer in self._observers), default=0.0)


_EVENTS = [name for name, value in vars(Observer).items() if isfunction(value) and name != "device_time"]


def heard(observer: Observer, event: str) -> Callable[..., None] | None:
    """What is called for an event; None where nobody listens, so that a hot path need call nothing."""
    hears: Callable[..., None] = getattr(observer, event)
    return None if getattr(hears, "__func__", hears) is getattr(Observer, event) else hears


def _each(listening: Sequence[Callable[..., None]]) -> Callable[..., None]:
    def tell(*args: object) -> None:
        for hears in listening:
            hears(*args)

    return tell
