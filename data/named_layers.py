"""The view of a model's MoE layers from the paths of their modules: those just found, or those of a saved skeleton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, NotRequired

from pydantic import Field, with_config
from torch import nn
from typing_extensions import TypedDict

from expertcast.predictors.artefacts import CLOSED
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.view import Adds, MoELayer, MoEView, OwnTensor


@with_config(CLOSED)
class LayerPaths(TypedDict):
    """Where in a model the modules of one MoE layer are."""

    block: str
    norm: str
    """Empty where the router reads the residual itself."""
    router: str
    experts: str
    router_dims: NotRequired[Annotated[int, Field(ge=2, le=3)]]
    """Of the router's input; 2 where it is not said."""
    router_arguments: NotRequired[dict[str, str | float | bool | None]]
    """What the block gives its router beside that: the path of a parameter or buffer, or a constant."""


_MODULES = ("block", "norm", "router", "experts")


def layers_by_name(
    model: nn.Module,
    names: Sequence[LayerPaths],
    top_k: int | None,
    model_id: str,
    *,
    adds: Sequence[Adds | None] | None = None,
) -> MoEView:
    """The view of a model whose layers are known.

    Args:
        model: needs no weights.
        names: the layers' modules in it.
        top_k: K; None: the routers are asked for it.
        model_id: where it comes from.
        adds: per layer, how its experts' output enters the residual stream; None where nothing asks for it.

    Raises:
        ExpertcastError: a path that is no module of the model, or one of another kind than its name says.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    layers = [_layer(modules, index, entry, top_k) for index, entry in enumerate(names)]
    if adds is not None:
        layers = [replace(layer, adds=own) for layer, own in zip(layers, adds, strict=True)]
    return MoEView(tuple(layers), model_id=model_id)


def _layer(modules: Mapping[str, nn.Module], index: int, paths: LayerPaths, top_k: int | None) -> MoELayer:
    for kind in _MODULES:
        path = str(paths.get(kind))
        if path not in modules or not (path or kind in ("block", "norm")):
            raise ExpertcastError(f"MoE layer {index}: {path!r}, given as its {kind}, is no module of the model")
    block, router, experts = modules[paths["block"]], modules[paths["router"]], modules[paths["experts"]]
    num_experts = _integer(experts, "num_experts")
    return MoELayer(
        index=index,
        block_name=paths["block"],
        norm_name=paths["norm"],
        router_name=paths["router"],
        experts_name=paths["experts"],
        decoder=modules[paths["block"].rpartition(".")[0]],
        block=block,
        norm=modules[paths["norm"]] if paths["norm"] else nn.Identity(),
        router=router,
        experts=experts,
        num_experts=num_experts,
        top_k=_integer(router, "top_k") if top_k is None else top_k,
        hidden_size=_hidden_size(router, num_experts),
        has_shared=_has_shared(block, router, experts),
        router_dims=paths.get("router_dims", 2),
        router_arguments=tuple(
            (name, _own_tensor(modules, index, value) if isinstance(value, str) else value)
            for name, value in paths.get("router_arguments", {}).items()
        ),
    )


def paths_of(layer: MoELayer) -> LayerPaths:
    """What :func:`layers_by_name` makes the layer of."""
    paths: LayerPaths = {
        "block": layer.block_name,
        "norm": layer.norm_name,
        "router": layer.router_name,
        "experts": layer.experts_name,
    }
    if layer.router_dims != 2:
        paths["router_dims"] = layer.router_dims
    if layer.router_arguments:
        paths["router_arguments"] = {
            name: value.path if isinstance(value, OwnTensor) else value for name, value in layer.router_arguments
        }
    return paths


def _own_tensor(modules: Mapping[str, nn.Module], index: int, path: str) -> OwnTensor:
    owner, _, name = path.rpartition(".")
    if owner not in modules or name not in {**modules[owner]._parameters, **modules[owner]._buffers}:
        raise ExpertcastError(f"MoE layer {index}: {path!r}, which its router is given, is no tensor of the model")
    return OwnTensor(path, modules[owner])


def _integer(module: nn.Module, attribute: str) -> int:
    if getattr(module, attribute, None) is None:
        raise ExpertcastError(f"{type(module).__name__} has no attribute {attribute}: not supported")
    return int(getattr(module, attribute))


def _hidden_size(router: nn.Module, experts: int) -> int:
    for parameter in router.parameters():
        if parameter.dim() == 2 and parameter.shape[0] == experts:
            return int(parameter.shape[1])
    raise ExpertcastError(
        f"router {type(router).__name__} has no [experts, hidden] weight: expertcast cannot apply its routing rule"
    )


def _has_shared(block: nn.Module, router: nn.Module, experts: nn.Module) -> bool:
    return any(
        child is not router and child is not experts and any(True for _ in child.parameters())
        for child in block.children()
    )
