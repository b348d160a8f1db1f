"""What a worker that offloads offers: its counters by `collective_rpc`, and a line about them when it ends."""

from __future__ import annotations

from multiprocessing.util import Finalize
from typing import TYPE_CHECKING
from weakref import ref

from vllm.logger import init_logger
from vllm.v1.worker.worker_base import WorkerBase

from expertcast.predictors.plain import Json
from expertcast_vllm.operators import NAME

if TYPE_CHECKING:
    from expertcast_vllm.offload import WorkerOffload

logger = init_logger("vllm.expertcast")

METHOD = "expertcast_statistics"
"""`llm.collective_rpc(METHOD)` gives each worker's counters."""


def offer(offload: WorkerOffload) -> None:
    """Add :data:`METHOD` to this process's worker, and close the offload when the process ends.

    Both are for a worker's process only, where the offload is made.
    """
    setattr(WorkerBase, METHOD, _statistics)
    # atexit's functions are not run in processes that multiprocessing forked
    Finalize(None, _end, args=(ref(offload),), exitpriority=100)


def _statistics(worker: WorkerBase) -> Json:
    offload: WorkerOffload = worker.vllm_config.compilation_config.static_forward_context[NAME]
    return offload.statistics()


def _end(known: ref[WorkerOffload]) -> None:
    offload = known()
    if offload is None or offload.parts is None:
        return
    if offload.has_run:
        counted = offload.statistics()
        rate = counted["hit_rate"]
        logger.info(
            "expertcast: %d experts needed, %s of them in slots, %.3g GB moved, %.3g s waited for them",
            counted["requests"], "none" if rate is None else f"{rate:.1%}", counted["bytes_moved"] / 1e9,
            counted["waited_s"],
        )  # fmt: skip
    offload.close()
