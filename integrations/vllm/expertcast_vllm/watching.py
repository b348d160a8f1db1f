"""A vLLM model that is watched: what its layers read, whose tokens run, told to whoever forecasts or collects."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.config import CompilationMode
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.tokenizers import cached_tokenizer_from_config

from expertcast.data.batch import RouterCall, capturing
from expertcast.data.live import Conversations, LiveOptions, LiveTraces
from expertcast.data.processes import exclusive
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import MoEView
from expertcast_vllm.requests import Requests, tell_requests
from expertcast_vllm.settings import Settings
from expertcast_vllm.step import without_padding
from expertcast_vllm.traffic import TrafficCollector
from expertcast_vllm.view import ForecastRouter, view_of
from expertcast_vllm.wiring import Kept, wire

if TYPE_CHECKING:
    from expertcast_vllm.step import Step


class Watching:
    """A model's wiring, and what a forward shows beyond what routers are called with.

    Args:
        model_runner: vLLM's, whose model is loaded.
        kept: its gates' parameters as they were loaded.

    Raises:
        ExpertcastError: a model, or a way of running it, that cannot be watched.
    """

    def __init__(self, model_runner: Any, kept: Kept) -> None:
        config = model_runner.vllm_config
        _check(config)
        self._runner = model_runner
        self.sees_residuals = config.compilation_config.mode == CompilationMode.NONE
        """Compiled forwards run without hooks."""
        layers = wire(model_runner)
        self.view: MoEView = view_of(layers, kept, str(config.model_config.model))
        self._factors = [layer.router.factor for layer in self.view if isinstance(layer.router, ForecastRouter)]
        self._residual: Tensor | None = None
        self._seen: tuple[RouterCall, RouterCall] | None = None
        self.running: Requests | None = None
        """Whose tokens the present forward is over."""
        self.collector: TrafficCollector | None = None
        if self.sees_residuals:
            for wired in layers:
                if wired.norm is not None:
                    wired.norm.register_forward_hook(self._normed)
        tell_requests(model_runner, self)
        self._folder = ExitStack()

    def collect(self, settings: Settings) -> TrafficCollector | None:
        """Keep the traffic from now on as traces, if that is asked for; of workers that share every layer the first one
        does.

        Returns:
            What is to be closed when no more comes.

        Raises:
            ExpertcastError: no folder for it, another process writes there, or residuals are not seen.
        """
        if settings.collect is None:
            return None
        if not self.sees_residuals:
            raise ExpertcastError("collect looks at layers while they run, which compiled ones do not show: start vLLM "
                                  "with --enforce-eager")  # fmt: skip
        if get_tensor_model_parallel_rank():
            return None
        tokenizer = cached_tokenizer_from_config(self._runner.vllm_config.model_config)
        if tokenizer is None:
            raise ExpertcastError("collect knows requests by their text: start vLLM without --skip-tokenizer-init")
        config, folder = self._runner.vllm_config.model_config, Path(settings.collect)
        self._folder.enter_context(exclusive(folder))
        live = LiveTraces(
            folder, self.view, LiveOptions(tokens=settings.collect_tokens, window=settings.collect_window),
            config=json.loads(config.hf_config.to_json_string(use_diff=False)), logits=torch.float32,
            dtype=str(config.dtype).removeprefix("torch."),
        )  # fmt: skip
        self.collector = TrafficCollector(live, self.view.shape, Conversations(tokenizer).hash)
        return self.collector

    def seen(self, call: RouterCall) -> RouterCall:
        """The call as transformers' router would have given it: with the residual stream, where it is seen, and ids and
        weights of its kind."""
        if self._seen is None or self._seen[0] is not call:
            residual = self._residual if self.sees_residuals else None
            if residual is not None and capturing():
                residual = without_padding(residual)
            rows = len(call.ids_TK)
            own = replace(
                call,
                residual_TD=call.residual_TD if residual is None else residual[:rows],
                weights_TK=call.weights_TK * self._factors[call.layer],
                ids_TK=call.ids_TK.long(),
            )
            self._seen = call, own
        return self._seen[1]

    def on_start(self, step: Step) -> None:
        """A forward's first router has run."""

    def on_router(self, step: Step, call: RouterCall) -> None:
        """A router has run."""
        del step
        if self.collector is not None:
            self.collector.see(self.seen(call))

    def start(self, running: Requests) -> None:
        """A forward over these requests' tokens is about to run."""
        self.running, self._seen = running, None
        if self.collector is not None:
            self.collector.start(running, self._runner.requests)

    def finish(self, running: Requests) -> None:
        """It has run to its end."""
        self._residual, self._seen = None, None
        if self.collector is not None:
            self.collector.finish(running)

    def ended(self) -> None:
        """Requests may have ended."""
        if self.collector is not None:
            self.collector.ended(self._runner.requests)

    def _normed(self, _module: nn.Module, args: tuple[Tensor, ...], output: Tensor | tuple[Tensor, Tensor]) -> None:
        self._residual = output[1] if isinstance(output, tuple) else args[0]


def _check(config: Any) -> None:
    """
    Raises:
        ExpertcastError: the model runs in a way that shows nothing of its layers.
    """
    parallel = config.parallel_config
    refused = {
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "--speculative-config": config.speculative_config is not None,
    }
    for option, given in refused.items():
        if given:
            raise ExpertcastError(
                f"forecasts and collecting need all layers of every token in one place: leave {option} out"
            )
