"""What every MoE layer's router reads and makes of it, with the residual stream, in the real forwards of a vLLM model.

T tokens, D hidden size, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from torch import Tensor, nn

from expertcast.data.taps import RouterCall
from expertcast.predictors.view import MoEView
from expertcast_vllm.steps import Step
from expertcast_vllm.wiring import WiredLayer, routing_told


class Taps:
    """Hooks on the norms and routers of a model, which only look. Between :meth:`start` and :meth:`finish` they tell.

    Args:
        layers: of the model, as they were found.
        view: of the same.
        on_router: is told of one router after another.
    """

    def __init__(self, layers: Sequence[WiredLayer], view: MoEView, on_router: Callable[[RouterCall], object]) -> None:
        self._on_router, self._view = on_router, view
        self._step: Step | None = None
        self._residual: Tensor | None = None
        with ExitStack() as stack:
            for index, wired in enumerate(layers):
                if wired.norm is not None:
                    stack.callback(wired.norm.register_forward_hook(self._normed).remove)
                stack.enter_context(routing_told(wired.runner, partial(self._routed, index)))
            self._stack = stack.pop_all()

    def start(self, step: Step) -> None:
        """A forward is about to run: what is told is of this one."""
        self._step, self._residual = step, None

    def finish(self) -> None:
        """It has run."""
        self._step, self._residual = None, None

    def close(self) -> None:
        """Take the hooks away."""
        self._stack.close()

    def _normed(self, _module: nn.Module, args: tuple[Tensor, ...], output: Tensor | tuple[Tensor, Tensor]) -> None:
        if self._step is not None:
            self._residual = output[1] if isinstance(output, tuple) else args[0]

    def _routed(self, index: int, hidden_TD: Tensor, logits_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> None:
        step = self._step
        if step is None:
            return
        layer, tokens = self._view[index], step.tokens
        router_input_TD = hidden_TD[:tokens, : layer.hidden_size]
        residual_TD = router_input_TD if self._residual is None else self._residual[:tokens]
        sequences = tokens if step.is_decoding else 1
        call = RouterCall(
            layer=index,
            sequences=sequences,
            tokens=tokens // sequences,
            residual_TD=residual_TD,
            router_input_TD=router_input_TD,
            logits_TE=logits_TE[:tokens, : layer.num_experts],
            weights_TK=weights_TK[:tokens] * layer.router.factor,
            ids_TK=ids_TK[:tokens].long(),
        )
        self._step = None  # forecasts call the model's own norms
        try:
            self._on_router(call)
        finally:
            self._step, self._residual = step, None
