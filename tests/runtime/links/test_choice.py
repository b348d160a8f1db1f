"""link='auto' on CUDA: the fastest of the links that copy what they should."""

from __future__ import annotations

import time

import pytest
import torch

from expertcast.predictors import ExpertcastError
from expertcast.runtime import InstantLink
from expertcast.runtime.arguments import make_link
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.links import speed as device_choice
from expertcast.runtime.links.base import Copy, Link
from expertcast.runtime.links.kernel import KernelLink
from expertcast.runtime.links.speed import choose, fastest_link, misses_s
from expertcast.runtime.storage.layout import BlockLayout, Field
from expertcast.runtime.storage.precision import FULL
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from tests.runtime.blocks import Blocks

LAYOUT = BlockLayout(fields=(Field(name="w", shape=(64,), dtype=torch.float32, offset=0),), block_bytes=256)


def _store_and_pool() -> tuple[ExpertStore, SlotPool]:
    return Blocks(LAYOUT, 9, torch.Generator().manual_seed(0)), SlotPool(LAYOUT, 5, torch.device("cpu"))


class _Slow(InstantLink):
    def wait(self, copy: Copy) -> None:
        time.sleep(0.02)
        super().wait(copy)


class _Wrong(InstantLink):
    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = FULL) -> Copy:
        return super().submit(0, slot, urgent=urgent, precision=precision)


class _Unusable(InstantLink):
    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        raise ExpertcastError("not here")


def test_the_faster_one_is_taken_whatever_the_order() -> None:
    store, pool = _store_and_pool()
    assert choose(store, pool, (_Slow, KernelLink)) is KernelLink
    assert choose(store, pool, (InstantLink, _Slow)) is InstantLink


def test_both_kinds_are_timed_from_ids_to_blocks() -> None:
    store, pool = _store_and_pool()
    for kind in (InstantLink, KernelLink):
        link = kind()
        link.attach(store, pool)
        assert 0 < misses_s(link, store, pool) < 1
        assert link.copies == 7 * 5


def test_a_link_that_cannot_be_used_or_copies_wrongly_is_left_out() -> None:
    store, pool = _store_and_pool()
    assert choose(store, pool, (_Slow, _Unusable)) is _Slow
    with pytest.warns(UserWarning, match="link 'instant' is left out: expert 1 arrived with other bytes"):
        assert choose(store, pool, (_Slow, _Wrong)) is _Slow
    with pytest.raises(ExpertcastError, match="not here"):
        choose(store, pool, (_Unusable, _Slow))


def test_what_was_chosen_holds_for_stores_that_are_as_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that was the fastest for one store cannot read another that found no memory to lock."""
    store, pool = _store_and_pool()
    asked: list[list[bool]] = []

    def chosen(store: ExpertStore, *_: object) -> type[Link]:
        asked.append(store.pinned_layers)
        return KernelLink if all(store.pinned_layers) else InstantLink

    monkeypatch.setattr(device_choice, "choose", chosen)
    monkeypatch.setattr(device_choice, "_CHOSEN", {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "made up")
    for locked, kind in ((True, KernelLink), (False, InstantLink), (True, KernelLink), (False, InstantLink)):
        monkeypatch.setattr(Blocks, "pinned_layers", [locked])
        assert isinstance(fastest_link(store, pool), kind)
    assert asked == [[True], [False]]


def test_auto_measures_on_cuda_only() -> None:
    assert make_link(OffloadConfig(link="auto"), "cuda") is None
    assert isinstance(make_link(OffloadConfig(link="auto"), "cpu"), InstantLink)
    assert isinstance(make_link(OffloadConfig(link="kernel"), "cpu"), KernelLink)
    with pytest.raises(ExpertcastError, match="choose from auto, instant, emulated, cuda, kernel"):
        OffloadConfig(link="pcie")
