"""Traced programs: the tensor operations of a function without the Python between them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning

from expertcast.data.machine import one_row, without_onednn
from expertcast.predictors.view import Functions, untraced

Tensors = tuple[Tensor, ...]
Program = Callable[..., Tensors]
"""Function from tensors to tensors that always runs the same operations."""

_VIEWS = {"aten::select": torch.ops.aten.select, "aten::unsqueeze": torch.ops.aten.unsqueeze}


def traced(
    function: Program, inputs: Tensors, modules: Sequence[nn.Module], *, lengths: Collection[int] | None = None
) -> Program | None:
    """Trace a function into a program; return None if it cannot be traced.

    Compare the program with the function on further inputs before use: it repeats the branches of the traced run and
    keeps every value that is neither an input nor a parameter. A program of one row runs without oneDNN.

    Args:
        function: function to trace; runs once on the inputs.
        inputs: tensors with the shapes and dtypes of later calls.
        modules: modules whose parameters the function reads; the program follows in-place changes of these.
        lengths: sizes that may change between calls, wherever they occur; the function's Python code must not depend
            on them. All other sizes become constants. None: every size follows the tensor, as in `torch.jit.trace`.
    """
    with warnings.catch_warnings(record=True) as caught, _frozen(modules), torch.no_grad():
        warnings.simplefilter("always")
        try:
            made = _program(function if lengths is None else _knowing_sizes(function, lengths), inputs)
        except Exception:  # tracing fails in many ways that depend on function and torch
            return None
    read = any(issubclass(each.category, TracerWarning) for each in caught)
    return None if read and lengths is not None else made


def _program(function: Program, inputs: Tensors) -> Program:
    """Trace as `torch.jit.trace` does, but so that the program can be freed.

    `torch.jit.trace` keeps every program with its weights in a global unit: see github.com/pytorch/pytorch/issues/35600
    and 43119.
    """
    graph, _ = torch._C._create_graph_by_tracing(function, inputs, lambda _: "", True, False)
    _take_views(graph)
    compiled: Program = torch._C._create_function_from_graph("program", graph)
    call = partial(without_onednn, compiled) if one_row(inputs[0]) else compiled
    optimizes, optimize = torch._C._get_graph_executor_optimize, torch._C._set_graph_executor_optimize

    def run(*given: Tensor) -> Tensors:
        before = optimizes()
        optimize(False)
        try:
            if not torch.is_grad_enabled():
                return call(*given)
            with torch.no_grad():
                return call(*given)
        finally:
            optimize(before)

    return run


def _take_views(graph: torch._C.Graph) -> None:
    """Replace views of constants by constants that share their memory, so that a layer's part is looked up once."""
    for node in list(graph.nodes()):
        given = list(node.inputs())
        if node.kind() in _VIEWS and all(value.node().kind() == "prim::Constant" for value in given):
            graph.setInsertPoint(node)
            view = _VIEWS[node.kind()](*(value.toIValue() for value in given))
            node.output().replaceAllUsesWith(graph.insertConstant(view))  # type: ignore[attr-defined]
    torch._C._jit_pass_dce(graph)


def _knowing_sizes(function: Program, lengths: Collection[int]) -> Program:
    def known(*given: Tensor) -> Tensors:
        with _Sizes(lengths):
            return function(*given)

    return known


class _Sizes(Functions):
    """Returns sizes as numbers, except the given lengths, which the trace follows."""

    def __init__(self, lengths: Collection[int]) -> None:
        super().__init__()
        self._lengths = lengths

    def run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if func is not Tensor.size and getattr(func, "__self__", None) is not Tensor.shape:
            return func(*args, **kwargs)
        with untraced():
            sizes = func(*args, **kwargs)
        if not any(size in self._lengths for size in (sizes if isinstance(sizes, tuple) else (sizes,))):
            return sizes
        followed = func(*args, **kwargs)
        if not isinstance(sizes, tuple):
            return followed
        return tuple(one if size in self._lengths else size for size, one in zip(sizes, followed, strict=True))


@contextmanager
def _frozen(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Turn gradients off for all parameters: a trace accepts none that require them."""
    trained = [each for module in modules for each in module.parameters() if each.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
