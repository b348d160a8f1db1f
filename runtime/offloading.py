"""expertcast.offload: a `transformers` MoE model whose experts live in host memory, and a few of them on the device.

L MoE layers, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

import reprlib
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from expertcast.checkpoints.checkpoint import PredictorCheckpoint
from expertcast.data.experts import OFFLOAD
from expertcast.data.moe_layers import experts_implementation, find_moe_layers
from expertcast.data.packed_experts import pack_module, packed_matrices
from expertcast.data.source import check_release
from expertcast.data.taps import RouterTaps
from expertcast.predictors import ExpertcastError, MoEView, NextToken, Predictor, predictor_class
from expertcast.predictors.hybrid import Hybrid, member_recall
from expertcast.predictors.messages import Progress
from expertcast.predictors.next_token import NextTokenTracker
from expertcast.runtime.config import (
    EXPANDED,
    EXPERTS_BITS,
    PACKED,
    OffloadConfig,
    make_link,
    make_store,
    named_checkpoint,
    remarks,
    slots_for,
)
from expertcast.runtime.drafts.names import NONE, QUANTISED
from expertcast.runtime.engine.cache import ExpertCache
from expertcast.runtime.engine.engine import Engine, EngineParts, HostEngine, LayerFlow
from expertcast.runtime.engine.front import (
    EXPERTS_NAME,
    ForwardGuard,
    attach,
    detach,
    early_attention_for,
    in_use,
    refuse_offloaded,
    refuse_shared,
    weights_guarded,
)
from expertcast.runtime.engine.kernels import SlotKernel, decode_kernel_followed, kernel_of
from expertcast.runtime.engine.speculation import Speculator
from expertcast.runtime.links.base import Link
from expertcast.runtime.policies import CacheShape, Policies
from expertcast.runtime.policies.eviction import Eviction, Pooled
from expertcast.runtime.policies.settings import PolicySet
from expertcast.runtime.recording.recorder import Observer, Observers, check_observers
from expertcast.runtime.storage.codecs import make_codec
from expertcast.runtime.storage.layout import BlockLayout, device_of
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore

if TYPE_CHECKING:
    from expertcast.runtime.drafts.drafting import Drafting
    from expertcast.runtime.engine.drift import DriftMonitor
    from expertcast.runtime.engine.refit import OnlineRefit
    from expertcast.runtime.engine.whole_texts import SlotExperts

# What options stand for on one model.


def resolve_predictor(
    given: str | Path | Predictor | None, view: MoEView
) -> tuple[Predictor | None, PredictorCheckpoint | None]:
    """What `predictor` (or `next_token`) stands for: bound to the model, and the checkpoint it came from.

    Raises:
        ExpertcastError: unknown name, one that must be trained first, or a checkpoint of another model.
    """
    if given is None:
        return None, None
    if isinstance(given, Predictor):
        return given.bind(view), None
    checkpoint = named_checkpoint(given)
    if checkpoint is not None:
        return checkpoint.load(view), checkpoint
    cls = predictor_class(str(given))
    made = cls(cls.config_class(), view.shape)
    if made.state_dict():
        raise ExpertcastError(
            f"predictor {given!r} must be trained for a model: give the folder that `expertcast train` wrote"
        )
    return made.bind(view), None


def executed_layers(config: OffloadConfig, layers: int, recall: Mapping[int, float] | None) -> list[int]:
    """What `mode`, `layers` and `min_recall` stand for: the layers that execute their forecast.

    Args:
        layers: L of the model.
        recall: recall@k of the forecasts by target layer, where it is known.

    Raises:
        ExpertcastError: no predictor to execute, or nothing that says where a hybrid should.
    """
    if config.mode == "exact":
        return []
    if config.resolved_predictor() is None:
        raise ExpertcastError(f"mode {config.mode!r} executes forecasts: give a predictor")
    if config.layers is not None:
        return list(config.layers)
    if config.mode == "speculate":
        return list(range(layers))
    if recall is None:
        raise ExpertcastError(
            "mode 'hybrid' needs to know where forecasts are good: give layers=[...], or a checkpoint with recall_at_k "
            "in its metrics.json"
        )
    return [layer for layer, value in recall.items() if value >= config.min_recall]


def recall_per_layer(checkpoint: PredictorCheckpoint | None, ahead: int = 1) -> dict[int, float] | None:
    """Recall@k by target layer on the validation split, as metrics.json has it; of whatever it has, without one.

    Args:
        checkpoint: whose.
        ahead: the distance; where metrics.json does not have it, recall is at the shortest one that was scored.
    """
    if checkpoint is None:
        return None
    metrics = checkpoint.metrics.get("validation", checkpoint.metrics)
    metrics = metrics.get("further", {}).get(str(ahead), metrics)
    per_layer = metrics.get("recall_at_k", {}).get(checkpoint.name, {}).get("per_layer")
    if per_layer is None:
        return None
    targets = metrics.get("targets", range(1, len(per_layer) + 1))
    return {int(layer): float(value) for layer, value in zip(targets, per_layer, strict=True)}


def mean_recall(checkpoint: PredictorCheckpoint | None) -> dict[str, float]:
    """Recall@k, the mean over layers, of a checkpoint's predictor and of what needs no training, as metrics.json has
    it; of a hybrid and its members on validation, as its config has it."""
    if checkpoint is None:
        return {}
    found = {**checkpoint.metrics.get("baselines", {}), **checkpoint.metrics.get("recall_at_k", {})}
    means = {name: float(values["mean"]) for name, values in found.items()}
    return means | member_recall(
        checkpoint.config["predictor_config"]["choices"] if checkpoint.name == Hybrid.name else []
    )


def make_monitor(
    config: OffloadConfig, view: MoEView, predictor: Predictor | None, checkpoint: PredictorCheckpoint | None
) -> DriftMonitor | None:
    """What `drift` stands for: compares forecasts with their checkpoint's recall at the distance that they are made at.

    Args:
        config: the options.
        view: the model's MoE layers.
        predictor: what forecasts; None where nothing does.
        checkpoint: where it comes from.
    """
    if predictor is None or not config.drift:
        return None
    from expertcast.runtime.engine.drift import DriftMonitor

    expected = recall_per_layer(checkpoint, config.ahead)
    if expected is not None and min(expected, default=0) != config.ahead:
        expected = None
    return DriftMonitor(view.shape.layers, view.shape.top_k, expected, predictor.name)


def make_refit(config: OffloadConfig, predictor: Predictor | None) -> OnlineRefit | None:
    """What `refit` stands for; `predictor` is bound to the model and on its device.

    Raises:
        ExpertcastError: nothing to refit.
    """
    if not config.refit:
        return None
    if predictor is None:
        raise ExpertcastError("refit changes forecasts: give a predictor")
    from expertcast.runtime.engine.refit import OnlineRefit

    return OnlineRefit(predictor, config.ahead, config.refit)


def slot_count(config: OffloadConfig, view: MoEView) -> int:
    """:func:`slots_for` of a model, whose drafts and decoding threads take their part of `memory`."""
    if config.memory is None:
        return slots_for(config, view.shape, 0)
    layout, store, codec, decoding, drafts = BlockLayout.of(view), config.store, None, 0, 0
    if config.draft in QUANTISED:
        from expertcast.runtime.drafts.quantised import expected_bytes

        drafts = expected_bytes(view, config.draft)
    if isinstance(store, ExpertStore):
        codec = getattr(store, "codec", None)
    elif (name := config.resolved_codec()) != "raw":
        codec = make_codec(name, layout)
    device = store.device if isinstance(store, ExpertStore) else device_of(view)
    if codec is not None and device.type == "cpu":
        from expertcast.runtime.storage.coded_reader import decoding_bytes

        decoding = decoding_bytes(codec)
    return slots_for(config, view.shape, layout.block_bytes, drafts, decoding)


def resolve_next_token(
    given: str | Path | Predictor | None, view: MoEView, policies: Policies, device: torch.device
) -> NextToken | None:
    """What `next_token` stands for: the forecaster of the next tokens, bound to the model and on its device.

    Args:
        given: a checkpoint's folder, or the predictor itself; None where nothing looks tokens ahead.
        view: the model's MoE layers.
        policies: which must do something with its forecasts.
        device: where the model computes.

    Raises:
        ExpertcastError: another predictor, or no policy that does anything with its forecasts.
    """
    if given is None:
        return None
    found, _ = resolve_predictor(given, view)
    if not isinstance(found, NextToken):
        raise ExpertcastError(
            f"next_token={str(given)!r} forecasts no tokens: give what `expertcast train --predictor next_token` wrote"
        )
    if not policies.eviction.cls.reads_tokens and policies.prefetch.name == "none":
        raise ExpertcastError(
            f"next_token serves prefetching and the eviction policy 'forecast', here are prefetch 'none' and eviction "
            f"{policies.eviction.name!r}: give policies=Policies(eviction='forecast'), or another prefetch"
        )
    return found.to(device)


class OffloadedModel:
    """A model with its experts in host memory and a few of them in slots on the device.

    Made by :func:`expertcast.offload`. The model itself stays what it was: `model.generate`, a pipeline or a plain
    forward run as ever, and find their experts in the slots. `close()`, or leaving the `with` block, puts everything
    back bit for bit. A model from :func:`expertcast.load_offloaded` has nowhere to put its experts: closing frees them,
    and the model refuses to run from then on.

    Pipelines, harnesses, trainers and servers read a model's device, dtype, configuration and class, move it to where
    it is, and call it: they take an offload in place of its model. `isinstance` takes it for one of the model's class,
    and what it lacks the model answers. What belongs to both, such as `generate`, is the offload's.

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
    """The model that is offloaded."""

    def __init__(
        self, model: PreTrainedModel, config: OffloadConfig, *, store: ExpertStore, slots: int, link: Link,
        speculator: Speculator, next_token: NextToken | None, kernel: SlotKernel, drift: DriftMonitor | None,
        recall: Mapping[str, float], observers: Sequence[Observer],
    ) -> None:  # fmt: skip
        self.model, self.view, self.store, self.link = model, speculator.view, store, link
        self.predictor = speculator.predictor
        self.refit = speculator.refit
        """Refits the forecasts while the model runs, where it was asked to."""
        self.policies = config.resolved_policies()
        """Which policies decide what is kept, loaded and dropped."""
        self.lossy = self.policies.lossy
        """Whether policies may change what is computed."""
        self.executed_layers = speculator.layers
        """Layers that execute their forecast when there is one."""
        self.drift = None if link.decides_on_device else drift
        """Follows the forecasts' recall; None where nothing forecasts, or the link decides on the device."""
        self.drafting: Drafting | None = None
        """Drafts of this model and what was learnt of them; None where the link decides on the device."""
        self._draft = config.draft
        self._reloadable = not next(self.view[0].experts.parameters()).is_meta
        self._closed = False
        self._stack = ExitStack()
        link.observer = Observers(observers)
        link.observer.attached(self.view.shape.experts)
        with torch.inference_mode(False), ExitStack() as undo:  # slots and weights outlive an inference_mode
            policies = self._take_experts(undo, slots)
            self._parts = EngineParts(
                link=link, pool=self.pool, speculator=speculator, policies=policies, kernel=kernel,
                tokens_ahead=None if next_token is None else NextTokenTracker(next_token),
                drift=self.drift, keep=config.cache, likely=config.likely, forecasts=config.forecasts, recall=recall,
            )  # fmt: skip
            self._engine = self._make_engine(undo)
            self.stats = self._engine.stats
            reporting = (self.drift, self.refit)
            self.stats.reports = [each.as_dict for each in reporting if each is not None]
            if not link.decides_on_device:
                self.stats.reports.append(self._engine.flow.forecasts_report)
            if self.drafting is not None:
                self.stats.reports.append(self.drafting.report)
            self._enter_model(undo, speculator, kernel)
            self._stack = undo.pop_all()

    def _take_experts(self, undo: ExitStack, slots: int) -> PolicySet:
        """Weights go to the store, and the device gets slots and a link; returns the policies for them."""
        view, store, link = self.view, self.store, self.link
        if not self._reloadable:
            undo.callback(_refuse_use, view)
        undo.enter_context(in_use(link, store, self.predictor))
        undo.callback(self._put_back)
        store.pack(view)
        policies = self.policies.make(
            CacheShape(layers=len(view), experts=view.shape.experts, top_k=view.shape.top_k, slots=slots)
        )
        if policies.miss.precisions:
            store.add_copies(policies.miss.precisions)
        self.pool = SlotPool(store.layout, slots, store.device)
        undo.callback(self.pool.free)
        link.attach(store, self.pool)
        if link.pools is not None:
            policies.eviction = Eviction.over_all(Pooled(link.pools), len(view))
        undo.callback(link.close)
        dropped = weakref.finalize(self.model, _close_dropped, link)  # its thread would keep a dropped model's store
        dropped.atexit = False
        undo.callback(dropped.detach)
        return policies

    def _make_engine(self, undo: ExitStack) -> Engine:
        if self.link.decides_on_device:
            from expertcast.runtime.experimental.device_engine import DeviceEngine

            return DeviceEngine(self._parts)
        from expertcast.runtime.drafts.drafting import Drafting

        engine = HostEngine(self._parts)
        self.drafting = Drafting(self.model, engine, self._parts, self.store)
        undo.callback(self.drafting.close)
        return engine

    def _enter_model(self, undo: ExitStack, speculator: Speculator, kernel: SlotKernel) -> None:
        """The model's experts are slots, and its hooks call the engine; weights and second forwards are guarded."""
        model, view, engine = self.model, self.view, self._engine
        for layer in view:
            undo.callback(detach, layer)
            attach(engine, layer)
        if self.refit is not None:
            undo.callback(self.refit.restore)
        undo.enter_context(weights_guarded(model, view))
        speculator.prepare()
        self._guard = ForwardGuard(model.base_model, view)
        undo.callback(self._guard.close)
        undo.enter_context(speculator.following())
        undo.callback(RouterTaps(model, view, engine.on_router, engine.on_start).close)
        undo.enter_context(decode_kernel_followed(model, kernel))
        undo.enter_context(experts_implementation(model, EXPERTS_NAME))
        model.__dict__[OFFLOAD] = self  # a model whose offload nobody holds stays offloaded
        undo.callback(model.__dict__.pop, OFFLOAD)

    @cached_property
    def experts(self) -> SlotExperts:
        """Runs whole texts layer by layer, for collection and measurements."""
        from expertcast.runtime.engine.whole_texts import SlotExperts

        return SlotExperts(self._engine, self._parts, self.store)

    @property
    def flow(self) -> LayerFlow:
        """What happens at one layer after another, by which policies.

        Raises:
            ExpertcastError: the link decides on the device: there is no flow on the host.
        """
        return self._engine.flow

    @property
    def residency(self) -> ExpertCache:
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
        return self.drafting.generate(
            chosen, args, kwargs, length=draft_length, assistant_tokenizer=assistant_tokenizer
        )

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

    # In place of its model

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        """The model's class: tools look it up in their tables. `type` says what this really is."""
        return type(self.__dict__.get("model", self))

    def __getattr__(self, name: str) -> Any:
        """What only the model has.

        Raises:
            AttributeError: it has no such attribute either.
        """
        model = self.__dict__.get("model")
        if model is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(model, name)

    def __setattr__(self, name: str, value: object) -> None:
        """What only the model has is set there."""
        model = self.__dict__.get("model")
        own = model is None or name in self.__dict__ or hasattr(type(self), name) or not hasattr(model, name)
        if own:
            object.__setattr__(self, name, value)
        else:
            setattr(model, name, value)

    def __dir__(self) -> list[str]:
        """Both's names."""
        return sorted({*object.__dir__(self), *dir(self.model)})

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The model stays where it is, and as it is.

        Raises:
            ExpertcastError: that is not what was asked for.
        """
        self.model.to(*args, **kwargs)
        return self

    def eval(self) -> Self:
        """The model's own, for its norms and dropout."""
        self.model.eval()
        return self

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        """Neither `pickle`, `torch.save` nor `copy` can take slots and threads along.

        Raises:
            ExpertcastError: always.
        """
        raise ExpertcastError(
            "an offload cannot be pickled, saved by torch.save or copied: save its OffloadConfig, close it and save "
            "the model"
        )


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


def pack_experts(view: MoEView, form: str) -> None:
    """Round a model's experts, which stay so.

    Args:
        view: its MoE layers; on the meta device they get their shapes.
        form: as `experts` of :class:`OffloadConfig` says it.

    Raises:
        ExpertcastError: they are packed already, in another form; or `packed`, which is what a checkpoint ships.
    """
    packed = packed_matrices(view[0].experts)
    if form in (PACKED, "auto"):
        if form == PACKED and not packed:
            raise ExpertcastError(
                "the experts here are expanded: give experts='int4' or 'int8'; only load_offloaded takes codes from a "
                "checkpoint"
            )
        return
    if packed:
        raise ExpertcastError(f"the model's experts are packed already: leave experts={form!r} out")
    for layer in Progress(f"rounding experts to {form}", unit="layer", steps=view):
        pack_module(layer.experts, layer.num_experts, EXPERTS_BITS[form])


def offload(
    model: PreTrainedModel, config: OffloadConfig | None = None, *, observers: Sequence[Observer] = (), **fields: object
) -> OffloadedModel:
    """Move a model's experts to host memory and run it from a few slots.

    Args:
        model: a `transformers` model of a supported family, on the device that computes.
        config: how; none is the default :class:`OffloadConfig`.
        observers: are told what happens, such as a :class:`expertcast.runtime.recording.recorder.Recorder`.
        fields: fields of :class:`OffloadConfig` that are other than in `config`, such as `predictor` or `slots`.

    Returns:
        An object that is also a context manager; `.model` is the model that was given. Options that change the output
        in mode 'exact', or have no effect, are warned of.

    Raises:
        ExpertcastError: no model, too few slots, an unknown option, mode, link or predictor, other observers, a
            predictor of another model, a model that is offloaded already, has no weights or is not supported; or
            transformers is too old.

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
    check_observers(observers)
    if not hasattr(model, "modules"):
        raise ExpertcastError(f"{reprlib.repr(model)} is no loaded model: expertcast.load_offloaded(...) loads one")
    refuse_offloaded(model)
    refuse_shared(config.link, config.store, config.predictor)
    view = find_moe_layers(model)
    device = config.store.device if isinstance(config.store, ExpertStore) else device_of(view)
    packed = config.experts in EXPERTS_BITS or bool(packed_matrices(view[0].experts))
    if packed and device.type != "cpu":
        raise ExpertcastError(f"experts in 4 or 8 bits are for models on the CPU, this one is on {device}")
    if config.experts != EXPANDED:
        pack_experts(view, config.experts)
    if config.experts in EXPERTS_BITS:
        warnings.warn(
            f"the model's experts are rounded to {config.experts}, and stay so when it is closed, with experts "
            "implementation 'grouped_mm'",
            stacklevel=2,
        )
    bound, checkpoint = resolve_predictor(config.resolved_predictor(), view)
    if bound is not None:
        if bound.looks != "layers":
            raise ExpertcastError(f"{bound.name} forecasts tokens, not layers: give it as next_token=, not predictor=")
        bound.to(device)
    early = early_attention_for(bound, model, view)
    speculator = Speculator(
        view, bound, layers=executed_layers(config, len(view), recall_per_layer(checkpoint, config.ahead)),
        true_weights=config.true_weights, prefill=config.speculate_prefill, ahead=config.ahead,
        router_free=config.router_free, reach=config.reach, early=early,
    )  # fmt: skip
    speculator.refit = make_refit(config, bound)
    for line in remarks(config):
        warnings.warn(line, stacklevel=2)
    count = slot_count(config, view)
    return OffloadedModel(
        model,
        config,
        store=make_store(config, view, device),
        slots=count,
        link=make_link(config, device.type),
        speculator=speculator,
        next_token=resolve_next_token(config.next_token, view, config.resolved_policies(), device),
        kernel=SlotKernel(kernel_of(model), count, packed),
        drift=make_monitor(config, view, bound, checkpoint),
        recall=mean_recall(checkpoint),
        observers=observers,
    )
