"""What goes wrong in an offloaded forward: the model stays usable or there is one clear error, never a wrong number.

"Usable" is checked to the bit: the logits of a generation after the fault are those of the resident model.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import linecache
import multiprocessing
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.timed.device import TimedDevice
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from expertcast import OffloadedModel, offload
from expertcast.checkpoints.checkpoint import save_predictor
from expertcast.data.models import meta_model
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.source import ModelSource
from expertcast.data.taps import RouterTaps
from expertcast.predictors import ExpertcastError, predictor_class
from expertcast.runtime import offloading as offloading_module
from expertcast.runtime.engine.engine import Engine
from expertcast.runtime.links.base import InstantLink
from expertcast.runtime.links.disk import DiskLink
from expertcast.runtime.links.emulated import EmulatedLink
from expertcast.runtime.recording.recorder import Observer
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.layout import FULL
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from expertcast.runtime.storage.transfer import Transfer
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy, refused
from tests.runtime.faults import INPUTS, RaiseAt, Result, facts_of, slow_link, still_right
from tests.runtime.links.simulated_device import DiskOnDevice


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("qwen3_moe")


@pytest.fixture
def swept() -> Iterator[None]:
    """Collecting garbage looks at what the test makes, not at all that other tests left."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def expected(model: PreTrainedModel) -> Result:
    return greedy(model, INPUTS)


# a forward that is cut short ---------------------------------------------------------------------------------------

PLACES: dict[str, Callable[[OffloadedModel, int], nn.Module]] = {
    "norm": lambda offloaded, layer: offloaded.view[layer].norm,
    "router": lambda offloaded, layer: offloaded.view[layer].router,
    "activation": lambda offloaded, layer: offloaded.view[layer].experts.act_fn,  # type: ignore[return-value]
    "experts": lambda offloaded, layer: offloaded.view[layer].experts,
    "block": lambda offloaded, layer: offloaded.view[layer].block,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("cache", [True, False])
def test_the_forward_raises(place: str, cache: bool, model: PreTrainedModel, expected: Result) -> None:
    with still_right(model, expected, cache=cache) as offloaded:
        for layer, error, count in ((0, ValueError(), 1), (2, KeyboardInterrupt(), 3), (3, SystemExit(), 2)):
            module = PLACES[place](offloaded, layer)
            for register in (module.register_forward_pre_hook, module.register_forward_hook):
                handle = register(RaiseAt(count, error))
                with pytest.raises(type(error)):
                    greedy(offloaded, INPUTS)
                handle.remove()


class _Interrupting(LogitsProcessor):  # type: ignore[misc]
    def __init__(self, step: int) -> None:
        self.raise_ = RaiseAt(step, KeyboardInterrupt())

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.raise_()
        return scores


@pytest.mark.parametrize("mode", ["exact", "speculate"])
def test_interrupt_between_steps(mode: str, model: PreTrainedModel, expected: Result) -> None:
    with offload(model, slots=5, predictor="next_norm", forecasts="always", mode=mode, link=slow_link()) as offloaded:
        own = greedy(offloaded, INPUTS)
        for step in (1, 4):
            with pytest.raises(KeyboardInterrupt):
                offloaded.generate(
                    **INPUTS, max_new_tokens=8, logits_processor=LogitsProcessorList([_Interrupting(step)])
                )
            assert_same(greedy(offloaded, INPUTS), own)
    assert_same(greedy(model, INPUTS), expected)


@pytest.mark.parametrize("method", ["submit", "wait", "cancel", "promote", "poll", "progress", "mark_read"])
@pytest.mark.parametrize(("after", "cache"), [(False, True), (True, False)])
def test_interrupt_inside_the_link(
    method: str, after: bool, cache: bool, model: PreTrainedModel, expected: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the link did what it was called for, or after, when only the caller does not know."""
    link = slow_link()
    called, raise_ = getattr(link, method), RaiseAt(0, KeyboardInterrupt())

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if not after:
            raise_()
        result = called(*args, **kwargs)
        if after:
            raise_()
        return result

    monkeypatch.setattr(link, method, interrupted)
    with still_right(model, expected, link=link, cache=cache) as offloaded:
        for count in (1, 7):
            raise_.count = count
            try:
                greedy(offloaded, INPUTS)
            except KeyboardInterrupt:
                assert raise_.count == 0
            raise_.count = 0
            assert_same(greedy(offloaded, INPUTS), expected)


@pytest.mark.parametrize("step", [149, pytest.param(37, marks=pytest.mark.slow)])
@pytest.mark.parametrize("disk", [False, True])
def test_interrupt_at_any_line(disk: bool, step: int, model: PreTrainedModel, expected: Result) -> None:
    """A signal arrives between any two lines of the runtime's own code: the next generation is right all the same."""
    runtime = os.path.dirname(offloading_module.__file__)
    folders = {os.path.join(runtime, room) for room in ("engine", "links", "storage")}
    left = 0

    def trace(frame: Any, event: str, _argument: Any) -> Any:
        nonlocal left
        if os.path.dirname(frame.f_code.co_filename) not in folders:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        # leaving a `with`, a trace is called with the block left and the lock held: a signal never comes there
        if event == "line" and not line.startswith("with "):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    short = greedy(model, INPUTS, 2)
    before, interrupted = sys.gettrace(), 0
    options = {"store": "disk", "link": DiskOnDevice(TimedDevice(1e9), buffers=2)} if disk else {}
    with still_right(model, expected, slots=4, **options) as offloaded:
        for lines in range(1, 3000, step):
            left = lines
            sys.settrace(trace)
            try:
                greedy(offloaded, INPUTS, 2)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                sys.settrace(before)  # that of whoever measures coverage
            assert_same(greedy(offloaded, INPUTS, 2), short)
    assert interrupted > 800 // step


# copies and memory that fail ---------------------------------------------------------------------------------------


class _Unreliable(EmulatedLink):
    """Loses some copies, in the thread that moves them or when they are submitted."""

    def __init__(self, *, submitting: bool) -> None:
        super().__init__(1e9, 2e-5, jitter=1e-4, seed=1)
        self.submitting = submitting
        self.fails = RaiseAt(0, OSError("bus error"))

    def _transfer(self, copy: Transfer, end: float) -> None:
        if not self.submitting:
            self.fails()
        super()._transfer(copy, end)
        if not self.submitting:
            self.fails()

    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = FULL) -> Transfer:
        if self.submitting:
            self.fails()
        return super().submit(key, slot, urgent=urgent, precision=precision)


@pytest.mark.parametrize("submitting", [True, False])
@pytest.mark.parametrize("cache", [True, False])
def test_a_copy_fails(submitting: bool, cache: bool, model: PreTrainedModel, expected: Result) -> None:
    link, failed = _Unreliable(submitting=submitting), 0
    with still_right(model, expected, link=link, cache=cache) as offloaded:
        for count in range(1, 60, 8):
            link.fails.count = count
            try:
                got = greedy(offloaded, INPUTS)
            except OSError:
                failed += 1
            else:  # a forecast's copy that was lost is loaded again when its layer asks for it
                assert_same(got, expected)
            link.fails.count = 0
            assert_same(greedy(offloaded, INPUTS), expected)
    assert failed > 1


class _Failing(Observer):
    """Raises when the n-th copy that a layer waits for, or that a forecast asked for, has come."""

    def __init__(self, count: int, *, urgent: bool) -> None:
        self._raise, self._urgent = RaiseAt(count, ZeroDivisionError()), urgent

    def copied(self, key: int, layer: int, start: float, end: float, urgent: bool) -> None:
        if urgent == self._urgent:
            self._raise()


LINKS: dict[str, Callable[[], dict[str, Any]]] = {
    "emulated": lambda: {"link": slow_link()},
    "instant": lambda: {"link": "instant"},
    "disk": lambda: {"link": "disk", "store": "disk"},
    "coded": lambda: {"link": "disk", "store": "disk", "codec": "bitsplit"},
    "staging": lambda: {"link": DiskOnDevice(TimedDevice(1e9), buffers=2), "store": "disk"},
}


@pytest.mark.parametrize("urgent", [True, False])
@pytest.mark.parametrize("link", LINKS)
def test_an_observer_fails(link: str, urgent: bool) -> None:
    """In whatever thread copies arrive: its exception is the forward's, and the next forward is right."""
    model = tiny_model("qwen3_moe").bfloat16()
    expected = greedy(model, INPUTS)
    failing = _Failing(1 if urgent else 5, urgent=urgent)
    with still_right(model, expected, observers=[failing], **LINKS[link]()) as offloaded:
        with pytest.raises(ZeroDivisionError):
            greedy(offloaded, INPUTS, 30)
        assert offloaded.link.copies


def test_no_memory_for_the_slots(model: PreTrainedModel, expected: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = facts_of(model)
    monkeypatch.setattr(offloading_module, "slots_for", lambda *_args: 10**11)
    with refused(r"slots=100000000000 need .* give fewer slots"):
        offload(model, slots=5)
    monkeypatch.undo()
    assert facts_of(model) == facts
    assert_same(greedy(model, INPUTS), expected)


def test_no_memory_to_put_the_experts_back(
    model: PreTrainedModel, expected: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights stay in the store, the model refuses to run, and closing again puts them back."""
    facts = facts_of(model)
    offloaded = offload(model, slots=5, link=slow_link())
    allocate, fails = torch.empty_strided, RaiseAt(4, torch.OutOfMemoryError("no memory"))
    monkeypatch.setattr(torch, "empty_strided", lambda *args, **kwargs: fails() or allocate(*args, **kwargs))
    with pytest.raises(ExpertcastError, match=r"no memory to put the experts back: free some and call close\(\) again"):
        offloaded.close()
    for run in (lambda: offloaded(**INPUTS), lambda: model(**INPUTS)):
        with pytest.raises(ExpertcastError, match="close"):
            run()
    offloaded.close()
    assert facts_of(model) == facts
    assert_same(greedy(model, INPUTS), expected)


@pytest.mark.parametrize("step", range(8))
def test_offload_fails_on_the_way(
    step: int, model: PreTrainedModel, expected: Result, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted while packing (within a layer too), making slots, starting the link, hooking, switching."""
    facts, threads = facts_of(model), threading.active_count()
    target, name, count = [
        (ExpertStore, "fill", 1),
        (ExpertStore, "fill", 3),
        (Tensor, "new_empty", 4),
        (SlotPool, "__init__", 1),
        (EmulatedLink, "attach", 1),
        (Engine, "attach", 2),
        (RouterTaps, "_attach", 2),
        (type(model), "set_experts_implementation", 3),
    ][step]
    called, raise_ = getattr(target, name), RaiseAt(count, KeyboardInterrupt())
    monkeypatch.setattr(target, name, lambda *args, **kwargs: raise_() or called(*args, **kwargs))
    with pytest.raises(KeyboardInterrupt):
        offload(model, slots=5, link=slow_link())
    monkeypatch.undo()
    assert facts_of(model) == facts
    assert threading.active_count() == threads
    assert_same(greedy(model, INPUTS), expected)
    with still_right(model, expected):
        pass


# what users do to an offloaded model -------------------------------------------------------------------------------


def test_use_after_close(model: PreTrainedModel, expected: Result) -> None:
    offloaded = offload(model, slots=5, predictor="next_norm", forecasts="always", link=slow_link())
    find_moe_layers(model)  # routers run, our experts function does not
    offloaded.close()
    offloaded.close()
    for use in (lambda: offloaded.generate(**INPUTS), lambda: offloaded(**INPUTS), offloaded.__enter__):
        with pytest.raises(ExpertcastError, match="this offload is closed"):
            use()
    assert_same(greedy(model, INPUTS), expected)
    with still_right(model, expected):
        pass


MOVES: list[Callable[[Any], Any]] = [
    lambda model: model.to(torch.float32),
    lambda model: model.half(),
    lambda model: model.to("meta"),
    lambda model: model.share_memory(),
    lambda model: model.base_model.to(torch.float32),
    lambda model: model.model.layers[2].float(),
    lambda model: model.model.layers[2].mlp.experts.double(),
    lambda model: model.to_empty(device="cpu"),
]


def test_the_model_is_moved(model: PreTrainedModel, expected: Result) -> None:
    with still_right(model, expected) as offloaded:
        for move in MOVES:
            with pytest.raises(ExpertcastError, match="close the offload before moving or converting"):
                move(model)
        assert model.to("cpu").to(torch.bfloat16) is model, "to where it is"
        assert_same(greedy(offloaded, INPUTS), expected)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("slots", [5, 8])
def test_weights_cannot_be_saved_loaded_or_copied(
    slots: int, model: PreTrainedModel, expected: Result, tmp_path: Path
) -> None:
    """With as many slots as experts, slots even have the weights' shapes."""
    weights = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    part = {name: tensor for name, tensor in weights.items() if ".2.mlp.experts." in name}
    with still_right(model, expected, slots=slots):
        for what in (
            lambda: model.state_dict(),
            lambda: model.model.layers[2].mlp.state_dict(),
            lambda: model.save_pretrained(tmp_path),
            lambda: model.load_state_dict(weights),
            lambda: model.load_state_dict(part, strict=False),
            lambda: model.model.layers[2].mlp.experts.load_state_dict(
                {name.rpartition(".")[2]: tensor for name, tensor in part.items()}
            ),
            lambda: copy.deepcopy(model),
            lambda: copy.deepcopy(model.model.layers[2]),
        ):
            with pytest.raises(ExpertcastError, match="close the offload before"):
                what()
    assert not list(tmp_path.glob("*.safetensors"))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_the_experts_implementation_is_changed(implementation: str, model: PreTrainedModel, expected: Result) -> None:
    with still_right(model, expected, slots=16) as offloaded:
        model.set_experts_implementation(implementation)
        for run in (lambda: offloaded(**INPUTS), lambda: model.generate(**INPUTS, max_new_tokens=2)):
            with pytest.raises(ExpertcastError, match=f"implementation was changed to '{implementation}'"):
                run()
        model.set_experts_implementation("expertcast")
        assert_same(greedy(offloaded, INPUTS), expected)
        model.set_experts_implementation(implementation)
        model.set_experts_implementation("expertcast")


def test_closed_while_the_implementation_is_another(model: PreTrainedModel, expected: Result) -> None:
    facts = facts_of(model)
    with offload(model, slots=5):
        model.set_experts_implementation("eager")
    assert facts_of(model) == facts
    assert_same(greedy(model, INPUTS), expected)


def test_parameters_replaced(model: PreTrainedModel, expected: Result) -> None:
    with still_right(model, expected) as offloaded:
        experts = offloaded.view[1].experts
        mine = experts.down_proj
        experts.down_proj = nn.Parameter(torch.zeros_like(mine), requires_grad=False)
        with pytest.raises(ExpertcastError, match="down_proj was changed or moved while the model is offloaded"):
            offloaded(**INPUTS)
        experts.down_proj = mine


def test_inference_mode(model: PreTrainedModel, expected: Result) -> None:
    """Offloaded and closed within: the weights that are put back are no inference tensors."""
    with torch.inference_mode(), still_right(model, expected):
        pass
    assert not any(parameter.is_inference() for parameter in model.parameters())
    with torch.inference_mode():
        offloaded = offload(model, slots=5, predictor="next_norm", forecasts="always")
    assert_same(greedy(offloaded, INPUTS), expected)
    offloaded.close()
    model(**INPUTS, labels=INPUTS["input_ids"]).loss.backward()


# the end -----------------------------------------------------------------------------------------------------------


def test_closed_with_prefetches_under_way(model: PreTrainedModel, expected: Result) -> None:
    """A slow link is still busy with forecasts when the offload is closed."""
    link = EmulatedLink(1e9, 5e-3)
    facts, threads = facts_of(model), threading.active_count()
    policies = "prefetch=top_k:overfetch=4.0"
    offloaded = offload(model, slots=16, predictor="next_norm", forecasts="always", link=link, policies=policies)
    handle = offloaded.view[2].block.register_forward_pre_hook(RaiseAt(2, KeyError()))
    with pytest.raises(KeyError), offloaded:
        greedy(offloaded, INPUTS)
    handle.remove()
    assert facts_of(model) == facts
    assert threading.active_count() == threads
    assert_same(greedy(model, INPUTS), expected)


def test_closed_from_a_hook(model: PreTrainedModel, expected: Result) -> None:
    """Within a forward the slots cannot be taken away: one error, and the offload is as it was."""
    with still_right(model, expected) as offloaded:
        handle = offloaded.view[1].block.register_forward_hook(lambda *_args: offloaded.close())
        with pytest.raises(ExpertcastError, match="a forward of this model is running"):
            greedy(offloaded, INPUTS)
        handle.remove()


@pytest.mark.usefixtures("swept")
def test_dropped_without_close() -> None:
    """Model, store and the link's thread go when nobody holds the model any more."""
    threads = threading.active_count()
    model = tiny_model("qwen3_moe")
    offloaded = offload(model, slots=5, predictor="next_norm", forecasts="always", link=slow_link())
    greedy(offloaded, INPUTS)
    gone = [weakref.ref(thing) for thing in (model, offloaded.store, offloaded.link, offloaded.view[0].experts)]
    del model, offloaded
    gc.collect()
    gc.collect()  # the link's thread lets go of the store as it ends
    assert [thing() for thing in gone] == [None] * len(gone)
    assert threading.active_count() == threads


class _Holder(Observer):
    """Holds a model, and drops it in the thread in which a copy arrives."""

    def __init__(self) -> None:
        self.held: list[object] = []
        self.let_go = threading.Event()

    def copied(self, key: int, layer: int, start: float, end: float, urgent: bool) -> None:
        if self.let_go.is_set():
            self.held.clear()
            gc.collect()


@pytest.mark.usefixtures("swept")
@pytest.mark.parametrize("disk", [False, True])
def test_dropped_in_the_links_own_thread(disk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose end it cannot wait for; all threads end."""
    unraisable, holder = list[object](), _Holder()
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    link, store = (DiskLink(bandwidth=30e3), "disk") if disk else (EmulatedLink(30e3), "memory")
    offloaded = offload(tiny_model("qwen3_moe"), slots=5, observers=[holder], link=link, store=store)
    del link
    gone = weakref.ref(offloaded.model)
    gc.collect()
    offloaded.link.submit(3, 0, urgent=True)  # takes a tenth of a second
    holder.held.append(offloaded)
    del offloaded
    holder.let_go.set()
    deadline = time.monotonic() + 10
    while (gone() is not None or _own_threads()) and time.monotonic() < deadline:
        time.sleep(0.2)
        gc.collect()  # the store goes when the link's threads have let go of it
    assert gone() is None
    assert not _own_threads()
    assert not unraisable


def _own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("expertcast")]


@pytest.mark.usefixtures("swept")
def test_the_handle_is_dropped(model: PreTrainedModel, expected: Result) -> None:
    """The model goes on from its slots."""
    offload(model, slots=5, predictor="next_norm", forecasts="always", link=slow_link())
    gc.collect()
    assert_same(greedy(model, INPUTS), expected)
    model._expertcast.close()  # or the link's thread ends while some other test counts threads


# several models, threads, processes --------------------------------------------------------------------------------


def test_two_models_at_once() -> None:
    models = [tiny_model("qwen3_moe"), tiny_model("qwen3_moe", seed=7), tiny_model("gpt_oss")]
    expected = [greedy(model, INPUTS) for model in models]
    assert not torch.equal(expected[0][0], expected[1][0])
    with (
        offload(models[0], slots=4, predictor="next_norm", forecasts="always", link=slow_link()) as first,
        offload(models[1], slots=4, predictor="next_norm", forecasts="always", link=slow_link(), cache=False) as second,
        offload(models[2], slots=4) as third,
    ):
        for _ in range(2):
            for offloaded, own in zip((first, second, third), expected, strict=True):
                assert_same(greedy(offloaded, INPUTS, 8), own)
        caches = [None, None]
        for token in expected[0][0][0]:  # step by step in turns
            for index, offloaded in enumerate((first, second)):
                output = offloaded(input_ids=token.view(1, 1), past_key_values=caches[index], use_cache=True)
                caches[index] = output.past_key_values
        with pytest.raises(ExpertcastError, match="offloaded already: close the other offload first"):
            offload(models[0], slots=4)
        first.close()
        assert_same(greedy(second, INPUTS), expected[1])
    for model, own in zip(models, expected, strict=True):
        assert_same(greedy(model, INPUTS), own)


def test_what_two_offloads_may_not_share(model: PreTrainedModel, expected: Result) -> None:
    other = tiny_model("qwen3_moe", seed=7)
    link = slow_link()
    cls = predictor_class("next_norm")
    predictor = cls(cls.config_class(), find_moe_layers(model).shape)
    with offload(model, slots=5, link=link, predictor=predictor, forecasts="always") as offloaded:
        for shared in ({"link": link}, {"predictor": predictor}, {"store": offloaded.store}):
            with pytest.raises(ExpertcastError, match="serves another offload: close that one first"):
                offload(other, slots=5, **shared)
        assert_same(greedy(offloaded, INPUTS), expected)
    with offload(other, slots=5, link=link, predictor=predictor, forecasts="always"):
        pass


def test_two_models_with_one_config(expected: Result) -> None:
    """transformers keeps the experts implementation in the config: offloading one would switch the other."""
    model = tiny_model("qwen3_moe")
    twin = type(model)(model.config).to(torch.bfloat16).eval()
    own = greedy(twin, INPUTS)
    with offload(model, slots=5) as offloaded:
        with pytest.raises(ExpertcastError, match="config"):
            twin(**INPUTS)
        with pytest.raises(ExpertcastError, match="deepcopy"):
            offload(twin, slots=5)
        assert_same(greedy(offloaded, INPUTS), expected)
    assert_same(greedy(twin, INPUTS), own)


def test_two_threads(model: PreTrainedModel, expected: Result) -> None:
    """A forward beside a running one is refused; after it, any thread may run."""
    with still_right(model, expected) as offloaded:
        inside, go_on = threading.Event(), threading.Event()

        def hold(*_args: Any) -> None:
            inside.set()
            assert go_on.wait(20)

        handle = offloaded.view[2].experts.act_fn.register_forward_hook(hold)  # type: ignore[operator, union-attr]
        results: list[Result] = []
        thread = threading.Thread(target=lambda: results.append(greedy(offloaded, INPUTS)))
        thread.start()
        assert inside.wait(20)
        with pytest.raises(ExpertcastError, match="another thread is running this offloaded model"):
            offloaded(**INPUTS)
        with pytest.raises(ExpertcastError, match="a forward of this model is running"):
            offloaded.close()
        go_on.set()
        thread.join()
        handle.remove()
        assert_same(results[0], expected)


def test_a_forward_inside_a_forward(model: PreTrainedModel, expected: Result) -> None:
    with still_right(model, expected) as offloaded:
        handle = offloaded.view[1].experts.act_fn.register_forward_hook(lambda *_args: model(**INPUTS) and None)  # type: ignore[operator, union-attr]
        with pytest.raises(ExpertcastError, match="inside another one"):
            greedy(offloaded, INPUTS)
        handle.remove()


def test_experts_of_another_layer_called_from_a_hook(model: PreTrainedModel, expected: Result) -> None:
    """The same ids at another layer are other experts."""
    outputs: list[Tensor] = []

    def ask_layer_three(_module: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        outputs.append(layers[3].mlp.experts(args[0].reshape(-1, 32), output[2], output[1]))

    layers: Any = model.model.layers
    handle = layers[1].mlp.gate.register_forward_hook(ask_layer_three)
    greedy(model, INPUTS)
    handle.remove()
    reference, outputs = outputs, []
    with still_right(model, expected):
        handle = layers[1].mlp.gate.register_forward_hook(ask_layer_three)
        assert_same(greedy(model, INPUTS), expected)
        handle.remove()
    assert len(outputs) == len(reference) > 1
    assert all(torch.equal(own, other) for own, other in zip(outputs, reference, strict=True))


def _in_child(run: Callable[[], Any], answer: Any) -> None:
    torch.set_num_threads(1)
    try:
        run()
        answer.put("ran")
    except ExpertcastError as error:
        answer.put(str(error))


def test_fork(model: PreTrainedModel, expected: Result) -> None:
    """The link's thread does not live on in the child: it is told so, and the parent goes on."""
    context = multiprocessing.get_context("fork")
    answer = context.SimpleQueue()
    with still_right(model, expected) as offloaded:
        child = context.Process(target=_in_child, args=(lambda: offloaded(**INPUTS), answer))
        child.start()
        child.join(30)
        assert child.exitcode == 0
        assert "offloaded in another process" in answer.get()


# What offload changes it puts back; what goes wrong leaves the model usable; bad input gives one line


def test_everything_is_put_back() -> None:
    model = tiny_model("gpt_oss")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    facts = (facts_of(model), [m.training for m in model.modules()])
    numbers = [module.num_experts for module in model.modules() if hasattr(module, "num_experts")]
    strides = [parameter.stride() for parameter in parameters.values()]
    with offload(model, slots=2, predictor="next_norm", forecasts="always") as offloaded:
        greedy(offloaded, {"input_ids": torch.tensor([[3, 4, 5]])})
        assert parameters["model.layers.0.mlp.experts.gate_up_proj"].numel() == 0, "the model's own memory is released"
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name].view(torch.uint8), before[name].view(torch.uint8)) for name in before)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert facts == (facts_of(model), [m.training for m in model.modules()])
    assert numbers == [module.num_experts for module in model.modules() if hasattr(module, "num_experts")]
    assert strides == [parameter.stride() for parameter in parameters.values()]


def test_routing_changed_by_another_hook(reference_model: PreTrainedModel, one: dict[str, Tensor]) -> None:
    """Ids that are not the router's are executed as given."""

    def turn(_module: nn.Module, _args: Any, output: Any) -> Any:
        logits_TE, weights_TK, ids_TK = output
        return logits_TE, weights_TK, (ids_TK + 7) % 64

    view = find_moe_layers(reference_model)
    with offload(reference_model, slots=9, predictor="next_norm", forecasts="always") as offloaded:
        handle = view[4].router.register_forward_hook(turn)
        got = greedy(offloaded, one, 4)
        handle.remove()
    handle = view[4].router.register_forward_hook(turn)
    expected = greedy(reference_model, one, 4)
    handle.remove()
    assert_same(got, expected)


def test_no_gradients() -> None:
    ids = torch.arange(1, 9)[None]
    with offload(tiny_model("qwen3_moe"), slots=8) as offloaded, torch.enable_grad():
        loss = offloaded(input_ids=ids, labels=ids).loss
        with pytest.raises(ExpertcastError, match="close the offload before training"):
            loss.backward()


def test_experts_function_outside_an_offload() -> None:
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation("expertcast")
    with pytest.raises(ExpertcastError, match=r"runs only inside expertcast\.offload"):
        model(input_ids=torch.tensor([[1]]))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"slots": 3}, "slots=3 is fewer than the 4 experts one token needs: give slots=4"),
        ({"memory": "100KB"}, "memory='100KB' holds 0 experts of 36.9 kB beside "),
        ({"mode": "speculate"}, "mode 'speculate' executes forecasts: give a predictor"),
        ({"mode": "hybrid", "predictor": "next_norm"}, r"give layers=\[...\], or a checkpoint"),
        ({"mode": "hybrid", "predictor": "next_norm", "layers": [12]}, r"layers=\[12\] do not exist"),
        ({"predictor": "quasi_hidden"}, "'quasi_hidden' must be trained"),
        ({"predictor": "oracle"}, "unknown predictor 'oracle'"),
        ({"predictor": "next_norm", "ahead": 2}, "layers ahead, not 2"),
        ({"predictor": "next_norm", "ahead": 0}, "ahead=0: must be greater than or equal to 1"),
        ({"link": "telepathy"}, "unknown link 'telepathy'"),
        ({"link": "cuda"}, "link 'cuda' needs a model on CUDA"),
        ({"link": "instant", "bandwidth": 1e9}, "bandwidth"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], line: str, reference_model: PreTrainedModel) -> None:
    with refused(line):
        offload(reference_model, **arguments)
    offload(reference_model, slots=4).close()


def test_wrong_models_and_predictors(reference_model: PreTrainedModel, tmp_path: Path) -> None:
    tiny = tiny_model("olmoe")
    view = find_moe_layers(tiny)
    cls = predictor_class("next_norm")
    predictor = cls(cls.config_class(), view.shape)
    with pytest.raises(ExpertcastError, match="predictor next_norm is for a model of"):
        offload(reference_model, predictor=predictor)
    save_predictor(predictor, tmp_path / "p", view=view)
    with pytest.raises(ExpertcastError, match="different router or norm weights"):
        offload(reference_model, predictor=tmp_path / "p")
    with offload(tiny, predictor=str(tmp_path / "p"), slots=2) as offloaded:
        offloaded(input_ids=torch.tensor([[1]]))
    with pytest.raises(ExpertcastError, match="no weights"):
        offload(meta_model(ModelSource.of("reference")))


def test_defaults_and_memory(reference_model: PreTrainedModel) -> None:
    with offload(reference_model) as offloaded:
        assert offloaded.pool.count == 12 * 64 // 4
    with offload(reference_model, cache=False) as offloaded:
        assert offloaded.pool.count == 3 * 4
    with offload(reference_model, memory="20GB") as offloaded:
        assert offloaded.pool.count == 12 * 64
        assert isinstance(offloaded.link, InstantLink)


# Two hundred times offloaded and closed: no memory, thread or file handle stays

CYCLES, WARM_UP = 201, 21
MOST_BYTES = 8 << 20
"""Of growth over 180 cycles, in which each takes about 1 MB for its forecasts alone."""


def _held() -> tuple[int, int, int]:
    """Threads and file handles of this process as the system counts them, and Python's threads.

    The least of a second: a thread that was joined is still counted for a moment.
    """
    counts = []
    for _ in range(50):
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), threading.active_count()))
        time.sleep(0.02)
    return min(counts)


def _resident() -> int:
    """Bytes of anonymous memory, after what is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(rows["RssAnon"].split()[0]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts what /proc says")
def test_two_hundred_cycles(tmp_path: Path) -> None:
    """Over links that copy and read in threads, with a predictor whose forecasts are traced.

    From memory, from a temporary disk store, and from a packed one that is opened again every time, as a loaded
    model does it; both have a thread that reads ahead.
    """
    model = tiny_model("qwen3_moe")
    prompt = torch.arange(1, 9)[None]
    expected = model(prompt).logits
    held, resident = [], []
    for cycle in range(CYCLES):
        kept = DiskStore(find_moe_layers(model), tmp_path, fingerprint="a") if cycle % 3 == 2 else None
        store = kept or ("memory", "disk")[cycle % 3]
        link = EmulatedLink(4e9) if store == "memory" else "disk"
        with offload(model, store=store, link=link, predictor="next_norm", forecasts="always", slots=20) as offloaded:
            logits = offloaded(prompt).logits
        if kept is not None:
            kept.close()
        del offloaded, link, store, kept
        if cycle in (WARM_UP, CYCLES - 1):
            assert torch.equal(logits, expected)
            held.append(_held())
            resident.append(_resident())
    assert all(now <= then for then, now in zip(*held, strict=True)), held
    assert resident[1] - resident[0] < MOST_BYTES
