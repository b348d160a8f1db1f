"""expertcast.offload: a `transformers` MoE model whose experts live in host memory.

L MoE layers, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from transformers import PreTrainedModel

from expertcast.data.discovery import experts_implementation, find_moe_layers
from expertcast.predictors import ExpertcastError, MoEView, Predictor
from expertcast.runtime.arguments import MODES, executed_layers, make_link, resolve_predictor, slot_count
from expertcast.runtime.cache import LRUPolicy
from expertcast.runtime.engine import EXPERTS_NAME, Engine
from expertcast.runtime.kernels import SlotKernel, kernel_of
from expertcast.runtime.links import Link
from expertcast.runtime.prefetcher import Prefetcher
from expertcast.runtime.recorder import Recorder
from expertcast.runtime.residency import Residency
from expertcast.runtime.slots import SlotPool
from expertcast.runtime.speculation import Speculator
from expertcast.runtime.statistics import RunStatistics
from expertcast.runtime.store import ExpertStore
from expertcast.runtime.taps import RouterTaps


class OffloadedModel:
    """A model with its experts in host memory and a few of them in slots on the device.

    Made by :func:`offload`. The model itself stays what it was: `model.generate`, a pipeline or a plain forward
    run as ever, and find their experts in the slots. `close()`, or leaving the `with` block, puts everything back
    bit for bit.
    """

    def __init__(
        self, model: PreTrainedModel, view: MoEView, speculator: Speculator, *, slots: int, link: Link,
        prefetcher: Prefetcher, cache: bool, kernel_slots: SlotKernel, recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.view = view
        self.predictor = speculator.predictor
        self.executed_layers = speculator.layers
        """Layers that execute their forecast when there is one."""
        self.link = link
        self.recorder = recorder
        link.recorder = recorder
        self.stats = RunStatistics(len(view))
        self._stack = ExitStack()
        self._closed = False
        with ExitStack() as undo:
            self.store = ExpertStore(view, pinned=next(view[0].experts.parameters()).is_cuda)
            undo.callback(self.store.unpack)
            self.store.pack(view)
            self.pool = SlotPool(self.store.layout, slots, self.store.device)
            link.attach(self.store, self.pool)
            undo.callback(link.close)
            residency = Residency(self.pool, link, LRUPolicy(), self.stats, experts=view.shape.experts, keep=cache)
            engine = Engine(residency, speculator, prefetcher, kernel_slots, recorder)
            for layer in view:
                undo.callback(Engine.detach, layer)
                engine.attach(layer)
                handle = layer.experts.register_state_dict_pre_hook(_refuse_state_dict)  # type: ignore[no-untyped-call]
                undo.callback(handle.remove)
            taps = RouterTaps(model, view, engine.on_router, engine.on_start)
            undo.callback(taps.close)
            undo.enter_context(experts_implementation(model, EXPERTS_NAME))
            self._stack = undo.pop_all()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' own `generate`."""
        self._check_open()
        return self.model.generate(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._check_open()
        return self.model(*args, **kwargs)

    def __enter__(self) -> OffloadedModel:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def reset_stats(self) -> None:
        """Set the counters of the run and of the link to zero."""
        self.stats.reset()
        self.link.reset()

    def close(self) -> None:
        """Put weights, experts implementation and hooks back; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._stack.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ExpertcastError("this offload is closed: call expertcast.offload(model) again, or use the model")


def offload(
    model: PreTrainedModel,
    *,
    predictor: str | Path | Predictor | None = None,
    mode: str = "exact",
    slots: int | None = None,
    memory: str | int | None = None,
    cache: bool = True,
    bandwidth: float | None = None,
    latency: float = 0.0,
    link: str | Link = "auto",
    overfetch: float = 1.0,
    ahead: int = 1,
    layers: Iterable[int] | None = None,
    min_recall: float = 0.9,
    true_weights: bool = False,
    speculate_prefill: bool = False,
    recorder: Recorder | None = None,
) -> OffloadedModel:
    """Move a model's experts to host memory and run it from a few slots.

    Args:
        predictor: a predictor, the folder of its checkpoint, or the name of one that needs no training; None loads
            experts on demand.
        mode: `exact` (forecasts only bring experts in early), `speculate` (forecasts are executed) or `hybrid`
            (executed at some layers).
        slots: experts that fit on the device; or `memory`, bytes or a text such as "2GB". Default: a quarter of all
            experts, with `cache=False` two layers' worth of one token.
        cache: keep experts until their slot is needed; False gives slots back as soon as a layer has run.
        bandwidth, latency: of the emulated link, bytes per second and seconds per copy (CPU only).
        link: `auto`, `instant`, `emulated`, `cuda`, or a link object.
        overfetch: experts prefetched per token as a multiple of K (exact mode).
        ahead: layers between a forecast and its target.
        layers: with `hybrid`, the layers that execute their forecast. None: those where the checkpoint's own recall@k
            is `min_recall` or more.
        true_weights: executed forecasts get the true router's weights over the forecast's ids.
        speculate_prefill: forecast and execute in prefill steps too; they are exact otherwise.
        recorder: collects what the run spends its time on (:class:`expertcast.runtime.recorder.Recorder`).

    Returns:
        An object that is also a context manager; `.model` is the model that was given.

    Raises:
        ExpertcastError: too few slots, unknown mode, link or predictor, a predictor of another model, a model that is
            offloaded already, has no weights or is not supported.
    """
    if mode not in MODES:
        raise ExpertcastError(f"unknown mode {mode!r}: choose from {', '.join(MODES)}")
    if Engine.is_attached(model):
        raise ExpertcastError("this model is offloaded already: close the other offload first")
    view = find_moe_layers(model)
    store_device = ExpertStore.device_of(view)
    bound, checkpoint = resolve_predictor(predictor, view)
    if bound is not None:
        bound.to(store_device)
    speculator = Speculator(
        view,
        bound,
        layers=executed_layers(mode, layers, view, bound, checkpoint, min_recall),
        true_weights=true_weights,
        prefill=speculate_prefill,
        ahead=ahead,
    )
    if mode == "exact" and (true_weights or layers is not None):
        warnings.warn("layers and true_weights have no effect in mode 'exact'", stacklevel=2)
    count = slot_count(view, ExpertStore.block_bytes_of(view), slots, memory, cache, overfetch)
    return OffloadedModel(
        model,
        view,
        speculator,
        slots=count,
        link=make_link(link, store_device.type, bandwidth, latency),
        prefetcher=Prefetcher(view.shape.experts, view.shape.top_k, overfetch),
        cache=cache,
        kernel_slots=SlotKernel(kernel_of(model), count),
        recorder=recorder,
    )


def _refuse_state_dict(*_args: Any) -> None:
    raise ExpertcastError("the model's experts are offloaded: close the offload before saving the model")
