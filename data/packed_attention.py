"""Attention of one token with packed projections: one graph of ggml in place of some thirty operations of torch.

    ggml     q, k, v = products of the input; biases; norms of heads; rotation by the position
    torch    the cache takes k and v; attention, the heads that share keys as rows of one; the output matrix

H heads, G heads of keys and values, C numbers of a head, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.utils import output_capturing

from expertcast.data import ggml
from expertcast.data.kv_cache import added
from expertcast.data.machine import without_gradients
from expertcast.data.packed_experts import PackedMatrix

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_NORMS = ("q_norm", "k_norm")
_NODES = 96
"""Most tensors of a graph."""
_TRIED, _NEAR = 5, 0.02
"""Tokens of the trial, and the largest difference of its outputs, relative to their norm: rounding makes .006."""


def fuse_attention(model: nn.Module) -> None:
    """Let attention modules with packed projections run one token by ggml, where that gives their own outputs.

    Other calls run the module's own code, with a mask that groups the heads of one token (:func:`_masked`).

    Args:
        model: the model, on the CPU.
    """
    agree: dict[tuple[object, ...], bool] = {}
    for module in model.modules():
        if not is_packed(getattr(module, "o_proj", None)):
            continue
        kind = _kind(module)
        if kind is not None and kind not in agree:
            agree[kind] = _agrees(module)
        if kind is not None and agree[kind]:
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
        elif getattr(module, "num_key_value_groups", 1) > 1:
            module.register_forward_pre_hook(_masked, with_kwargs=True)


def is_packed(layer: object) -> bool:
    """Whether a layer is a packed linear one."""
    return isinstance(layer, nn.Module) and isinstance(layer.__dict__.get("matrix"), PackedMatrix)


def _kind(module: nn.Module) -> tuple[object, ...] | None:
    """Return a key that modules of equal code share; None: the module is not attention as it is fused here."""
    children = dict(module.named_children())
    norms = {name: child for name, child in children.items() if name in _NORMS}
    if list(module.parameters(recurse=False)) or children.keys() != {*_PROJECTIONS, "o_proj", *norms}:
        return None
    forms = []
    for name in _PROJECTIONS:
        layer = children[name]
        if not is_packed(layer) or not layer.__dict__["matrix"].has_one_piece:
            return None
        forms.append((layer.__dict__["matrix"].form, layer.bias is not None))
    own = settings(module)
    size, heads = own.get("head_dim", 0), forms[0][0].outputs
    if not size or heads % size or any(norm.weight.numel() != size for norm in norms.values()):  # type: ignore[operator, union-attr]
        return None
    return type(module), *forms, *norms, *own.items()


def settings(module: nn.Module) -> dict[str, object]:
    """Return a module's own numbers and words, but for its place in the model."""
    own = vars(module).items()
    return {name: value for name, value in own if isinstance(value, (int, float, str)) and name != "layer_idx"}


@torch.no_grad()
def agrees(attention: Any, own: Callable[..., Tensor], fused: Callable[..., Tensor]) -> bool:
    """Return whether two forwards have equal outputs for a token behind some others, up to rounding.

    Args:
        attention: the attention module within.
        own, fused: of an attention module or its layer; the first one runs the other tokens.
    """
    dtype, random = attention.o_proj.__dict__["matrix"].dtype, torch.Generator().manual_seed(0)
    hidden = torch.randn(1, _TRIED, attention.q_proj.in_features, generator=random, dtype=torch.float32).to(dtype)
    half = torch.rand(1, _TRIED, attention.head_dim // 2, generator=random, dtype=torch.float32)
    angles = half.repeat(1, 1, 2) * 6
    positions = angles.cos().to(dtype), angles.sin().to(dtype)

    def last(forward: Callable[..., Tensor]) -> Tensor:
        cache, found = DynamicCache(), hidden
        for some, call in ((slice(0, -1), own), (slice(-1, None), forward)):
            turned = tuple(each[:, some] for each in positions)
            found = call(hidden[:, some], position_embeddings=turned, attention_mask=None, past_key_values=cache)
        return found

    try:
        expected, found = last(own), last(fused)
        return near(found, expected)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False  # it takes other arguments, or returns more


def near(found: Tensor, expected: Tensor) -> bool:
    """Return whether outputs of a trial differ by rounding alone."""
    return bool((found.float() - expected.float()).norm() <= _NEAR * expected.float().norm())


def _agrees(module: Any) -> bool:
    def named(forward: Callable[..., Any], hidden: Tensor, **others: Any) -> Tensor:
        found: Tensor = forward(module, hidden_states=hidden, **others)[0]
        return found

    return agrees(module, partial(named, type(module).forward), partial(named, _forward))


def _forward(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Run an attention module."""
    if args or not takes(module, kwargs.get("hidden_states"), kwargs) or not is_plain(module):
        given = _masked(module, args, kwargs) if getattr(module, "num_key_value_groups", 1) > 1 else None
        args, kwargs = given or (args, kwargs)
        own: tuple[Tensor, Tensor | None] = type(module).forward(module, *args, **kwargs)
        return own
    matrices = projections(module)
    key = (*matrices, *_parts(module), kwargs["hidden_states"].dtype)
    return module.o_proj(attended(module, kwargs["hidden_states"], kwargs, matrices, key)), None


def _parts(module: Any) -> tuple[object, ...]:
    """Return what a graph depends on beside the matrices: another model's may lie where freed ones lay."""
    epsilons = [getattr(module._modules.get(name), "variance_epsilon", None) for name in _NORMS]
    return module.head_dim, *epsilons, *((own[name].dtype, own[name].data_ptr()) for own, name in vectors(module))


def vectors(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Return the biases and the norms' weights that graphs read where they lie, by owner and name."""
    own = module._modules
    found = [(own[name]._parameters, "bias") for name in _PROJECTIONS]  # type: ignore[union-attr]
    found += [(norm._parameters, "weight") for norm in map(own.get, _NORMS) if norm is not None]
    return [(owner, name) for owner, name in found if owner[name] is not None]


def is_readable(vector: Tensor) -> bool:
    """Whether graphs can read a vector where it lies."""
    return vector.dtype in ggml.KINDS and vector.device.type == "cpu" and vector.is_contiguous()


def is_fused(module: nn.Module | None) -> bool:
    """Whether a module is attention that runs one token by ggml."""
    return module is not None and getattr(module.__dict__.get("forward"), "__func__", None) is _forward


def takes(module: Any, hidden: object, arguments: Mapping[str, Any]) -> bool:
    """Return whether ggml can run a call: one token, without a mask.

    Args:
        module: the attention module.
        hidden: its input.
        arguments: its other arguments, by name.
    """
    positions = arguments.get("position_embeddings")
    return (
        isinstance(hidden, Tensor) and hidden.shape == (1, 1, module._modules["q_proj"].in_features)
        and hidden.device.type == "cpu" and hidden.dtype in ggml.KINDS
        and arguments.get("past_key_values") is not None and arguments.get("attention_mask") is None
        and positions is not None and positions[0].shape == (1, 1, module.head_dim)
        and vars(module.config).get("_attn_implementation_internal") == "sdpa"  # its property takes 5 to 15 us
        and not module.training and torch._C._get_tracing_state() is None
    )  # fmt: skip


def is_plain(module: nn.Module) -> bool:
    """Whether the layers that the graph replaces are packed, without hooks, and readable."""
    own = module._modules
    replaced = [each for name, each in own.items() if each is not None and name != "o_proj"]
    if not all(is_packed(own[name]) for name in _PROJECTIONS) or any(map(observed, replaced)):
        return False
    return all(is_readable(owner[name]) for owner, name in vectors(module))


def observed(module: nn.Module) -> bool:
    """Whether a module has hooks on its forward."""
    return observing(module._forward_hooks) or observing(module._forward_pre_hooks)


def observing(hooks: Mapping[Any, Any]) -> bool:
    """Whether hooks do anything: those that transformers leaves after a forward with gathered outputs do not."""
    return any(
        output_capturing._active_collector.get() or getattr(each, "__module__", None) != output_capturing.__name__
        for each in hooks.values()
    )


def projections(module: nn.Module) -> tuple[ggml.Matrices, ...]:
    """Return the matrices of queries, keys and values where they lie now."""
    return tuple(module._modules[name].__dict__["matrix"].single() for name in _PROJECTIONS)


def attended(
    module: Any, hidden: Tensor, arguments: Mapping[str, Any], matrices: tuple[ggml.Matrices, ...],
    key: tuple[object, ...], norm: Any = None,
) -> Tensor:  # fmt: skip
    """Return what a token's heads attend to, [1, 1, H x C]; the cache takes its keys and values.

    Args:
        module, hidden, arguments: those of :func:`takes`.
        matrices: result of :func:`projections`.
        key: that of the graph (:func:`ggml.kept`).
        norm: RMSNorm of the input; None: the input is normalised.
    """
    attention = ggml.kept(key, lambda: _Attention(module, hidden.dtype, matrices, norm))
    return attention.run(module, hidden, arguments["position_embeddings"], arguments["past_key_values"])


class _Turn:
    """The rotation [1, C] by a position: cosines, and sines of which the first half is negative."""

    def __init__(self, size: int) -> None:
        with torch.inference_mode(False):  # else only steps in that mode may write to it
            self.cos, self.sin = (torch.empty(1, size, dtype=torch.float32) for _ in range(2))
        self._seen: tuple[Tensor, Tensor] | None = None

    def follow(self, cos: Tensor, sin: Tensor) -> None:
        """Take the rotation [1, 1, C], which all layers of a step share."""
        if self._seen is None or self._seen[0] is not cos or self._seen[1] is not sin:
            self.cos.copy_(cos[0])
            self.sin.copy_(sin[0])
            self.sin[:, : self.sin.shape[1] // 2].neg_()
            self._seen = cos, sin


class _Attention:
    """The graph of one layer.

    Args:
        module: the attention module.
        dtype: of its input and output.
        matrices: of its projections of queries, keys and values.
        before: RMSNorm of the input; None: there is none.
    """

    def __init__(self, module: Any, dtype: torch.dtype, matrices: tuple[ggml.Matrices, ...], before: Any) -> None:
        size, hidden, own = module.head_dim, matrices[0].inputs, module._modules
        heads, pairs, _ = (each.outputs // size for each in matrices)
        shape = 1, heads + 2 * pairs, 1, size
        needed = (shape, torch.float32), (shape, dtype), ((heads + pairs, size), torch.float32)
        made, turned, turning = ggml.scratch(*needed)
        self._turn = ggml.kept(("turn", size), lambda: _Turn(size))
        work = sum(each.outputs * each.inputs for each in matrices)
        self._graph = graph = ggml.Graph("attention", work, _NODES)
        cos, sin = graph.tensor(self._turn.cos), graph.tensor(self._turn.sin)
        self._input, row = graph.given(dtype, hidden)
        if before is not None:
            normed = graph.apply("rms_norm", row, before.variance_epsilon)
            row = graph.apply("mul", normed, graph.numbers(before._parameters["weight"]))
        parts = *turning.split_with_sizes((heads, pairs)), made[:, heads + pairs :]
        for matrix, name, norm, out in zip(matrices, _PROJECTIONS, (*_NORMS, ""), parts, strict=True):
            bias, scale = own[name].bias, own.get(norm)
            found = graph.apply("mul_mat", graph.weights(matrix), row, out=out if bias is scale is None else None)
            if bias is not None:
                found = graph.apply("add", found, graph.numbers(bias), out=out if scale is None else None)
            if scale is not None:
                found = graph.view("reshape_2d", found, size, matrix.outputs // size)
                found = graph.apply("rms_norm", found, scale.variance_epsilon)
                graph.apply("mul", found, graph.numbers(scale._parameters["weight"]), out=out)
        before_turn = graph.tensor(turning)
        halves = [
            graph.view("view_2d", before_turn, size // 2, heads + pairs, 4 * size, start) for start in (2 * size, 0)
        ]
        across = graph.apply("mul", graph.apply("concat", *halves, 0), sin)
        graph.apply("add", graph.apply("mul", before_turn, cos), across, out=made[:, : heads + pairs])
        graph.cast(graph.tensor(made), dtype, turned)
        query, self._keys, self._values = turned.split_with_sizes((heads, pairs, pairs), 1)
        self._query = query.view(1, pairs, heads // pairs, -1)

    @without_gradients
    def run(self, module: Any, hidden: Tensor, positions: tuple[Tensor, Tensor], cache: Any) -> Tensor:
        """Run :func:`attended`."""
        hidden = hidden.contiguous()
        self._input.data = hidden.data_ptr()
        self._turn.follow(*positions)
        self._graph.run()
        keys, values = added(cache, module.layer_idx, self._keys, self._values)
        seen = nn.functional.scaled_dot_product_attention(self._query, keys, values, scale=module.scaling)
        return seen.view(1, 1, -1)


def _masked(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give torch's attention of one token a mask that hides nothing: without a mask, torch converts each head's keys
    and values to float32 for every query head (2,048 bf16 tokens: 15 ms a layer); with one, transformers groups the
    heads.
    """
    hidden = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(hidden, Tensor) or hidden.device.type != "cpu" or hidden.shape[1] != 1:
        return None
    if module.config._attn_implementation != "sdpa" or kwargs.get("attention_mask", hidden) is not None:
        return None
    return args, {**kwargs, "attention_mask": hidden.new_ones(1, 1, 1, 1, dtype=torch.bool)}
