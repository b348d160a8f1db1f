"""Finding the MoE layers of a `transformers` model by structure, never by model name.

Router: the class that the model records as `router_logits`. Experts: the module decorated with
`use_experts_implementation`. Norm: the module whose output is the MoE block's input, seen in one probe
forward of two tokens, which also checks that the block's output is added to the norm's input unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from expertcast.data.named_layers import LayerPaths, layers_by_name
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.view import MoEView

PROBE_EXPERTS = "expertcast_probe"


def find_moe_layers(model: PreTrainedModel) -> MoEView:
    """The MoE layers of a model, first to last; costs one forward of two tokens.

    Works on meta-device models too. The model is left as it was.

    Raises:
        ExpertcastError: the model has no MoE layers of the supported shape; the line says why.
    """
    blocks = _moe_blocks(model)
    norms = _probe(model, [block for block, _, _ in blocks])
    names: list[LayerPaths] = [
        {"block": block, "norm": norms[block], "router": f"{block}.{router}", "experts": f"{block}.{experts}"}
        for block, router, experts in blocks
    ]
    view = layers_by_name(model, names, None, str(model.config._name_or_path or type(model).__name__))
    shapes = {(layer.num_experts, layer.top_k, layer.hidden_size) for layer in view}
    if len(shapes) > 1:
        raise ExpertcastError(
            f"{type(model).__name__} mixes MoE layers of different shape (E, K, D): {sorted(shapes)}; not supported"
        )
    return view


@contextmanager
def experts_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Run the model's experts with another registered function, and put the old one back at the end."""
    before = model.get_experts_implementation()
    model.set_experts_implementation(name)
    try:
        yield
    finally:
        model.set_experts_implementation(before)


def _is_experts_module(module: nn.Module) -> bool:
    """Whether the module's class is decorated with `use_experts_implementation`."""
    return all(hasattr(module, mark) for mark in ("has_gate", "is_transposed", "_is_expert_parallel"))


def _moe_blocks(model: PreTrainedModel) -> list[tuple[str, str, str]]:
    """(block path, router's name in it, experts' name in it) per MoE layer, in model order."""
    router_classes = _router_classes(model)
    if not router_classes:
        raise ExpertcastError(
            f"{type(model).__name__} records no router_logits: it is no Mixture-of-Experts model, or one that "
            "routes in a way expertcast does not support"
        )
    found = []
    for name, module in model.named_modules():
        children = list(module.named_children())
        routers = [child for child, m in children if isinstance(m, router_classes)]
        experts = [child for child, m in children if _is_experts_module(m)]
        if routers and experts:
            found.append((name, routers[0], experts[0]))
    if not found:
        _refuse_experts(model, router_classes)
    return found


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


def _probe_experts(experts: nn.Module, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    return hidden_TD.clone()


def _probe(model: PreTrainedModel, block_names: list[str]) -> dict[str, str]:
    """Path of the norm before each block. Raises ExpertcastError when the block is no plain residual branch."""
    ALL_EXPERTS_FUNCTIONS.register(PROBE_EXPERTS, _probe_experts)
    producers: dict[int, tuple[str, Tensor]] = {}
    seen: dict[str, _Probed] = {}
    owners = {name.rpartition(".")[0]: name for name in block_names}
    keep: list[object] = []  # ids stay unique only while the tensors live

    def after(name: str, args: tuple[object, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        first = output[0] if isinstance(output, tuple) else output
        keep.append(output)
        if name in owners and owners[name] in seen:
            seen[owners[name]].layer_output = first
        if name in block_names:
            seen[name].block_output = first
        elif isinstance(output, Tensor) and args and isinstance(args[0], Tensor):
            producers[id(output)] = (name, args[0])

    def before(name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        seen[name] = _Probed(*producers.get(id(hidden), ("", None)))

    training = model.training
    with ExitStack() as stack:
        for name in block_names:
            hook = model.get_submodule(name).register_forward_pre_hook(
                lambda _m, args, kwargs, name=name: before(name, args, kwargs), with_kwargs=True
            )
            stack.callback(hook.remove)
        for name, module in model.named_modules():
            if name:
                hook = module.register_forward_hook(lambda _m, args, output, name=name: after(name, args, output))
                stack.callback(hook.remove)
        stack.enter_context(experts_implementation(model, PROBE_EXPERTS))
        stack.callback(model.train, training)
        model.eval()
        device = next(model.parameters()).device
        padding = getattr(model.config.get_text_config(), "pad_token_id", None)  # its embedding may be zero
        tokens = [token for token in (1, 2, 3) if token != padding][:2]
        with torch.no_grad():
            # a ready 4-d mask: transformers builds none of its own, which a meta model could not do
            model.base_model(
                input_ids=torch.tensor([tokens], device=device),
                attention_mask=torch.zeros(1, 1, 2, 2, dtype=model.dtype, device=device),
                use_cache=False,
            )
    for name in block_names:
        _check_probed(model, name, seen.get(name))
    return {name: seen[name].norm_name for name in block_names}


@dataclass(slots=True)
class _Probed:
    """What the probe saw around one MoE block."""

    norm_name: str
    residual: Tensor | None
    block_output: Tensor | None = None
    layer_output: Tensor | None = None


def _check_probed(model: PreTrainedModel, name: str, probed: _Probed | None) -> None:
    if probed is None or not probed.norm_name or probed.residual is None:
        raise ExpertcastError(
            f"{type(model).__name__} is not supported: no norm's output is the input of {name} (not a pre-norm MoE)"
        )
    if probed.layer_output is None or probed.block_output is None or probed.layer_output.is_meta:
        return
    expected = probed.residual + probed.block_output.reshape(probed.residual.shape)
    if not torch.allclose(expected.float(), probed.layer_output.float(), rtol=1e-2, atol=1e-3):
        raise ExpertcastError(
            f"{type(model).__name__} is not supported: the output of {name} is not simply added to the residual stream"
        )
