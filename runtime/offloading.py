"""expertcast.offload: a `transformers` MoE model with its experts in host memory and a few of them on the device.

L MoE layers, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import grouped_mm_experts_forward

from expertcast.data.experts import OFFLOAD
from expertcast.data.machine import free_memory
from expertcast.data.moe_layers import check_model, find_moe_layers
from expertcast.data.packed_experts import activation_bytes
from expertcast.data.source import check_release
from expertcast.predictors import ExpertcastError, MoEView
from expertcast.runtime.config import (
    COPY,
    EXPERTS_BITS,
    OffloadConfig,
    make_link,
    make_store,
    pack_experts,
    remarks,
    slots_for,
)
from expertcast.runtime.drafts.names import NONE
from expertcast.runtime.engine.cache import ExpertCache
from expertcast.runtime.engine.engine import Engine, LayerFlow
from expertcast.runtime.engine.front import in_use, refuse_offloaded, refuse_shared, run_from_slots
from expertcast.runtime.engine.kernels import SlotKernel, kernel_of
from expertcast.runtime.engine.speculation import Speculator
from expertcast.runtime.forecasters import make_forecasters
from expertcast.runtime.links.base import Link
from expertcast.runtime.plan import context_bytes, parts_beside
from expertcast.runtime.policies import CacheShape, Policies
from expertcast.runtime.policies.eviction import Eviction, PoolEviction
from expertcast.runtime.policies.settings import AUTO, PolicySet
from expertcast.runtime.recording.recorder import Observer, Observers
from expertcast.runtime.storage.layout import ExpertsForm, device_of, expert_parameters
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore

if TYPE_CHECKING:
    from expertcast.runtime.engine.whole_texts import SlotExperts


class OffloadedModel:
    """A model with its experts in host memory and a few of them in slots on the device.

    :func:`expertcast.offload` returns one. The model works as before: `model.generate`, a pipeline or a plain forward
    run, with their experts in the slots. `close()`, or the end of the `with` block, restores every weight bit for bit.
    For a model from :func:`expertcast.load_offloaded`, closing frees the experts, and the model refuses later forwards.

    Pipelines, harnesses, trainers and servers accept an offload in place of its model: `isinstance` accepts it for the
    model's class, and missing attributes come from the model. Attributes of both, such as `generate`, are the
    offload's.

    Example:
        >>> import expertcast
        >>> from expertcast.data.models import load_tokenizer
        >>> inputs = load_tokenizer("reference")("It is a truth", return_tensors="pt")
        >>> with expertcast.load_offloaded("reference", slots=192) as offloaded:
        ...     output = offloaded.generate(**inputs, max_new_tokens=4, do_sample=False)
        >>> 0.0 < offloaded.stats.as_dict()["hit_rate"] < 1.0
        True
    """

    model: PreTrainedModel
    """The offloaded model."""

    def __init__(
        self, model: PreTrainedModel, config: OffloadConfig, *, speculator: Speculator, recall: Mapping[str, float],
        store: ExpertStore, slots: int, link: Link, kernel: SlotKernel, observers: Sequence[Observer],
    ) -> None:  # fmt: skip
        self.model, self.view, self.store, self.link = model, speculator.view, store, link
        self.predictor = speculator.predictor
        self.policies = config.resolved_policies()
        """Policies of eviction, prefetches, misses and routing."""
        self.lossy = self.policies.lossy
        """Whether policies may change the output."""
        self.executed_layers = speculator.layers
        """Layers that execute their forecast."""
        self.context = config.context
        """Tokens of the longest sequence for which memory is reserved."""
        self._draft = config.draft
        room = context_bytes(replace(config, draft=NONE), model.config, self.view, model.dtype)
        self._activations = sum(room.values()), activation_bytes(self.view[0], 4)  # while the experts have their shapes
        self._reloadable = not next(self.view[0].experts.parameters()).is_meta
        self._closed = False
        self._stack = ExitStack()
        link.observer = Observers(observers) if observers else None
        with torch.inference_mode(False), ExitStack() as undo:  # slots and weights outlive an inference_mode
            policies = self._take_experts(undo, slots)
            self._engine = Engine(
                link=link, pool=self.pool, speculator=speculator, policies=policies, kernel=kernel,
                keep=config.cache, forecasts=config.forecasts, recall=recall,
            )  # fmt: skip
            self._compute_misses(undo, config, kernel)
            from expertcast.runtime.drafts.drafting import Drafter

            self.drafting = Drafter(model, self._engine, store)
            """Drafts of this model and their governors."""
            undo.callback(self.drafting.close)
            self.stats = self._engine.stats
            self.stats.reports = [self._engine.flow.forecasts_report, self.drafting.report]
            self._guard = run_from_slots(undo, model, self._engine, speculator, kernel)
            model.__dict__[OFFLOAD] = self  # a model stays offloaded without another reference to this
            undo.callback(model.__dict__.pop, OFFLOAD)
            self._stack = undo.pop_all()

    def _compute_misses(self, undo: ExitStack, config: OffloadConfig, kernel: SlotKernel) -> None:
        """Let the host compute missing experts, if the configuration says so and it can."""
        if config.misses == COPY:
            return
        cuda = self.store.device.type == "cuda"
        reasons = {
            "without all experts in memory": not self.store.addressable,
            f"over link {self.link.name!r}, whose copies nothing overlaps": not self.link.overlaps,
            f"with miss {self.policies.miss.name!r}": self.policies.miss.cls.lossy,
            "in mode 'exact' on CUDA, where host and device round differently": cuda and config.mode == "exact",
        }
        if reason := next((reason for reason, holds in reasons.items() if holds), None):
            warnings.warn(f"misses {config.misses!r} has no effect {reason}: all misses are copied", stacklevel=4)
            return
        from expertcast.runtime.engine.host import HostExperts

        flow, own = self._engine.flow, SlotKernel(grouped_mm_experts_forward) if cuda else kernel
        flow.host = HostExperts(self.store, own.run_pairs, flow.residency, auto=config.misses == AUTO)
        undo.callback(flow.host.close)

    def _take_experts(self, undo: ExitStack, slots: int) -> PolicySet:
        """Move the weights to the store, and give the device slots and a link; return the policies for them."""
        store, link = self.store, self.link
        if not self._reloadable:
            undo.callback(_refuse_use, self.view)
        undo.enter_context(in_use(link, store, self.predictor))
        undo.callback(self._put_back)
        store.pack(self.view)
        shape = CacheShape(
            layers=store.layers, experts=store.experts, top_k=store.top_k, slots=slots, regions=store.regions(slots)
        )
        policies = self.policies.make(shape)
        if policies.miss.precisions:
            store.add_copies(policies.miss.precisions)
        self.pool = SlotPool(store.layout, slots, store.device, shape.regions)
        undo.callback(self.pool.free)
        link.attach(store, self.pool)
        if link.pools is not None:
            policies.eviction = Eviction.from_policy(PoolEviction(link.pools), shape)
        undo.callback(link.close)
        dropped = weakref.finalize(
            self.model, _close_dropped, link
        )  # else its thread would keep the store of a dropped model
        dropped.atexit = False
        undo.callback(dropped.detach)
        return policies

    @cached_property
    def experts(self) -> SlotExperts:
        """Runs whole sequences layer by layer, for collection and measurements."""
        from expertcast.runtime.engine.whole_texts import SlotExperts

        return SlotExperts(self._engine, self.store, *self._activations)

    @property
    def flow(self) -> LayerFlow:
        """Flow of the layers under the policies."""
        return self._engine.flow

    @property
    def residency(self) -> ExpertCache:
        """Cache of the experts: their slots, and the rules of eviction."""
        return self._engine.residency

    def generate(
        self, *args: Any, draft: str | Policies | None = None, draft_length: int | None = None, **kwargs: Any
    ) -> Any:
        """Run transformers' `generate`, with a draft if there is one.

        A draft gives the same tokens sooner, or with sampling, tokens of the same distribution. Passes over several
        tokens round differently: in bf16 and fp16, greedy tokens may differ where the two largest logits are equal or
        within a step or two of the dtype.

        Args:
            args: arguments of transformers' `generate`.
            draft: drafts tokens, of which those stay that the exact model would choose: a name of
                :func:`expertcast.runtime.drafts.names.draft_names`, or lossy policies; `auto` chooses by the timing of
                this run, `none` is plain decoding. None: the draft of the configuration.
            draft_length: tokens to draft in every cycle; None: the number that is fastest, 0 included.
            kwargs: keyword arguments of transformers' `generate`.

        Raises:
            ExpertcastError: no such draft, or options that exclude a draft.
        """
        self._check_open()
        chosen = self._draft if draft is None else draft
        if chosen == NONE:
            if draft_length is not None:
                raise ExpertcastError(f"draft_length={draft_length} needs a draft: give draft, or leave it out")
            return self.model.generate(*args, **kwargs)
        if self.executed_layers or self.lossy:
            raise ExpertcastError(
                "a draft needs an exact model for verification, and this one executes forecasts or has lossy policies: "
                "offload it in mode 'exact', and give these as the draft"
            )
        return self.drafting.generate(chosen, args, kwargs, length=draft_length)

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
        """Reset the counters of the run and of the link."""
        self.link.reset()
        self.stats.reset()

    def close(self) -> None:
        """Restore weights, experts implementation and hooks; a second call does nothing.

        Raises:
            ExpertcastError: a forward is running, or the device has too little memory for the experts.
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
        """Restore the weights, before anything else: until then the model refuses to run."""
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

    # In place of its model

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        """The model's class, for tools that look it up; `type` returns the real one."""
        return type(self.__dict__.get("model", self))

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the model.

        Raises:
            AttributeError: the model does not have it either.
        """
        model = self.__dict__.get("model")
        if model is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(model, name)

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute of the offload, or of the model if only the model has it."""
        model = self.__dict__.get("model")
        own = model is None or name in self.__dict__ or hasattr(type(self), name) or not hasattr(model, name)
        if own:
            object.__setattr__(self, name, value)
        else:
            setattr(model, name, value)

    def __dir__(self) -> list[str]:
        """Return the names of both."""
        return sorted({*object.__dir__(self), *dir(self.model)})

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Accept the device and dtype that the model has.

        Raises:
            ExpertcastError: another device or dtype.
        """
        self.model.to(*args, **kwargs)
        return self

    def eval(self) -> Self:
        """Set the model to evaluation mode."""
        self.model.eval()
        return self

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        """Refuse `pickle`, `torch.save` and `copy`, which cannot copy slots and threads.

        Raises:
            ExpertcastError: always.
        """
        raise ExpertcastError(
            "an offload cannot be pickled, saved by torch.save or copied: save its OffloadConfig, close it and save "
            "the model"
        )


_EXPERTS_FREED = "this model from load_offloaded is closed and its experts are freed: call load_offloaded again"


def _close_dropped(link: Link) -> None:
    """Close the link of a dropped model, in a new thread if needed: garbage collection may run in a thread of the link,
    which cannot wait for its own end."""
    if threading.current_thread() is threading.main_thread():
        link.close()
    else:
        threading.Thread(target=link.close, name="expertcast-close").start()


class _Refusal:
    """Refuses forwards, state dicts and pickles of a layer whose experts are freed, until others are in their place."""

    def __init__(self, freed: nn.Parameter) -> None:
        self._freed = freed

    def __call__(self, experts: nn.Module, *_args: object) -> None:
        if next(experts.parameters()) is self._freed:
            raise ExpertcastError(_EXPERTS_FREED)

    def __reduce__(self) -> NoReturn:
        raise ExpertcastError(_EXPERTS_FREED)


def _refuse_use(view: MoEView) -> None:
    for layer in view:
        refusal = _Refusal(next(layer.experts.parameters()))
        layer.experts.register_forward_pre_hook(refusal)
        layer.experts.register_state_dict_pre_hook(refusal)  # type: ignore[no-untyped-call]


def offload(
    model: PreTrainedModel, config: OffloadConfig | None = None, *, observers: Sequence[Observer] = (), **fields: object
) -> OffloadedModel:
    """Move a model's experts to host memory and run it from a few slots.

    Args:
        model: a `transformers` model of a supported family, on the device that computes.
        config: how to offload; None: the default :class:`OffloadConfig`.
        observers: receive the run's events, such as a :class:`expertcast.runtime.recording.recorder.Recorder`.
        fields: fields of :class:`OffloadConfig` that replace those of `config`, such as `predictor` or `slots`.

    Returns:
        An offload, which is also a context manager; its `.model` is `model`. A warning names options that change the
        output in mode 'exact', or that have no effect.

    Raises:
        ExpertcastError: `model` is no model, is offloaded already, has no weights or is not supported; an unknown
            option, mode, link or predictor; a predictor of another model; too few slots; transformers is too old.

    Example:
        >>> import expertcast
        >>> from expertcast.data.models import load_model, load_tokenizer
        >>> model, tokenizer = load_model("reference"), load_tokenizer("reference")
        >>> inputs = tokenizer("It is a truth", return_tensors="pt")
        >>> expected = model.generate(**inputs, max_new_tokens=4, do_sample=False)
        >>> with expertcast.offload(model, predictor="next_norm", slots=192):
        ...     output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
        >>> output.equal(expected)
        True
    """
    check_release("offloading")
    config = OffloadConfig.of(config, fields)
    check_model(model)
    refuse_offloaded(model)
    return offload_layers(model, None, config, observers)


def offload_layers(
    model: PreTrainedModel, view: MoEView | None, config: OffloadConfig, observers: Sequence[Observer] = ()
) -> OffloadedModel:
    """Offload a model as :func:`offload` does; `view`: its MoE layers, or None to find them."""
    refuse_shared(config.link, config.store, config.predictor)
    if view is None:
        view = find_moe_layers(model)
    device = config.store.device if isinstance(config.store, ExpertStore) else device_of(view)
    speculator, recall = make_forecasters(config, model, view, device)
    link = make_link(config, device.type)
    pack_experts(view, config.experts, device.type)  # after all refusals of options: rounding cannot be undone
    if config.experts in EXPERTS_BITS:
        warnings.warn(
            f"the model's experts are rounded to {config.experts}, and stay rounded after the offload is closed",
            stacklevel=3,
        )
    for line in remarks(config):
        warnings.warn(line, stacklevel=3)
    store = make_store(config, ExpertsForm.of(view), device)
    beside: dict[str, int] = {}
    if config.memory is not None:
        freed = sum(
            part.nbytes for layer in view for part in expert_parameters(layer.experts, layer.num_experts).values()
        )
        beside = parts_beside(config, store, context_bytes(config, model.config, view, model.dtype), freed)
    slots = slots_for(config, store, beside)
    free = free_memory(device) if device.type == "cpu" else None  # the experts leave room on other devices
    if free is not None and config.slots is None and config.memory is None:
        slots = max(store.top_k, min(slots, free // store.layout.block_bytes))
    return OffloadedModel(
        model,
        config,
        speculator=speculator,
        recall=recall,
        store=store,
        slots=slots,
        link=link,
        kernel=SlotKernel(kernel_of(model)),
        observers=observers,
    )
