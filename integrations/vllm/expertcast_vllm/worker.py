"""What a worker that offloads offers: its counters by `collective_rpc`, and a line about them when it ends."""

from __future__ import annotations

from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.worker.worker_base import WorkerBase

from expertcast.predictors.messages import Json
from expertcast.runtime.links.base import Link
from expertcast.runtime.recording.statistics import RunStatistics
from expertcast_vllm.names import METRICS, OFFLOAD, STATISTICS
from expertcast_vllm.traffic import TrafficCollector

if TYPE_CHECKING:
    from expertcast_vllm.offload import WorkerOffload

logger = init_logger("vllm.expertcast")


def offer(offload: WorkerOffload) -> None:
    """Add methods to this process's worker by which it is asked; close the offload when it is dropped, or at the end.

    Both are for a worker's process only, where the offload is made.
    """
    setattr(WorkerBase, STATISTICS, _statistics)
    setattr(WorkerBase, METRICS, _metrics)
    # atexit's functions are not run in processes that multiprocessing forked
    Finalize(offload, _end, args=(offload.ending,), exitpriority=100)


def _statistics(worker: WorkerBase) -> Json:
    return _of(worker).statistics()


def _metrics(worker: WorkerBase) -> str:
    return _of(worker).metrics()


def _of(worker: WorkerBase) -> WorkerOffload:
    offload: WorkerOffload = worker.vllm_config.compilation_config.static_forward_context[OFFLOAD]
    return offload


@dataclass(slots=True)
class Ending:
    """What outlives an offload for a moment."""

    link: Link | None = None
    stats: RunStatistics | None = None
    collector: TrafficCollector | None = None


def _end(ending: Ending) -> None:
    if ending.stats is not None:
        total, rate = ending.stats.total, ending.stats.hit_rate
        waited = "" if "waited_s" in ending.stats.uncounted else f", {total.waited_s:.3g} s waited for them"
        logger.info(
            "expertcast: %d experts needed, %s of them in slots, %.3g GB moved%s",
            total.requests, "none" if rate is None else f"{rate:.1%}", total.bytes_moved / 1e9, waited,
        )  # fmt: skip
    if ending.collector is not None:
        ending.collector.close()
    if ending.link is not None:
        ending.link.close()
