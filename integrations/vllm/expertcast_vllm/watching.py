"""A vLLM model that is watched: what runs, layer by layer, told to whoever forecasts or collects."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from expertcast.data.exclusive import exclusive
from expertcast.data.live import LiveOptions, LiveTraces
from expertcast.data.taps import RouterCall
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.view import MoEView
from expertcast_vllm.steps import Step, StepListener, steps_told
from expertcast_vllm.taps import Taps
from expertcast_vllm.traffic import TrafficCollector
from expertcast_vllm.view import view_of
from expertcast_vllm.wiring import Kept, wire

_TOKENS = 2
"""Of the dry run."""


class Watching(StepListener):
    """A model's wiring, and who is told of its forwards.

    Args:
        model_runner: vLLM's, whose model is loaded.
        kept: its gates' parameters as they were loaded.

    Raises:
        ExpertcastError: a model or a kind of runner that cannot be watched.
    """

    def __init__(self, model_runner: Any, kept: Kept) -> None:
        config = model_runner.vllm_config
        _check(config)
        self._runner = model_runner
        self.layers = wire(model_runner.get_model(), lambda: model_runner._dummy_run(_TOKENS))
        self.view: MoEView = view_of(self.layers, kept, str(config.model_config.model))
        self.on_start: list[Callable[[Step], object]] = []
        """Are told that a forward starts."""
        self.on_router: list[Callable[[RouterCall], object]] = []
        """Are told of each router in it."""
        self.collector: TrafficCollector | None = None
        self._stack = ExitStack()
        self._taps = Taps(self.layers, self.view, self._routed)
        self._stack.callback(self._taps.close)
        self._stack.enter_context(steps_told(model_runner, self))

    def collect(self, folder: Path, options: LiveOptions) -> None:
        """Keep the traffic from now on as traces.

        Args:
            folder: where.
            options: how much.

        Raises:
            ExpertcastError: the folder holds something else, or another process writes it.
        """
        config = self._runner.vllm_config.model_config
        self._stack.enter_context(exclusive(folder))
        live = LiveTraces(
            folder, self.view, options, config=json.loads(config.hf_config.to_json_string(use_diff=False)),
            logits=torch.float32, dtype=str(config.dtype).removeprefix("torch."),
        )  # fmt: skip
        self.collector = TrafficCollector(live, self.view.shape)
        self._stack.callback(self.collector.close)

    def start(self, step: Step) -> None:
        self._taps.start(step)
        if self.collector is not None:
            self.collector.start(step, self._runner.requests)
        for told in self.on_start:
            told(step)

    def finish(self, step: Step) -> None:
        self._taps.finish()
        if self.collector is not None:
            self.collector.finish(step)

    def requests(self, running: Any) -> None:
        if self.collector is not None:
            self.collector.requests(running)

    def close(self) -> None:
        """Take the hooks away, and write what was collected."""
        self._stack.close()

    def _routed(self, call: RouterCall) -> None:
        if self.collector is not None:
            self.collector.see(call)
        for told in self.on_router:
            told(call)


def _check(config: Any) -> None:
    """
    Raises:
        ExpertcastError: the model runs in a way that shows nothing of its layers.
    """
    parallel = config.parallel_config
    if not config.model_config.enforce_eager:
        raise ExpertcastError("forecasts and collecting look at layers while they run: give --enforce-eager")
    if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
        raise ExpertcastError("forecasts and collecting need all layers and tokens in one place: leave out pipeline "
                              "and data parallelism")  # fmt: skip
    if config.speculative_config is not None:
        raise ExpertcastError("forecasts and collecting do not know drafts' tokens: leave out --speculative-config")
