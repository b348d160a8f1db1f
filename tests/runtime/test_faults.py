"""What goes wrong in an offloaded forward: the model stays usable or there is one clear error, never a wrong number.

"Usable" is checked to the bit: the logits of a generation after the fault are those of the resident model.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.timed.device import TimedDevice
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from expertcast.data.taps import RouterTaps
from expertcast.predictors import ExpertcastError
from expertcast.runtime import EmulatedLink, OffloadedModel, offload
from expertcast.runtime import offloading as offloaded_module
from expertcast.runtime import offloading as offloading_module
from expertcast.runtime.engine.engine import Engine
from expertcast.runtime.links.base import Copy
from expertcast.runtime.recording.recorder import Observer
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy
from tests.runtime.faults import INPUTS, RaiseAt, Result, facts_of, slow_link, still_right
from tests.runtime.links.disk_on_device import DiskOnDevice


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_model("qwen3_moe")


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
    with offload(model, slots=5, predictor="next_norm", mode=mode, link=slow_link()) as offloaded:
        own = greedy(offloaded, INPUTS)
        for step in (1, 4):
            with pytest.raises(KeyboardInterrupt):
                offloaded.generate(
                    **INPUTS, max_new_tokens=8, logits_processor=LogitsProcessorList([_Interrupting(step)])
                )
            assert_same(greedy(offloaded, INPUTS), own)
    assert_same(greedy(model, INPUTS), expected)


@pytest.mark.parametrize("method", ["submit", "wait", "cancel", "promote", "poll", "progress", "mark_read"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("cache", [True, False])
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
        for count in (1, 2, 7, 20):
            raise_.count = count
            try:
                greedy(offloaded, INPUTS)
            except KeyboardInterrupt:
                assert raise_.count == 0
            raise_.count = 0
            assert_same(greedy(offloaded, INPUTS), expected)


@pytest.mark.parametrize("disk", [False, True])
def test_interrupt_at_any_line(disk: bool, model: PreTrainedModel, expected: Result) -> None:
    """A signal arrives between any two lines of the runtime's own code: the next generation is right all the same."""
    runtime = os.path.dirname(offloaded_module.__file__)
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
    options = {"store": "disk", "link": DiskOnDevice(TimedDevice(1e9), places=2)} if disk else {}
    with still_right(model, expected, slots=4, **options) as offloaded:
        for lines in range(1, 3000, 37):
            left = lines
            sys.settrace(trace)
            try:
                greedy(offloaded, INPUTS, 2)
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                sys.settrace(before)  # that of whoever measures coverage
            assert_same(greedy(offloaded, INPUTS, 2), short)
    assert interrupted > 20


# copies and memory that fail ---------------------------------------------------------------------------------------


class _Unreliable(EmulatedLink):
    """Loses some copies, in the thread that moves them or when they are submitted."""

    def __init__(self, *, submitting: bool) -> None:
        super().__init__(1e9, 2e-5, jitter=1e-4, seed=1)
        self.submitting = submitting
        self.fails = RaiseAt(0, OSError("bus error"))

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        super().attach(store, pool)
        move = self._mover.move

        def unreliable(*args: int) -> None:
            if not self.submitting:
                self.fails()
            move(*args)

        self._mover.move = unreliable  # type: ignore[method-assign]

    def submit(self, key: int, slot: int, *, urgent: bool) -> Copy:
        if self.submitting:
            self.fails()
        return super().submit(key, slot, urgent=urgent)


@pytest.mark.parametrize("submitting", [True, False])
@pytest.mark.parametrize("cache", [True, False])
def test_a_copy_fails(submitting: bool, cache: bool, model: PreTrainedModel, expected: Result) -> None:
    link, failed = _Unreliable(submitting=submitting), 0
    with still_right(model, expected, link=link, cache=cache) as offloaded:
        for count in range(1, 60, 4):
            link.fails.count = count
            try:
                got = greedy(offloaded, INPUTS)
            except OSError:
                failed += 1
            else:  # a forecast's copy that was lost is loaded again when its layer asks for it
                assert_same(got, expected)
            link.fails.count = 0
            assert_same(greedy(offloaded, INPUTS), expected)
    assert failed > 3


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
    "kernel": lambda: {"link": "kernel"},
    "disk": lambda: {"link": "disk", "store": "disk"},
    "coded": lambda: {"link": "disk", "store": "disk", "codec": "bitsplit"},
    "staging": lambda: {"link": DiskOnDevice(TimedDevice(1e9), places=2), "store": "disk"},
}


@pytest.mark.parametrize("urgent", [True, False])
@pytest.mark.parametrize("link", LINKS)
def test_an_observer_fails(link: str, urgent: bool) -> None:
    """In whatever thread copies arrive: its exception is the forward's, and the next forward is right."""
    model = tiny_model("qwen3_moe").bfloat16()
    expected = greedy(model, INPUTS)
    for count in (1, 5):
        failing = _Failing(count, urgent=urgent)
        with still_right(model, expected, observers=[failing], **LINKS[link]()) as offloaded:
            with pytest.raises(ZeroDivisionError):
                greedy(offloaded, INPUTS, 30)
            assert offloaded.link.copies


def test_no_memory_for_the_slots(model: PreTrainedModel, expected: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = facts_of(model)
    monkeypatch.setattr(offloading_module, "slot_count", lambda *_args: 10**11)
    with pytest.raises(ExpertcastError, match=r"slots=100000000000 of 3072 bytes each .* give fewer slots") as caught:
        offload(model)
    assert "\n" not in str(caught.value)
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
