"""Where a worker's experts lie once vLLM has loaded them: what it wrote them to, or a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from vllm.config import ParallelConfig

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.storage.layout import ExpertsForm
from expertcast.runtime.storage.memory import HostMemory
from expertcast.runtime.storage.store import ExpertStore
from expertcast.runtime.transport import make_store

if TYPE_CHECKING:
    from expertcast_vllm.layer import OffloadedExperts
    from expertcast_vllm.offload import WorkerOffload


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
