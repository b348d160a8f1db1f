"""Finding the MoE layers of a `transformers` model by structure, never by model name.

Router: the class that the model records as `router_logits`. Experts: the module decorated with
`use_experts_implementation`. Norm: the module whose output is the router's input, seen in one probe forward of two
tokens (:mod:`expertcast.data.probe`), which also shows what the block gives its router beside that, and how what the
experts put out enters the residual stream. Where no norm's output is the router's input, that input stands for the
residual too.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from expertcast.data.named_layers import LayerPaths, layers_by_name
from expertcast.data.probe import BlockNames, Probed, experts_implementation, probe
from expertcast.data.release import check_release
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.view import MoEView

__all__ = ["experts_implementation", "find_moe_layers"]


def find_moe_layers(model: PreTrainedModel) -> MoEView:
    """The MoE layers of a model, first to last; costs one forward of two tokens.

    Works on meta-device models too. The model is left as it was.

    Raises:
        ExpertcastError: the model has no MoE layers of the supported shape, or transformers is too old; the line says
            why.
    """
    check_release("reading the MoE layers of")
    blocks = _moe_blocks(model)
    seen = probe(model, blocks)
    names = [_paths(model, block, seen[block.block]) for block in blocks]
    adds = [seen[block.block].adds() for block in blocks]
    model_id = str(model.config._name_or_path or type(model).__name__)
    top_k = [_top_k(model, block, seen[block.block]) for block in blocks]
    view = layers_by_name(model, names, top_k[0], model_id, adds=adds)
    shapes = {(layer.num_experts, own, layer.hidden_size) for layer, own in zip(view, top_k, strict=True)}
    if len(shapes) > 1:
        raise ExpertcastError(
            f"{type(model).__name__} mixes MoE layers of different shape (E, K, D): {sorted(shapes)}; not supported"
        )
    return view


def _is_experts_module(module: nn.Module) -> bool:
    """Whether the module's class is decorated with `use_experts_implementation`."""
    return all(hasattr(module, mark) for mark in ("has_gate", "is_transposed", "_is_expert_parallel"))


def _moe_blocks(model: PreTrainedModel) -> list[BlockNames]:
    """Per MoE layer, in model order."""
    router_classes = _router_classes(model)
    if not router_classes:
        raise ExpertcastError(
            f"{type(model).__name__} records no router_logits: it is no Mixture-of-Experts model, or one that "
            "routes in a way expertcast does not support"
        )
    _refuse_adapters(model, router_classes)
    found = []
    for name, module in model.named_modules():
        children = list(module.named_children())
        routers = [child for child, m in children if isinstance(m, router_classes)]
        experts = [child for child, m in children if _is_experts_module(m)]
        if routers and experts:
            found.append(BlockNames(block=name, router=f"{name}.{routers[0]}", experts=f"{name}.{experts[0]}"))
    own = {names.experts for names in found}
    others = [name for name, module in model.named_modules() if _is_experts_module(module) and name not in own]
    if not found and not others:
        _refuse_experts(model, router_classes)
    if others:
        raise ExpertcastError(
            f"{type(model).__name__} is not supported: {others[0]} is routed by something else than "
            f"{' or '.join(cls.__name__ for cls in router_classes)} (by a table of token ids, or per modality)"
        )
    return found


def _refuse_adapters(model: PreTrainedModel, router_classes: tuple[type[nn.Module], ...]) -> None:
    """PEFT puts itself in the place of what it adapts: beside attention that is nobody's business here."""
    for name, module in model.named_modules():
        if _is_experts_module(module) or isinstance(module, router_classes):
            above = name.rpartition(".")[0]
            if type(model.get_submodule(above)).__module__.startswith("peft."):
                raise ExpertcastError(
                    f"{above} is an adapter on routers or experts, which offloading cannot run: merge it "
                    "(merge_and_unload()), or adapt attention only"
                )


def _refuse_experts(model: PreTrainedModel, router_classes: tuple[type[nn.Module], ...]) -> None:
    for module in model.modules():
        if any(isinstance(child, router_classes) for child in module.children()):
            others = [type(child).__name__ for child in module.children() if not isinstance(child, router_classes)]
            raise ExpertcastError(
                f"{type(model).__name__} is not supported: its experts ({', '.join(others) or 'none'}) are quantised "
                "or not decorated with use_experts_implementation; load it dequantised in bf16, or use a family "
                "that transformers decorates"
            )
    raise ExpertcastError(
        f"{type(model).__name__} has no MoE layer in which router and experts stand side by side: not supported"
    )


def _router_classes(model: PreTrainedModel) -> tuple[type[nn.Module], ...]:
    classes: list[type[nn.Module]] = []
    for module in model.modules():
        if not isinstance(module, PreTrainedModel):
            continue
        recorder = (module._can_record_outputs or {}).get("router_logits")
        for entry in recorder if isinstance(recorder, (list, tuple)) else [recorder]:
            target = getattr(entry, "target_class", entry)
            if isinstance(target, type) and target not in classes:
                classes.append(target)
    return tuple(classes)


def _paths(model: PreTrainedModel, names: BlockNames, seen: Probed) -> LayerPaths:
    """What a skeleton keeps of one layer's place.

    Raises:
        ExpertcastError: the block did not run, or its router returns or is given what has no place here.
    """
    kind, router = type(model).__name__, type(model.get_submodule(names.router)).__name__
    if seen.router_input is None:
        raise ExpertcastError(f"{kind} is not supported: {names.block} does not run on text")
    if not isinstance(seen.output, tuple) or len(seen.output) != 3:
        count = len(seen.output) if isinstance(seen.output, tuple) else 1
        raise ExpertcastError(
            f"{kind} is not supported: its router {router} returns {count} values, not logits, weights and ids"
        )
    norm = seen.norm if seen.router_input == seen.normed else ""
    paths: LayerPaths = {"block": names.block, "norm": norm, "router": names.router, "experts": names.experts}
    if seen.dims != 2:
        paths["router_dims"] = seen.dims
    if seen.arguments:
        paths["router_arguments"] = {
            name: _argument(model, names, name, value) for name, value in seen.arguments.items()
        }
    return paths


def _argument(model: PreTrainedModel, names: BlockNames, name: str, value: object) -> str | float | bool | None:
    """Where in the model what a router is given beside its input lies, or what it is.

    Raises:
        ExpertcastError: it is nothing that stays as it is from token to token.
    """
    if value is None or isinstance(value, (bool, int, float)):
        return value
    block = model.get_submodule(names.block)
    for own, tensor in (*block.named_parameters(), *block.named_buffers()):
        if tensor is value:
            return f"{names.block}.{own}"
    router = type(model.get_submodule(names.router)).__name__
    raise ExpertcastError(
        f"{type(model).__name__} is not supported: its router {router} is given {name!r}, which is no weight of "
        f"{names.block}: it goes by more than its logits"
    )


def _top_k(model: PreTrainedModel, names: BlockNames, seen: Probed) -> int:
    """K, by what a router returned.

    Raises:
        ExpertcastError: that is not logits over all experts, and weights and ids of K of them.
    """
    assert isinstance(seen.output, tuple)
    shapes = [list(each.shape) if isinstance(each, Tensor) else None for each in seen.output]
    top_k = (shapes[2] or [0])[-1]
    experts = getattr(model.get_submodule(names.experts), "num_experts", None)
    if shapes != [[2, experts], [2, top_k], [2, top_k]]:
        raise ExpertcastError(
            f"{type(model).__name__} is not supported: for 2 tokens its router "
            f"{type(model.get_submodule(names.router)).__name__} returns {shapes}, not logits [2, {experts}], weights "
            "and ids [2, K]"
        )
    return top_k
