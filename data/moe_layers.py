"""Find the MoE layers of a `transformers` model by structure, never by model name.

The router is the class that the model records as `router_logits`. The experts are the module decorated with
`use_experts_implementation`. One forward of two tokens, in which experts return their own input, shows the rest: the
norm whose output is the router's input (without one, that input counts as the residual), the router's other arguments,
and how the experts' output enters the residual stream. The forward needs no weights, so a model on the meta device
works too.
"""

from __future__ import annotations

import inspect
import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as fx_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from expertcast.data.source import check_release
from expertcast.predictors.messages import ExpertcastError, first_line
from expertcast.predictors.view import Adds, MoELayer, MoEView, OwnTensor

Sum = dict[int, float]
"""Sum of atoms: factor by atom."""

_aten = torch.ops.aten
_SAME = {
    _aten.view, _aten._unsafe_view, _aten.reshape, _aten.clone, _aten._to_copy, _aten.alias, _aten.detach,
    _aten.unsqueeze, _aten.squeeze, _aten.contiguous, _aten.lift_fresh,
}  # fmt: skip
"""The same numbers in another shape, place or dtype."""
_PLUS = {_aten.add: 1.0, _aten.add_: 1.0, _aten.sub: -1.0, _aten.sub_: -1.0}
_TIMES = {_aten.mul, _aten.mul_, _aten.div, _aten.div_}


class Sums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that tracks each tensor as a linear combination of opaque terms, its atoms.

    An addition, a product with a number and a change of shape or dtype keep the atoms of their arguments; any other
    operation makes a new atom. No value is read.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sums: dict[int, Sum] = {}
        self._behind: list[frozenset[int]] = []
        """Marked atoms that an atom was computed from, by atom."""
        self._alive: list[Tensor] = []  # ids stay unique only while the tensors live
        self._made: dict[object, Tensor] = {}

    def of(self, tensor: Tensor) -> Sum:
        """Return the tensor as a sum of atoms."""
        if id(tensor) not in self._sums:
            self._put(tensor, {self._atom(frozenset()): 1.0})
        return self._sums[id(tensor)]

    def mark(self, tensor: Tensor) -> int:
        """Make the tensor one atom, follow what is computed from it, and return the atom."""
        atom = self._atom(frozenset([len(self._behind)]))
        self._put(tensor, {atom: 1.0})
        return atom

    def depends(self, atoms: Iterable[int], marked: int) -> bool:
        """Return whether any of the atoms is, or was computed from, the marked one."""
        return any(marked in self._behind[atom] for atom in atoms)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        kwargs = dict(kwargs or {})
        output = self._run(func, args, kwargs)
        if isinstance(output, Tensor):
            self._follow(func.overloadpacket, args, kwargs, output)
        elif isinstance(output, (tuple, list)):
            for each in output:
                if isinstance(each, Tensor):
                    self._put(each, self._new(args, kwargs))
        return output

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Run an operation, on the meta device once for arguments alike: its shapes are computed slowly, in Python."""
        key = _key((func, args, tuple(kwargs.items())))
        if (made := self._made.get(key)) is not None:
            return torch.empty_strided(made.shape, made.stride(), dtype=made.dtype, device="meta")
        output = func(*args, **kwargs)
        fresh = all(each.alias_info is None for each in (*func._schema.arguments, *func._schema.returns))
        if fresh and isinstance(output, Tensor) and output.is_meta:
            self._made[key] = output
        return output

    def _follow(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        total = self._sum(operation, args, kwargs) if output.is_floating_point() else None
        self._put(output, self._new(args, kwargs) if total is None else total)
        if args and output is args[0] and output._base is not None:  # written through a view
            self._put(output._base, self._new((*args, output._base), kwargs))

    def _sum(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sum | None:
        """Return the result in the atoms of its arguments; None for an operation that makes a new atom."""
        first = args[0] if args else None
        if not isinstance(first, Tensor):
            return None
        if operation in _SAME:
            return self.of(first)
        if len(args) < 2:
            return None
        second = args[1]
        if operation in _TIMES and isinstance(second, Real):
            factor = float(second) if operation in (_aten.mul, _aten.mul_) else 1.0 / float(second)
            return {atom: factor * value for atom, value in self.of(first).items()}
        if operation in _PLUS and isinstance(second, Tensor):
            factor = _PLUS[operation] * float(kwargs.get("alpha", 1.0))
            return minus(self.of(first), self.of(second), -factor)
        return None

    def _new(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sum:
        tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        behind = {marked for tensor in tensors for atom in self.of(tensor) for marked in self._behind[atom]}
        return {self._atom(frozenset(behind)): 1.0}

    def _atom(self, behind: frozenset[int]) -> int:
        self._behind.append(behind)
        return len(self._behind) - 1

    def _put(self, tensor: Tensor, total: Sum) -> None:
        self._alive.append(tensor)
        self._sums[id(tensor)] = total


def minus(first: Sum, second: Sum, factor: float = 1.0) -> Sum:
    """Return `first - factor * second` without atoms that cancel."""
    total = dict(first)
    for atom, value in second.items():
        total[atom] = total.get(atom, 0.0) - factor * value
    return {atom: value for atom, value in total.items() if value}


def _key(value: object) -> object:
    """Return what an operation's shapes depend on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return tuple(map(_key, value)) if isinstance(value, (tuple, list)) else (type(value), value)


PROBE_EXPERTS = "expertcast_probe"
Producers = dict[int, tuple[str, nn.Module, Tensor, Tensor]]
"""Path and module that returned a tensor, the module's first input, and the tensor, by the tensor's id."""


@dataclass(slots=True, kw_only=True)
class Probed:
    """One MoE block with its router and experts, and what the probe found; sums are those of :class:`Sums`."""

    family: str
    """Name of the model's class."""
    names: tuple[str, str, str]
    """Paths of block, router and experts."""
    modules: tuple[nn.Module, nn.Module, nn.Module]
    """Block, router and experts."""
    decoder: nn.Module
    """The module around the block."""
    norm: tuple[str, nn.Module] | None = None
    """Path and module whose output is the block's input; None if there is no such module."""
    residual: Sum | None = None
    """Input of the norm."""
    normed: Sum | None = None
    router_input: Sum | None = None
    dims: int = 2
    """Dimensions of the router's input: 2 for [T, D], 3 for [B, S, D]."""
    arguments: dict[str, object] = field(default_factory=dict)
    """The router's other arguments by name."""
    output: object = None
    """Return value of the router."""
    experts: int = -1
    """Atom of the experts' output."""
    block: Sum | None = None
    layer: Sum | None = None
    """Output of the module around the block."""
    depends: bool = False
    """Whether the layer's output depends on the experts' output other than by a term of the sum."""

    def adds(self) -> Adds | None:
        """Return how the layer adds the experts' output to the residual stream; None if the output is not a term."""
        if self.layer is None or self.residual is None or self.block is None:
            return None
        added = minus(self.layer, self.residual)
        factor = added.get(self.experts)
        if factor is None or self.depends or any(atom in self.residual for atom in added):
            return None
        behind = factor / self.block.get(self.experts, factor)  # factor of the block's output in the layer
        alike = added.keys() == self.block.keys() and all(
            math.isclose(value, behind * self.block[atom]) for atom, value in added.items()
        )
        return Adds(factor=factor, beside=not alike)


def probe(model: PreTrainedModel, blocks: Sequence[Probed]) -> list[Probed]:
    """Run a forward of two tokens and return the blocks with what it showed; the model stays unchanged.

    Raises:
        ExpertcastError: the forward fails.
    """
    device = next(model.parameters()).device
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)  # its embedding may be zero
    tokens = [token for token in (1, 2, 3) if token != padding][:2]
    ready = torch.zeros(1, 1, 2, 2, dtype=model.dtype, device=device)
    given: dict[str, object] = {"input_ids": torch.tensor([tokens], device=device), "use_cache": False}
    # a ready 4-d mask keeps transformers from building its own, which fails for some models on the meta device; layers
    # other than attention may reject it, and some models compute positions from values
    positions = torch.arange(2, device=device)[None]
    masked: dict[str, object] = {"attention_mask": ready}
    attempts: list[dict[str, object]] = [masked, {}, {**masked, "position_ids": positions}]
    errors: list[Exception] = []
    for attempt in attempts:
        try:
            return _forward(model, blocks, {**given, **attempt})
        except Exception as error:  # the model's code may raise anything on inputs that it rejects
            errors.append(error)
    name = ": ".join(filter(None, [model.config.name_or_path, type(model).__name__]))
    raise ExpertcastError(
        f"{name} is not supported: it does not run on two tokens of text "
        f"({type(errors[-1]).__name__}: {first_line(errors[-1])})"
    ) from errors[-1]


@contextmanager
def experts_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Run the model's experts with another registered function inside; restores the old one."""
    before = model.get_experts_implementation()
    model.set_experts_implementation(name)
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def _probe_experts(experts: nn.Module, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    return hidden_TD.clone()


def _forward(model: PreTrainedModel, blocks: Sequence[Probed], given: Mapping[str, object]) -> list[Probed]:
    ALL_EXPERTS_FUNCTIONS.register(PROBE_EXPERTS, _probe_experts)
    sums = Sums()
    seen = [replace(block) for block in blocks]
    producers: Producers = {}
    training = model.training
    with ExitStack() as stack:
        for probed in seen:
            stack.enter_context(_watched(probed, sums, producers))
        for name, module in model.named_modules():
            if name:

                def after(module: nn.Module, args: tuple[object, ...], output: object, name: str = name) -> None:
                    if isinstance(output, Tensor) and args and isinstance(args[0], Tensor):
                        producers[id(output)] = (name, module, args[0], output)

                stack.callback(module.register_forward_hook(after).remove)
        stack.enter_context(experts_implementation(model, PROBE_EXPERTS))
        stack.callback(model.train, training)
        model.eval()
        stack.enter_context(torch.no_grad())
        # a mask on the meta device has no values: assume that it is set everywhere
        stack.enter_context(fx_config.patch(meta_nonzero_assume_all_nonzero=True))  # type: ignore[attr-defined]
        stack.enter_context(sums)
        model.base_model(**given)
    return seen


def _first_tensor(output: object) -> Tensor | None:
    """Return a module's output, or the first of several; None if that is not a tensor."""
    first = output[0] if isinstance(output, tuple) and output else output
    return first if isinstance(first, Tensor) else None


@contextmanager
def _watched(probed: Probed, sums: Sums, producers: Producers) -> Iterator[None]:
    """Fill in `probed` by hooks on one block, its router, its experts and the layer around it."""
    block, router, experts = probed.modules

    def before_block(_module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if hidden is not None and id(hidden) in producers:
            name, norm, residual, _ = producers[id(hidden)]
            probed.norm = name, norm
            probed.residual, probed.normed = sums.of(residual), sums.of(hidden)

    def after_router(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, object], output: object) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        hidden, *others = bound.items()
        assert isinstance(hidden[1], Tensor), f"{type(module).__name__} was not given a tensor first"
        probed.router_input, probed.dims = sums.of(hidden[1]), hidden[1].dim()
        probed.arguments, probed.output = dict(others), output

    def after_experts(_module: nn.Module, _args: object, output: Tensor) -> None:
        probed.experts = sums.mark(output)

    def after_block(_module: nn.Module, _args: object, output: object) -> None:
        if (first := _first_tensor(output)) is not None:
            probed.block = sums.of(first)

    def after_layer(_module: nn.Module, _args: object, output: object) -> None:
        if (first := _first_tensor(output)) is not None:
            probed.layer = sums.of(first)
            others = [atom for atom in probed.layer if atom != probed.experts]
            probed.depends = sums.depends(others, probed.experts)

    with ExitStack() as stack:
        for handle in (
            block.register_forward_pre_hook(before_block, with_kwargs=True),
            router.register_forward_hook(after_router, with_kwargs=True),
            experts.register_forward_hook(after_experts),
            block.register_forward_hook(after_block),
            probed.decoder.register_forward_hook(after_layer),
        ):
            stack.callback(handle.remove)
        yield


def check_model(model: object) -> None:
    """Refuse what is not a model of transformers whose weights are in place.

    Raises:
        ExpertcastError: another object, a module around a model, or a model that accelerate moves about.
    """
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    if not isinstance(model, nn.Module) or not hasattr(model, "set_experts_implementation"):
        if any(isinstance(module, PreTrainedModel) for module in modules):
            raise ExpertcastError(f"a {type(model).__name__} is a module around a model: pass the model inside")
        shown = reprlib.repr(model) if isinstance(model, str) else f"a {type(model).__name__}"
        raise ExpertcastError(f"{shown} is no loaded model: expertcast.load_offloaded(...) loads one")
    if any(hasattr(module, "_hf_hook") for module in modules):
        raise ExpertcastError(
            "accelerate moves this model's weights while it runs: load the model without device_map and without "
            "accelerate's offload"
        )


def find_moe_layers(model: PreTrainedModel) -> MoEView:
    """Return the MoE layers of a model in order, after one forward of two tokens.

    The model may be on the meta device, and stays unchanged.

    Raises:
        ExpertcastError: the model has no MoE layers of the supported form, or transformers is too old.
    """
    check_release("reading the MoE layers of")
    check_model(model)
    seen = probe(model, _moe_blocks(model))
    layers = tuple(_layer(index, each) for index, each in enumerate(seen))
    shapes = {(layer.num_experts, layer.top_k, layer.hidden_size) for layer in layers}
    if len(shapes) > 1:
        raise ExpertcastError(
            f"{type(model).__name__} mixes MoE layers of different shape (E, K, D): {sorted(shapes)}; not supported"
        )
    return MoEView(layers, model_id=str(model.config.name_or_path or type(model).__name__))


def same_layers(view: MoEView, model: nn.Module, other: nn.Module) -> MoEView:
    """Return the layers of a view in another model with the same modules, without a forward.

    Args:
        view, model: a view and its model.
        other: such as the same model with weights.
    """
    names = {module: name for name, module in model.named_modules()}

    def there(module: nn.Module) -> nn.Module:
        return other.get_submodule(names[module]) if module in names else module  # no norm: an identity

    def arguments(layer: MoELayer) -> tuple[tuple[str, OwnTensor | float | None], ...]:
        given = layer.router_arguments
        return tuple(
            (name, replace(own, owner=there(own.owner)) if isinstance(own, OwnTensor) else own) for name, own in given
        )

    layers = tuple(
        replace(
            layer, decoder=there(layer.decoder), block=there(layer.block), norm=there(layer.norm),
            router=there(layer.router), experts=there(layer.experts), router_arguments=arguments(layer),
        )
        for layer in view
    )  # fmt: skip
    return replace(view, layers=layers)


def _is_experts_module(module: nn.Module) -> bool:
    """Return whether the module's class is decorated with `use_experts_implementation`."""
    return all(hasattr(module, mark) for mark in ("has_gate", "is_transposed", "_is_expert_parallel"))


def _moe_blocks(model: PreTrainedModel) -> list[Probed]:
    """Return one record per MoE layer, in order."""
    family, modules = type(model).__name__, dict(model.named_modules())
    router_classes = _router_classes(modules.values())
    if not router_classes:
        raise ExpertcastError(
            f"{family} records no router_logits: it is not a Mixture-of-Experts model, or it routes in a way that "
            "expertcast does not support"
        )
    _refuse_adapters(modules, router_classes)
    found = []
    for name, module in modules.items():
        children = list(module.named_children())
        routers = [child for child in children if isinstance(child[1], router_classes)]
        experts = [child for child in children if _is_experts_module(child[1])]
        if routers and experts:
            (router_name, router), (experts_name, own) = routers[0], experts[0]
            names = (name, f"{name}.{router_name}", f"{name}.{experts_name}")
            decoder = modules[name.rpartition(".")[0]]
            found.append(Probed(family=family, names=names, modules=(module, router, own), decoder=decoder))
    routed = {each.names[2] for each in found}
    others = [name for name, module in modules.items() if _is_experts_module(module) and name not in routed]
    if not found and not others:
        _refuse_experts(family, modules.values(), router_classes)
    if others:
        raise ExpertcastError(
            f"{family} is not supported: {others[0]} is routed by something else than "
            f"{' or '.join(cls.__name__ for cls in router_classes)} (by a table of token ids, or per modality)"
        )
    return found


def _refuse_adapters(modules: Mapping[str, nn.Module], router_classes: tuple[type[nn.Module], ...]) -> None:
    """Refuse PEFT adapters on routers or experts, whose modules PEFT replaces; adapters on attention are fine."""
    for name, module in modules.items():
        if _is_experts_module(module) or isinstance(module, router_classes):
            above = name.rpartition(".")[0]
            if type(modules[above]).__module__.startswith("peft."):
                raise ExpertcastError(
                    f"{above} is an adapter on routers or experts, which offloading cannot run: merge it "
                    "(merge_and_unload()), or adapt attention only"
                )


def _refuse_experts(family: str, modules: Iterable[nn.Module], router_classes: tuple[type[nn.Module], ...]) -> NoReturn:
    for module in modules:
        if any(isinstance(child, router_classes) for child in module.children()):
            others = [type(child).__name__ for child in module.children() if not isinstance(child, router_classes)]
            raise ExpertcastError(
                f"{family} is not supported: its experts ({', '.join(others) or 'none'}) are quantised or not "
                "decorated with use_experts_implementation; load it dequantised in bf16, or use a family that "
                "transformers decorates"
            )
    raise ExpertcastError(f"{family} is not supported: it has no MoE layer with router and experts side by side")


def _router_classes(modules: Iterable[nn.Module]) -> tuple[type[nn.Module], ...]:
    classes: list[type[nn.Module]] = []
    for module in modules:
        if not isinstance(module, PreTrainedModel):
            continue
        recorder = (module._can_record_outputs or {}).get("router_logits")
        for entry in recorder if isinstance(recorder, (list, tuple)) else [recorder]:
            target = getattr(entry, "target_class", entry)
            if isinstance(target, type) and target not in classes:
                classes.append(target)
    return tuple(classes)


def _layer(index: int, seen: Probed) -> MoELayer:
    """Make the layer of one probed block.

    Raises:
        ExpertcastError: the block did not run, or its router has unsupported arguments or return values.
    """
    (block, router, experts), (block_name, router_name, experts_name) = seen.modules, seen.names
    if seen.router_input is None:
        raise ExpertcastError(f"{seen.family} is not supported: {block_name} does not run on text")
    outside: tuple[str, nn.Module] = ("", nn.Identity())
    norm_name, norm = seen.norm if seen.norm is not None and seen.router_input == seen.normed else outside
    num_experts = _number_of_experts(experts)
    return MoELayer(
        index=index,
        norm_name=norm_name,
        router_name=router_name,
        experts_name=experts_name,
        decoder=seen.decoder,
        block=block,
        norm=norm,
        router=router,
        experts=experts,
        num_experts=num_experts,
        top_k=_top_k(seen, num_experts),
        hidden_size=_hidden_size(router, num_experts),
        has_shared=any(child not in (router, experts) and [*child.parameters()] for child in block.children()),
        adds=seen.adds(),
        router_dims=seen.dims,
        router_arguments=tuple((name, _argument(seen, name, value)) for name, value in seen.arguments.items()),
    )


def _number_of_experts(experts: nn.Module) -> int:
    if getattr(experts, "num_experts", None) is None:
        raise ExpertcastError(f"{type(experts).__name__} has no attribute num_experts: not supported")
    return int(experts.num_experts)  # type: ignore[arg-type]


def _hidden_size(router: nn.Module, experts: int) -> int:
    for parameter in router.parameters():
        if parameter.dim() == 2 and parameter.shape[0] == experts:
            return int(parameter.shape[1])
    raise ExpertcastError(
        f"router {type(router).__name__} has no [experts, hidden] weight: expertcast cannot apply its routing rule"
    )


def _argument(seen: Probed, name: str, value: object) -> OwnTensor | float | None:
    """Describe one more argument of a router.

    Raises:
        ExpertcastError: the argument may change from token to token.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return value
    block, router, _ = seen.modules
    for own, tensor in (*block.named_parameters(), *block.named_buffers()):
        if tensor is value:
            return OwnTensor(f"{seen.names[0]}.{own}", block.get_submodule(own.rpartition(".")[0]))
    raise ExpertcastError(
        f"{seen.family} is not supported: its router {type(router).__name__} takes {name!r}, which is not a weight of "
        f"{seen.names[0]}, so its choice does not follow from its logits"
    )


def _top_k(seen: Probed, experts: int) -> int:
    """Return K, from a router's return value for two tokens.

    Raises:
        ExpertcastError: the value is not logits over all experts, and weights and ids of K of them.
    """
    output, subject = seen.output, f"{seen.family} is not supported: "
    router_kind = type(seen.modules[1]).__name__
    if not isinstance(output, tuple) or len(output) != 3:
        count = len(output) if isinstance(output, tuple) else 1
        raise ExpertcastError(f"{subject}its router {router_kind} returns {count} values, not logits, weights and ids")
    shapes = [list(each.shape) if isinstance(each, Tensor) else None for each in output]
    top_k = (shapes[2] or [0])[-1]
    if shapes != [[2, experts], [2, top_k], [2, top_k]]:
        raise ExpertcastError(
            f"{subject}for 2 tokens its router {router_kind} returns {shapes}, not logits [2, {experts}], weights and "
            "ids [2, K]"
        )
    if not top_k:
        raise ExpertcastError(f"{subject}its routers choose 0 experts of {experts} (num_experts_per_tok)")
    return top_k
