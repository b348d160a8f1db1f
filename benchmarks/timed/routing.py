"""Recorded routing of published models, for a model with random weights and for traces.

P positions of one sequence: the end of a prompt, then N decoded tokens. L MoE layers, E routed experts per layer, K
experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache, PretrainedConfig, PreTrainedModel

from benchmarks.conditions import ROOT
from benchmarks.shapes import SHAPES
from expertcast.data.routing_file import ABSENT, Routing, read_routing
from expertcast.predictors import ExpertcastError, MoELayer, MoEView, Predictor
from expertcast.predictors.base import PredictorConfig, RouterState

RECORDINGS = {"qwen3-30b-a3b": "qwen3-30b-a3b-k6", "gpt-oss-120b": "gpt-oss-120b-k2"}
"""Files of `benchmarks/routing` by shape. They have 6 of the models' 8, and 2 of 4 experts per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTables:
    """Routing of every position, and forecasts for positions from `prompt` on."""

    ids_PLK: Tensor
    forecast_NLK: Tensor
    """Forecast ids for position prompt + n. A wrong id has the rank of the id it replaces."""
    prompt: int


@cache
def routing_of(shape: str) -> Routing:
    """Return the recording of a shape.

    Raises:
        ExpertcastError: there is none.
    """
    if shape not in RECORDINGS:
        raise ExpertcastError(f"shape {shape!r} has no recorded routing: choose from {', '.join(RECORDINGS)}")
    return read_routing(ROOT / "benchmarks" / "routing" / f"{RECORDINGS[shape]}.parquet")


def recorded_config(shape: str, layers: int | None = None) -> PretrainedConfig:
    """Return the config of a shape, with the experts per token of its recording."""
    top_k, config = routing_of(shape).top_k, SHAPES[shape].config(layers)
    config.num_experts_per_tok = top_k
    return config


def recorded(
    shape: str, *, layers: int | None = None, prompt: int, new_tokens: int, accuracy: float, seed: int = 0
) -> RoutingTables:
    """Return the recorded routing of the last tokens of the prompt and of the first decoded tokens, with forecasts.

    Args:
        shape: one of `RECORDINGS`.
        layers: the first so many layers; None: all.
        prompt: positions of the prompt, 1 or more.
        new_tokens: positions after the prompt.
        accuracy: probability that an expert of a token is in the forecast; else one that the token does not use is.
        seed: seed of the forecasts.

    Raises:
        ExpertcastError: there is no recording, or it is shorter.
    """
    routing = routing_of(shape)
    first = int(routing.prompt_T.sum())
    decoded = len(routing.prompt_T) - first
    if prompt > first or new_tokens > decoded:
        raise ExpertcastError(f"the routing of {shape} has {first} prompt and {decoded} decoded tokens: use fewer")
    ids_PLK = routing.ids_TLK[first - prompt : first + new_tokens, :layers]
    ids_PLK = np.where(ids_PLK == ABSENT, ids_PLK[prompt - 1], ids_PLK)  # llama.cpp: a prompt's last layer and token
    forecast_NLK, rng, experts = ids_PLK[prompt:].copy(), np.random.default_rng(seed), np.arange(routing.experts)
    for ids_K in forecast_NLK.reshape(-1, routing.top_k):  # a view
        wrong_K = rng.random(routing.top_k) >= accuracy
        ids_K[wrong_K] = rng.choice(np.setdiff1d(experts, ids_K), wrong_K.sum(), replace=False)
    return RoutingTables(ids_PLK=torch.from_numpy(ids_PLK), forecast_NLK=torch.from_numpy(forecast_NLK), prompt=prompt)


class PrescribedRouting(Predictor):
    """Routing of a model by tables while it is entered, and a predictor of the tables' forecasts. Enter it before
    `offload`.

    Random weights route at random, which defeats every cache and forecast. Hooks on the routers replace their logits by
    position; the routers' own rule makes ids and weights of them, as many as the tables have. It supports one sequence.

    Args:
        model: the model.
        view: its MoE layers.
        tables: the routing.
    """

    name = "prescribed"

    def __init__(self, model: PreTrainedModel, view: MoEView, tables: RoutingTables) -> None:
        super().__init__(PredictorConfig(), view.shape)
        self.bind(view)
        self.position = 0
        """Position of the first token of the current forward pass."""
        self._model, self._prompt, self._stack = [model], tables.prompt, ExitStack()  # a list hides the modules
        routing_PLE, self._forecast_NLE = (
            _logits(ids, view.shape.experts) for ids in (tables.ids_PLK, tables.forecast_NLK)
        )
        top_k, self._routers = tables.ids_PLK.shape[-1], list[tuple[Tensor, Tensor, Tensor]]()
        """Output of each layer's router for all positions."""
        for layer, logits_PE in zip(view, routing_PLE.unbind(1), strict=True):
            ids_PK, weights_PK = layer.route(logits_PE)
            self._routers.append((logits_PE, weights_PK[:, :top_k], ids_PK[:, :top_k]))

    def __enter__(self) -> PrescribedRouting:
        base = self._model[0].base_model
        self._stack.callback(base.register_forward_pre_hook(self._before_model, with_kwargs=True).remove)
        for layer in self.view:
            self._stack.callback(layer.router.register_forward_hook(partial(self._routed, layer)).remove)
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def logits(self, state: RouterState, ahead: int) -> Tensor:
        number = self.position - self._prompt
        assert number >= 0, "forecasts are for decode steps"
        return self._forecast_NLE[number : number + 1, state.layer + ahead]

    def _before_model(self, _module: nn.Module, _args: object, kwargs: Mapping[str, object]) -> None:
        past = kwargs.get("past_key_values")
        self.position = past.get_seq_length() if isinstance(past, Cache) else 0

    def _routed(
        self, layer: MoELayer, _router: nn.Module, _args: object, output: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        start, end = self.position, self.position + len(output[0])
        assert end <= len(self._routers[0][0]), "the tables are shorter than the text"
        return tuple(values[start:end] for values in self._routers[layer.index])


def _logits(ids_XLK: Tensor, experts: int) -> Tensor:
    """Return logits [X, L, E] whose K largest are the ids, in their order."""
    falling_K = -0.2 * torch.arange(ids_XLK.shape[-1])
    return torch.full((*ids_XLK.shape[:-1], experts), -30.0).scatter(-1, ids_XLK, falling_K.expand(ids_XLK.shape))
