"""The view of a model's MoE layers from the paths of their modules: those just found, or those of a saved skeleton."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import with_config
from torch import nn
from typing_extensions import TypedDict

from expertcast.predictors.artefacts import CLOSED
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.view import MoELayer, MoEView


@with_config(CLOSED)
class LayerPaths(TypedDict):
    """Where in a model the modules of one MoE layer are."""

    block: str
    norm: str
    router: str
    experts: str


def layers_by_name(model: nn.Module, names: Sequence[LayerPaths], top_k: int | None, model_id: str) -> MoEView:
    """The view of a model whose layers are known.

    `names` are the layers' modules in the `model`, which needs no weights and comes from `model_id`; with `top_k` None
    the routers are asked for it.

    Raises:
        ExpertcastError: a path that is no module of the model, or one of another kind than its name says.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    layers = [_layer(modules, index, entry, top_k) for index, entry in enumerate(names)]
    return MoEView(tuple(layers), model_id=model_id)


def _layer(modules: Mapping[str, nn.Module], index: int, paths: LayerPaths, top_k: int | None) -> MoELayer:
    for kind, path in paths.items():
        if path not in modules:
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
        norm=modules[paths["norm"]],
        router=router,
        experts=experts,
        num_experts=num_experts,
        top_k=_integer(router, "top_k") if top_k is None else top_k,
        hidden_size=_hidden_size(router, num_experts),
        has_shared=_has_shared(block, router, experts),
    )


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
