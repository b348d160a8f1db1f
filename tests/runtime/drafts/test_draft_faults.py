"""A fault while drafting or verifying leaves cache, slots and model as they should be, whoever raises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation import BaseStreamer

from expertcast import OffloadedModel, offload
from tests.runtime.drafts.loops import SLOTS, check_books, prompt, tiny
from tests.runtime.faults import RaiseAt, facts_of, slow_link

NEW = 10
Given = dict[str, Any]
Place = Callable[[OffloadedModel, RaiseAt, Given], AbstractContextManager[None]]


class _Processor(LogitsProcessor):  # type: ignore[misc]
    def __init__(self, raises: RaiseAt) -> None:
        self._raises = raises

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._raises()
        return scores


class _Streamer(BaseStreamer):  # type: ignore[misc]
    def __init__(self, raises: RaiseAt) -> None:
        self._raises = raises

    def put(self, value: torch.Tensor) -> None:
        self._raises()

    def end(self) -> None:
        """Do nothing."""


def _module(layer: int, which: str) -> Place:
    @contextmanager
    def place(offloaded: OffloadedModel, raises: RaiseAt, _given: Given) -> Iterator[None]:
        module = getattr(offloaded.view[layer], which)
        handle = module.register_forward_hook(raises)
        yield
        handle.remove()

    return place


def _link(method: str) -> Place:
    @contextmanager
    def place(offloaded: OffloadedModel, raises: RaiseAt, _given: Given) -> Iterator[None]:
        link = offloaded.link
        called = getattr(link, method)

        def interrupted(*args: Any, **kwargs: Any) -> Any:
            raises()
            return called(*args, **kwargs)

        setattr(link, method, interrupted)
        yield
        delattr(link, method)

    return place


@contextmanager
def _processor(_offloaded: OffloadedModel, raises: RaiseAt, given: Given) -> Iterator[None]:
    given["logits_processor"] = LogitsProcessorList([_Processor(raises)])
    yield


@contextmanager
def _streamer(_offloaded: OffloadedModel, raises: RaiseAt, given: Given) -> Iterator[None]:
    given["streamer"] = _Streamer(raises)
    yield


PLACES: dict[str, Place] = {
    "router": _module(1, "router"),
    "first experts": _module(0, "experts"),
    "last experts": _module(2, "experts"),
    "submit": _link("submit"),
    "wait": _link("wait"),
    "processor": _processor,
    "streamer": _streamer,
}


def own_threads() -> int:
    """Threads but for the one that watches progress bars."""
    return sum(type(thread).__name__ != "TMonitor" for thread in threading.enumerate())


def settled(model: PreTrainedModel, cache: DynamicCache, whole: torch.Tensor) -> None:
    """The cache holds so many tokens of the text: the model goes on behind them as behind the text itself."""
    held = cache.get_seq_length()
    lengths = {layer.get_seq_length() for layer in cache.layers if hasattr(layer, "get_seq_length")}
    assert lengths == {held}
    assert 5 <= held < whole.shape[1]
    with torch.no_grad():
        got = model(whole[:, held:], past_key_values=cache).logits
        expected = model(whole).logits[:, held:]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("family", "draft", "place"),
    [
        *(("qwen3_next", ("int4", "resident")[number % 2], place) for number, place in enumerate(PLACES)),
        *(("qwen3_moe", "int4", place) for place in PLACES),
        *(("qwen3_moe", draft, "last experts") for draft in ("resident", "speculate")),
        ("qwen3_moe", "drop_cascade", "processor"),
    ],
)
def test_nothing_is_left_of_a_fault(family: str, draft: str, place: str) -> None:
    model, ids_BS, hit = tiny(family), prompt(), 0
    facts, threads = facts_of(model), own_threads()
    layers, list_of = model.config.num_hidden_layers, model.model.layers
    plain: Given = {"max_new_tokens": NEW, "do_sample": False}
    with offload(model, slots=SLOTS, predictor="next_norm", link=slow_link(), forecasts="always") as offloaded:
        whole = offloaded.generate(ids_BS, **plain, draft="none")
        executed = offloaded._engine.speculator.layers
        assert offloaded.drafting is not None
        offloaded.generate(ids_BS, **plain, draft=draft, draft_length=3)
        for count, kind in ((2, RuntimeError), (4, KeyboardInterrupt), (11, RuntimeError)):
            raises, forwards = RaiseAt(count, kind("here")), RaiseAt(0, kind())
            cache = DynamicCache(config=model.config)
            given = {**plain, "past_key_values": cache}
            counted = model.base_model.register_forward_hook(forwards)
            with PLACES[place](offloaded, raises, given), suppress(kind):
                offloaded.generate(ids_BS, **given, draft=draft, draft_length=3)
            counted.remove()
            hit += raises.count == 0
            if raises.count == 0 and forwards.count < 0:  # the prompt went through
                settled(model, cache, whole)
            assert offloaded._engine.stage is None
            assert offloaded._engine.ahead is None
            assert offloaded._engine.speculator.layers == executed
            assert model.config.num_hidden_layers == layers
            assert model.model.layers is list_of
            assert torch.equal(offloaded.generate(ids_BS, **plain, draft=draft), whole), count
            check_books(offloaded)
        assert torch.equal(offloaded.generate(ids_BS, **plain, draft="none"), whole)
    assert hit >= 2
    assert facts_of(model) == facts
    assert own_threads() == threads
    assert torch.equal(model.generate(ids_BS, **plain), whole)


@pytest.mark.parametrize("draft", ["cascade", "fetch_lowest"])
def test_an_interrupt_between_draft_and_verification_leaves_no_copies_in_less(
    draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before those were given up: the next forward is exact."""
    model, ids_BS = tiny("qwen3_moe"), prompt()
    with torch.no_grad():
        before = model(ids_BS).logits
    with offload(model, slots=SLOTS) as offloaded, torch.no_grad():
        with monkeypatch.context() as patched:
            patched.setattr(offloaded.residency, "keep_full_only", RaiseAt(1, KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                offloaded.generate(ids_BS, max_new_tokens=NEW, do_sample=False, draft=draft, draft_length=3)
        assert torch.equal(offloaded(ids_BS).logits, before)
        check_books(offloaded)
