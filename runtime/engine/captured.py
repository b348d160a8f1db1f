"""Tensor programs as CUDA graphs: one launch in the place of one per kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

Program = Callable[..., tuple[Tensor, ...]]
"""Tensors in, tensors out, always by the same operations."""

_WARM_UP = 3
"""Runs before a capture: libraries get their workspaces."""


@contextmanager
def recording(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: _POOL_HANDLE | None = None
) -> Iterator[None]:
    """What is launched becomes a graph and does not run.

    torch's own capture stream belongs to whatever device was current first: kernels of another device would run beside
    it and not be captured. Only this thread is kept from calls that a capture forbids.

    Args:
        graph: an empty one.
        stream: of the device whose kernels are launched.
        pool: memory that it shares with graphs which never run beside it; None: its own.
    """
    with (
        torch.cuda.device(stream.device),
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
    ):
        yield


class CapturedProgram:
    """A program that replays. Its outputs are the same tensors each time: they hold until the next call.

    Args:
        program: is run a few times, and recorded.
        inputs: of the shapes and dtypes that it will be called with, on one CUDA device.
        pool: memory that graphs share which never run side by side.

    Raises:
        RuntimeError: it does what a graph may not, such as to ask the device for a value.
    """

    def __init__(self, program: Program, inputs: tuple[Tensor, ...], pool: _POOL_HANDLE) -> None:
        device = inputs[0].device
        self._inputs = tuple(tensor.clone() for tensor in inputs)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                program(*self._inputs)
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with recording(self._graph, stream, pool):
            self._outputs = program(*self._inputs)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._outputs


class Captures:
    """Makes graphs of programs that run one after another, on one stream at a time."""

    def __init__(self) -> None:
        self._pool: _POOL_HANDLE | None = None

    def of(self, program: Program, inputs: tuple[Tensor, ...]) -> Program | None:
        """The program as a CUDA graph; None off CUDA, and where it cannot be one or gives other bits."""
        if inputs[0].device.type != "cuda":
            return None
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            made = CapturedProgram(program, inputs, self._pool)
            same = all(map(torch.equal, made(*inputs), program(*inputs)))
        except RuntimeError:
            return None
        return made if same else None
