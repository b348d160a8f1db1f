"""expertcast.offload: a `transformers` MoE model whose experts live in host memory.

L MoE layers, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel

from expertcast.data.discovery import experts_implementation, find_moe_layers
from expertcast.predictors import ExpertcastError, MoEView, NextToken, Predictor
from expertcast.predictors.next_token_tracker import NextTokenTracker
from expertcast.runtime.arguments import (
    MODES,
    device_decides,
    executed_layers,
    make_link,
    make_store,
    resolve_next_token,
    resolve_policies,
    resolve_predictor,
    slot_count,
)
from expertcast.runtime.engine.device import DeviceEngine
from expertcast.runtime.engine.flow import LayerFlow
from expertcast.runtime.engine.guards import ForwardGuard, in_use, refuse_shared, weights_guarded
from expertcast.runtime.engine.host import EXPERTS_NAME, Engine
from expertcast.runtime.engine.kernels import SlotKernel, kernel_of
from expertcast.runtime.engine.residency import Residency
from expertcast.runtime.engine.speculation import Speculator
from expertcast.runtime.engine.taps import RouterTaps
from expertcast.runtime.links.base import Link
from expertcast.runtime.links.choice import fastest_link
from expertcast.runtime.links.cuda import CudaLink
from expertcast.runtime.links.kernel import DeviceStatistics, KernelLink
from expertcast.runtime.policies import PRESETS, CacheShape, Policies
from expertcast.runtime.recording.recorder import Recorder
from expertcast.runtime.recording.statistics import RunStatistics
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore


class OffloadedModel:
    """A model with its experts in host memory and a few of them in slots on the device.

    Made by :func:`offload`. The model itself stays what it was: `model.generate`, a pipeline or a plain forward
    run as ever, and find their experts in the slots. `close()`, or leaving the `with` block, puts everything back
    bit for bit. A model from :func:`expertcast.load_offloaded` has nowhere to put its experts: closing frees them,
    and the model refuses to run from then on.
    """

    def __init__(
        self, model: PreTrainedModel, view: MoEView, speculator: Speculator, *, slots: int, link: Link | None,
        policies: Policies, next_token: NextToken | None, cache: bool, kernel_slots: SlotKernel, store: ExpertStore,
        recorder: Recorder | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.view = view
        self.predictor = speculator.predictor
        self.policies = policies
        """Which policies decide what is kept, loaded and dropped."""
        self.executed_layers = speculator.layers
        """Layers that execute their forecast when there is one."""
        self.recorder = recorder
        if recorder is not None:
            recorder.experts = view.shape.experts
        self.stats = RunStatistics(len(view))
        self._stack = ExitStack()
        self._closed = False
        with torch.inference_mode(False), ExitStack() as undo:  # slots and weights outlive an inference_mode
            self.store = store
            self._reloadable = not next(view[0].experts.parameters()).is_meta
            if not self._reloadable:
                undo.callback(_refuse_use, view)
            undo.enter_context(in_use(link, store, speculator.predictor))
            undo.callback(self._put_back)
            store.pack(view)
            shape = view.shape
            decide = policies.make(
                CacheShape(layers=shape.layers, experts=shape.experts, top_k=shape.top_k, slots=slots)
            )
            if decide.miss.precisions:
                store.add_copies(decide.miss.precisions)
            self.pool = SlotPool(self.store.layout, slots, self.store.device)
            if link is None:
                link = fastest_link(self.store, self.pool) if device_decides(policies) else CudaLink()
            self.link = link
            link.recorder = recorder
            link.attach(self.store, self.pool)
            undo.callback(link.close)
            dropped = weakref.finalize(model, link.close)  # whose thread would keep the store of a dropped model
            dropped.atexit = False
            undo.callback(dropped.detach)
            engine: Engine
            if isinstance(link, KernelLink):  # its books are on the device
                self.stats = DeviceStatistics(link, self.store.layout.block_bytes)
                engine = DeviceEngine(link, self.pool, speculator, decide.prefetch, kernel_slots, recorder, keep=cache)
            else:
                self.residency = Residency(
                    self.pool, link, decide.eviction, self.stats, experts=shape.experts, keep=cache
                )
                carry = 0 if speculator.predictor is None else speculator.ahead
                follows = None if next_token is None else NextTokenTracker(next_token)
                self.flow = LayerFlow(self.residency, decide, view, carry=carry, tokens_ahead=follows)
                engine = Engine(self.flow, speculator, kernel_slots, recorder)
            for layer in view:
                undo.callback(Engine.detach, layer)
                engine.attach(layer)
            undo.enter_context(weights_guarded(model, view))
            speculator.prepare()
            self._guard = ForwardGuard(model, view, EXPERTS_NAME)
            undo.callback(self._guard.close)
            taps = RouterTaps(model, view, engine.on_router, engine.on_start)
            undo.callback(taps.close)
            undo.enter_context(experts_implementation(model, EXPERTS_NAME))
            model.__dict__["_expertcast"] = self  # a model whose offload nobody holds stays offloaded
            undo.callback(model.__dict__.pop, "_expertcast")
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
        """Put weights, experts implementation and hooks back; a second call does nothing.

        Raises:
            ExpertcastError: a forward is running; or the device has no memory for the experts: free some, call again.
        """
        if self._closed:
            return
        self._guard.stop()
        self.link.close()
        self._put_back()
        self._closed = True
        self._stack.close()

    def _put_back(self) -> None:
        """Weights first: until they are all there, the model refuses to run."""
        if hasattr(self, "pool"):
            self.pool.free()
        try:
            with torch.inference_mode(False):
                self.store.unpack()
        except torch.OutOfMemoryError as error:
            raise ExpertcastError(
                f"{self.store.device} has no memory to put the experts back: free some and call close() again"
            ) from error
        self.store.close()

    def _check_open(self) -> None:
        if self._closed:
            if not self._reloadable:
                raise ExpertcastError(_EXPERTS_FREED)
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
    policies: Policies | str | None = None,
    next_token: str | Path | Predictor | None = None,
    overfetch: float = 1.0,
    ahead: int = 1,
    layers: Iterable[int] | None = None,
    min_recall: float = 0.9,
    true_weights: bool = False,
    speculate_prefill: bool = False,
    store: str | ExpertStore = "memory",
    store_folder: str | Path | None = None,
    recorder: Recorder | None = None,
) -> OffloadedModel:
    """Move a model's experts to host memory and run it from a few slots.

    Args:
        predictor: a predictor, the folder of its checkpoint, or the name of one that needs no training; None loads
            experts on demand.
        mode: `exact` (forecasts only bring experts in early), `speculate` (forecasts are executed) or `hybrid`
            (executed at some layers).
        slots: experts that fit on the device; or `memory`, bytes or a text such as "2GB". Default: a quarter of all
            experts, with `cache=False` three layers' worth of one token.
        cache: keep experts until their slot is needed; False gives slots back as soon as a layer has run.
        bandwidth, latency: of the emulated link, bytes per second and seconds per copy (CPU only).
        link: `auto`, `instant`, `emulated`, `cuda`, `kernel` (copies decided and made on the device), or a link
            object. `auto` on CUDA measures `cuda` and `kernel` on the store and takes the faster.
        policies: which experts are kept, loaded and dropped: :class:`expertcast.runtime.policies.Policies`, or the name
            of a preset, which forecasts with the preset's own predictor unless one is given. Default: lru over all
            slots, the forecast's own experts prefetched, every miss fetched.
        next_token: a `next_token` predictor or its checkpoint's folder, for the eviction policy `forecast`.
        overfetch: experts prefetched per token as a multiple of K (exact mode).
        ahead: layers between a forecast and its target.
        layers: with `hybrid`, the layers that execute their forecast. None: those where the checkpoint's own recall@k
            is `min_recall` or more.
        true_weights: executed forecasts get the true router's weights over the forecast's ids.
        speculate_prefill: forecast and execute in prefill steps too; they are exact otherwise.
        store: where the experts lie: `memory` (page-locked for a model on CUDA, as far as there is room), `disk` (a
            mapped file, for models larger than memory), or a store object, which is closed with the offload.
        store_folder: with `disk`, the folder of the file, one per model. Default: a temporary one.
        recorder: collects what the run spends its time on (:class:`expertcast.runtime.recording.recorder.Recorder`).

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
    if EXPERTS_NAME in model.get_experts_implementation().values():
        raise ExpertcastError(
            f"the model's config says {EXPERTS_NAME!r}, as that of an offloaded model does: give each model a config "
            "of its own (copy.deepcopy), or set another experts implementation"
        )
    refuse_shared(link, store, predictor)
    view = find_moe_layers(model)
    store_device = store.device if isinstance(store, ExpertStore) else ExpertStore.device_of(view)
    chosen = resolve_policies(policies, overfetch)
    if predictor is None and isinstance(policies, str):
        predictor = PRESETS[policies].predictor
    bound, checkpoint = resolve_predictor(predictor, view)
    if bound is not None:
        if bound.looks != "layers":
            raise ExpertcastError(f"{bound.name} forecasts tokens, not layers: give it as next_token=, not predictor=")
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
        link=make_link(link, store_device.type, bandwidth, latency, chosen),
        policies=chosen,
        next_token=resolve_next_token(next_token, view, chosen, store_device),
        cache=cache,
        kernel_slots=SlotKernel(kernel_of(model), count),
        store=make_store(store, store_folder, view, store_device),
        recorder=recorder,
    )


_EXPERTS_FREED = "this model was loaded offloaded and closed, its experts are freed: call load_offloaded again"


def _refuse_use(view: MoEView) -> None:
    """The experts are gone for good: neither a forward nor a saved file may come out of this model."""

    def refuse(*_args: Any) -> None:
        raise ExpertcastError(_EXPERTS_FREED)

    for layer in view:
        layer.experts.register_forward_pre_hook(refuse)
        layer.experts.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
