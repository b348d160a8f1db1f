"""What a worker's offload is made of, from what vLLM loaded and what the settings say.

L MoE layers of this worker, E routed experts per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from vllm.logger import init_logger

from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.plain import Json
from expertcast.runtime.arguments import slots_for
from expertcast.runtime.engine.base import EngineParts
from expertcast.runtime.engine.host import HostEngine
from expertcast.runtime.links.base import Link
from expertcast.runtime.links.speed import fastest_link
from expertcast.runtime.policies.registry import CacheShape
from expertcast.runtime.storage.layout import ExpertsForm
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from expertcast.runtime.transport import make_link, make_store
from expertcast_vllm.foresight import Foresight
from expertcast_vllm.kernel import VllmKernel
from expertcast_vllm.store import LoadedStore

if TYPE_CHECKING:
    from expertcast_vllm.offload import WorkerOffload

logger = init_logger("vllm.expertcast")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Made when a worker's experts are loaded."""

    store: ExpertStore
    pool: SlotPool
    link: Link
    kernel: VllmKernel

    @classmethod
    def make(cls, offload: WorkerOffload) -> Self:
        """Move the layers' experts into a store, and give the layers slots.

        Raises:
            ExpertcastError: layers differ, too few slots, or a link that this device has not.
        """
        config, shape, device = offload.settings.offload, offload.shape, offload.device
        layouts = [layer.quant_method.layout for layer in offload.layers]
        experts = [layer.local_num_experts for layer in offload.layers]
        for layer, layout, count in zip(offload.layers, layouts, experts, strict=True):
            if (layout, count) != (layouts[0], experts[0]):
                raise ExpertcastError(
                    f"{layer.layer_name} has experts of another shape, dtype or number than the first MoE layer: one "
                    "pool of slots needs them alike; not supported"
                )
        form = ExpertsForm(shape=shape, layout=layouts[0])
        slots = slots_for(config, shape, form.layout.block_bytes)
        store = _store(offload, form)
        pool = SlotPool(form.layout, slots, device)
        link = make_link(config, device.type) or fastest_link(store, pool)
        if link.decides_on_device:
            raise ExpertcastError("link 'kernel' is not supported under vLLM: take link='cuda'")
        link.attach(store, pool)
        for layer in offload.layers:
            layer.quant_method.use_slots(layer, pool.views)
        logger.info(
            "expertcast: %d of %d experts have a slot (%.3g GB on %s), all of them %.3g GB in store %r, link %r",
            slots, shape.layers * shape.experts, pool.nbytes / 1e9, device, store.nbytes / 1e9, store.name, link.name,
        )  # fmt: skip
        return cls(store=store, pool=pool, link=link, kernel=VllmKernel(pool.views))

    def as_dict(self) -> Json:
        """What there is, as plain values."""
        return {
            "slots": self.pool.count,
            "slots_bytes": self.pool.nbytes,
            "store_bytes": self.store.nbytes,
            "bytes_moved": self.link.bytes_moved,
            "link": self.link.name,
        }


def make_engine(offload: WorkerOffload) -> HostEngine:
    """The engine of a worker whose experts are loaded.

    Raises:
        ExpertcastError: a predictor that does not exist, or of another model.
    """
    parts, config, shape = offload.parts, offload.settings.offload, offload.shape
    assert parts is not None
    cache = CacheShape(layers=shape.layers, experts=shape.experts, top_k=shape.top_k, slots=parts.pool.count)
    foresight = offload.foresight or Foresight.make(offload, None)
    drift = foresight.drift
    engine = HostEngine(
        EngineParts(
            link=parts.link, pool=parts.pool, speculator=foresight.speculator,
            policies=config.resolved_policies().make(cache), kernel=parts.kernel, drift=drift, keep=config.cache,
            likely=config.likely,
            gated=config.forecasts == "worth",
        )
    )  # fmt: skip
    if drift is not None:
        engine.stats.reports = [drift.as_dict]
    return engine


def _store(offload: WorkerOffload, form: ExpertsForm) -> ExpertStore:
    methods = [layer.quant_method for layer in offload.layers]
    if offload.settings.offload.store == "memory":
        store = LoadedStore(form, offload.device)
        for index, method in enumerate(methods):
            store.adopt(index, method.memory)
            method.memory = None
        return store
    stored = make_store(offload.settings.offload, form, offload.device)
    for index, method in enumerate(methods):
        views = method.layout.views(method.memory.bytes)
        stored.fill(index, lambda target, views=views: [target[name].copy_(view) for name, view in views.items()])
        method.memory.release()
        method.memory = None
    stored.finish()
    return stored
