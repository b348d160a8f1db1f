"""Memory of the exact size; what cannot be page-locked stays pageable with one warning and works as well."""

from __future__ import annotations

import gc
import mmap
import platform
import subprocess
import sys
import threading
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from expertcast.data.machine import available_memory
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError
from expertcast.runtime.loading import load_offloaded
from expertcast.runtime.storage import memory as memory_module
from expertcast.runtime.storage.layout import BlockLayout
from expertcast.runtime.storage.memory import HostMemory, PageLock, commit, trim_heap
from expertcast.runtime.storage.store import ExpertStore
from tests.families.models import tiny_model

PAGE = mmap.PAGESIZE


class CountingDriver:
    """Locks up to `room` bytes and refuses the rest, as a driver does; keeps the books."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room
        self.locked: dict[int, int] = {}
        self.refused = 0

    def register(self, pointer: int, nbytes: int) -> str | None:
        assert pointer % PAGE == 0
        assert nbytes % PAGE == 0
        assert pointer not in self.locked
        if sum(self.locked.values()) + nbytes > self.room:
            self.refused += 1
            return "out of memory"
        self.locked[pointer] = nbytes
        return None

    def unregister(self, pointer: int) -> None:
        del self.locked[pointer]


def test_exact_size_aligned_and_zeroed() -> None:
    driver = CountingDriver()
    lock = PageLock(driver=driver)
    memory = HostMemory(5 * PAGE + 1, lock)
    assert memory.bytes.shape == (5 * PAGE + 1,)
    assert memory.bytes.data_ptr() % PAGE == 0
    assert not memory.bytes.any()
    memory.bytes.fill_(7)
    assert memory.pinned
    assert list(driver.locked.values()) == [6 * PAGE], "whole pages, and no power of two"
    assert lock.locked_bytes == 6 * PAGE
    memory.release()
    memory.release()
    assert driver.locked == {}
    assert lock.locked_bytes == 0


def test_unlocked_when_forgotten() -> None:
    driver = CountingDriver()
    memory = HostMemory(100, PageLock(driver=driver))
    kept = memory.bytes
    del memory
    gc.collect()
    assert driver.locked == {}
    kept.fill_(1)  # the mapping lives as long as a tensor views it


def test_released_memory_lives_as_long_as_a_tensor_views_it() -> None:
    memory = HostMemory(10 * PAGE)
    row = memory.bytes[PAGE:]
    memory.release()
    row.fill_(3)
    assert int(row.sum()) == 3 * 9 * PAGE
    assert not memory.pinned


@pytest.mark.parametrize("limit", ["budget", "driver"])
def test_what_does_not_fit_is_pageable_with_one_warning(limit: str) -> None:
    driver = CountingDriver(3 * PAGE if limit == "driver" else 1 << 40)
    lock = PageLock(3 * PAGE if limit == "budget" else None, driver)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        memories = [HostMemory(PAGE * 3 // 2, lock) for _ in range(4)]
    assert [memory.pinned for memory in memories] == [True, False, False, False]
    assert driver.refused == (limit == "driver"), "not asked again after a refusal"
    assert len(caught) == 1
    words = "out of memory" if limit == "driver" else f"{PAGE} bytes may still be locked"
    assert words in str(caught[0].message)
    assert f"only {2 * PAGE} bytes of the experts are page-locked" in str(caught[0].message)
    for memory in memories:
        memory.bytes.fill_(1)
        memory.release()
    assert driver.locked == {}
    assert HostMemory(PAGE * 3 // 2, lock).pinned, "released bytes may be locked again"


def test_store_locks_the_layers_that_fit() -> None:
    """Two of four layers are page-locked; every block holds its expert and comes back bit for bit."""
    model = tiny_model("gpt_oss")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    view = find_moe_layers(model)
    layer_bytes = -(-8 * BlockLayout.of(view).block_bytes // PAGE) * PAGE
    driver = CountingDriver(2 * layer_bytes)
    store = ExpertStore(view, lock=PageLock(driver=driver))
    with pytest.warns(UserWarning, match="stays pageable"):
        store.pack(view)
    assert [memory is not None and memory.pinned for memory in store._memory] == [True, True, False, False]
    for layer in view:
        for name, parameter in store.views(layer.index).items():
            assert torch.equal(parameter, before[f"{layer.experts_name}.{name}"])
    assert all(store.block(key).data_ptr() % 256 == 0 for key in range(32))
    store.unpack()
    assert driver.locked == {}
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_copies_are_page_locked_as_the_store_is() -> None:
    driver = CountingDriver()
    view = find_moe_layers(tiny_model("gpt_oss"))
    store = ExpertStore(view, lock=PageLock(driver=driver))
    store.pack(view)
    before = len(driver.locked)
    store.add_copies(("int4",))
    copies = store.copies("int4")
    assert copies._memory.pinned
    assert driver.locked[copies.block(0).data_ptr()] >= copies._memory.bytes.nbytes
    store.unpack()
    assert len(driver.locked) == 0 < before


def test_default_budget_is_the_memory_at_hand() -> None:
    available = available_memory()
    assert available is not None
    assert 0 < available < 1 << 50
    driver = CountingDriver()
    with pytest.warns(UserWarning, match="may still be locked"):
        assert not PageLock(driver=driver).lock(0, available + (1 << 34))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere pages are committed when they are used")
def test_pages_are_committed_and_keep_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "_PIECE", 16 << 20)
    memory = HostMemory(64 << 20)
    before = _resident(memory)
    memory.bytes[:5] = 7
    commit(memory.bytes)
    for thread in threading.enumerate():
        if thread.name == "commit-pages":
            thread.join()
    assert before == 0
    assert _resident(memory) == 64 << 20 or not _populates()
    assert memory.bytes[:6].tolist() == [7] * 5 + [0]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere pages are committed when they are used")
def test_a_process_may_end_while_pages_are_committed() -> None:
    """Such as after a short answer from many slots: the thread has the last reference, and frees the memory."""
    lines = (
        "import time, weakref",
        "from expertcast.runtime.storage import memory",
        "memory._PIECE = 1 << 27",
        "tensor = memory.HostMemory(1 << 28).bytes",
        "freed = weakref.ref(tensor)",
        "memory.commit(tensor)",
        "del tensor",
        "while freed() is not None: time.sleep(.0002)",
    )
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], check=False, timeout=60).returncode == 0


def test_impossible_size_is_one_line() -> None:
    with pytest.raises(ExpertcastError, match="cannot map 72057594037927936 bytes of host memory"):
        HostMemory(1 << 56)


def _peak() -> int:
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(rows["VmHWM"].split()[0]) * 1024


def _resident(memory: HostMemory) -> int:
    """Return the bytes of the memory's pages that are committed."""
    begin = f"{memory.bytes.data_ptr():x}-"
    rows = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(row for row in rows if row.startswith(begin))
    return int(next(row for row in rows if row.startswith("Rss:")).split()[1]) * 1024


def _populates() -> bool:
    """Whether the kernel is 5.14 or later."""
    return tuple(int(part) for part in platform.release().split(".")[:2]) >= (5, 14)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_packing_and_unpacking_never_hold_two_copies() -> None:
    """Of ten layers: one is in both places at a time, with some room for what the allocator keeps."""
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=256, num_hidden_layers=10, num_attention_heads=2, num_key_value_heads=2,
        head_dim=16, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=512,
    )  # fmt: skip
    view = find_moe_layers(Qwen3MoeForCausalLM(config).to(torch.bfloat16))
    store = ExpertStore(view)
    gc.collect()
    for step in (partial(store.pack, view), store.unpack):
        trim_heap()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = _peak()
        step()
        assert _peak() - before < 0.35 * store.nbytes


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_holds_the_checkpoint_once(tmp_path: Path) -> None:
    """One tensor per expert in the file, fused in the model: with some room for what the allocator keeps."""
    config = Qwen3MoeConfig(
        vocab_size=4096, hidden_size=256, num_hidden_layers=12, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, num_experts=48, num_experts_per_tok=4, moe_intermediate_size=384,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="200MB")
    size = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    gc.collect()
    trim_heap()
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak()
    with load_offloaded(tmp_path, device="cpu", slots=16, store="memory") as offloaded, torch.no_grad():
        offloaded.model(input_ids=torch.tensor([[1, 2, 3]]))
        assert 0.9 * size < _peak() - before < 1.15 * size


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestCuda:
    def test_locked_and_copied(self) -> None:
        memory = HostMemory(3 * PAGE + 5, PageLock())
        assert memory.pinned
        assert memory.bytes.is_pinned()
        memory.bytes.copy_(torch.arange(len(memory.bytes)).to(torch.uint8))
        copied = memory.bytes.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(copied.cpu(), memory.bytes)
        kept = memory.bytes
        memory.release()
        assert not kept.is_pinned()

    def test_a_refusal_leaves_no_error_behind(self) -> None:
        """The same range twice is what a driver refuses for certain."""
        first = HostMemory(4 * PAGE, PageLock())
        with pytest.warns(UserWarning, match="the driver refused"):
            assert not PageLock().lock(first.bytes.data_ptr(), 4 * PAGE)
        assert torch.ones(3, device="cuda").add_(1).sum().item() == 6
        first.release()
