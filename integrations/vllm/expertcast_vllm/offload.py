"""All offloaded layers of one worker: their store, slots, link and engine, and what happens in a step.

T tokens, D hidden size, E routed experts per layer, K experts per token, L MoE layers of this worker.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from prometheus_client import CollectorRegistry, generate_latest
from torch import Tensor
from vllm.config import VllmConfig

from expertcast.data.batch import RouterCall, capturing
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.predictors.view import ModelShape
from expertcast.runtime.config import named_checkpoint
from expertcast.runtime.engine.engine import Engine
from expertcast.runtime.serving.metrics import ExpertMetrics
from expertcast.runtime.storage.memory import PageLock
from expertcast.runtime.storage.store import ExpertStore
from expertcast_vllm.config_check import check_config
from expertcast_vllm.foresight import Foresight
from expertcast_vllm.groups import groups
from expertcast_vllm.loading import follow_worker
from expertcast_vllm.names import OFFLOAD
from expertcast_vllm.parts import Parts, make_engine
from expertcast_vllm.routing import follow_routing
from expertcast_vllm.settings import KEY, Settings
from expertcast_vllm.step import Step, running_step, without_padding
from expertcast_vllm.store import keep
from expertcast_vllm.watching import Watching
from expertcast_vllm.worker import Ending, offer

if TYPE_CHECKING:
    from expertcast_vllm.layer import OffloadedExperts


class Listener(Protocol):
    """Is told what happens in steps over requests' tokens."""

    def on_start(self, step: Step) -> None:
        """A forward starts."""

    def on_router(self, step: Step, call: RouterCall) -> None:
        """A router has run; first to last in every forward."""


class WorkerOffload:
    """The layers that one model has in one worker process, run from one pool of slots.

    Layers are added while vLLM makes the model, and prepared when it has loaded them; the last one gets slots for all.
    The engine is made by the first step over a request's tokens.

    Raises:
        ExpertcastError: options of vLLM that do not go with offloading.
    """

    def __init__(self, config: VllmConfig, settings: Settings) -> None:
        check_config(config, settings)
        self.config, self.settings = config, settings
        self.layers: list[OffloadedExperts] = []
        self.device = torch.device(config.device_config.device)
        self.listeners: list[Listener] = []
        self.lock = PageLock() if self.device.type == "cuda" and settings.offload.store == "memory" else None
        """Of the memory that experts are loaded to."""
        self.store: ExpertStore | None = None
        """Once a layer is loaded."""
        self.parts: Parts | None = None
        """Store, slots and link, once all layers are loaded."""
        self.watching: Watching | None = None
        """Shows what forecasts and traces are made of, where any are asked for."""
        self.foresight: Foresight | None = None
        """What forecasts, once the model is loaded."""
        self.ending = Ending()
        self._prepared: set[int] = set()
        self._engine: Engine | None = None
        self._step: Step | None = None
        self._call: RouterCall | None = None
        """Of the router that ran last."""
        self._whole = False
        """Its layer's experts run in one piece."""
        self._metrics: CollectorRegistry | None = None
        predictor = settings.offload.resolved_predictor()
        # a bad name ends it before the weights are read
        self.checkpoint = named_checkpoint(predictor) if isinstance(predictor, str | Path) else None
        self._kept = follow_worker()

    @classmethod
    def of(cls, config: VllmConfig, settings: Settings) -> WorkerOffload:
        """The offload of the model that vLLM makes with this config."""
        global _latest
        made = None if _latest is None else _latest()
        if made is None or made.config is not config:
            made = cls(config, settings)
            config.compilation_config.static_forward_context[OFFLOAD] = made
            offer(made)
            if isinstance(config.additional_config, dict):  # vLLM's caches of compiled code go by it
                config.additional_config[KEY] = settings.as_dict()
            _latest = weakref.ref(made)
        return made

    @property
    def shape(self) -> ModelShape:
        """Of the model, as far as this worker has it."""
        moe = self.layers[0].moe_config
        return ModelShape(
            layers=len(self.layers), experts=moe.num_experts, top_k=moe.experts_per_token, hidden=moe.hidden_dim
        )

    @property
    def engine(self) -> Engine:
        """Made when it is first asked for, after loading."""
        if self._engine is None:
            assert self.parts is not None, "no engine before the experts are loaded"
            self._engine = make_engine(self)
            self.ending.stats = self._engine.stats
        return self._engine

    def add(self, layer: OffloadedExperts) -> int:
        """A layer has been made; its index.

        Raises:
            ExpertcastError: the others run already.
        """
        if self.store is not None:
            raise ExpertcastError(
                f"{layer.layer_name} is made after the model was loaded, as drafting models with experts are: start "
                "vLLM without that"
            )
        self.layers.append(layer)
        return len(self.layers) - 1

    def prepared(self, layer: OffloadedExperts) -> None:
        """A layer's experts lie ready in host memory.

        Raises:
            ExpertcastError: layers differ, or a file, slots or link cannot be had.
        """
        self.store = keep(self, layer)
        self._prepared.add(layer.index)
        if len(self._prepared) == len(self.layers):
            self.parts = Parts.make(self)
            self.ending.link = self.parts.link
            follow_routing(self)

    def loaded(self, model_runner: Any) -> None:
        """The model is loaded: what forecasts and collecting need of it is looked for.

        Raises:
            ExpertcastError: a predictor or a folder that cannot be, or a model that cannot be watched.
        """
        wanted = self.settings
        if self.foresight is not None:
            return
        if wanted.collect is not None or wanted.offload.resolved_predictor() is not None:
            self.watching = Watching(model_runner, self._kept)
            self.listeners.append(self.watching)
        self.foresight = Foresight.make(self, self.watching)
        if self.watching is not None:
            self.ending.collector = self.watching.collect(wanted)
        if self.parts is not None and self.parts.link.decides_on_device:
            self.engine  # noqa: B018  # what it holds is no graph's

    def warmed_up(self) -> None:
        """What comes now are requests."""
        if self._engine is not None:
            self._engine.stats.reset()

    def routed(self, index: int, hidden_TD: Tensor, logits_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """A layer's router has run; the ids [T, K] that its experts are to be called with."""
        if index == 0:
            self._start()
        step = self._step
        if step is None:
            return ids_TK
        if capturing():
            hidden_TD, logits_TE, weights_TK, ids_TK = map(without_padding, (hidden_TD, logits_TE, weights_TK, ids_TK))
        rows = slice(0, step.tokens)
        sequences = step.requests if step.decodes else 1
        self._call = call = RouterCall(
            layer=index, sequences=sequences, tokens=step.tokens // sequences, residual_TD=hidden_TD[rows],
            router_input_TD=hidden_TD[rows], logits_TE=logits_TE[rows], weights_TK=weights_TK[rows],
            ids_TK=ids_TK[rows].long(),
        )  # fmt: skip
        for listener in self.listeners:
            listener.on_router(step, call)
        self._whole = self._fits(index, call.ids_TK)
        if self._whole:
            self.engine.on_router(call)
        return ids_TK

    def run(self, index: int, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """A layer's experts: the bits of vLLM's own kernel. Rows of padding get zeros, of a trial run anything."""
        assert self.parts is not None
        step, kernel = self._step, self.parts.kernel
        kernel.tokens, kernel.ids_dtype = len(hidden_TD), ids_TK.dtype
        if step is None:
            slots_TK = ids_TK % self.parts.pool.count
            return kernel.run(self.layers[index], hidden_TD, slots_TK, weights_TK, ids_TK)
        if step.tokens < len(hidden_TD):
            output_TD = torch.zeros_like(hidden_TD)
            rows = slice(0, step.tokens)
            output_TD[rows] = self._run(index, hidden_TD[rows], weights_TK[rows])
            return output_TD
        return self._run(index, hidden_TD, weights_TK)

    def statistics(self) -> Json:
        """What the engine has counted, and what there is."""
        assert self.parts is not None, "nothing is counted before the experts are loaded"
        return {**self.engine.stats.as_dict(), **self.parts.as_dict()}

    def metrics(self) -> str:
        """The same as a page for Prometheus."""
        if self._metrics is None:
            assert self.parts is not None
            self._metrics = CollectorRegistry(auto_describe=False)
            self._metrics.register(ExpertMetrics(self.parts.source(self)))
        return generate_latest(self._metrics).decode()

    def _start(self) -> None:
        self._step = step = running_step()
        if step is None:
            return
        for listener in self.listeners:
            listener.on_start(step)
        self.engine.on_start(fresh=not step.decodes)

    def _fits(self, index: int, ids_TK: Tensor) -> bool:
        limit = self.engine.limit(index)
        return min(ids_TK.numel(), self.shape.experts) <= limit or len(ids_TK.unique()) <= limit

    def _run(self, index: int, hidden_TD: Tensor, weights_TK: Tensor) -> Tensor:
        layer, call = self.engine.view[index], self._call
        assert call is not None, "experts run behind their router"
        assert call.layer == index, "and in its order"
        ids_TK = call.ids_TK  # the very tensor that was announced: nobody has to compare
        if self._whole:
            return self.engine.run(layer, hidden_TD, ids_TK, weights_TK)
        output_TD = torch.empty_like(hidden_TD)
        parts = groups(ids_TK.cpu(), layer.num_experts, self.engine.limit(index), self.engine.held(index))
        for rows in (rows.to(hidden_TD.device) for rows in parts):
            output_TD[rows] = self.engine.run(layer, hidden_TD[rows], ids_TK[rows], weights_TK[rows])
        return output_TD


_latest: weakref.ref[WorkerOffload] | None = None
