"""What a worker's offload is made of, from what vLLM loaded and what the settings say.

L MoE layers of this worker, E routed experts per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from vllm import __version__ as vllm_version
from vllm.logger import init_logger

from expertcast.predictors.messages import Json
from expertcast.runtime.engine.engine import Engine, EngineParts, HostEngine
from expertcast.runtime.experimental.device_engine import DeviceEngine
from expertcast.runtime.links.base import Link
from expertcast.runtime.offloading import slots_for
from expertcast.runtime.policies.base import CacheShape
from expertcast.runtime.serving.metrics import Source
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from expertcast.runtime.transport import make_link
from expertcast_vllm.config_check import check_slots
from expertcast_vllm.foresight import Foresight
from expertcast_vllm.kernel import GatheringKernel, MappingKernel, VllmKernel

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
        """Close the store, and give the layers slots.

        Raises:
            ExpertcastError: too few slots, or a link that this device has not.
        """
        config, shape, device = offload.settings.offload, offload.shape, offload.device
        store = offload.store
        assert store is not None, "no slots before the experts are loaded"
        store.finish()
        slots = slots_for(config, shape, store.layout.block_bytes)
        check_slots(offload.config, shape, slots)
        pool = SlotPool(store.layout, slots, device)
        link = make_link(config, device.type)
        link.attach(store, pool)
        for layer in offload.layers:
            layer.quant_method.use_slots(layer, pool.views)
        logger.info(
            "expertcast: %d of %d experts have a slot (%.3g GB on %s), all of them %.3g GB in store %r, link %r",
            slots, shape.layers * shape.experts, pool.nbytes / 1e9, device, store.nbytes / 1e9, store.name, link.name,
        )  # fmt: skip
        kernel = GatheringKernel if device.type == "cpu" else MappingKernel
        return cls(store=store, pool=pool, link=link, kernel=kernel(pool.views))

    def source(self, offload: WorkerOffload) -> Source:
        """What a page for Prometheus reads."""
        engine, options = offload.engine, offload.settings.offload
        foresight = offload.foresight
        predictor = None if foresight is None else foresight.speculator.predictor
        policy = options.resolved_policies().as_dict()
        return Source(
            stats=engine.stats, link=self.link, pool=self.pool, store=self.store,
            drift=None if foresight is None else foresight.drift,
            info={
                "model": offload.config.model_config.model,
                "predictor": "none" if predictor is None else predictor.name,
                "mode": "exact",
                "policy": ",".join(f"{kind}={text}" for kind, text in policy.items()),
                "link": self.link.name,
                "store": self.store.name,
                "vllm": vllm_version,
            },
        )  # fmt: skip

    def as_dict(self) -> Json:
        """What there is, as plain values."""
        return {
            "slots": self.pool.count,
            "slots_bytes": self.pool.nbytes,
            "store_bytes": self.store.nbytes,
            "bytes_moved": self.link.bytes_moved,
            "link": self.link.name,
        }


def make_engine(offload: WorkerOffload) -> Engine:
    """The engine of a worker whose experts are loaded.

    Raises:
        ExpertcastError: a predictor that does not exist, or of another model.
    """
    parts, config, shape = offload.parts, offload.settings.offload, offload.shape
    assert parts is not None
    cache = CacheShape(layers=shape.layers, experts=shape.experts, top_k=shape.top_k, slots=parts.pool.count)
    foresight = offload.foresight or Foresight.make(offload, None)
    made = DeviceEngine if parts.link.decides_on_device else HostEngine
    engine = made(
        EngineParts(
            link=parts.link, pool=parts.pool, speculator=foresight.speculator,
            policies=config.resolved_policies().make(cache), kernel=parts.kernel, drift=foresight.drift,
            keep=config.cache, likely=config.likely, gated=config.forecasts == "worth",
        )
    )  # fmt: skip
    if foresight.drift is not None:
        engine.stats.reports = [foresight.drift.as_dict]
    return engine
