"""The MoE layers of a vLLM model, found in one dry run, in the form that predictors, traces and engines use.

A layer's gate is the module that produced the router's logits; its norm is the module that produced the gate's input.
vLLM's norms return a pair: their output and the residual stream that they normalised.

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

GateParameters = Mapping[nn.Module, Mapping[str, Tensor]]
"""Parameters of modules as they were loaded, by name."""


def record_gates() -> GateParameters:
    """Record the parameters of all possible gates of the next loaded model.

    On CPUs vLLM packs the weights of linear layers for its kernels after loading, and removes them from the module.

    Returns:
        A mapping that is filled in when the model's weights are loaded.
    """
    gates: dict[nn.Module, dict[str, Tensor]] = {}
    process = base_loader.process_weights_after_loading

    def keep(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        base_loader.process_weights_after_loading = process
        experts = {runner.moe_config.num_logical_experts for runner in runners_of(model)}
        for module in model.modules():
            weight = module._parameters.get("weight")
            if weight is not None and weight.dim() == 2 and weight.shape[0] in experts:
                gates[module] = {name: each for name, each in module._parameters.items() if each is not None}
        process(model, *args, **kwargs)

    base_loader.process_weights_after_loading = keep
    return gates


def runners_of(model: nn.Module) -> list[MoERunner]:
    """Return the runners of the MoE layers in order."""
    return [module for module in model.modules() if isinstance(module, MoERunner)]


def find_layers(model_runner: Any, gates: GateParameters) -> MoEView:
    """Find a model's MoE layers by a dry run over two tokens.

    Args:
        model_runner: vLLM's model runner with a loaded model.
        gates: parameters of possible gates, as they were loaded.

    Raises:
        ExpertcastError: a layer does not run, no module produces its logits, or its gate is quantised or has a
            routing rule that cannot run on forecasts.
    """
    model = model_runner.get_model()
    runners = runners_of(model)
    watch = _DryRunHooks()
    with ExitStack() as stack:
        stack.callback(register_module_forward_pre_hook(watch.enter).remove)
        stack.callback(register_module_forward_hook(watch.leave).remove)
        stack.enter_context(_uncompiled(model))
        for runner in runners:
            stack.callback(observe_routing(runner, partial(watch.routed, runner)))
        model_runner._dummy_run(_TOKENS)
    names = {module: name for name, module in model.named_modules()}
    missing = [names[runner] for runner in runners if runner not in watch.found]
    if missing:
        raise ExpertcastError(
            f"{type(model).__name__}: {missing[0]} does not run, or no module produces its router logits: its experts "
            "cannot be forecast, leave predictor and collect out"
        )
    layers = [
        _layer(index, names[runner], runner, gates, **watch.found[runner]) for index, runner in enumerate(runners)
    ]
    return MoEView(tuple(layers), model_id=str(model_runner.vllm_config.model_config.model))


@contextmanager
def _uncompiled(model: nn.Module) -> Iterator[None]:
    """Run vLLM's compiled modules uncompiled, so that hooks work."""
    compiled: list[Any] = [module for module in model.modules() if getattr(module, "do_not_compile", True) is False]
    for module in compiled:
        module.do_not_compile = True
    try:
        yield
    finally:
        for module in compiled:
            module.do_not_compile = False


def observe_routing(
    runner: MoERunner, observer: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor | None]
) -> Callable[[], None]:
    """Call `observer` after each run of a layer's router.

    `observer` gets router input [T, D], logits [T, E], combine weights [T, K] and ids [T, K]. It may return
    ids that replace the router's.

    Returns:
        A function that ends the observation.
    """
    router = runner.router
    select = router.select_experts

    def selected(hidden_states: Tensor, router_logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        weights_TK, ids_TK = select(hidden_states, router_logits, *args, **kwargs)
        other_TK = observer(hidden_states, router_logits, weights_TK, ids_TK)
        return weights_TK, ids_TK if other_TK is None else other_TK

    router.select_experts = selected
    return partial(setattr, router, "select_experts", select)


class _DryRunHooks:
    """Hooks that record the inputs and outputs of modules in one forward pass."""

    def __init__(self) -> None:
        self.found: dict[MoERunner, dict[str, Any]] = {}
        self._running: list[nn.Module] = []
        self._ran: list[tuple[nn.Module, Tensor | None, Tensor]] = []
        """Modules run since the last MoE layer, with input and output, which stay referenced so that no two share
        memory.
        """

    def enter(self, module: nn.Module, _args: tuple[object, ...]) -> None:
        self._running.append(module)

    def leave(self, module: nn.Module, args: tuple[object, ...], output: object) -> None:
        self._running.pop()
        given = args[0] if args and isinstance(args[0], Tensor) else None
        made = output[0] if isinstance(output, tuple) and output else output
        if isinstance(made, Tensor):
            self._ran.append((module, given, made))

    def routed(self, runner: MoERunner, hidden_TD: Tensor, logits_TE: Tensor, *_: Tensor) -> None:
        gate, read_TD = self._producer(logits_TE)
        if gate is not None:
            norm, _unused = self._producer(hidden_TD if read_TD is None else read_TD)
            block, decoder = [module for module in self._running if module is not runner][:-3:-1]
            self.found[runner] = {"gate": gate, "norm": norm, "block": block, "decoder": decoder}
        self._ran.clear()

    def _producer(self, tensor: Tensor) -> tuple[nn.Module | None, Tensor | None]:
        """Return the last module that produced a tensor, and that module's input."""
        for module, given, made in reversed(self._ran):
            if made.data_ptr() == tensor.data_ptr() and made.numel() == tensor.numel():
                return module, given
        return None, None


# View


class ForecastRouter(nn.Module):
    """A layer's router with transformers' interface and vLLM's routing rule.

    It maps router inputs to logits, combine weights and ids. Its parameters are the gate's, with the same names.

    Args:
        name: name of the layer, for messages.
        runner: the layer's runner.
        gate: parameters of the gate by name.

    Raises:
        ExpertcastError: the routing rule uses expert replicas.
    """

    def __init__(self, name: str, runner: MoERunner, gate: dict[str, Tensor]) -> None:
        super().__init__()
        rule = runner.router
        if not isinstance(rule, BaseRouter) or rule.eplb_state is not None:
            raise ExpertcastError(
                f"{name}: {type(rule).__name__} with expert replicas cannot be forecast: leave predictor out"
            )
        for each, tensor in gate.items():
            self.register_parameter(each, nn.Parameter(tensor.detach(), requires_grad=False))
        self.top_k = rule.top_k
        self._rule = [rule]  # a list hides it from the state dict
        self.factor = runner.routed_scaling_factor
        """Factor on the combine weights after the experts."""

    def forward(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits [T, E], combine weights [T, K] and ids [T, K] (int64)."""
        weight_ED = self.get_parameter("weight")
        bias_E = self._parameters.get("bias")
        logits_TE = functional.linear(hidden_TD.to(weight_ED.dtype), weight_ED, bias_E)
        weights_TK, ids_TK = self._rule[0]._compute_routing(hidden_TD, logits_TE, None)
        return logits_TE, weights_TK * self.factor, ids_TK.long()


def _layer(
    index: int, name: str, runner: MoERunner, gates: GateParameters, *, gate: nn.Module, norm: nn.Module | None,
    block: nn.Module, decoder: nn.Module,
) -> MoELayer:  # fmt: skip
    """Build the view of one layer.

    Args:
        index: number of the MoE layer.
        name: name of the runner.
        runner: the runner.
        gates: parameters of possible gates.
        gate: produces the logits.
        norm: produces the gate's input; None if no norm does.
        block: contains the runner.
        decoder: contains the block.
    """
    parameters = dict(gates.get(gate, {}))
    weight = parameters.get("weight")
    if weight is None or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ExpertcastError(f"the gate of {name} has no unquantised weight: leave predictor and collect out")
    router, block_name = ForecastRouter(name, runner, parameters), name.rpartition(".")[0]
    return MoELayer(
        index=index, norm_name="" if norm is None else f"{block_name}.norm",
        router_name=f"{block_name}.gate", experts_name=name, decoder=decoder, block=block,
        norm=nn.Identity() if norm is None else norm, router=router, experts=runner.routed_experts,
        num_experts=weight.shape[0], top_k=router.top_k, hidden_size=weight.shape[1],
        has_shared=runner.shared_experts is not None,
    )  # fmt: skip
