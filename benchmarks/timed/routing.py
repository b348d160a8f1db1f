"""Prescribed routing for benchmarks: drawn from a random process with set properties.

P positions of a sequence, N decode positions, L MoE layers, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from expertcast.predictors import ExpertcastError, ModelShape, MoELayer, MoEView, Predictor
from expertcast.predictors.base import Forecast, PredictorConfig, RouterState
from expertcast.predictors.options import validate

Ids = NDArray[np.int64]
Scores = NDArray[np.float64]

_LAST = 1e6
"""Reduction of a score that places an expert behind all others."""
_RANK_DECAY = 0.8
"""Combine weight of each drawn expert relative to the one before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingOptions:
    """Properties of a routing process.

    Raises:
        ExpertcastError: a value is out of range.
    """

    persistence: Annotated[float, Field(ge=0, le=1)] = 0.3
    """Probability that an expert of a token is an expert of the next token too; the others are drawn among the rest."""
    skew: Annotated[float, Field(ge=0)] = 0.8
    """Exponent of the Zipf distribution by which experts are drawn, in a random order per layer; 0: uniform."""
    accuracy: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Probability that an expert of a token is in the forecast."""
    seed: int = 0

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTables:
    """Routing of every position, and forecasts for positions from `prompt` on, on the CPU."""

    ids_PLK: Tensor
    weights_PLK: Tensor
    """float32"""
    forecast_NLK: Tensor
    """Forecast ids for position prompt + n. A wrong id has the rank of the id it replaces."""
    prompt: int
    experts: int
    source: str
    """Origin of the routing, for people."""

    def measured(self) -> dict[str, float]:
        """Return the measured properties of the decode positions."""
        return {
            "reuse": _overlap(self.ids_PLK[self.prompt :], self.ids_PLK[self.prompt - 1 : -1]),
            "accuracy": _overlap(self.ids_PLK[self.prompt :, 1:], self.forecast_NLK[:, 1:]),
            "distinct_experts": float(
                np.mean([len(np.unique(layer_PK)) for layer_PK in self.ids_PLK[self.prompt :].unbind(1)])
            ),
        }


def drawn(shape: ModelShape, *, prompt: int, new_tokens: int, options: RoutingOptions) -> RoutingTables:
    """Draw tables from a process. The same options give the same tables.

    Args:
        shape: the model's shape.
        prompt: positions of the prompt, 1 or more.
        new_tokens: positions after the prompt.
        options: properties of the process.
    """
    rng = np.random.default_rng(options.seed)
    ids_PLK = torch.from_numpy(_draw(rng, shape, prompt + new_tokens, options))
    weights_K = torch.tensor([_RANK_DECAY**rank for rank in range(shape.top_k)])
    return RoutingTables(
        ids_PLK=ids_PLK,
        weights_PLK=(weights_K / weights_K.sum()).expand(ids_PLK.shape),
        forecast_NLK=_forecasts(rng, ids_PLK[prompt:], shape.experts, options.accuracy),
        prompt=prompt,
        experts=shape.experts,
        source=f"drawn: persistence {options.persistence:g}, Zipf exponent {options.skew:g}, "
        f"forecast accuracy {options.accuracy:g}, seed {options.seed}",
    )


def _draw(rng: np.random.Generator, shape: ModelShape, positions: int, options: RoutingOptions) -> Ids:
    """Draw ids [P, L, K]: a Markov chain over positions, independent between layers."""
    layers, experts, top_k = shape.layers, shape.experts, shape.top_k
    popularity_LE = -options.skew * np.log(1.0 + rng.permuted(np.tile(np.arange(experts), (layers, 1)), axis=1))
    ids_PLK = np.empty((positions, layers, top_k), dtype=np.int64)
    ids_LK = _ranked(popularity_LE + rng.gumbel(size=(layers, experts)), top_k)
    for position in range(positions):
        stays_LK = rng.random((layers, top_k)) < options.persistence
        score_LE = popularity_LE + rng.gumbel(size=(layers, experts))
        ids_LK = _refilled(ids_LK, stays_LK, score_LE)
        ids_PLK[position] = ids_LK
    return ids_PLK


def _forecasts(rng: np.random.Generator, ids_NLK: Tensor, experts: int, accuracy: float) -> Tensor:
    """Return the true ids, each replaced with probability 1 - accuracy by an expert that is not among them."""
    made_NLK = ids_NLK.numpy().copy()
    for ids_LK in made_NLK:
        right_LK = rng.random(ids_LK.shape) < accuracy
        ids_LK[:] = _refilled(ids_LK, right_LK, rng.random((len(ids_LK), experts)))
    return torch.from_numpy(made_NLK)


def _refilled(ids_LK: Ids, stays_LK: NDArray[np.bool_], score_LE: Scores) -> Ids:
    """Replace the ids that do not stay by the highest-scoring other experts; by each other where none is left."""
    held_LK = np.where(stays_LK, -np.inf, np.take_along_axis(score_LE, ids_LK, axis=1) - _LAST)
    np.put_along_axis(score_LE, ids_LK, held_LK, axis=1)
    fresh_LK = _ranked(score_LE, ids_LK.shape[1])
    which_LK = np.cumsum(~stays_LK, axis=1) - 1
    return np.where(stays_LK, ids_LK, np.take_along_axis(fresh_LK, which_LK.clip(min=0), axis=1))


def _ranked(score_LE: Scores, count: int) -> Ids:
    """Return [L, count] experts by falling score."""
    top_LK = np.argpartition(-score_LE, count - 1, axis=1)[:, :count]
    order_LK = np.argsort(-np.take_along_axis(score_LE, top_LK, axis=1), axis=1)
    return np.take_along_axis(top_LK, order_LK, axis=1)


def _overlap(ids_PLK: Tensor, other_PLK: Tensor) -> float:
    """Return the mean share of each row's K ids that are in the other row."""
    if not ids_PLK.numel():
        return 1.0
    return float((ids_PLK.unsqueeze(-1) == other_PLK.unsqueeze(-2)).any(-1).float().mean())


class RoutingProcess:
    """Replaces a model's routing while it is entered (`with process:`). Enter it before `offload`.

    Random weights route at random, which defeats every cache and forecast. Hooks on the routers replace their output by
    position, so that every run of a benchmark has the same routing; the routers still run.

    It supports one sequence at a time. A hook costs one list index per layer and token: all tensors are prepared.

    Args:
        model: the model.
        view: its MoE layers.
        tables: the routing.

    Raises:
        ExpertcastError: the tables have another number of layers or experts per token.
    """

    def __init__(self, model: PreTrainedModel, view: MoEView, tables: RoutingTables) -> None:
        device, dtype = next(view[0].router.parameters()).device, _weights_dtype(view[0])
        if tables.ids_PLK.shape[1:] != (len(view), view.shape.top_k):
            raise ExpertcastError(f"routing tables for {tuple(tables.ids_PLK.shape[1:])} do not fit {view.shape}")
        self.tables = tables
        self.position = 0
        """Position of the first token of the current forward pass."""
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
        """Return a predictor of the tables' forecasts, equally accurate for every distance in `ahead`."""
        made = TablePredictor(PredictorConfig(ahead=ahead), self._view.shape)
        made.follow(self)
        return made.bind(self._view)

    def routing(self, layer: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Return (ids, weights) [T, K] of a layer for the tokens of the current forward pass."""
        number = self.position - self.tables.prompt
        if tokens == 1 and 0 <= number < len(self._decode[layer]):
            return self._decode[layer][number]
        end = self.position + tokens
        if end > self._ids_LPK.shape[1]:
            raise ExpertcastError(f"position {end} exceeds the routing tables: draw more than {self._ids_LPK.shape[1]}")
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
            if not armed[index]:  # a predictor runs this router: keep its own output
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
    """Returns the forecasts of a :class:`RoutingProcess`. Create it with :meth:`RoutingProcess.predictor`."""

    name: ClassVar[str] = "routing_process"

    def follow(self, process: RoutingProcess) -> None:
        """Forecast for the current position of `process`."""
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
    """Return logits [1, E] whose softmax over the K ids is their weights; the others are far below."""
    logits_1E = torch.full((1, experts), -30.0)
    logits_1E[0, ids_K] = weights_K.clamp(min=1e-9).log()
    return logits_1E


def _weights_dtype(layer: MoELayer) -> torch.dtype:
    """Return the dtype of this router's weights."""
    weight = next(layer.router.parameters())
    _, weights_TK = layer.route(torch.zeros(1, layer.num_experts, dtype=weight.dtype, device=weight.device))
    return weights_TK.dtype
