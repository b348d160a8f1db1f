"""A decoder layer's step of one token, with its norms and the router's product in the graphs of ggml around attention.

    ggml     norm, queries, keys, values (:mod:`expertcast.data.packed_attention`)
    torch    attention
    ggml     output matrix, residual, norm, the router's product
    own      the router's choice, and the rest of the layer

D hidden size, E routed experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial, update_wrapper
from operator import itemgetter
from threading import local
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from expertcast.data import ggml, packed_attention
from expertcast.data.machine import one_row, without_gradients, without_onednn
from expertcast.data.taps import OBSERVES

_NORMS = ("input_layernorm", "post_attention_layernorm")
_NODES = 24
"""Most tensors of a graph."""
_STEP = "_step"
"""Attribute of a layer."""
_GIVEN = "_product"
"""Attribute of a router: the hidden state with which it runs next, and its product, float32 [1, E]."""


def fuse_layers(model: nn.Module, routers: Iterable[str]) -> None:
    """Let decoder layers with packed attention run one token by ggml, where that gives their own outputs.

    Args:
        model: the model, on the CPU.
        routers: names of its routers.
    """
    packed_attention.fuse_attention(model)
    forwards: dict[object, _Router] = {}
    places = {}
    for name in routers:
        router = model.get_submodule(name)
        if type(router) not in forwards:
            forwards[type(router)] = _Router(router)
        router.forward = MethodType(forwards[type(router)], router)  # type: ignore[method-assign]
        if forwards[type(router)].takes_products:
            places[name] = router
    agree: dict[object, bool] = {}
    for name, layer in model.named_modules():
        norms = [layer._modules.get(norm) for norm in _NORMS]
        fused = packed_attention.is_fused(layer._modules.get("self_attn"))
        if not fused or len(layer._modules) != 4 or not all(map(_is_norm, norms)):
            continue
        (rest,) = layer._modules.keys() - {"self_attn", *_NORMS}
        kind = type(layer), type(layer.self_attn), *map(type, norms), *packed_attention.settings(layer).items()
        if kind not in agree:
            agree[kind] = _agrees(layer, rest)
        if agree[kind]:
            own = [path.removeprefix(f"{name}.").split(".") for path in places if path.startswith(f"{name}.")]
            forward = _Layer(type(layer).forward, rest, own[0] if len(own) == 1 else None)
            layer.forward = MethodType(forward, layer)  # type: ignore[method-assign]


def _is_norm(module: Any) -> bool:
    return hasattr(module, "variance_epsilon") and [*module._parameters] == ["weight"]


# Routers


class _Router:
    """The forward of routers of one class, which take one token's product where their layer has computed it.

    Else they run one token without oneDNN: a product of a row by 128 x 2,048 bf16 weights takes 158 us in a model with
    it, 82 without.

    Args:
        router: one of them.
    """

    def __init__(self, router: Any) -> None:
        self._own, self._now = type(router).forward, local()
        update_wrapper(self, self._own)
        self._choose = _with_linear(self._own, self._linear)
        self.takes_products = self._agrees(router)

    def __call__(self, router: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a router."""
        hidden = args[0] if len(args) == 1 else None
        if hidden is None or not one_row(hidden):
            return self._own(router, *args, **kwargs)
        given = router.__dict__.pop(_GIVEN, None)
        if given is None or given[0].data_ptr() != hidden.data_ptr():
            return without_onednn(self._own, router, hidden, **kwargs)
        self._now.product = given[1]
        return self._choose(router, hidden, **kwargs)

    def _linear(self, hidden: Tensor, _weight: Tensor, bias: Tensor | None = None) -> Tensor:
        product: Tensor = self._now.product.to(hidden.dtype)
        self._now.product = None  # there is one
        return product if bias is None else product + bias

    @torch.no_grad()
    def _agrees(self, router: Any) -> bool:
        """Return whether a router's only use of its input is one product with its weights."""
        if weights_of(router) is None:
            return False
        weight = router.weight
        random = torch.Generator().manual_seed(0)
        hidden = torch.randn(1, weight.shape[1], generator=random, dtype=torch.float32).to(weight.dtype)
        self._now.product = hidden.float() @ weight.float().t()
        try:
            expected, found = self._own(router, hidden), self._choose(router, torch.full_like(hidden, torch.nan))
            pairs = list(zip(expected, found, strict=True))
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return False
        return all(packed_attention.near(made, own) for own, made in pairs)


def weights_of(router: Any) -> ggml.Matrices | None:
    """Return a router's weights [E, D], if ggml can multiply by them where they lie."""
    weight = router._parameters.get("weight")
    kind = None if weight is None else ggml.KINDS.get(weight.dtype)
    if kind is None or weight.dim() != 2 or weight.device.type != "cpu" or not weight.is_contiguous():
        return None
    return ggml.Matrices(kind, weight.data_ptr(), 1, weight.nbytes, *weight.shape)


def _with_linear(function: Any, linear: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return a function for which `torch.nn.functional.linear` is another one."""
    functional = SimpleNamespace(**{**vars(nn.functional), "linear": linear})
    layers = SimpleNamespace(**{**vars(nn), "functional": functional})
    others = {nn.functional: functional, nn: layers, torch: SimpleNamespace(**{**vars(torch), "nn": layers})}
    scope = {
        name: others.get(value, value) if isinstance(value, ModuleType) else value
        for name, value in function.__globals__.items()
    }
    return FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)


# Layers


class _Layer:
    """The forward of a decoder layer.

    Args:
        own: the forward of its class.
        rest: name of the part behind the second norm.
        router: place of its router in the layer; None: it multiplies for itself.
    """

    def __init__(self, own: Callable[..., Any], rest: str, router: list[str] | None) -> None:
        self._own, self._rest, self._router = own, rest, router
        update_wrapper(self, own)

    def __call__(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        parts = layer._modules
        attention, before, after = parts["self_attn"], *(parts[name] for name in _NORMS)
        if len(args) != 1 or not packed_attention.takes(attention, args[0], kwargs):
            return self._own(layer, *args, **kwargs)
        step: _Step | None = layer.__dict__.get(_STEP)
        if step is None or not step.holds():
            step = layer.__dict__[_STEP] = _Step.of(layer, self._router)
        if step is None or not all(getattr(hook, OBSERVES, False) for hook in after._forward_pre_hooks.values()):
            return self._own(layer, *args, **kwargs)
        seen = packed_attention.attended(attention, args[0], kwargs, step.projections, (step.key, True), before)
        graph = ggml.kept((step.key, False), lambda: _After(args[0].dtype, step.output, step.weights, after))
        residual, hidden, product = graph.run(seen, args[0])
        for hook in after._forward_pre_hooks.values():
            hook(after, (residual,))
        if step.weights is not None:
            step.router.__dict__[_GIVEN] = hidden, product
        return residual + parts[self._rest](hidden)


class _Step(NamedTuple):
    """The parts of a layer as its graphs take them. To check them takes a tenth of the time of finding them."""

    hooks: list[dict[Any, Any]]
    """Hooks of the parts that the graphs replace: there are none."""
    parts: list[tuple[Mapping[str, Any], Callable[[Mapping[str, Any]], object], object]]
    """Owners with the parts that are theirs: modules, and the forward of attention."""
    places: list[tuple[Mapping[str, Any], str, torch.dtype, int]]
    """Dtypes and addresses of parameters, by owner and name."""
    projections: tuple[ggml.Matrices, ...]
    output: ggml.Matrices
    """The output matrix of attention."""
    router: nn.Module | None
    weights: ggml.Matrices | None
    """The router's, if it takes products."""
    key: object
    """Key of the graphs."""

    @classmethod
    def of(cls, layer: Any, router: list[str] | None) -> _Step | None:
        """Return a layer's; None: it runs its own code."""
        attention, before, after = layer.self_attn, *(layer._modules[name] for name in _NORMS)
        output, replaced = attention.o_proj, [before, *filter(None, attention._modules.values())]
        if not packed_attention.is_fused(attention) or not packed_attention.is_plain(attention):
            return None
        patched = any("forward" in own.__dict__ for own in (after, *replaced))
        if patched or not packed_attention.is_packed(output) or output.bias is not None:
            return None
        hooks = [each for own in (attention, *replaced) for each in (own._forward_hooks, own._forward_pre_hooks)]
        hooks.append(after._forward_hooks)
        owners = {id(layer): (layer, ["self_attn", *_NORMS]), id(attention): (attention, [*attention._modules])}
        inner: Any = layer if router else None
        for name in router or ():
            owners.setdefault(id(inner), (inner, []))[1].append(name)
            inner = inner._modules[name]
        weights = None if inner is None else weights_of(inner)
        packed = [own.__dict__["matrix"] for own in replaced if packed_attention.is_packed(own)]
        read: list[tuple[Mapping[str, Any], str]] = [(own.parameters, own.name) for own in packed]
        if weights is not None:
            read.append((inner._parameters, "weight"))
        vectors = [(norm._parameters, "weight") for norm in (before, after)] + packed_attention.vectors(attention)
        wrong = any(norm.weight.numel() != output.out_features for norm in (before, after))
        if wrong or not all(packed_attention.is_readable(own[name]) for own, name in vectors):
            return None
        places = [(own, name, own[name].dtype, own[name].data_ptr()) for own, name in (*read, *vectors)]
        parts: list[tuple[Mapping[str, Any], Callable[[Mapping[str, Any]], object], object]]
        parts = [(own._modules, getter := itemgetter(*names), getter(own._modules)) for own, names in owners.values()]
        parts.append((attention.__dict__, itemgetter("forward"), attention.forward))
        matrix = output.__dict__["matrix"].single()
        found = cls(hooks, parts, places, packed_attention.projections(attention), matrix, inner, weights, object())
        return found if found.holds() else None

    def holds(self) -> bool:
        """Return whether nothing has changed."""
        if any(self.hooks) and any(map(packed_attention.observing, self.hooks)):
            return False
        try:
            for own, parts, found in self.parts:
                if parts(own) != found:
                    return False
            for own, name, dtype, address in self.places:
                memory = own[name]
                if memory.data_ptr() != address or memory.dtype != dtype:
                    return False
        except KeyError:  # a part was removed
            return False
        return True


class _After:
    """The graph of a layer behind its attention.

    Args:
        dtype: of the layer's input and output.
        matrix: the output matrix of attention.
        weights: the router's; None: there is no product with them.
        norm: the norm of what is behind.
    """

    def __init__(self, dtype: torch.dtype, matrix: ggml.Matrices, weights: ggml.Matrices | None, norm: Any) -> None:
        self._inputs, self._size, self._dtype = matrix.inputs, matrix.outputs, dtype
        self._products = 0 if weights is None else weights.outputs
        self._graph = graph = ggml.Graph("attention", matrix.outputs * matrix.inputs, _NODES)
        (self._seen, seen), (self._before, before) = graph.given(dtype, matrix.inputs), graph.given(dtype, self._size)
        residual = graph.apply("add", graph.apply("mul_mat", graph.weights(matrix), seen), before)
        normed = graph.apply("rms_norm", residual, norm.variance_epsilon)
        normed = graph.apply("mul", normed, graph.numbers(norm._parameters["weight"]))
        self._made = [graph.taken(residual, dtype), graph.taken(normed, dtype)]
        if weights is not None:
            product = graph.apply("mul_mat", graph.weights(weights), normed)
            self._made.append(graph.taken(product, torch.float32))

    @without_gradients
    def run(self, seen: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the residual and what the norm makes of it, [1, 1, D] each, and the product, float32 [1, E]."""
        seen, hidden = seen.contiguous(), hidden.contiguous()
        assert seen.numel() == self._inputs
        self._seen.data, self._before.data = seen.data_ptr(), hidden.data_ptr()
        both = torch.empty(2, 1, 1, self._size, dtype=self._dtype)
        product = torch.empty(1, self._products, dtype=torch.float32)
        residual, normed = both.unbind()
        for record, memory in zip(self._made, (residual, normed, product), strict=False):
            record.data = memory.data_ptr()
        self._graph.run()
        return residual, normed, product


class _Half(nn.Module):
    """Stands for the rest of a layer in a trial."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * 0.5 + 1


def _agrees(layer: Any, rest: str) -> bool:
    """Return whether the fused code gives a layer's own outputs."""
    behind, layer._modules[rest] = layer._modules[rest], _Half()
    own = type(layer).forward
    try:
        return packed_attention.agrees(layer.self_attn, partial(own, layer), partial(_Layer(own, rest, None), layer))
    finally:
        layer._modules[rest] = behind
        layer.__dict__.pop(_STEP, None)
