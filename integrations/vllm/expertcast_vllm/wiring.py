"""The MoE layers of a vLLM model, found in one dry run, as predictors, traces and engines see them.

A layer's gate is the module that gave the logits its router was called with, its norm the module that gave what the
gate read. vLLM's norms return a pair, what they made and the residual stream that they made it from.

T tokens, D hidden size, L MoE layers, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.model_loader import base_loader

from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import MoELayer, MoEView

_TOKENS = 2

Kept = Mapping[nn.Module, Mapping[str, Tensor]]
"""Modules' own parameters by name, as they were loaded."""


def keep_gates() -> Kept:
    """Keep the parameters of all that may be a gate in the model that is loaded next: they are filled in when its
    weights have come.

    On CPUs vLLM packs linear layers' weights for its kernels after loading, and leaves none in the module.
    """
    kept: dict[nn.Module, dict[str, Tensor]] = {}
    process = base_loader.process_weights_after_loading

    def keep(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        base_loader.process_weights_after_loading = process
        experts = {runner.moe_config.num_logical_experts for runner in runners_of(model)}
        for module in model.modules():
            weight = module._parameters.get("weight")
            if weight is not None and weight.dim() == 2 and weight.shape[0] in experts:
                kept[module] = {name: each for name, each in module._parameters.items() if each is not None}
        process(model, *args, **kwargs)

    base_loader.process_weights_after_loading = keep
    return kept


def runners_of(model: nn.Module) -> list[MoERunner]:
    """The MoE layers' runners, first to last."""
    return [module for module in model.modules() if isinstance(module, MoERunner)]


def wire(model_runner: Any, kept: Kept) -> MoEView:
    """The view of a model; costs a dry run over two tokens.

    Args:
        model_runner: vLLM's, whose model is loaded.
        kept: its gates' parameters as they were loaded.

    Raises:
        ExpertcastError: a layer does not run, no module gives its logits, or its gate is quantised or routes in a way
            that cannot be asked for forecasts.
    """
    model = model_runner.get_model()
    runners = runners_of(model)
    watch = _Watch()
    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(watch.enter).remove)
        stack.callback(register_module_forward_hook(watch.leave).remove)
        stack.enter_context(_uncompiled(model))
        for runner in runners:
            stack.callback(tell_routing(runner, partial(watch.routed, runner)))
        model_runner._dummy_run(_TOKENS)
    names = {module: name for name, module in model.named_modules()}
    missing = [names[runner] for runner in runners if runner not in watch.found]
    if missing:
        raise ExpertcastError(
            f"{type(model).__name__}: {missing[0]} routes by logits that no module of it gives, or does not run: its "
            "experts cannot be forecast, leave predictor and collect out"
        )
    layers = [_layer(index, names[runner], runner, kept, **watch.found[runner]) for index, runner in enumerate(runners)]
    return MoEView(tuple(layers), model_id=str(model_runner.vllm_config.model_config.model))


@contextmanager
def _uncompiled(model: nn.Module) -> Iterator[None]:
    """Inside, what vLLM compiles of a model runs as it is written, under hooks."""
    compiled: list[Any] = [module for module in model.modules() if getattr(module, "do_not_compile", True) is False]
    for module in compiled:
        module.do_not_compile = True
    try:
        yield
    finally:
        for module in compiled:
            module.do_not_compile = False


def tell_routing(
    runner: MoERunner, told: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor | None]
) -> Callable[[], None]:
    """Hand `told` what a layer's router reads and makes of it, from now on: router input [T, D], logits [T, E], combine
    weights and ids [T, K]. Ids that it returns take the place of the router's.

    Returns:
        What ends that.
    """
    router = runner.router
    select = router.select_experts

    def selected(hidden_states: Tensor, router_logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        weights_TK, ids_TK = select(hidden_states, router_logits, *args, **kwargs)
        other_TK = told(hidden_states, router_logits, weights_TK, ids_TK)
        return weights_TK, ids_TK if other_TK is None else other_TK

    router.select_experts = selected
    return partial(setattr, router, "select_experts", select)


class _Watch:
    """What modules are given and give, in one forward."""

    def __init__(self) -> None:
        self.found: dict[MoERunner, dict[str, Any]] = {}
        self._running: list[nn.Module] = []
        self._ran: list[tuple[nn.Module, Tensor | None, Tensor]] = []
        """Modules that have run since the last MoE layer, with what they read and gave: held, so that no two lie in one
        place."""

    def enter(self, module: nn.Module, _args: tuple[object, ...]) -> None:
        self._running.append(module)

    def leave(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        self._running.pop()
        given = args[0] if args and isinstance(args[0], Tensor) else None
        made = output[0] if isinstance(output, tuple) and output else output
        if isinstance(made, Tensor):
            self._ran.append((module, given, made))

    def routed(self, runner: MoERunner, hidden_TD: Tensor, logits_TE: Tensor, *_: Tensor) -> None:
        gate, read_TD = self._maker(logits_TE)
        if gate is not None:
            norm, _unused = self._maker(hidden_TD if read_TD is None else read_TD)
            block, decoder = [module for module in self._running if module is not runner][:-3:-1]
            self.found[runner] = {"gate": gate, "norm": norm, "block": block, "decoder": decoder}
        self._ran.clear()

    def _maker(self, tensor: Tensor) -> tuple[nn.Module | None, Tensor | None]:
        """The last module that gave a tensor, and what it read."""
        for module, given, made in reversed(self._ran):
            if made.data_ptr() == tensor.data_ptr() and made.numel() == tensor.numel():
                return module, given
        return None, None


# View


class ForecastRouter(nn.Module):
    """A layer's router as transformers has it: from router inputs to logits, combine weights and ids, by vLLM's own
    routing rule. Its parameters are the gate's, under the same names."""

    def __init__(self, name: str, runner: MoERunner, gate: dict[str, Tensor]) -> None:
        super().__init__()
        rule = runner.router
        if not isinstance(rule, BaseRouter) or rule.eplb_state is not None:
            raise ExpertcastError(f"{name} routes by {type(rule).__name__} with replicas: it cannot be forecast")
        for each, tensor in gate.items():
            self.register_parameter(each, nn.Parameter(tensor.detach(), requires_grad=False))
        self.top_k = rule.top_k
        self._rule = [rule]  # in a list: no part of the state dict
        self.factor = runner.routed_scaling_factor
        """What combine weights are multiplied with after the experts."""

    def forward(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [T, E], combine weights and ids [T, K] (int64)."""
        weight_ED = self.get_parameter("weight")
        bias_E = self._parameters.get("bias")
        logits_TE = functional.linear(hidden_TD.to(weight_ED.dtype), weight_ED, bias_E)
        weights_TK, ids_TK = self._rule[0]._compute_routing(hidden_TD, logits_TE, None)
        return logits_TE, weights_TK * self.factor, ids_TK.long()


def _layer(
    index: int, name: str, runner: MoERunner, kept: Kept, *, gate: nn.Module, norm: nn.Module | None,
    block: nn.Module, decoder: nn.Module,
) -> MoELayer:  # fmt: skip
    """Of the runner's name: the gate gives its logits, the norm what the gate reads (None: no norm does), the block
    holds the runner, and the decoder the block."""
    parameters = dict(kept.get(gate, {}))
    weight = parameters.get("weight")
    if weight is None or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ExpertcastError(f"the gate of {name} has no plain weight: its experts cannot be forecast")
    router, block_name = ForecastRouter(name, runner, parameters), name.rpartition(".")[0]
    return MoELayer(
        index=index, block_name=block_name, norm_name="" if norm is None else f"{block_name}.norm",
        router_name=f"{block_name}.gate", experts_name=name, decoder=decoder, block=block,
        norm=nn.Identity() if norm is None else norm, router=router, experts=runner.routed_experts,
        num_experts=weight.shape[0], top_k=router.top_k, hidden_size=weight.shape[1],
        has_shared=runner.shared_experts is not None,
    )  # fmt: skip
