"""The links on a real CUDA device: bytes, order between streams, graph capture, and what the host does not wait for.

The simulations in the modules beside this one try every order; here are the same rules on hardware.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from expertcast.data.moe_layers import find_moe_layers
from expertcast.runtime.benchmarking.bench import link_rate
from expertcast.runtime.links.cuda import CudaLink
from expertcast.runtime.links.disk_cuda import CudaDiskLink
from expertcast.runtime.links.driver import CudaDevice, Readback
from expertcast.runtime.recording.recorder import Recorder
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.layout import PRECISIONS
from expertcast.runtime.storage.packed import dequantise, dequantise_plain
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from tests.runtime.links.cuda_helpers import LONG, MARKS, attached, cuda_model, holds

pytestmark = MARKS


def _attached(kind: str, folder: Path) -> tuple[CudaLink, ExpertStore, SlotPool]:
    """A link to experts in page-locked memory, in pageable memory, or in a raw or coded file."""
    if kind in ("pinned", "pageable"):
        link = CudaLink(window=2)
        store, pool = attached(link, pinned=kind == "pinned")
        assert all(memory is not None and memory.pinned for memory in store._memory) is (kind == "pinned")
        return link, store, pool
    codec, _, buffers = kind.partition(" ")
    link, view = CudaDiskLink(buffers=int(buffers) if buffers else None), find_moe_layers(cuda_model())
    store = DiskStore(view, folder, codec=codec)
    store.pack(view)
    pool = SlotPool(store.layout, 12, torch.device("cuda"))
    link.attach(store, pool)
    assert link._memory is not None
    assert link._memory.pinned
    return link, store, pool


@pytest.mark.parametrize("kind", ["pinned", "pageable", "raw", "raw 1", "bitsplit", "bitsplit 1"])
def test_every_block_arrives(kind: str, tmp_path: Path) -> None:
    link, store, pool = _attached(kind, tmp_path)
    for first in (0, 12):
        copies = [link.submit(first + slot, slot, urgent=slot % 3 == 0) for slot in range(12)]
        for copy in copies:
            link.wait(copy)
        assert all(holds(pool, store, slot, first + slot) for slot in range(12))
        link.mark_read(list(range(12)))
    link.synchronize()
    assert link.copies == 24
    assert link.bytes_moved == 24 * store.layout.block_bytes
    assert link.busy_s > 0
    assert link_rate(link, store) > 0
    link.close()


@pytest.mark.parametrize(("kind", "marked"), [("pinned", True), ("pinned", False), ("raw", True), ("bitsplit", True)])
def test_a_slot_is_not_overwritten_while_it_is_read(kind: str, marked: bool, tmp_path: Path) -> None:
    """Without `mark_read` the slot is overwritten: the test can fail."""
    link, store, pool = _attached(kind, tmp_path)
    link.wait(link.submit(0, 0, urgent=True))
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    read = pool.block(0).clone()
    if marked:
        link.mark_read([0])
    copy = link.submit(9, 0, urgent=True)
    link.wait(copy)
    assert torch.equal(read.cpu(), store.block(0 if marked else 9))
    assert holds(pool, store, 0, 9)
    link.close()


@pytest.mark.parametrize("waited", [True, False])
def test_compute_waits_for_the_copy_and_the_host_does_not(waited: bool) -> None:
    link = CudaLink()
    store, pool = attached(link)
    with torch.cuda.stream(link._stream):
        torch.cuda._sleep(LONG)
    copy = link.submit(5, 0, urgent=True)
    if waited:
        link.wait(copy)
    read = pool.block(0).clone()
    assert not link.poll(copy), "the host came here before the copy was done"
    expected = store.block(5) if waited else torch.zeros_like(store.block(5))
    assert torch.equal(read.cpu(), expected)
    link.close()


def test_copies_are_on_the_recorders_clock() -> None:
    link, recorder = CudaLink(), Recorder("cuda")
    link.observer = recorder
    attached(link)
    recorder.step_start()
    for key in range(6):
        link.wait(link.submit(key, key, urgent=True))
    torch.cuda._sleep(1000)
    recorder.step_end()
    link.synchronize()
    (step,) = recorder.spans()
    spans = recorder.copies()
    assert [span.key for span in spans] == list(range(6))
    assert all(step.start <= span.start < span.end <= step.end for span in spans)
    assert sum(span.seconds for span in spans) == pytest.approx(link.busy_s, abs=1e-4)
    link.close()


class TestReadback:
    def test_values_of_a_late_kernel(self) -> None:
        readback = Readback(CudaDevice(torch.device("cuda")))
        ids_TK = torch.zeros(2, 4, dtype=torch.int64, device="cuda")
        torch.cuda._sleep(LONG)
        ids_TK.copy_(torch.arange(8, device="cuda").view(2, 4))
        pending = readback.start(ids_TK)
        torch.cuda._sleep(10 * LONG)  # the copy does not wait for later kernels
        running = torch.cuda.Event()
        running.record()
        assert pending.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert not running.query()

    def test_more_than_the_ring_holds(self) -> None:
        readback = Readback(CudaDevice(torch.device("cuda")))
        pending = [readback.start(torch.full((1 + step % 5, 8), step, device="cuda")) for step in range(100)]
        large = torch.arange(9000, device="cuda").view(-1, 9)
        assert readback.start(large).tolist() == large.tolist()
        for step, entry in enumerate(pending):
            assert entry.tolist() == [[step] * 8] * (1 + step % 5)


# Packed copies on a CUDA device


@pytest.mark.parametrize(("precision", "bits"), [("int8", 8), ("int4", 4), ("int2", 2)])
def test_the_devices_weights_are_the_hosts(precision: str, bits: int) -> None:
    """Products of 4 or 2 bits and a half-precision scale are exact; 8-bit products are rounded once or twice."""
    store, _ = attached(CudaLink())
    store.add_copies((precision,))
    packed = store.copies(precision)
    rows = packed.block(3)[: packed.layout.rows_nbytes].view(packed.layout.rows, -1)
    found, expected = dequantise_plain(rows.cuda(), bits).cpu(), dequantise(rows, bits)
    torch.testing.assert_close(found, expected, rtol=1e-6 if bits == 8 else 0, atol=1e-7 if bits == 8 else 0)


def test_packed_copies_become_blocks_while_compute_is_behind() -> None:
    """Expansions are launched at once and run after their copies; the next copy into a slot waits for them."""
    link = CudaLink()
    store, pool = attached(link)
    store.add_copies(PRECISIONS)
    assert all(packed._memory.pinned for packed in store.packed.values())
    torch.cuda._sleep(LONG)  # type: ignore[no-untyped-call]
    for slot, precision in enumerate(PRECISIONS):
        copy = link.submit(5 + slot, slot, urgent=True, precision=precision)
        link.wait(copy)
        link.expand(copy)
    seen = pool.block(0).clone()
    link.mark_read([0])
    link.wait(link.submit(20, 0, urgent=True))
    torch.cuda.synchronize()
    assert torch.equal(pool.block(0).cpu(), store.block(20))
    blocks = [seen.cpu(), pool.block(1).cpu(), pool.block(2).cpu()]
    for slot, (precision, block) in enumerate(zip(PRECISIONS, blocks, strict=True)):
        expected = torch.zeros_like(block)
        packed = store.copies(precision)
        packed.layout.expand(packed.block(5 + slot), expected)
        for name, view in store.layout.views(block).items():
            torch.testing.assert_close(view, store.layout.views(expected)[name])
    link.close()
