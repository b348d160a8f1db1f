"""A block's early run in decode steps as a traced program: its tensor operations without modules, hooks and a cache.

The trace is taken from the block's own run, and used once it has given that run's own bits in several steps. Keys and
values of the past are inputs of it: nothing is copied, and nothing written.

B sequences, D hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from expertcast.data.cache_reading import growing_layer
from expertcast.data.early_block import Block, Call
from expertcast.data.router_call import capturing
from expertcast.data.tracing import Program, traced

_CHECKED = 3
"""Steps, the traced one included, in which a program is compared with the block."""
_AGAIN = 256
"""And again after so many, for what changes only with the length of a text."""
_TRIALS = 4
"""Steps in which a trace is tried: where a length is by chance some other size of the model, it fails."""
_MOST = 8
"""Shapes and flags that a block has programs for."""


class _Made:
    """A program for calls of one form, if there is one, and how often it was called and tried."""

    __slots__ = ("calls", "run", "trials")

    def __init__(self) -> None:
        self.run: Program | None = None
        self.calls = 0
        self.trials = _TRIALS


class EarlyProgram:
    """The programs of one block."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._made: dict[tuple[Any, ...], _Made] = {}

    def run(self, hidden_B1D: Tensor, call: Call, own: Callable[[], Tensor | None]) -> Tensor | None:
        """The residual [B, 1, D] that the block reaches its router's norm with.

        Args:
            hidden_B1D: its input.
            call: what it is called with besides.
            own: runs the block itself, which is done where there is no program.
        """
        past, index = call.kwargs.get("past_key_values"), self._block.cache_index
        layer = None if past is None or index is None else growing_layer(past, index)
        if layer is None or not self._block.checked:
            return own()
        held = {name: value for name, value in vars(layer).items() if isinstance(value, Tensor)}
        tensors = [hidden_B1D, *held.values()]
        try:
            form = (hidden_B1D.shape, hidden_B1D.dtype, call.dtype, type(layer), *held, _form(call, tensors))
        except TypeError:  # it is called with what is neither a tensor nor a flag
            return own()
        made = self._made.get(form)
        if made is None:
            if len(self._made) == _MOST:
                return own()
            made = self._made[form] = _Made()
        if made.run is None or made.calls < _CHECKED or made.calls % _AGAIN == 0:
            return own() if capturing() else self._checked(made, call, held, tensors, own)
        made.calls += 1
        return made.run(*tensors)[0]

    def _checked(
        self, made: _Made, call: Call, held: dict[str, Tensor], tensors: list[Tensor], own: Callable[[], Tensor | None]
    ) -> Tensor | None:
        """What `own` gives, compared with what the program gives, which is made if there is none.

        Args:
            made: the program.
            call: what the block is called with.
            held: the past's tensors.
            tensors: all inputs of the program.
            own: as for :meth:`run`.
        """
        expected = own()
        if made.run is None and made.trials:
            made.trials -= 1
            made.run = self._trace(call, held, tensors)
        if made.run is not None and expected is not None:
            made.calls += 1
            if not torch.equal(made.run(*tensors)[0], expected):
                made.run, made.trials = None, 0
        return expected

    def _trace(self, call: Call, held: dict[str, Tensor], tensors: list[Tensor]) -> Program | None:
        past, index = call.kwargs["past_key_values"], self._block.cache_index
        assert index is not None

        def reached(hidden_B1D: Tensor, *given: Tensor) -> tuple[Tensor]:
            reader: Cache = copy.copy(past)
            reader.layers = list(past.layers)
            layer = reader.layers[index] = copy.copy(past.layers[index])
            for name, tensor in zip(held, given, strict=False):
                setattr(layer, name, tensor)
            args, kwargs = _filled((call.args, _besides(call)), iter(given[len(held) :]))
            return (self._block.reach(hidden_B1D, Call(args, kwargs, call.dtype), reader),)

        lengths = {tensor.shape[-2] + more for tensor in held.values() if tensor.dim() > 2 for more in (0, 1)}
        return traced(reached, tuple(tensors), [self._block.layer.decoder], lengths=lengths)


def _besides(call: Call) -> dict[str, Any]:
    return {name: value for name, value in call.kwargs.items() if name != "past_key_values"}


def _form(call: Call, tensors: list[Tensor]) -> tuple[Any, ...]:
    """What a block is called with, as something to compare; its tensors are added to `tensors`.

    Raises:
        TypeError: it is called with anything but tensors, flags and collections of these.
    """
    found: list[Any] = [_formed(value, tensors) for value in call.args]
    for name, value in _besides(call).items():
        found += name, _formed(value, tensors)
    return tuple(found)


def _formed(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.dtype
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return tuple(_formed(each, tensors) for each in value)
    if isinstance(value, dict):
        return tuple((name, _formed(each, tensors)) for name, each in value.items())
    raise TypeError(type(value))


def _filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same with other tensors, in the order in which :func:`_formed` finds them."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, tuple | list):
        return type(value)(_filled(each, tensors) for each in value)
    if isinstance(value, dict):
        return {name: _filled(each, tensors) for name, each in value.items()}
    return value
