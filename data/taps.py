"""Hooks on a model's routers, which observe each routing decision and may replace it.

Collection reads activations through them, and the offloaded runtime chooses experts in them.

T tokens, B sequences, S tokens per sequence, D hidden size, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.utils.output_capturing import _active_collector

from expertcast.data.batch import RouterCall, RouterOutput
from expertcast.predictors.view import MoELayer, MoEView

OBSERVES = "expertcast_observes"
"""Attribute of a hook before a norm that only reads what the norm takes."""

# Outputs that transformers gathers by hooks: forecasts run modules unrecorded


@contextmanager
def unrecorded() -> Iterator[None]:
    """Keep modules that run inside out of the outputs that transformers gathers."""
    token = _active_collector.set(None)
    try:
        yield
    finally:
        _active_collector.reset(token)


class RouterTaps:
    """Hooks on the norms and routers of a model, and on the start of each forward.

    The hooks ignore modules that `on_router` runs, because predictors call the model's own norms and routers. In a
    compiled model the hooks run between its graphs.

    Args:
        model: model to hook.
        view: its MoE layers.
        on_router: called with each router call; returns None to keep the routing, or (ids, weights) to replace it.
        on_start: called at the start of each forward with True if its sequences are new (the key-value cache is empty).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        view: MoEView,
        on_router: Callable[[RouterCall], tuple[Tensor, Tensor] | None],
        on_start: Callable[[bool], None] | None = None,
    ) -> None:
        self._on_router = on_router
        self._muted = False
        self._packed = False
        """Whether the forward is a decode step of several requests in one row (continuous batching)."""
        self._residuals: list[Tensor | None] = [None] * len(view)
        with ExitStack() as self._stack:
            if on_start is not None:
                self._on_start = on_start
                handle = model.base_model.register_forward_pre_hook(self._before_model, with_kwargs=True)
                self._stack.callback(handle.remove)
            for layer in view:
                self._attach(layer)
            self._stack = self._stack.pop_all()

    def close(self) -> None:
        """Remove the hooks."""
        self._stack.close()

    def _attach(self, layer: MoELayer) -> None:
        def before_norm(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if not self._muted:
                self._residuals[layer.index] = args[0]

        def after_router(_module: nn.Module, args: tuple[Tensor, ...], output: RouterOutput) -> RouterOutput | None:
            return None if self._muted else self._routed(layer, args[0], output)

        def before_block(_module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            if not self._muted:  # a router's flat input does not show the number of sequences
                self._residuals[layer.index] = args[0] if args else kwargs["hidden_states"]

        setattr(before_norm, OBSERVES, True)
        if layer.norm_name:
            self._stack.callback(layer.norm.register_forward_pre_hook(before_norm).remove)
        else:
            self._stack.callback(layer.block.register_forward_pre_hook(before_block, with_kwargs=True).remove)
        self._stack.callback(layer.router.register_forward_hook(after_router).remove)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_model(self, _module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        past: Cache | None = kwargs.get("past_key_values")
        ids_BS = kwargs.get("input_ids", args[0] if args else None)
        ends = kwargs.get("cu_seq_lens_q")  # set by continuous batching, which has its own cache
        self._packed = isinstance(ends, Tensor) and isinstance(ids_BS, Tensor) and ids_BS.numel() == len(ends) - 1
        fresh = ends is None if past is None else not past.get_seq_length()
        self._on_start(fresh)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _routed(self, layer: MoELayer, router_input: Tensor, output: RouterOutput) -> RouterOutput | None:
        logits_TE, weights_TK, ids_TK = output
        residual = self._residuals[layer.index]
        assert residual is not None, "the router ran without its norm"
        self._residuals[layer.index] = None
        sequences, tokens = residual.shape[:2] if residual.dim() == 3 else (residual.shape[0], 1)
        if self._packed:
            sequences, tokens = tokens, 1
        if not layer.norm_name:
            residual = router_input
        call = RouterCall(
            layer=layer.index,
            sequences=sequences,
            tokens=tokens,
            residual_TD=residual.reshape(-1, layer.hidden_size),
            router_input_TD=router_input.reshape(-1, layer.hidden_size),
            logits_TE=logits_TE,
            weights_TK=weights_TK,
            ids_TK=ids_TK,
        )
        self._muted, token = True, _active_collector.set(None)  # a forecast runs the model's own norms and routers
        try:
            replaced = self._on_router(call)
        finally:
            self._muted = False
            _active_collector.reset(token)
        return None if replaced is None else (logits_TE, replaced[1], replaced[0])
