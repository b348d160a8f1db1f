"""The disk's links: the resident model's bits from a file, on the CPU in no memory but the slots, on CUDA by blocks.

Behind CUDA real files and readers run under a simulated device, in every order that CUDA allows.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from benchmarks.timed.device import TimedDevice
from torch import Tensor
from transformers import PreTrainedModel

from expertcast import OffloadConfig, offload
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError
from expertcast.runtime.config import make_link
from expertcast.runtime.links.base import InstantLink, Link
from expertcast.runtime.links.disk import DiskLink
from expertcast.runtime.links.disk_cuda import CudaDiskLink, buffer_count
from expertcast.runtime.policies import Policies
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.expert_file import FILE_NAME
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy
from tests.runtime.faults import INPUTS, RaiseAt
from tests.runtime.links.simulated_device import DiskOnDevice, SimulatedDevice, drive

SLOTS = 5
LINKS: dict[str, Callable[[], Link]] = {"cpu": DiskLink, "cuda": lambda: DiskOnDevice(TimedDevice(1e9))}


def _model(seed: int = 0) -> PreTrainedModel:
    return tiny_model("qwen3_moe", seed=seed).to(torch.bfloat16)


def _checked(link: Link) -> None:
    if isinstance(link, DiskOnDevice):
        assert not link.device.races  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["cpu", "cuda", "instant"])
@pytest.mark.parametrize("codec", ["raw", "bitsplit"])
def test_same_bits(name: str, codec: str, tmp_path: Path) -> None:
    """Without forecasts and with, also where a layer's experts come in chunks; then the model is what it was.

    Bytes read are fewer than those moved where experts are compressed, and set to zero with the others.
    """
    model = _model()
    before = greedy(model, INPUTS)
    settings: list[dict[str, Any]] = [
        {"slots": 20}, {"cache": False}, {"predictor": "next_norm", "slots": 9}, {"slots": 5}
    ]  # fmt: skip
    for fields in settings:
        made = {**LINKS, "instant": InstantLink}[name]()
        options = fields if name == "cpu" else {**fields, "link": made}
        with offload(model, store="disk", codec=codec, store_folder=tmp_path, **options) as offloaded:
            link = offloaded.link
            assert type(link) is type(made)
            assert_same(greedy(offloaded, INPUTS), before)
            stats = offloaded.stats.as_dict()
            assert stats["bytes_moved"] >= stats["misses"] * offloaded.store.layout.block_bytes > 0
            assert link.busy_s > 0
            _checked(link)
            if name != "instant":
                assert (link.bytes_read == link.bytes_moved) is (codec == "raw")
                assert link.bytes_read > 0
            assert offloaded.pool.block(0).data_ptr() % 4096 == 0
            offloaded.reset_stats()
            assert link.bytes_read == link.bytes_moved == 0
        assert_same(greedy(model, INPUTS), before)


def test_lower_precision_comes_from_memory() -> None:
    model, texts = _model(), []
    for make in (*LINKS.values(), InstantLink):
        with offload(model, store="disk", link=make(), slots=5, policies=Policies(miss="fetch_lowest")) as offloaded:
            texts.append(greedy(offloaded, INPUTS, 3))
            _checked(offloaded.link)
    assert_same(*texts[:2])
    assert_same(*texts[1:])


@pytest.mark.parametrize("name", LINKS)
def test_a_file_that_is_cut_off(name: str, tmp_path: Path) -> None:
    """One error for each forward, and one for putting the experts back; with its bytes again the model is right."""
    model = _model()
    before = greedy(model, INPUTS)
    offloaded = offload(model, store="disk", codec="raw", store_folder=tmp_path, slots=5, link=LINKS[name]())
    path = tmp_path / FILE_NAME
    content, times = path.read_bytes(), path.stat()
    os.truncate(path, len(content) // 2)
    for _ in range(2):
        with pytest.raises(ExpertcastError, match="was changed or truncated while it was in use"):
            greedy(offloaded, INPUTS)
    with pytest.raises(ExpertcastError, match="cannot be read: it was truncated"):
        offloaded.store.views(offloaded.store.layers - 1)
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert_same(greedy(offloaded, INPUTS), before)
    offloaded.close()
    assert_same(greedy(model, INPUTS), before)


def test_a_file_that_is_replaced_while_in_use(tmp_path: Path) -> None:
    """After an interrupted forward pass, the reopened reader reads the store's own file."""
    one, two = _model(), _model(seed=1)
    expected = greedy(one, INPUTS)
    with offload(one, store="disk", codec="raw", store_folder=tmp_path, slots=5) as offloaded:
        with offload(two, store="disk", codec="raw", store_folder=tmp_path, slots=5):
            pass
        interrupt = offloaded.view[2].experts.act_fn.register_forward_hook(RaiseAt(1, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            greedy(offloaded, INPUTS)
        interrupt.remove()
        assert_same(greedy(offloaded, INPUTS), expected)


def test_a_file_that_is_written_over_while_in_use(tmp_path: Path) -> None:
    """A reopened reader refuses the file too."""
    one, two = _model(), _model(seed=1)
    with offload(two, store="disk", codec="raw", store_folder=tmp_path / "two", slots=5):
        pass
    with offload(one, store="disk", codec="raw", store_folder=tmp_path / "one", slots=5) as offloaded:
        path = tmp_path / "one" / FILE_NAME
        content = path.read_bytes()
        shutil.copyfile(tmp_path / "two" / FILE_NAME, path)
        for _ in range(2):
            with pytest.raises(ExpertcastError, match="was changed or truncated while it was in use"):
                greedy(offloaded, INPUTS)
        with pytest.raises(ExpertcastError, match="remove the store"):
            offloaded.store.views(0)
        path.write_bytes(content)


# Random orders of reads, copies and kernels behind CUDA


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


def _wrong(seed: int, store: DiskStore, blocks: list[Tensor], buffers: int | None) -> int:
    """Return how many kernels of random layers read a wrong block."""
    link, pool = DiskOnDevice(SimulatedDevice(seed), buffers), SlotPool(store.layout, SLOTS, torch.device("cpu"))
    link.attach(store, pool)
    wrong = drive(seed, link, pool, blocks, layers=30, waited=1.0).wrong
    assert link.busy_s > 0
    assert link.bytes_moved == link.copies * store.layout.block_bytes
    link.close()
    return wrong


@pytest.mark.parametrize("buffers", [1, 3, None])
def test_no_schedule_lets_a_kernel_see_another_block(
    store: DiskStore, blocks: list[Tensor], buffers: int | None
) -> None:
    assert sum(_wrong(seed, store, blocks, buffers) for seed in range(8)) == 0


def test_blocks_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    for processors, buffers in ((2, 5), (64, 8)):
        monkeypatch.setattr("expertcast.runtime.links.disk_cuda.usable_processors", lambda count=processors: count)
        assert buffer_count(9 << 20, 4, coded=True) == buffers
    assert [buffer_count(mib << 20, 4) for mib in (400, 9, 4, 1)] == [4, 4, 4, 10]
    assert buffer_count(4096, 4) == 32


def test_what_is_taken_on_cuda(tmp_path: Path) -> None:
    def link(**fields: Any) -> Link:
        return make_link(OffloadConfig(store="disk", store_folder=tmp_path, **fields), "cuda")

    assert isinstance(link(), CudaDiskLink)
    assert isinstance(link(codec="bitsplit", bandwidth=1e9), CudaDiskLink)
    assert cast(CudaDiskLink, link(bandwidth=1e9)).bandwidth == 1e9
    with pytest.raises(ExpertcastError, match="'cuda' has no bandwidth or latency"):
        link(link="cuda", bandwidth=1e9)


def test_refusals(reference_model: PreTrainedModel, store: DiskStore) -> None:
    with pytest.raises(ExpertcastError, match="give store='disk'"):
        offload(reference_model, link="disk")
    with pytest.raises(ExpertcastError, match="latency"):
        offload(reference_model, store="disk", link="disk", latency=1e-3)
    assert all(torch.isfinite(parameter).all() for parameter in reference_model.parameters())
    memory, link = ExpertStore(find_moe_layers(_model())), LINKS["cuda"]()
    with pytest.raises(ExpertcastError, match="give store='disk'"):
        link.attach(memory, SlotPool(store.layout, 1, torch.device("cpu")))
    link.close()
    with pytest.raises(ExpertcastError, match="link='disk', which selects"):
        DiskLink().attach(store, SlotPool(store.layout, 1, torch.device("meta")))
    for kind in (DiskLink, CudaDiskLink):
        with pytest.raises(ExpertcastError, match="threads=0"):
            kind(0)
        with pytest.raises(ExpertcastError, match="bandwidth=0"):
            kind(bandwidth=0)
    with pytest.raises(ExpertcastError, match="buffers=0: give 1 or more"):
        CudaDiskLink(buffers=0)
