"""The disk behind a CUDA device: real files and readers under a simulated device, in every order that CUDA allows."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from benchmarks.timed.device import TimedDevice
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError
from expertcast.runtime import OffloadConfig, offload
from expertcast.runtime.config import make_link
from expertcast.runtime.links.base import Copy
from expertcast.runtime.links.cuda import CudaLink, PacedCudaLink
from expertcast.runtime.links.disk import DiskLink
from expertcast.runtime.links.disk_cuda import CudaDiskLink, StagedCopy, Staging, places_of
from expertcast.runtime.policies import Policies
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.expert_file import FILE_NAME
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy
from tests.runtime.faults import INPUTS
from tests.runtime.links.disk_on_device import DiskOnDevice
from tests.runtime.links.simulated_device import SimulatedDevice

SLOTS = 5


def _model() -> PreTrainedModel:
    return tiny_model("qwen3_moe").to(torch.bfloat16)


@pytest.fixture(scope="module", params=["raw", "bitsplit"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiskStore]:
    view, folder = find_moe_layers(_model()), tmp_path_factory.mktemp("store")
    made = DiskStore(view, folder, codec=request.param)
    made.pack(view)
    yield made
    made.close()


@pytest.fixture(scope="module")
def blocks(store: DiskStore) -> list[Tensor]:
    return [store.block(key).clone() for key in range(store.layers * store.experts)]


def _drive(seed: int, store: DiskStore, blocks: list[Tensor], link: DiskOnDevice, layers: int = 30) -> int:
    """Random layers: keys are read, forecast, promoted, dropped and overwritten; how many kernels saw another block."""
    pool = SlotPool(store.layout, SLOTS, torch.device("cpu"))
    link.attach(store, pool)
    device, order, wrong = cast(SimulatedDevice, link.device), random.Random(seed), 0
    held: dict[int, tuple[int, Copy]] = {}

    def kernel(expected: dict[int, int]) -> None:
        nonlocal wrong
        wrong += sum(not torch.equal(pool.block(slot), blocks[key]) for key, slot in expected.items())

    for _ in range(layers):
        needed = order.sample(range(len(blocks)), 2)
        forecast = [key for key in order.sample(range(len(blocks)), 3) if key not in needed]
        for key in (*needed, *forecast):
            if key in held:
                continue
            slot = next((s for s in range(SLOTS) if s not in {other for other, _ in held.values()}), -1)
            if slot < 0:
                victim = order.choice([other for other in held if other not in needed])
                slot, copy = held.pop(victim)
                if not link.cancel(copy):
                    link.wait(copy)
            held[key] = slot, link.submit(key, slot, urgent=key in needed)
        for key in needed:
            if order.random() < 0.5:
                link.promote(held[key][1])
            link.wait(held[key][1])
        expected = {key: held[key][0] for key in needed}
        device.compute.push(lambda expected=expected: kernel(expected))  # type: ignore[misc]
        link.mark_read([held[key][0] for key in needed])
        device.steps(order.randrange(30))
        link.progress()
    device.synchronize()
    return wrong


@pytest.mark.parametrize("places", [1, 3, None])
def test_no_schedule_lets_a_kernel_see_another_block(
    store: DiskStore, blocks: list[Tensor], places: int | None
) -> None:
    for seed in range(8):
        link = DiskOnDevice(SimulatedDevice(seed), places)
        assert _drive(seed, store, blocks, link) == 0
        assert link.busy_s > 0
        assert link.bytes_moved == link.copies * store.layout.block_bytes
        link.close()


def test_a_block_given_back_too_early_is_seen(
    store: DiskStore, blocks: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = 0
    give_back, issue = Staging.give_back, CudaDiskLink._issue

    def issued(link: CudaDiskLink, copy: Copy) -> None:
        issue(link, copy)
        assert isinstance(copy, StagedCopy)
        give_back(link._open_staging, copy)

    monkeypatch.setattr(CudaDiskLink, "_issue", issued)
    monkeypatch.setattr(Staging, "give_back", lambda _staging, _copy: None)
    for seed in range(8):
        link = DiskOnDevice(SimulatedDevice(seed), 2)
        wrong += _drive(seed, store, blocks, link)
        link.close()
    assert wrong > 0


@pytest.mark.parametrize("codec", ["raw", "bitsplit"])
@pytest.mark.parametrize("fields", [{"slots": 5}, {"cache": False}, {"predictor": "next_norm", "slots": 9}])
def test_same_bits(codec: str, fields: dict[str, object], tmp_path: Path) -> None:
    """The engine's way, from a raw and a coded file; then the model is what it was."""
    model = _model()
    before, device = greedy(model, INPUTS), TimedDevice(1e9)
    options = {"store": "disk", "codec": codec, "store_folder": tmp_path, "link": DiskOnDevice(device), **fields}
    with offload(model, **options) as offloaded:  # type: ignore[arg-type]
        assert_same(greedy(offloaded, INPUTS), before)
        stats = offloaded.stats.as_dict()
        assert stats["bytes_moved"] >= stats["misses"] * offloaded.store.layout.block_bytes > 0
        assert offloaded.link.bytes_read > 0
    assert_same(greedy(model, INPUTS), before)
    assert not device.races


def test_lower_precision_comes_from_memory() -> None:
    model, texts = _model(), []
    for link in (DiskOnDevice(TimedDevice(1e9)), DiskLink()):
        with offload(model, store="disk", link=link, slots=5, policies=Policies(miss="fetch_lowest")) as offloaded:
            texts.append(greedy(offloaded, INPUTS, 3))
    assert_same(*texts)


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    """One error for each forward; with the bytes there again the model is right."""
    model = _model()
    before = greedy(model, INPUTS)
    with offload(model, store="disk", store_folder=tmp_path, slots=5, link=DiskOnDevice(TimedDevice(1e9))) as offloaded:
        path = tmp_path / FILE_NAME
        content, times = path.read_bytes(), path.stat()
        os.truncate(path, len(content) // 2)
        for _ in range(2):
            with pytest.raises(ExpertcastError, match="was changed or cut off while it was in use"):
                greedy(offloaded, INPUTS)
        path.write_bytes(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert_same(greedy(offloaded, INPUTS), before)


def test_a_block_that_could_not_be_filled_is_free_again(tmp_path: Path) -> None:
    view = find_moe_layers(_model())
    store, link = DiskStore(view, tmp_path), DiskOnDevice(SimulatedDevice(0), 1)
    store.pack(view)
    link.attach(store, pool := SlotPool(store.layout, 1, torch.device("cpu")))
    content, times = store.path.read_bytes(), store.path.stat()
    os.truncate(store.path, 4096)
    for _ in range(2):
        with pytest.raises(ExpertcastError, match="was changed or cut off while it was in use"):
            link.wait(link.submit(3, 0, urgent=True))
    store.path.write_bytes(content)
    os.utime(store.path, ns=(times.st_atime_ns, times.st_mtime_ns))
    link.wait(link.submit(3, 0, urgent=True))
    link.synchronize()
    assert torch.equal(pool.block(0), store.block(3))
    link.close()
    store.close()


def test_blocks_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expertcast.runtime.links.disk_cuda.usable_processors", lambda: 2)
    assert places_of(9 << 20, 4, coded=True) == 5
    monkeypatch.setattr("expertcast.runtime.links.disk_cuda.usable_processors", lambda: 64)
    assert places_of(9 << 20, 4, coded=True) == 8
    assert [places_of(mib << 20, 4) for mib in (400, 9, 4, 1)] == [4, 4, 4, 10]
    assert places_of(4096, 4) == 32


def test_what_is_taken_on_cuda(tmp_path: Path) -> None:
    def link(**fields: object) -> object:
        return make_link(OffloadConfig(store="disk", store_folder=tmp_path, **fields), "cuda")  # type: ignore[arg-type]

    assert isinstance(link(), CudaDiskLink)
    assert isinstance(link(codec="bitsplit", bandwidth=1e9), CudaDiskLink)
    assert isinstance(link(bandwidth=1e9), PacedCudaLink), "the device's own link, as slow as that"
    assert cast(CudaDiskLink, link(link="disk", bandwidth=1e9)).bandwidth == 1e9
    assert type(link(link="cuda")) is CudaLink, "which copies from the mapped file"


def test_refusals(store: DiskStore) -> None:
    view = find_moe_layers(_model())
    link = DiskOnDevice(TimedDevice(1e9))
    with pytest.raises(ExpertcastError, match="give store='disk'"):
        link.attach(ExpertStore(view), SlotPool(store.layout, 1, torch.device("cpu")))
    link.close()
    with pytest.raises(ExpertcastError, match="link='disk', which goes by that"):
        DiskLink().attach(store, SlotPool(store.layout, 1, torch.device("meta")))
    with pytest.raises(ExpertcastError, match="places=0: give 1 or more"):
        CudaDiskLink(places=0)
    with pytest.raises(ExpertcastError, match="threads=0"):
        CudaDiskLink(0)
