"""The seam between an offload and its transformers model, and refusals while the model is offloaded.

The experts modules of an offloaded model hold slots, whose contents change. Saving, loading, copying, pickling,
dispatching or moving them, replacing them by adapters, or another experts function would silently give wrong results,
and two forwards at once would overwrite each other's slots. Each of these is an error here, before a change.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from types import FrameType
from typing import NoReturn
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from expertcast.data.batch import RouterCall
from expertcast.data.kv_cache import grow_in_place
from expertcast.data.machine import without_gradients
from expertcast.data.moe_layers import PROBE_EXPERTS, experts_implementation
from expertcast.data.packed_experts import packed_matrices
from expertcast.data.taps import RouterTaps
from expertcast.predictors.base import Predictor
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import MoELayer, MoEView
from expertcast.runtime.engine.engine import Engine
from expertcast.runtime.engine.kernels import SlotKernel, decode_kernel_followed
from expertcast.runtime.engine.speculation import Speculator, early_attention_for

# The experts function in transformers' registry

EXPERTS_NAME = "expertcast"
"""Name of our experts function in transformers' registry."""

_RUNNING: WeakKeyDictionary[nn.Module, tuple[ref[Engine], int]] = WeakKeyDictionary()
"""Offloaded experts modules with their layer. The model's hooks keep the engine alive."""


def detach(layer: MoELayer) -> None:
    """Stop running a layer's experts from slots; the caller restores the parameters."""
    _RUNNING.pop(layer.experts, None)
    layer.experts.__dict__["num_experts"] = layer.num_experts  # an interrupted kernel leaves the number of slots


def refuse_offloaded(model: PreTrainedModel) -> None:
    """Raise ExpertcastError if the model is offloaded, or its config has our experts implementation."""
    if any(module in _RUNNING for module in model.modules()):
        raise ExpertcastError("this model is offloaded already: close the other offload first")
    if EXPERTS_NAME in model.get_experts_implementation().values():
        raise ExpertcastError(
            f"the model's config has experts implementation {EXPERTS_NAME!r}, like an offloaded model: give each model "
            "its own config (copy.deepcopy), or set another experts implementation"
        )


# a trace would record the transfers of one call: a compiled model is compiled around this function
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _offloaded_experts(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    found = _RUNNING.get(experts)
    engine = None if found is None else found[0]()
    if found is None or engine is None:
        raise ExpertcastError(
            f"experts implementation {EXPERTS_NAME!r} runs only inside expertcast.offload(model): set another one, "
            "such as 'grouped_mm' (or does this model share its config with an offloaded one?)"
        )
    output_TD = _run(engine, found[1], hidden_states, top_k_index, top_k_weights)
    if torch.is_grad_enabled() and hidden_states.requires_grad:
        refused: Tensor = _NoBackward.apply(hidden_states, output_TD)  # type: ignore[no-untyped-call]
        return refused
    return output_TD


@without_gradients
def _run(engine: Engine, layer: int, *arguments: Tensor) -> Tensor:
    runs = engine if engine.stage is None else engine.stage
    return runs.run(engine.view.layers[layer], *arguments)


class _NoBackward(torch.autograd.Function):
    """Refuses a backward, which would find other experts in the slots."""

    @staticmethod
    def forward(ctx: object, hidden_TD: Tensor, output_TD: Tensor) -> Tensor:
        del ctx, hidden_TD
        return output_TD.view_as(output_TD)

    @staticmethod
    def backward(ctx: object, *gradients: object) -> None:
        raise ExpertcastError("an offloaded model has no gradients: close the offload before training the model")


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _offloaded_experts)


_IN_USE: WeakSet[object] = WeakSet()
"""Links, stores and predictors of open offloads."""


def refuse_shared(*parts: object) -> None:
    """Refuse a link, store or predictor of an open offload.

    Raises:
        ExpertcastError: an object is in use.
    """
    for part in parts:
        if part is not None and not isinstance(part, str | os.PathLike) and part in _IN_USE:
            raise ExpertcastError(
                f"this {type(part).__name__} serves another offload: close that one first, or give each its own"
            )


@contextmanager
def in_use(*parts: object) -> Iterator[None]:
    """Reserve objects for one offload."""
    mine = [part for part in parts if part is not None]
    _IN_USE.update(mine)
    try:
        yield
    finally:
        _IN_USE.difference_update(mine)


class ForwardGuard:
    """Allows one forward at a time, in the process of the offload, with our experts function."""

    def __init__(self, base: nn.Module, view: MoEView) -> None:
        self._base = base
        configs: list[PreTrainedConfig] = [layer.experts.config for layer in view]
        self._configs = list({id(config): config for config in configs}.values())
        self._parts = [
            (layer.block._modules, name, part)
            for layer in view
            for part in (layer.router, layer.experts)
            for name, child in layer.block.named_children()
            if child is part
        ]
        """Place of the router and of the experts of each layer: children of the block, name, module."""
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._running: int | None = None
        """Thread of the running forward; it stays after a forward that raises."""
        self._stopped = False
        self._handles = [
            self._base.register_forward_pre_hook(self._before),
            self._base.register_forward_hook(self._after),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def stop(self) -> None:
        """Refuse all later forwards.

        Raises:
            ExpertcastError: a forward is running in some thread.
        """
        with self._lock:
            if any(_depth(frame, self._base) for frame in sys._current_frames().values()):
                raise ExpertcastError("a forward of this model is running: close the offload after its end")
            self._stopped = True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before(self, _module: nn.Module, _args: object) -> None:
        for config in self._configs:
            name = config._experts_implementation
            if name not in (EXPERTS_NAME, PROBE_EXPERTS):
                raise ExpertcastError(
                    f"the model's experts implementation was changed to {name!r} while it is offloaded: set it back "
                    f"with model.set_experts_implementation({EXPERTS_NAME!r}), or close the offload first"
                )
        for children, name, part in self._parts:
            if children.get(name) is not part:
                raise ExpertcastError(
                    f"{name!r} of an MoE layer was replaced by a {type(children.get(name)).__name__} while the model "
                    "is offloaded: put it back (an adapter: unload()) and leave routers and experts as they are, or "
                    "close the offload first"
                )
        if os.getpid() != self._process:
            raise ExpertcastError(
                "this model was offloaded in another process, whose threads and copies a fork does not have: "
                "load and offload the model in each process"
            )
        with self._lock:
            if self._stopped:
                raise ExpertcastError("this offload is not closed completely: call close() again")
            own = threading.get_ident()
            if self._running is not None:
                frames = sys._current_frames()
                if self._running != own and _depth(frames.get(self._running), self._base):
                    raise ExpertcastError(
                        "another thread is running this offloaded model: run one forward at a time, or offload a "
                        "second copy of the model"
                    )
                if _depth(frames[own], self._base) > 1:
                    raise ExpertcastError("a forward of this offloaded model was started inside another one")
            self._running = own

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after(self, _module: nn.Module, _args: object, _output: object) -> None:
        self._running = None


def _depth(frame: FrameType | None, module: nn.Module) -> int:
    """Return the number of nested calls of the module in a thread."""
    depth, code = 0, nn.Module._call_impl.__code__
    while frame is not None:
        depth += frame.f_code is code and frame.f_locals.get("self") is module
        frame = frame.f_back
    return depth


@contextmanager
def weights_guarded(model: PreTrainedModel, view: MoEView) -> Iterator[None]:
    """Refuse to save, load, copy, pickle, dispatch, move or convert the model or any part of it that holds experts.

    Moving it to its own device, or converting it to its own dtype, as pipelines do, is allowed.
    """
    experts = {layer.experts for layer in view}
    parts = [module for module in model.modules() if not experts.isdisjoint(module.modules())]
    with ExitStack() as stack:
        for part in parts:
            own = tuple(name for name, module in part.named_modules() if module in experts)
            for handle in (
                part.register_state_dict_pre_hook(_refuse_reading),  # type: ignore[no-untyped-call]
                part.register_load_state_dict_pre_hook(partial(_refuse_writing, own)),  # type: ignore[no-untyped-call]
            ):
                stack.callback(handle.remove)
            refused = {
                "__deepcopy__": _refuse("copying the model"),
                "__getstate__": _refuse("pickling or copying the model, or saving it by torch.save"),
            }
            for name, value in {"_apply": partial(_apply_in_place, part), **refused}.items():
                part.__dict__[name] = value
                stack.callback(part.__dict__.pop, name, None)
        yield


_ADAPTING = ("peft.", "transformers.integrations.peft")
"""Modules whose state dicts are for adapters alone."""


def _refuse_reading(*_args: object) -> None:
    """Refuse a state dict whose caller saves the model, or dispatches it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = str(frame.f_globals.get("__name__"))
        if caller.startswith(_ADAPTING):
            return
        if caller.startswith("accelerate."):
            raise ExpertcastError(
                "the model is offloaded by expertcast, accelerate cannot dispatch or offload it as well: close the "
                "offload before that, or leave the model where it is"
            )
        frame = frame.f_back
    _refuse("saving the model")()


def _refuse_writing(
    experts: tuple[str, ...], _module: nn.Module, state: Mapping[str, object], prefix: str, *_args: object
) -> None:
    """Refuse a state dict with weights of experts; adapters beside them may be loaded."""
    if any(name.startswith(tuple(prefix + each for each in experts)) for name in state):
        _refuse("loading weights into the model")()


def _refuse(what: str) -> Callable[..., NoReturn]:
    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise ExpertcastError(f"the model's experts are offloaded: close the offload before {what}")

    return refuse


def _apply_in_place(part: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Apply a function that changes nothing; `to`, `cuda`, `half` and `share_memory` all call a module's `_apply`."""
    parameters = list(part.parameters())  # blocks of packed layers keep their type whatever it is
    sample = next((each for each in parameters if each.is_floating_point()), parameters[0])[:1].detach().clone()
    pointer = sample.data_ptr()
    if function(sample) is not sample or sample.data_ptr() != pointer:
        raise ExpertcastError(
            "the model's experts are offloaded: close the offload before moving or converting the model"
        )
    if not packed_matrices(part):  # their scales have a dtype of their own
        with torch.no_grad():
            type(part)._apply(part, function, recurse)  # type: ignore[no-untyped-call]
    return part


def run_from_slots(
    undo: ExitStack, model: PreTrainedModel, engine: Engine, speculator: Speculator, kernel: SlotKernel
) -> ForwardGuard:
    """Make a model's experts slots of an engine, and its hooks call the engine; guard its weights and its forwards.

    Args:
        undo: receives the callbacks that restore the model.
        model: the model to offload.
        engine, speculator, kernel: parts of the offload.

    Returns:
        The guard that stops forwards when the offload closes.
    """
    view = engine.view
    for layer in view:
        undo.callback(detach, layer)
        engine.attach(layer)
        _RUNNING[layer.experts] = (ref(engine), layer.index)
    undo.enter_context(weights_guarded(model, view))
    guard = ForwardGuard(model.base_model, view)
    undo.callback(guard.close)
    undo.callback(model.base_model.register_forward_pre_hook(grow_in_place, with_kwargs=True).remove)
    speculator.prepare()
    undo.enter_context(speculator.following())
    undo.callback(RouterTaps(model, view, engine.on_router, engine.on_start).close)
    undo.enter_context(decode_kernel_followed(model, kernel))
    undo.enter_context(experts_implementation(model, EXPERTS_NAME))
    return guard


# Executed forecasts without an engine


@contextmanager
def speculate(
    model: PreTrainedModel,
    view: MoEView,
    predictor: Predictor,
    *,
    layers: Sequence[int] | None = None,
    prefill: bool = True,
    ahead: int = 1,
    observe: Callable[[RouterCall, Tensor], object] | None = None,
) -> Iterator[Speculator]:
    """Execute forecasts at the MoE layers of a model, resident or offloaded, by hooks.

    Args:
        model: the model of `view`.
        view, predictor, ahead: as for :class:`Speculator`.
        layers: layers that execute their forecast; None: all layers with a forecast.
        prefill: also speculate in steps of several tokens per sequence (teacher-forced evaluation).
        observe: called after each router with the call and the ids [T, K] of the executed (or forecast) experts.

    Raises:
        ExpertcastError: `layers` or `ahead` out of the range of model or predictor.
    """
    chosen = range(len(view)) if layers is None else layers
    early = early_attention_for(predictor, model, view)
    speculator = Speculator(view, predictor, layers=chosen, prefill=prefill, ahead=ahead, early=early)

    def on_router(call: RouterCall) -> tuple[Tensor, Tensor] | None:
        executed = speculator.executed(call)
        if speculator.due(call, executed) is not None:
            speculator.forecast(call)
        if observe is not None:
            observe(call, call.ids_TK if executed is None else executed[0])
        return executed

    taps = RouterTaps(model, view, on_router, speculator.start)
    with closing(taps), speculator.following():
        yield speculator
