"""All offloaded layers of one worker: their store, slots, link and engine, and what happens in a step.

T tokens, D hidden size, E routed experts per layer, K experts per token, L MoE layers of this worker.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial, wraps
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry, generate_latest
from torch import Tensor, nn
from vllm import __version__ as vllm_version
from vllm.config import ParallelConfig, VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.moe_output import UnfinalizedMoEOutput
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import WorkerBase

from expertcast.data.batch import RouterCall, capturing
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.predictors.view import ModelShape
from expertcast.runtime.config import OffloadConfig, make_link, make_store, named_checkpoint, slots_for
from expertcast.runtime.engine.drift import DriftMonitor
from expertcast.runtime.engine.engine import Engine, EngineParts, HostEngine
from expertcast.runtime.engine.speculation import Speculator
from expertcast.runtime.experimental.device_engine import DeviceEngine
from expertcast.runtime.forecasters import mean_recall
from expertcast.runtime.links.base import Link
from expertcast.runtime.policies.base import CacheShape
from expertcast.runtime.recording.statistics import RunStatistics
from expertcast.runtime.serving.metrics import ExpertMetrics, Source
from expertcast.runtime.storage.layout import ExpertsForm
from expertcast.runtime.storage.memory import HostMemory, PageLock
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from expertcast_vllm.method import GatheringKernel, MappingKernel, OffloadedMethod, VllmKernel
from expertcast_vllm.settings import KEY, METRICS, OFFLOAD, STATISTICS, Settings
from expertcast_vllm.step import Step, check_config, check_slots, groups, running_step, without_padding
from expertcast_vllm.watching import Watching, make_speculator
from expertcast_vllm.wiring import Kept, keep_gates, tell_routing


def _running_offload() -> WorkerOffload:
    """Of the model that runs. Compiled code outlives its process: it holds the numbers of layers only."""
    offload: WorkerOffload = get_forward_context().no_compile_layers[OFFLOAD]
    return offload


def routed(hidden_states: Tensor, router_logits: Tensor, topk_weights: Tensor, topk_ids: Tensor, layer: int) -> Tensor:
    """A layer's router has run; gives its choice [T, K] back, which the layer's experts are to be called with."""
    ids = _running_offload().routed(layer, hidden_states, router_logits, topk_weights, topk_ids)
    return ids.clone() if ids is topk_ids else ids


def run(hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, layer: int) -> Tensor:
    """A layer's experts over [T, D]."""
    return _running_offload().run(layer, hidden_states, topk_ids, topk_weights)


direct_register_custom_op(
    op_name="expertcast_routed", op_func=routed, fake_impl=lambda *given, **_: torch.empty_like(given[3])
)
direct_register_custom_op(
    op_name="expertcast_run", op_func=run, fake_impl=lambda *given, **_: torch.empty_like(given[0])
)

ROUTED = torch.ops.vllm.expertcast_routed
"""The operator of :func:`routed`."""
RUN = torch.ops.vllm.expertcast_run
"""The operator of :func:`run`."""


# Store


class LoadedStore(ExpertStore):
    """Experts in the very memory that vLLM's loader wrote them to."""

    def adopt(self, layer: int, memory: HostMemory) -> None:
        """This is the layer's memory: blocks of all its experts, one after another."""
        self._memory[layer] = memory
        self._hold(layer, memory.bytes)


def keep(offload: WorkerOffload, layer: OffloadedExperts) -> ExpertStore:
    """Put a layer's experts, which are ready for the kernel, into the worker's store; the first one makes it.

    Raises:
        ExpertcastError: a layer differs from the first one, or the disk has no room.
    """
    method = layer.quant_method
    memory, layout = method.memory, method.layout
    assert memory is not None
    store = offload.store
    if store is None:
        form = ExpertsForm(shape=offload.shape, layout=layout)
        if offload.settings.offload.store == "memory":
            store = LoadedStore(form, device=offload.device)
        else:
            options = _of_rank(offload.settings.offload, offload.config.parallel_config)
            store = make_store(options, form, offload.device)
    if (store.layout, store.experts) != (layout, layer.local_num_experts):
        raise ExpertcastError(
            f"{layer.layer_name} has experts of another shape, dtype or number than the MoE layer before it: one pool "
            "of slots needs them alike; not supported"
        )
    if isinstance(store, LoadedStore):
        store.adopt(layer.index, memory)
    else:
        views = layout.views(memory.bytes)

        def write(target: dict[str, Tensor]) -> None:
            for name, view in views.items():
                target[name].copy_(view)

        store.fill(layer.index, write)
        memory.release()
    method.memory = None
    return store


def _of_rank(options: OffloadConfig, parallel: ParallelConfig) -> OffloadConfig:
    """Workers hold different parts of the experts, each in a folder of its own."""
    if options.store_folder is None or parallel.world_size == 1:
        return options
    return replace(options, store_folder=Path(options.store_folder) / f"{parallel.rank}-of-{parallel.world_size}")


# The worker

logger = init_logger("vllm.expertcast")
_TELLS = "tells_expertcast"


def follow_worker() -> Kept:
    """Have the offload of this process's worker told when its model is loaded (`WorkerOffload.loaded`), when it is
    warmed up and when the worker ends, and add the methods to workers by which it is asked.

    Returns:
        What may be its model's gates: filled in when the model's weights have come.
    """
    if not hasattr(Worker.shutdown, _TELLS):
        # the first is asked for when the model is loaded: nothing is compiled or measured yet
        Worker.get_kv_cache_spec = _telling(
            Worker.get_kv_cache_spec, before=lambda offload, worker: offload.loaded(worker.model_runner)
        )
        Worker.compile_or_warm_up_model = _telling(
            Worker.compile_or_warm_up_model, after=lambda offload, _worker: offload.warmed_up()
        )
        Worker.shutdown = _telling(Worker.shutdown, before=lambda offload, _worker: offload.ending.close())
        setattr(WorkerBase, STATISTICS, lambda worker: _offload_of(worker).statistics())
        setattr(WorkerBase, METRICS, lambda worker: _offload_of(worker).metrics())
    return keep_gates()


def _telling(method: Any, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None) -> Any:
    """A worker's method that tells its offload, if there is one, before or after."""

    @wraps(method)
    def told(self: Worker, *args: Any, **kwargs: Any) -> Any:
        offload = _offload_of(self)
        if offload is not None and before is not None:
            before(offload, self)
        result = method(self, *args, **kwargs)
        if offload is not None and after is not None:
            after(offload, self)
        return result

    setattr(told, _TELLS, True)
    return told


def _offload_of(worker: WorkerBase) -> Any:
    return worker.vllm_config.compilation_config.static_forward_context.get(OFFLOAD)


def _sum_up(stats: RunStatistics) -> None:
    total, rate = stats.total, stats.hit_rate
    waited = "" if "waited_s" in stats.uncounted else f", {total.waited_s:.3g} s waited for them"
    logger.info(
        "expertcast: %d experts needed, %s of them in slots, %.3g GB moved%s",
        total.requests, "none" if rate is None else f"{rate:.1%}", total.bytes_moved / 1e9, waited,
    )  # fmt: skip


def follow_routing(offload: WorkerOffload) -> None:
    """Tell the offload of every routing from now on."""
    modules = offload.config.compilation_config.static_forward_context.values()
    for runner in (module for module in modules if isinstance(module, MoERunner)):
        experts = runner.routed_experts
        assert experts in offload.layers, "other classes are refused before"
        tell_routing(runner, partial(ROUTED, layer=experts.index))


class WorkerOffload:
    """The layers that one model has in one worker process, run from one pool of slots.

    Layers are added while vLLM makes the model, and prepared when it has loaded them; the last one gets slots for all.
    The engine is made by the first step over a request's tokens.

    Raises:
        ExpertcastError: options of vLLM that do not go with offloading.
    """

    pool: SlotPool
    link: Link
    kernel: VllmKernel
    """These three once all layers are loaded."""
    drift: DriftMonitor | None
    """Follows the forecasts' recall, with the speculator."""

    def __init__(self, config: VllmConfig, settings: Settings) -> None:
        check_config(config, settings)
        self.config, self.settings = config, settings
        self.layers: list[OffloadedExperts] = []
        self.device = torch.device(config.device_config.device)
        self.lock = PageLock() if self.device.type == "cuda" and settings.offload.store == "memory" else None
        """Of the memory that experts are loaded to."""
        self.store: ExpertStore | None = None
        """Once a layer is loaded."""
        self.watching: Watching | None = None
        """Shows what forecasts and traces are made of, where any are asked for."""
        self.speculator: Speculator | None = None
        """Once the model is loaded."""
        self.ending = ExitStack()
        """What is closed when the worker ends, when this is dropped, or at the process's end."""
        self._step: Step | None = None
        self._call: RouterCall | None = None
        """Of the router that ran last."""
        self._whole = False
        """Its layer's experts run in one piece."""
        predictor = settings.offload.resolved_predictor()
        # a bad name ends it before the weights are read
        self.checkpoint = named_checkpoint(predictor) if isinstance(predictor, str | Path) else None
        self._kept = follow_worker()

    @classmethod
    def of(cls, config: VllmConfig, settings: Settings) -> WorkerOffload:
        """The offload of the model that vLLM makes with this config."""
        context = config.compilation_config.static_forward_context
        made: WorkerOffload | None = context.get(OFFLOAD)
        if made is None:
            made = context[OFFLOAD] = cls(config, settings)
            # atexit's functions are not run in processes that multiprocessing forked
            Finalize(made, made.ending.close, exitpriority=100)
            if isinstance(config.additional_config, dict):  # vLLM's caches of compiled code go by it
                config.additional_config[KEY] = settings.as_dict()
        return made

    @property
    def shape(self) -> ModelShape:
        """Of the model, as far as this worker has it."""
        moe = self.layers[0].moe_config
        return ModelShape(
            layers=len(self.layers), experts=moe.num_experts, top_k=moe.experts_per_token, hidden=moe.hidden_dim
        )

    @cached_property
    def engine(self) -> Engine:
        """Made when it is first asked for, after loading.

        Raises:
            ExpertcastError: policies that do not go with the slots.
        """
        config, shape = self.settings.offload, self.shape
        assert self.speculator is not None, "no engine before the model is loaded"
        cache = CacheShape(layers=shape.layers, experts=shape.experts, top_k=shape.top_k, slots=self.pool.count)
        made = DeviceEngine if self.link.decides_on_device else HostEngine
        engine = made(
            EngineParts(
                link=self.link, pool=self.pool, speculator=self.speculator,
                policies=config.resolved_policies().make(cache), kernel=self.kernel, drift=self.drift,
                keep=config.cache, likely=config.likely, forecasts=config.forecasts,
                recall=mean_recall(self.checkpoint),
            )
        )  # fmt: skip
        reports = [] if self.drift is None else [self.drift.as_dict]
        if isinstance(engine, HostEngine):
            reports.append(engine.flow.forecasts_report)
        engine.stats.reports = reports
        self.ending.callback(_sum_up, engine.stats)
        return engine

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
        if all(each.quant_method.is_prepared for each in self.layers):
            self._give_slots()
            self.ending.callback(self.link.close)
            follow_routing(self)

    def loaded(self, model_runner: Any) -> None:
        """The model is loaded: what forecasts and collecting need of it is looked for.

        Raises:
            ExpertcastError: a predictor or a folder that cannot be, or a model that cannot be watched.
        """
        wanted = self.settings
        if self.speculator is not None:
            return
        if wanted.collect is not None or wanted.offload.resolved_predictor() is not None:
            self.watching = Watching(model_runner, self._kept)
        self.speculator, self.drift = make_speculator(self, self.watching)
        if self.watching is not None:
            collector = self.watching.collect(wanted)
            if collector is not None:
                self.ending.callback(collector.close)
        if self.link.decides_on_device:
            self.engine  # noqa: B018  # what it holds is no graph's

    def warmed_up(self) -> None:
        """What comes now are requests."""
        if "engine" in vars(self):
            self.engine.stats.reset()

    def routed(self, index: int, hidden_TD: Tensor, logits_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """A layer's router has run; the ids [T, K] that its experts are to be called with."""
        if index == 0:
            self._step = running_step()
            if self._step is not None:
                self.engine.on_start(fresh=not self._step.decodes)
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
        if self.watching is not None:
            self.watching.on_router(call)
        self._whole = self._fits(index, call.ids_TK)
        if self._whole:
            self.engine.on_router(call)
        return ids_TK

    def run(self, index: int, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """A layer's experts: the bits of vLLM's own kernel. Rows of padding get zeros, of a trial run anything."""
        step, kernel = self._step, self.kernel
        kernel.tokens, kernel.ids_dtype = len(hidden_TD), ids_TK.dtype
        if step is None:
            slots_TK = ids_TK % self.pool.count
            return kernel.run(self.layers[index], hidden_TD, slots_TK, weights_TK, ids_TK)
        if step.tokens < len(hidden_TD):
            output_TD = torch.zeros_like(hidden_TD)
            rows = slice(0, step.tokens)
            output_TD[rows] = self._run(index, hidden_TD[rows], weights_TK[rows])
            return output_TD
        return self._run(index, hidden_TD, weights_TK)

    def statistics(self) -> Json:
        """What the engine has counted, and what there is."""
        assert self.store is not None
        return {
            **self.engine.stats.as_dict(),
            "slots": self.pool.count,
            "slots_bytes": self.pool.nbytes,
            "store_bytes": self.store.nbytes,
            "bytes_moved": self.link.bytes_moved,
            "link": self.link.name,
        }

    def metrics(self) -> str:
        """The same as a page for Prometheus."""
        return generate_latest(self._registry).decode()

    @cached_property
    def _registry(self) -> CollectorRegistry:
        store, speculator = self.store, self.speculator
        assert store is not None
        assert speculator is not None
        policy = self.settings.offload.resolved_policies().as_dict()
        registry = CollectorRegistry(auto_describe=False)
        source = Source(
            stats=self.engine.stats, link=self.link, pool=self.pool, store=store, drift=self.drift,
            info={
                "model": self.config.model_config.model,
                "predictor": "none" if speculator.predictor is None else speculator.predictor.name,
                "mode": "exact",
                "policy": ",".join(f"{kind}={text}" for kind, text in policy.items()),
                "link": self.link.name,
                "store": store.name,
                "vllm": vllm_version,
            },
        )  # fmt: skip
        registry.register(ExpertMetrics(source))
        return registry

    def _give_slots(self) -> None:
        """Close the store, and give the layers slots.

        Raises:
            ExpertcastError: too few slots, or a link that this device has not.
        """
        config, shape, device, store = self.settings.offload, self.shape, self.device, self.store
        assert store is not None, "no slots before the experts are loaded"
        store.finish()
        slots = slots_for(config, store)
        check_slots(self.config, shape, slots)
        self.pool = SlotPool(store.layout, slots, device)
        self.link = make_link(config, device.type)
        self.link.attach(store, self.pool)
        self.kernel = (GatheringKernel if device.type == "cpu" else MappingKernel)(self.pool.views)
        for layer in self.layers:
            layer.quant_method.use_slots(layer, self.pool.views)
        logger.info(
            "expertcast: %d of %d experts have a slot (%.3g GB on %s), all of them %.3g GB in store %r, link %r",
            slots, shape.layers * shape.experts, self.pool.nbytes / 1e9, device, store.nbytes / 1e9, store.name,
            self.link.name,
        )  # fmt: skip

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


# Layer


def refuse_other_experts(ours: type[RoutedExperts]) -> None:
    """Have layers of routed experts that are not `ours` refused where expertcast is asked for: models with a class of
    their own pass by vLLM's registry."""
    make = RoutedExperts.__init__

    @wraps(make)
    def made(self: RoutedExperts, layer_name: str, *args: Any, **kwargs: Any) -> None:
        if not isinstance(self, ours) and Settings.of(get_current_vllm_config().additional_config) is not None:
            raise ExpertcastError(
                f"{layer_name}: {type(self).__name__} keeps experts in a way of its own: not supported, switch "
                "expertcast off for this model"
            )
        make(self, layer_name, *args, **kwargs)

    RoutedExperts.__init__ = made


def check_shape(offload: WorkerOffload) -> None:
    """Whether a predictor's checkpoint can be of the model whose first layer is made; its weights are compared when
    they have come.

    Raises:
        ExpertcastError: experts, how many of them a token takes, or hidden sizes differ.
    """
    checkpoint, config = offload.checkpoint, offload.config.model_config
    if checkpoint is None:
        return
    trained = checkpoint.config["shape"]
    found = {"E": offload.shape.experts, "K": offload.shape.top_k, "D": config.get_hidden_size()}
    for size, words in (("E", "experts per layer"), ("K", "experts per token"), ("D", "as hidden size")):
        if trained[size] != found[size]:
            raise ExpertcastError(
                f"{checkpoint.folder} was trained for {checkpoint.config['model_id']!r} with {trained[size]} {words}, "
                f"and {str(config.model)!r} has {found[size]}: train a predictor for this model with `expertcast train`"
            )


class OffloadedExperts(RoutedExperts):
    """Experts in a store, run from slots; vLLM's own class where nobody asked for that."""

    offload: WorkerOffload
    index: int
    """Among the MoE layers of this process, first to last."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = get_current_vllm_config()
        settings = Settings.of(config.additional_config)
        if settings is None:
            self.__class__ = RoutedExperts  # type: ignore[assignment]
            RoutedExperts.__init__(self, *args, **kwargs)
            return
        # vLLM's own asks for the method, which asks for this
        object.__setattr__(self, "offload", WorkerOffload.of(config, settings))
        super().__init__(*args, **kwargs)
        self.index = self.offload.add(self)
        if self.index == 0:
            check_shape(self.offload)
        self._come: set[tuple[str, bool, int]] = set()
        shards = (3 if self.moe_config.is_act_and_mul else 2) * (2 if self.moe_config.has_bias else 1)
        self._expected = shards * self.local_num_experts

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> FusedMoEMethodBase:
        method = super()._get_quant_method(prefix, quant_config, moe_config)
        return OffloadedMethod.in_place_of(method, prefix, self.offload.lock)

    def weight_loader(  # type: ignore[override]
        self, param: nn.Parameter, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int,
        return_success: bool = False,
    ) -> bool | None:  # fmt: skip
        """As vLLM's. With the experts on disk, a layer that is complete goes there: the rest needs its memory.

        Raises:
            ExpertcastError: the layer's weights were loaded before.
        """
        if self.quant_method.is_prepared:
            raise ExpertcastError(
                f"{self.layer_name}: the experts lie in a store and cannot be loaded again: start vLLM anew"
            )
        loaded = super().weight_loader(param, loaded_weight, weight_name, shard_id, expert_id, return_success=True)
        if loaded and self.offload.settings.offload.store == "disk":
            self._come.add((shard_id, "bias" in weight_name, expert_id))
            if len(self._come) == self._expected:
                self.quant_method.prepare(self)
        return loaded if return_success else None

    def forward_modular(
        self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, shared_experts: SharedExperts | None = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor | UnfinalizedMoEOutput:  # fmt: skip
        del shared_experts, shared_experts_input  # run by vLLM's runner, before or beside: no kernel here overlaps them
        return RUN(x, topk_weights, topk_ids, self.index)


OffloadedExperts.weight_loader.supports_moe_loading = True  # type: ignore[attr-defined]
