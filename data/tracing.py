"""Functions of tensors as traced programs: the same operations without Python between them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import TracerWarning
from torch.overrides import TorchFunctionMode

Tensors = tuple[Tensor, ...]
Program = Callable[..., Tensors]
"""Tensors in, tensors out, always by the same operations."""

_VIEWS = {"aten::select": torch.ops.aten.select, "aten::unsqueeze": torch.ops.aten.unsqueeze}


def traced(
    function: Program, inputs: Tensors, modules: Sequence[nn.Module], *, lengths: Collection[int] | None = None
) -> Program | None:
    """The function as a program of its own; None where it cannot be one: it must be compared with the function on
    further inputs, for a branch on values and what is neither input nor parameter are as they were in the trace.

    Args:
        function: runs here once, on the inputs.
        inputs: of the shapes and dtypes that the program will be called with.
        modules: whose parameters it reads: changes that are made in place are seen.
        lengths: sizes that may be others in another call, wherever they come up: nothing in Python may depend on them.
            All other sizes become constants. None: nothing is said about sizes.
    """
    with warnings.catch_warnings(record=True) as said, _frozen(modules), torch.no_grad():
        warnings.simplefilter("always")
        try:
            made = _program(function if lengths is None else _knowing_sizes(function, lengths), inputs)
        except Exception:  # not this function, or not this torch
            return None
    read = any(issubclass(each.category, TracerWarning) for each in said)
    return None if read and lengths is not None else made


def _program(function: Program, inputs: Tensors) -> Program:
    """As `torch.jit.trace`, which keeps what it traced, weights included, in a global unit for ever: this is freed.

    See github.com/pytorch/pytorch/issues/35600 and 43119.
    """
    graph, _ = torch._C._create_graph_by_tracing(function, inputs, lambda _: "", True, False)
    _take_views(graph)
    compiled: Program = torch._C._create_function_from_graph("program", graph)
    optimizes, optimize = torch._C._get_graph_executor_optimize, torch._C._set_graph_executor_optimize

    def run(*given: Tensor) -> Tensors:
        before = optimizes()
        optimize(False)
        try:
            if not torch.is_grad_enabled():
                return compiled(*given)
            with torch.no_grad():
                return compiled(*given)
        finally:
            optimize(before)

    return run


def _take_views(graph: torch._C.Graph) -> None:
    """Views of constants become constants, which share the memory: a layer's part of a buffer is looked up once."""
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


class _Sizes(TorchFunctionMode):
    """Gives numbers for sizes, which a trace would follow as if any of them could change."""

    def __init__(self, lengths: Collection[int]) -> None:
        super().__init__()
        self._lengths = lengths

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        if func is not Tensor.size and getattr(func, "__self__", None) is not Tensor.shape:
            return func(*args, **kwargs)
        tracing = torch._C._get_tracing_state()
        torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
        try:
            sizes = func(*args, **kwargs)
        finally:
            torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]
        if not any(size in self._lengths for size in (sizes if isinstance(sizes, tuple) else (sizes,))):
            return sizes
        followed = func(*args, **kwargs)
        if not isinstance(sizes, tuple):
            return followed
        return tuple(one if size in self._lengths else size for size, one in zip(sizes, followed, strict=True))


@contextmanager
def _frozen(modules: Sequence[nn.Module]) -> Iterator[None]:
    """A trace takes no parameter that asks for gradients."""
    asking = [each for module in modules for each in module.parameters() if each.requires_grad]
    for parameter in asking:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)
