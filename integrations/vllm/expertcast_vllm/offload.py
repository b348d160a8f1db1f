"""Offloaded layers of one worker: their store, slots, link and engine, and the custom operators that run them.

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

from expertcast.data.batch import RouterCall
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.predictors.view import ModelShape
from expertcast.runtime.config import OffloadConfig, make_link, make_store, named_checkpoint, slots_for
from expertcast.runtime.engine.engine import Engine
from expertcast.runtime.engine.speculation import Speculator
from expertcast.runtime.forecasters import mean_recall
from expertcast.runtime.links.base import Link
from expertcast.runtime.policies.base import CacheShape
from expertcast.runtime.recording.recorder import RunStatistics
from expertcast.runtime.serving.metrics import ExpertMetrics, MetricSource
from expertcast.runtime.storage.layout import ExpertsForm
from expertcast.runtime.storage.memory import HostMemory, PageLock
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from expertcast_vllm.method import GatheringKernel, MappingKernel, OffloadedMethod, VllmKernel
from expertcast_vllm.observer import ModelObserver, make_speculator
from expertcast_vllm.settings import KEY, METRICS, OFFLOAD, STATISTICS, Settings
from expertcast_vllm.step import Step, check_config, groups, running_step
from expertcast_vllm.wiring import GateParameters, observe_routing, record_gates


def _running_offload() -> WorkerOffload:
    """Return the running model's offload.

    Compiled code outlives its process, so it refers to layers by number and finds the offload here.
    """
    offload: WorkerOffload = get_forward_context().no_compile_layers[OFFLOAD]
    return offload


def routed(hidden_states: Tensor, router_logits: Tensor, topk_weights: Tensor, topk_ids: Tensor, layer: int) -> Tensor:
    """Process a layer's routing; return the ids [T, K] for the layer's experts."""
    ids = _running_offload().routed(layer, hidden_states, router_logits, topk_weights, topk_ids)
    return ids.clone() if ids is topk_ids else ids


def run(hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, layer: int) -> Tensor:
    """Run a layer's experts on [T, D] inputs; return [T, D]."""
    return _running_offload().run(layer, hidden_states, topk_ids, topk_weights)


direct_register_custom_op(
    op_name="expertcast_routed", op_func=routed, fake_impl=lambda *given, **_: torch.empty_like(given[3])
)
direct_register_custom_op(
    op_name="expertcast_run", op_func=run, fake_impl=lambda *given, **_: torch.empty_like(given[0])
)


# Store


class LoadedStore(ExpertStore):
    """Store that uses the host memory to which vLLM's loader wrote the experts."""

    def adopt(self, layer: int, memory: HostMemory) -> None:
        """Take over a layer's memory, which has the blocks of all its experts one after another."""
        self._memory[layer] = memory
        self._hold(layer, memory.bytes)


def keep(offload: WorkerOffload, layer: OffloadedExperts) -> ExpertStore:
    """Put a layer's converted experts into the worker's store; the first layer creates the store.

    Raises:
        ExpertcastError: a layer differs from the first one, or the disk is full.
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
            f"{layer.layer_name} differs from the MoE layer before it in shape, dtype or number of experts: not "
            "supported, because all layers share one pool of slots"
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
    """Give each worker its own store folder: workers have different parts of the experts."""
    if options.store_folder is None or parallel.world_size == 1:
        return options
    return replace(options, store_folder=Path(options.store_folder) / f"{parallel.rank}-of-{parallel.world_size}")


# The worker

logger = init_logger("vllm.expertcast")


def hook_worker() -> GateParameters:
    """Patch vLLM's worker to notify its offload when the model is loaded, when the warm-up is over and when the worker
    ends.

    Also add the worker methods that return counters.

    Returns:
        Parameters of possible gates, filled in when the model's weights are loaded.
    """
    if not hasattr(WorkerBase, STATISTICS):
        # vLLM calls the first method once the model is loaded, before it compiles or profiles.
        Worker.get_kv_cache_spec = _notifying(
            Worker.get_kv_cache_spec, before=lambda offload, worker: offload.loaded(worker.model_runner)
        )
        Worker.compile_or_warm_up_model = _notifying(
            Worker.compile_or_warm_up_model, after=lambda offload, _worker: offload.warmed_up()
        )
        Worker.shutdown = _notifying(Worker.shutdown, before=lambda offload, _worker: offload.ending.close())
        setattr(WorkerBase, STATISTICS, lambda worker: _offload_of(worker).statistics())
        setattr(WorkerBase, METRICS, lambda worker: _offload_of(worker).metrics())
    return record_gates()


def _notifying(method: Any, before: Callable[..., None] | None = None, after: Callable[..., None] | None = None) -> Any:
    """Return a worker's method that also calls `before` and `after` with its offload, if it has one."""

    @wraps(method)
    def notifying(self: Worker, *args: Any, **kwargs: Any) -> Any:
        offload = _offload_of(self)
        if offload is not None and before is not None:
            before(offload, self)
        result = method(self, *args, **kwargs)
        if offload is not None and after is not None:
            after(offload, self)
        return result

    return notifying


def _offload_of(worker: WorkerBase) -> Any:
    return worker.vllm_config.compilation_config.static_forward_context.get(OFFLOAD)


def _sum_up(stats: RunStatistics) -> None:
    total = stats.total
    logger.info(
        "expertcast: %d experts needed, %s of them in slots, %.3g GB moved, %.3g s waited for them",
        total.requests, f"{stats.hit_rate:.1%}" if total.requests else "none", total.bytes_moved / 1e9, total.waited_s,
    )  # fmt: skip


def hook_routing(offload: WorkerOffload) -> None:
    """Pass every routing to the offload from now on."""
    modules = offload.config.compilation_config.static_forward_context.values()
    for runner in (module for module in modules if isinstance(module, MoERunner)):
        experts = runner.routed_experts
        assert experts in offload.layers, "other classes are refused earlier"
        observe_routing(runner, partial(torch.ops.vllm.expertcast_routed, layer=experts.index))


class WorkerOffload:
    """All MoE layers of one model in one worker process, with one pool of slots.

    vLLM adds layers while it creates the model, and prepares them when it has loaded them; the last prepared layer
    creates the slots. The first step over a request's tokens creates the engine.

    Args:
        config: vLLM's config.
        settings: options of the plug-in.

    Raises:
        ExpertcastError: an option of vLLM is not supported.
    """

    pool: SlotPool
    link: Link
    kernel: VllmKernel
    """Pool, link and kernel are set once all layers are loaded."""

    def __init__(self, config: VllmConfig, settings: Settings) -> None:
        check_config(config)
        self.config, self.settings = config, settings
        self.layers: list[OffloadedExperts] = []
        self.device = torch.device(config.device_config.device)
        self.lock = PageLock() if self.device.type == "cuda" and settings.offload.store == "memory" else None
        """Page lock for the memory that experts are loaded to."""
        self.store: ExpertStore | None = None
        """Set once a layer is loaded."""
        self.observer: ModelObserver | None = None
        """Observer of the model for forecasts and traces; None without either."""
        self.speculator: Speculator | None = None
        """Set once the model is loaded."""
        self.ending = ExitStack()
        """Cleanup for the end of the worker or the process."""
        self._step: Step | None = None
        self._call: RouterCall | None = None
        """Call of the router that ran last."""
        self._whole = False
        """Whether that layer's experts run in one piece."""
        predictor = settings.offload.resolved_predictor()
        # An invalid name fails here, before the weights are read.
        self.checkpoint = named_checkpoint(predictor) if isinstance(predictor, str | Path) else None
        self._gates = hook_worker()

    @classmethod
    def of(cls, config: VllmConfig, settings: Settings) -> WorkerOffload:
        """Return the offload of the model with this config, and create it at the first call."""
        context = config.compilation_config.static_forward_context
        made: WorkerOffload | None = context.get(OFFLOAD)
        if made is None:
            made = context[OFFLOAD] = cls(config, settings)
            # multiprocessing's Finalize: functions of atexit do not run in forked processes
            Finalize(made, made.ending.close, exitpriority=100)
            if isinstance(config.additional_config, dict):  # part of the key of vLLM's compile cache
                config.additional_config[KEY] = settings.as_dict()
        return made

    @property
    def shape(self) -> ModelShape:
        """Shape of this worker's part of the model."""
        moe = self.layers[0].moe_config
        return ModelShape(
            layers=len(self.layers), experts=moe.num_experts, top_k=moe.experts_per_token, hidden=moe.hidden_dim
        )

    @cached_property
    def engine(self) -> Engine:
        """The engine, created at the first access after loading.

        Raises:
            ExpertcastError: the policies do not fit the slots.
        """
        config, shape = self.settings.offload, self.shape
        assert self.speculator is not None, "no engine before the model is loaded"
        cache = CacheShape(layers=shape.layers, experts=shape.experts, top_k=shape.top_k, slots=self.pool.count)
        engine = Engine(
            link=self.link, pool=self.pool, speculator=self.speculator,
            policies=config.resolved_policies().make(cache), kernel=self.kernel, keep=config.cache,
            forecasts=config.forecasts, recall=mean_recall(self.checkpoint),
        )  # fmt: skip
        engine.flow.splits = False  # a token's experts run together
        engine.stats.reports = [engine.flow.forecasts_report]
        self.ending.callback(_sum_up, engine.stats)
        return engine

    def add(self, layer: OffloadedExperts) -> int:
        """Add a layer and return its index.

        Raises:
            ExpertcastError: the model is loaded already.
        """
        if self.store is not None:
            raise ExpertcastError(
                f"{layer.layer_name} is created after the model was loaded: start vLLM without a draft model that has "
                "experts"
            )
        self.layers.append(layer)
        return len(self.layers) - 1

    def prepared(self, layer: OffloadedExperts) -> None:
        """Store a layer's converted experts; after the last layer, create the slots.

        Raises:
            ExpertcastError: the layers differ, or a file, slots or a link cannot be created.
        """
        self.store = keep(self, layer)
        if all(each.quant_method.is_prepared for each in self.layers):
            self._give_slots()
            self.ending.callback(self.link.close)
            hook_routing(self)

    def loaded(self, model_runner: Any) -> None:
        """Set up forecasts and collection for the loaded model.

        Raises:
            ExpertcastError: the predictor or folder is invalid, or the model cannot be observed.
        """
        wanted = self.settings
        if self.speculator is not None:
            return
        if wanted.collect is not None or wanted.offload.resolved_predictor() is not None:
            self.observer = ModelObserver(model_runner, self._gates)
        self.speculator = make_speculator(self, self.observer)
        if self.observer is not None:
            collector = self.observer.collect(wanted)
            if collector is not None:
                self.ending.callback(collector.close)

    def warmed_up(self) -> None:
        """Reset the counters after vLLM's warm-up."""
        if "engine" in vars(self):
            self.engine.stats.reset()

    def routed(self, index: int, hidden_TD: Tensor, logits_TE: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> Tensor:
        """Process a layer's routing and start its copies; return the ids [T, K] for its experts."""
        if index == 0:
            self._step = running_step()
            if self._step is not None:
                self.engine.on_start(fresh=not self._step.decodes)
        step = self._step
        if step is None:
            return ids_TK
        rows = slice(0, step.tokens)
        sequences = step.requests if step.decodes else 1
        self._call = call = RouterCall(
            layer=index, sequences=sequences, tokens=step.tokens // sequences, residual_TD=hidden_TD[rows],
            router_input_TD=hidden_TD[rows], logits_TE=logits_TE[rows], weights_TK=weights_TK[rows],
            ids_TK=ids_TK[rows].long(),
        )  # fmt: skip
        if self.observer is not None:
            self.observer.on_router(call)
        self._whole = self._fits(index, call.ids_TK)
        if self._whole:
            self.engine.on_router(call)
        return ids_TK

    def run(self, index: int, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Run a layer's experts, bit for bit as vLLM's own kernel. Padding rows get zeros; warm-up passes use any
        experts.
        """
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
        """Return the engine's counters and the sizes of slots and store."""
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
        """Return the same counters as a Prometheus page."""
        return generate_latest(self._registry).decode()

    @cached_property
    def _registry(self) -> CollectorRegistry:
        store, speculator = self.store, self.speculator
        assert store is not None
        assert speculator is not None
        policy = self.settings.offload.resolved_policies().as_dict()
        registry = CollectorRegistry(auto_describe=False)
        source = MetricSource(
            stats=self.engine.stats, link=self.link, pool=self.pool, store=store,
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
        """Finish the store and create slots, link and kernel.

        Raises:
            ExpertcastError: there are too few slots, or the link does not support this device.
        """
        config, shape, device, store = self.settings.offload, self.shape, self.device, self.store
        assert store is not None, "slots need loaded experts"
        store.finish()
        slots = slots_for(config, store)
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
        limit = self.engine.residency.limit(index)
        return min(ids_TK.numel(), self.shape.experts) <= limit or len(ids_TK.unique()) <= limit

    def _run(self, index: int, hidden_TD: Tensor, weights_TK: Tensor) -> Tensor:
        layer, call = self.engine.view[index], self._call
        assert call is not None, "experts run after their router"
        assert call.layer == index, "layers run in order"
        ids_TK = call.ids_TK  # the same tensor as in on_router, so that the engine need not compare values
        if self._whole:
            return self.engine.run(layer, hidden_TD, ids_TK, weights_TK)
        output_TD = torch.empty_like(hidden_TD)
        residency = self.engine.residency
        parts = groups(ids_TK.cpu(), layer.num_experts, residency.limit(index), residency.held(index))
        for rows in (rows.to(hidden_TD.device) for rows in parts):
            output_TD[rows] = self.engine.run(layer, hidden_TD[rows], ids_TK[rows], weights_TK[rows])
        return output_TD


# Layer


def refuse_other_experts(ours: type[RoutedExperts]) -> None:
    """Refuse layers of routed experts of other classes than `ours` if expertcast is on.

    Models with their own class of experts bypass vLLM's registry.
    """
    make = RoutedExperts.__init__

    @wraps(make)
    def made(self: RoutedExperts, layer_name: str, *args: Any, **kwargs: Any) -> None:
        if not isinstance(self, ours) and Settings.of(get_current_vllm_config().additional_config) is not None:
            raise ExpertcastError(
                f"{layer_name}: experts of class {type(self).__name__} are not supported: switch expertcast off"
            )
        make(self, layer_name, *args, **kwargs)

    RoutedExperts.__init__ = made


def check_shape(offload: WorkerOffload) -> None:
    """Raise if a predictor's checkpoint cannot belong to the model. The weights are compared once they are loaded.

    Raises:
        ExpertcastError: number of experts, experts per token or hidden size differ.
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
                f"but {str(config.model)!r} has {found[size]}: train a predictor for this model with `expertcast train`"
            )


class OffloadedExperts(RoutedExperts):
    """Routed experts in a store, run from slots; vLLM's own class if expertcast is off."""

    offload: WorkerOffload
    index: int
    """Index among the MoE layers of this process."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = get_current_vllm_config()
        settings = Settings.of(config.additional_config)
        if settings is None:
            self.__class__ = RoutedExperts  # type: ignore[assignment]
            RoutedExperts.__init__(self, *args, **kwargs)
            return
        # vLLM's constructor creates the method, which needs the offload.
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
        """Load weights as vLLM does. With a store on disk, write a complete layer to it at once, which frees its
        memory.

        Raises:
            ExpertcastError: the layer's weights were loaded before.
        """
        if self.quant_method.is_prepared:
            raise ExpertcastError(
                f"{self.layer_name}: its experts are in a store and cannot be loaded again: restart vLLM"
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
        del shared_experts, shared_experts_input  # vLLM's runner runs them; no kernel here overlaps them
        return torch.ops.vllm.expertcast_run(x, topk_weights, topk_ids, self.index)


OffloadedExperts.weight_loader.supports_moe_loading = True  # type: ignore[attr-defined]
