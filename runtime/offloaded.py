"""A model whose experts live in host memory, and a few of them on the device.

L MoE layers, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

import threading
import weakref
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from expertcast.data.discovery import experts_implementation
from expertcast.data.experts import OFFLOAD
from expertcast.data.taps import RouterTaps
from expertcast.predictors import ExpertcastError, MoEView
from expertcast.predictors.next_token_tracker import NextTokenTracker
from expertcast.runtime.drafts.drafting import Drafting, DraftOptions
from expertcast.runtime.drafts.names import NONE
from expertcast.runtime.engine import seam
from expertcast.runtime.engine.base import EngineParts
from expertcast.runtime.engine.device import DeviceEngine
from expertcast.runtime.engine.flow import LayerFlow
from expertcast.runtime.engine.guards import ForwardGuard, in_use, weights_guarded
from expertcast.runtime.engine.host import HostEngine
from expertcast.runtime.engine.kernels import decode_kernel_followed
from expertcast.runtime.engine.residency import Residency
from expertcast.runtime.engine.whole_texts import SlotExperts
from expertcast.runtime.links.base import Link
from expertcast.runtime.links.speed import fastest_link
from expertcast.runtime.offload_parts import OffloadParts
from expertcast.runtime.policies import CacheShape, Policies
from expertcast.runtime.policies.eviction.pooled import Pooled
from expertcast.runtime.policies.scope import Eviction
from expertcast.runtime.recording.observer import Observers
from expertcast.runtime.stand_in import StandIn
from expertcast.runtime.storage.slots import SlotPool


class OffloadedModel(StandIn):
    """A model with its experts in host memory and a few of them in slots on the device.

    Made by :func:`expertcast.offload`. The model itself stays what it was: `model.generate`, a pipeline or a plain
    forward run as ever, and find their experts in the slots. `close()`, or leaving the `with` block, puts everything
    back bit for bit. A model from :func:`expertcast.load_offloaded` has nowhere to put its experts: closing frees them,
    and the model refuses to run from then on.
    """

    def __init__(self, model: PreTrainedModel, parts: OffloadParts) -> None:
        speculator = parts.speculator
        self.model = model
        self.view = view = speculator.view
        self.predictor = speculator.predictor
        self.refit = speculator.refit
        """Refits the forecasts while the model runs, where it was asked to."""
        self.policies = parts.policies
        """Which policies decide what is kept, loaded and dropped."""
        self.lossy = parts.policies.lossy
        """Whether policies may change what is computed."""
        self.executed_layers = speculator.layers
        """Layers that execute their forecast when there is one."""
        self.store = store = parts.store
        observer = Observers(parts.observers)
        observer.attached(view.shape.experts)
        self._stack = ExitStack()
        self._closed = False
        with torch.inference_mode(False), ExitStack() as undo:  # slots and weights outlive an inference_mode
            self._reloadable = not next(view[0].experts.parameters()).is_meta
            if not self._reloadable:
                undo.callback(_refuse_use, view)
            undo.enter_context(in_use(parts.link, store, speculator.predictor))
            undo.callback(self._put_back)
            store.pack(view)
            policies = parts.policies.make(
                CacheShape(layers=len(view), experts=view.shape.experts, top_k=view.shape.top_k, slots=parts.slots)
            )
            if policies.miss.precisions:
                store.add_copies(policies.miss.precisions)
            self.pool = SlotPool(store.layout, parts.slots, store.device)
            undo.callback(self.pool.free)
            self.link = link = fastest_link(store, self.pool) if parts.link is None else parts.link
            link.observer = observer
            link.attach(store, self.pool)
            if link.pools is not None:
                policies.eviction = Eviction.over_all(Pooled(link.pools), len(view))
            undo.callback(link.close)
            dropped = weakref.finalize(
                model, _close_dropped, link
            )  # whose thread would keep the store of a dropped model
            dropped.atexit = False
            undo.callback(dropped.detach)
            self.drift = None if link.decides_on_device else parts.drift
            """Follows the forecasts' recall; None where nothing forecasts, or the link decides on the device."""
            made = DeviceEngine if link.decides_on_device else HostEngine
            engine_parts = EngineParts(
                link=link, pool=self.pool, speculator=speculator, policies=policies, kernel=parts.kernel,
                tokens_ahead=None if parts.next_token is None else NextTokenTracker(parts.next_token),
                drift=self.drift, keep=parts.cache, likely=parts.likely, gated=parts.gated,
            )  # fmt: skip
            self._engine = engine = made(engine_parts)
            self.stats = engine.stats
            self.experts = SlotExperts(engine, engine_parts, store)
            """What collecting and measuring run whole texts through."""
            self.stats.reports = [each.as_dict for each in (self.drift, speculator.refit) if each is not None]
            self.drafting: Drafting | None = None
            """Drafts of this model and what was learnt of them; None where the link decides on the device."""
            if isinstance(engine, HostEngine):
                self.drafting = Drafting(model, engine, engine_parts, store)
                undo.callback(self.drafting.close)
                self.stats.reports.append(self.drafting.report)
            self._draft = parts.draft
            for layer in view:
                undo.callback(seam.detach, layer)
                seam.attach(engine, layer)
            if speculator.refit is not None:
                undo.callback(speculator.refit.restore)
            undo.enter_context(weights_guarded(model, view))
            speculator.prepare()
            self._guard = ForwardGuard(model, view, seam.EXPERTS_NAME)
            undo.callback(self._guard.close)
            undo.enter_context(speculator.following())
            taps = RouterTaps(model, view, engine.on_router, engine.on_start)
            undo.callback(taps.close)
            undo.enter_context(decode_kernel_followed(model, parts.kernel))
            undo.enter_context(experts_implementation(model, seam.EXPERTS_NAME))
            model.__dict__[OFFLOAD] = self  # a model whose offload nobody holds stays offloaded
            undo.callback(model.__dict__.pop, OFFLOAD)
            self._stack = undo.pop_all()

    @property
    def flow(self) -> LayerFlow:
        """What happens at one layer after another, by which policies.

        Raises:
            ExpertcastError: the link decides on the device: there is no flow on the host.
        """
        return self._engine.flow

    @property
    def residency(self) -> Residency:
        """Which experts have a slot, and by which rules they lose it.

        Raises:
            ExpertcastError: the link decides on the device: its tables say so.
        """
        return self._engine.flow.residency

    def generate(
        self, *args: Any, draft: str | Policies | PreTrainedModel | None = None, draft_length: int | None = None,
        assistant_tokenizer: PreTrainedTokenizerBase | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """transformers' own `generate`, with a draft if there is one: the same tokens sooner, or, with sampling, others
        of the same distribution. Passes over several tokens round differently: in bf16 and fp16 a greedy text may go on
        differently where the two largest logits are equal, or a step or two of the dtype apart.

        Args:
            args: those of transformers.
            draft: what writes tokens ahead, of which those stay that the exact model would have chosen: a name of
                :func:`expertcast.runtime.drafts.names.draft_names`, lossy policies, or an assistant model; `auto`
                chooses by what this run's own cycles took, `none` is plain decoding. By default what the offload was
                made with.
            draft_length: tokens drafted in every cycle; by default as many as pay, none included.
            assistant_tokenizer: of an assistant with other tokens than the model, beside `tokenizer`.
            kwargs: those of transformers.

        Raises:
            ExpertcastError: no such draft, or something that a draft does not go with.
        """
        self._check_open()
        chosen = self._draft if draft is None else draft
        if assistant_tokenizer is not None and not isinstance(chosen, PreTrainedModel):
            kwargs["assistant_tokenizer"] = assistant_tokenizer
        if chosen == NONE:
            if draft_length is not None:
                raise ExpertcastError(f"draft_length={draft_length} needs a draft: give draft, or leave it out")
            return self.model.generate(*args, **kwargs)
        if self.drafting is None:
            raise ExpertcastError("drafts need their experts' copies decided on the host: offload with link='cuda'")
        if self.executed_layers or self.lossy:
            raise ExpertcastError(
                "a draft is verified by the exact model, and this one is offloaded with executed forecasts or lossy "
                "policies: offload it in mode 'exact', and give these as the draft"
            )
        options = DraftOptions(draft=chosen, length=draft_length, assistant_tokenizer=assistant_tokenizer)
        return self.drafting.generate(options, args, kwargs)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        self._check_open()
        return self.model(*args, **kwargs)

    def __repr__(self) -> str:
        experts = f"{self.pool.count} of {self.store.layers * self.store.experts} experts in slots"
        forecasts = "no predictor" if self.predictor is None else f"predictor {self.predictor.name}"
        end = ", closed" if self._closed else ""
        return f"<OffloadedModel of {self.view.model_id}: {experts}, {forecasts}, {self.link.name} link{end}>"

    def __enter__(self) -> OffloadedModel:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def reset_stats(self) -> None:
        """Set the counters of the run and of the link to zero."""
        with self.stats.resetting():
            self.stats.reset()
            self.link.reset()
        if self.drift is not None:
            self.drift.reset()

    def close(self) -> None:
        """Put weights, experts implementation and hooks back; a second call does nothing.

        Raises:
            ExpertcastError: a forward is running; or the device has no memory for the experts: free some, call again.
        """
        if self._closed:
            return
        self._guard.stop()
        self.link.close()
        self.pool.free()
        self._put_back()
        self._closed = True
        self._stack.close()

    def _put_back(self) -> None:
        """Weights first: until they are all there, the model refuses to run."""
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


_EXPERTS_FREED = "this model was loaded offloaded and closed, its experts are freed: call load_offloaded again"


def _close_dropped(link: Link) -> None:
    """Close the link of a model that nobody holds. Its own threads, in which garbage may be collected, cannot wait for
    their end: another one does."""
    if threading.current_thread() is threading.main_thread():
        link.close()
    else:
        threading.Thread(target=link.close, name="expertcast-close").start()


def _refuse_use(view: MoEView) -> None:
    """The experts are gone for good: neither a forward nor a saved file may come out of this model."""

    def refuse(*_args: object) -> None:
        raise ExpertcastError(_EXPERTS_FREED)

    for layer in view:
        layer.experts.register_forward_pre_hook(refuse)
        layer.experts.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
