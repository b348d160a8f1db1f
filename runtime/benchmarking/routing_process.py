"""Routing by table in place of a model's own routers, and a predictor that forecasts it as well as it is told to.

Random weights route at random, which no cache and no forecast survives. Hooks on the routers replace what they return,
by position in the text, so that every run of a benchmark sees the same routing; the routers still run and cost their
time.

T tokens, N decode positions, L MoE layers, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from expertcast.predictors import ExpertcastError, MoELayer, MoEView, Predictor
from expertcast.predictors.base import Forecast, PredictorConfig, RouterState
from expertcast.runtime.benchmarking.routing_tables import RoutingTables


class RoutingProcess:
    """Replaces the routing of a model while it is entered (`with process:`); attach it before `offload`.

    One text at a time. What a hook costs per layer and token is one list index: everything is in its place before.
    """

    def __init__(self, model: PreTrainedModel, view: MoEView, tables: RoutingTables) -> None:
        device, dtype = next(view[0].router.parameters()).device, _weights_dtype(view[0])
        if tables.ids_PLK.shape[1:] != (len(view), view.shape.top_k):
            raise ExpertcastError(f"routing tables for {tuple(tables.ids_PLK.shape[1:])} do not fit {view.shape}")
        self.tables = tables
        self.position = 0
        """Of the first token of the running forward."""
        self._model, self._view = model, view
        self._ids_LPK = tables.ids_PLK.transpose(0, 1).contiguous().to(device)
        self._weights_LPK = tables.weights_PLK.transpose(0, 1).contiguous().to(device, dtype)
        self._decode = [
            list(zip(ids_PK[tables.prompt :].split(1), weights_PK[tables.prompt :].split(1), strict=True))
            for ids_PK, weights_PK in zip(self._ids_LPK, self._weights_LPK, strict=True)
        ]
        """[L][N]: (ids, weights) of one token each."""
        self._armed = [False] * len(view)
        self._stack = ExitStack()

    def predictor(self, ahead: tuple[int, ...] = (1,)) -> Predictor:
        """Forecasts from the tables; as accurate for every distance in `ahead`."""
        made = TablePredictor(PredictorConfig(ahead=ahead), self._view.shape)
        made.follow(self)
        return made.bind(self._view)

    def routing(self, layer: int, tokens: int) -> tuple[Tensor, Tensor]:
        """(ids, weights) [T, K] of a layer for the tokens of the running forward."""
        number = self.position - self.tables.prompt
        if tokens == 1 and 0 <= number < len(self._decode[layer]):
            return self._decode[layer][number]
        end = self.position + tokens
        if end > self._ids_LPK.shape[1]:
            raise ExpertcastError(f"the routing tables hold {self._ids_LPK.shape[1]} positions, {end} were run")
        return self._ids_LPK[layer, self.position : end], self._weights_LPK[layer, self.position : end]

    def __enter__(self) -> RoutingProcess:
        handle = self._model.base_model.register_forward_pre_hook(self._before_model, with_kwargs=True)
        self._stack.callback(handle.remove)
        for layer in self._view:
            self._attach(layer)
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def _attach(self, layer: MoELayer) -> None:
        index, armed = layer.index, self._armed

        def before_block(_module: nn.Module, _args: object) -> None:
            armed[index] = True

        def after_router(_module: nn.Module, _args: object, output: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            if not armed[index]:  # a predictor runs this router: the truth is not for it
                return None
            armed[index] = False
            logits_TE = output[0]
            ids_TK, weights_TK = self.routing(index, logits_TE.shape[0])
            return logits_TE, weights_TK, ids_TK

        self._stack.callback(layer.block.register_forward_pre_hook(before_block).remove)
        self._stack.callback(layer.router.register_forward_hook(after_router).remove)

    def _before_model(self, _module: nn.Module, _args: object, kwargs: Mapping[str, object]) -> None:
        past = kwargs.get("past_key_values")
        self.position = past.get_seq_length() if isinstance(past, Cache) else 0


class TablePredictor(Predictor):
    """Forecasts what a :class:`RoutingProcess` says it should. Made by :meth:`RoutingProcess.predictor`."""

    name: ClassVar[str] = "routing_process"

    def follow(self, process: RoutingProcess) -> None:
        """Forecast for the position at which this process is."""
        tables = process.tables
        self._process = process
        device, dtype = process._ids_LPK.device, process._weights_LPK.dtype
        weights_NLK = tables.weights_PLK[tables.prompt :]
        self._forecasts = [
            [
                Forecast(
                    layer=layer,
                    logits_TE=_logits(ids_LK[layer], weights_LK[layer], tables.experts).to(device),
                    topk_ids_TK=ids_LK[layer : layer + 1].to(device),
                    topk_weights_TK=weights_LK[layer : layer + 1].to(device, dtype),
                )
                for layer in range(self.shape.layers)
            ]
            for ids_LK, weights_LK in zip(tables.forecast_NLK, weights_NLK, strict=True)
        ]

    def logits(self, state: RouterState, ahead: int) -> Tensor:
        return self._forecast(state, state.layer + ahead, ahead).logits_TE

    def _forecast(self, state: RouterState, target: int, ahead: int) -> Forecast:
        number = self._process.position - self._process.tables.prompt
        if number < 0 or len(state.topk_ids_TK) != 1:
            raise ExpertcastError("a routing process forecasts decode steps only: leave speculate_prefill out")
        return self._forecasts[number][target]


def _logits(ids_K: Tensor, weights_K: Tensor, experts: int) -> Tensor:
    """[1, E] logits whose softmax over the K ids gives their weights; the others lie far below."""
    logits_1E = torch.full((1, experts), -30.0)
    logits_1E[0, ids_K] = weights_K.clamp(min=1e-9).log()
    return logits_1E


def _weights_dtype(layer: MoELayer) -> torch.dtype:
    """What this layer's router returns its weights in."""
    weight = next(layer.router.parameters())
    _, weights_TK = layer.route(torch.zeros(1, layer.num_experts, dtype=weight.dtype, device=weight.device))
    return weights_TK.dtype
