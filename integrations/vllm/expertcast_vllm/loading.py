"""Where a worker stands while it starts and ends: told once its model is loaded, when it is warm, and when it shuts
down."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

from vllm.v1.worker.gpu_worker import Worker

from expertcast_vllm.wiring import Kept, keep_gates, runners_of

if TYPE_CHECKING:
    from expertcast_vllm.offload import WorkerOffload

_TELLS = "tells_expertcast"


def follow_worker() -> Kept:
    """Have the offload that is being made told when its worker's model is loaded (`WorkerOffload.loaded`), and when
    the worker ends.

    Returns:
        What may be its model's gates: filled in when the model's weights have come.
    """
    if not hasattr(Worker.get_kv_cache_spec, _TELLS):
        Worker.get_kv_cache_spec = _loaded(Worker.get_kv_cache_spec)
        Worker.compile_or_warm_up_model = _warmed(Worker.compile_or_warm_up_model)
        Worker.shutdown = _ending(Worker.shutdown)
    return keep_gates()


def _loaded(specify: Any) -> Any:
    """vLLM asks for this next: nothing is compiled or measured yet."""

    @wraps(specify)
    def told(self: Worker, *args: Any, **kwargs: Any) -> Any:
        offload = _offload_of(self)
        if offload is not None:
            offload.loaded(self.model_runner)
        return specify(self, *args, **kwargs)

    setattr(told, _TELLS, True)
    return told


def _warmed(warm_up: Any) -> Any:
    @wraps(warm_up)
    def told(self: Worker) -> Any:
        times = warm_up(self)
        offload = _offload_of(self)
        if offload is not None:
            offload.warmed_up()
        return times

    return told


def _ending(shutdown: Any) -> Any:
    @wraps(shutdown)
    def told(self: Worker) -> None:
        offload = _offload_of(self)
        if offload is not None and offload.ending.collector is not None:
            offload.ending.collector.close()
        shutdown(self)

    return told


def _offload_of(worker: Worker) -> WorkerOffload | None:
    runner = getattr(worker, "model_runner", None)
    model = getattr(runner, "model", None)
    for each in () if model is None else runners_of(model):
        found: WorkerOffload | None = getattr(each.routed_experts, "offload", None)
        return found
    return None
