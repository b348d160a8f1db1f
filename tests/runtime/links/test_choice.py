"""link='auto' on CUDA: the fastest of the links that copy what they should."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from expertcast.predictors import ExpertcastError
from expertcast.runtime import InstantLink
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.experimental.kernel_link import KernelLink
from expertcast.runtime.links import speed as device_choice
from expertcast.runtime.links.base import Copy, Link
from expertcast.runtime.links.cuda import CudaLink
from expertcast.runtime.links.emulated import EmulatedLink
from expertcast.runtime.links.speed import choose, fastest_link, matmuls, misses_s
from expertcast.runtime.storage.layout import FULL, BlockLayout, Field
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from expertcast.runtime.transport import make_link
from tests.runtime.blocks import Blocks

LAYOUT = BlockLayout(fields=(Field(name="w", shape=(64,), dtype=torch.float32, offset=0),), block_bytes=256)


def _store_and_pool() -> tuple[ExpertStore, SlotPool]:
    return Blocks(LAYOUT, 9, torch.Generator().manual_seed(0)), SlotPool(LAYOUT, 5, torch.device("cpu"))


class _Slow(InstantLink):
    def wait(self, copy: Copy) -> None:
        time.sleep(0.02)
        super().wait(copy)


class _HoldsUp(InstantLink):
    """Copies a block in 3 ms, in which nothing else runs."""

    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = FULL) -> Copy:
        time.sleep(0.003)
        return super().submit(key, slot, urgent=urgent, precision=precision)


class _Beside(EmulatedLink):
    """Copies a block in 4 ms, whatever else runs."""

    def __init__(self) -> None:
        super().__init__(bandwidth=LAYOUT.block_bytes / 0.004)


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


def test_the_one_that_leaves_room_for_matmuls_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, five blocks come over in 15 ms and in 20 ms; beside 20 ms of computing in 35 ms and in 20 ms."""
    store, pool = _store_and_pool()
    assert choose(store, pool, (_Beside, _HoldsUp)) is _HoldsUp
    monkeypatch.setattr(device_choice, "matmuls", lambda _store, _pool: lambda: time.sleep(0.02))
    assert choose(store, pool, (_HoldsUp, _Beside)) is _Beside


@pytest.mark.parametrize("kind", [InstantLink, KernelLink])
def test_what_runs_beside_starts_once_a_round_before_compute_waits(
    kind: type[Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, pool = _store_and_pool()
    link, called = kind(), []
    link.attach(store, pool)
    for name in ("submit", "move", "wait", "join"):
        if hasattr(link, name):
            monkeypatch.setattr(link, name, _noting(called, name, getattr(link, name)))
    misses_s(link, store, pool, lambda: called.append("beside"))
    round_ = ["move", "beside", "join"] if kind is KernelLink else ["submit"] * 5 + ["beside"] + ["wait"] * 5
    assert called == round_ * 7


def _noting(called: list[str], name: str, function: Callable[..., object]) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        called.append(name)
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("columns", [32, 20])
def test_matmuls_read_the_weights_of_a_layers_step(native: bool, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 columns of bf16 are no whole 16 bytes: torch's grouped kernel refuses them."""
    fields = (
        Field(name="up", shape=(16, columns), dtype=torch.bfloat16, offset=0),
        Field(name="bias", shape=(8,), dtype=torch.bfloat16, offset=1024),
        Field(name="down", shape=(columns, 8), dtype=torch.bfloat16, offset=1280),
    )
    layout = BlockLayout(fields=fields, block_bytes=2048)
    store, pool = Blocks(layout, 9, torch.Generator().manual_seed(0)), SlotPool(layout, 12, torch.device("cpu"))
    for name in ("up", "down"):
        pool.views[name].copy_(torch.randn(pool.views[name].shape, generator=torch.Generator().manual_seed(1)))
    monkeypatch.setattr(device_choice, "has_persistent_grouped_mm", lambda _weight: native)
    grouped: list[object] = []
    monkeypatch.setattr(functional, "grouped_mm", _noting(grouped, "grouped", functional.grouped_mm))
    results = matmuls(store, pool)()
    assert len(grouped) == (2 if native and columns == 32 else 0)
    for name, result in zip(("up", "down"), results, strict=True):
        expected = pool.views[name][:8].float().sum(dim=2)
        assert torch.allclose(result.float().reshape(expected.shape), expected, rtol=0.02, atol=0.05)


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
    for options in ({"reach": 2}, {"forecasts": "worth"}, {"next_token": "folder"}, {"refit": 1.0}):
        assert isinstance(make_link(OffloadConfig(link="auto", **options), "cuda"), CudaLink)
        with pytest.raises(ExpertcastError, match=f"on the device, without {next(iter(options))}.* take link='cuda'"):
            make_link(OffloadConfig(link="kernel", **options), "cuda")
    with pytest.raises(ExpertcastError, match="choose from auto, instant, emulated, disk, cuda, kernel"):
        OffloadConfig(link="pcie")
