"""How fast a link is when nothing disturbs it, and which one a CUDA device is better off with.

The choice is measured on the real store, once per process: from a layer's ids, which are on the device, to its experts
in slots, with a layer's matmuls running beside the copies. The link with the copy engine reads the ids back first; the
kernel's link does not, but its copies take multiprocessors, may be slower, and may hold the matmuls up.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.experimental.kernel_link import KernelLink, has_persistent_grouped_mm
from expertcast.runtime.links.base import Link
from expertcast.runtime.links.cuda import CudaLink, PacedCudaLink
from expertcast.runtime.links.disk import DiskLink
from expertcast.runtime.links.disk_cuda import CudaDiskLink
from expertcast.runtime.links.driver import CudaDevice, Readback, copy_seconds
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore

_LARGE = 256 * 2**20
"""Bytes of the large copy; the store's own size if that is less."""
_SMALL = 4096
_REPEATS = 5
_ROUNDS = 5
_EXPERTS = 8

_CHOSEN: dict[tuple[str, int, int, bool], type[Link]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """What a link does when nothing disturbs it."""

    rate: float
    """Bytes per second of a large copy; of block copies back to back on a link that moves only blocks."""
    copy_s: float
    """Seconds of one expert's block among others back to back."""
    latency_s: float
    """Seconds that a copy takes whatever its size."""


def link_speed(link: Link, store: ExpertStore) -> LinkSpeed:
    """Measure a link that is attached to a store, with memory of its own: no slot of a run is touched.

    CUDA: page-locked copies between events, a large one for the rate and a small one for the latency, and what the link
    was told to add to them. Emulated: copies
    of blocks, back to back through a second link of the same numbers, in a thread of its own. Disk: the same, as fast
    as it reads. Instant: memory copies.
    To be called between forwards.

    Raises:
        ExpertcastError: a link of another kind on the CPU, whose speed nothing is known about.
    """
    if link.driver is not None and not isinstance(link, CudaDiskLink | DiskLink):
        return _cuda_speed(link, link.driver, store)
    block_bytes = store.layout.block_bytes
    copy_s = _block_seconds(store, link.twin())
    return LinkSpeed(rate=block_bytes / copy_s, copy_s=copy_s, latency_s=link.latency)


def _block_seconds(store: ExpertStore, link: Link) -> float:
    """Seconds per block of a series back to back, of the series that was disturbed least."""
    count = min(16, store.layers * store.experts)
    pool = SlotPool(store.layout, count, store.device)
    link.attach(store, pool)
    try:
        seconds = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            copies = [link.submit(key, slot, urgent=True) for slot, key in enumerate(range(count))]
            for copy in copies:
                link.wait(copy)
            if isinstance(link, CudaLink):
                link.synchronize()
            seconds.append((time.perf_counter() - start) / count)
    finally:
        link.close()
    return min(seconds)


def _cuda_speed(link: Link, driver: CudaDevice, store: ExpertStore) -> LinkSpeed:
    block_bytes = store.layout.block_bytes
    large = min(_LARGE, max(store.nbytes, block_bytes))
    small = min(_SMALL, large)
    seconds_of = {size: copy_seconds(driver, size) for size in {large, block_bytes, small}}
    rate = large / seconds_of[large]
    latency_s, copy_s = max(0.0, seconds_of[small] - small / rate), seconds_of[block_bytes]
    if isinstance(link, PacedCudaLink):
        rate, latency_s = link.bandwidth or rate, latency_s + link.latency
        copy_s = link.latency + block_bytes / rate
    return LinkSpeed(rate=rate, copy_s=copy_s, latency_s=latency_s)


def fastest_link(store: ExpertStore, pool: SlotPool) -> Link:
    """A new link for this store and pool, of the kind that was fastest; not attached."""
    locked = all(store.pinned_layers)  # another store may not be: what was chosen for the one cannot read the other
    key = torch.cuda.get_device_name(pool.device), store.layout.block_bytes, min(_EXPERTS, pool.count), locked
    if key not in _CHOSEN:
        _CHOSEN[key] = choose(store, pool, (CudaLink, KernelLink))
    return _CHOSEN[key]()


def choose(store: ExpertStore, pool: SlotPool, kinds: tuple[Callable[[], Link], ...]) -> type[Link]:
    """The kind by which a layer's copies and matmuls, started together, are both done first.

    That is a layer's time without a cache and with right forecasts, plus what a layer without one waits for its ids.
    The first kind is the one to fall back on where another cannot be used or copies wrongly.
    """
    seconds: dict[type[Link], float] = {}
    beside = matmuls(store, pool)
    for kind in kinds:
        link = kind()
        try:
            link.attach(store, pool)
            try:
                seconds[type(link)] = misses_s(link, store, pool, beside)
            finally:
                link.close()
        except Exception as error:
            if not seconds:
                raise
            if not isinstance(error, ExpertcastError):  # no page-locked memory, no Triton: nothing to report
                warnings.warn(f"link {link.name!r} is left out: {error}", stacklevel=2)
    return min(seconds, key=seconds.__getitem__)


def matmuls(store: ExpertStore, pool: SlotPool) -> Callable[[], list[Tensor]]:
    """Launches the matmuls of a layer's decode step: ones [experts, 1, K] times the first slots' [experts, K, N].

    By the `grouped_mm` that copies can hold up, or by a batched matmul where torch has no such kernel for the device,
    the type or the shape (it takes rows of whole 16 bytes).
    """
    count = _count(store, pool)
    ends = torch.arange(1, count + 1, dtype=torch.int32, device=pool.device)
    grouped_mm = getattr(functional, "grouped_mm", None) or torch._grouped_mm
    calls: list[Callable[[], Tensor]] = []
    for view in pool.views.values():
        if view.dim() != 3:  # a bias
            continue
        weight = view[:count].transpose(1, 2)
        rows = weight.new_ones(count, weight.shape[1])
        whole = all(side * weight.element_size() % 16 == 0 for side in weight.shape[1:])
        if whole and has_persistent_grouped_mm(weight):
            calls.append(partial(grouped_mm, rows, weight, offs=ends))
        else:
            calls.append(partial(torch.bmm, rows.unsqueeze(1), weight))
    return lambda: [call() for call in calls]


def misses_s(link: Link, store: ExpertStore, pool: SlotPool, beside: Callable[[], object] = lambda: None) -> float:
    """Seconds from a layer's ids to its experts in slots, all of them missing; the best of a few rounds.

    Args:
        link: attached to both.
        store: where the experts are.
        pool: whose slots they get.
        beside: called when the copies have been started; what it launches on the current stream is waited for too.

    Raises:
        RuntimeError: a block arrived with other bytes than it has.
    """
    count = _count(store, pool)
    readback = Readback(link.driver)
    best = float("inf")
    for turn in range(_ROUNDS + 2):
        first = (turn * count) % (store.experts - count + 1)
        ids_TK = torch.arange(first, first + count, device=pool.device).unsqueeze(0)
        if isinstance(link, KernelLink):
            link.residency.clear()
        _synchronize(pool)
        start = time.perf_counter()
        if isinstance(link, KernelLink):
            link.move(link.residency.bring(0, ids_TK))
            with link.beside_copies():
                beside()
            link.join(link.ticket())
            slots = link.residency.slots_for(0, ids_TK)
        else:
            copies = [
                link.submit(key, slot, urgent=True) for slot, key in enumerate(readback.start(ids_TK).tolist()[0])
            ]
            beside()
            for copy in copies:
                link.wait(copy)
            slots = torch.arange(count)
        _synchronize(pool)
        if turn >= 2:  # the first rounds compile kernels and wake the link
            best = min(best, time.perf_counter() - start)
        for key, slot in enumerate(slots.reshape(-1).tolist(), start=first):
            if not torch.equal(pool.block(slot).cpu(), store.block(key)):
                raise RuntimeError(f"expert {key} arrived with other bytes")
    return best


def _count(store: ExpertStore, pool: SlotPool) -> int:
    """Experts of a layer that are copied at once."""
    return min(_EXPERTS, pool.count, store.experts)


def _synchronize(pool: SlotPool) -> None:
    if pool.device.type == "cuda":
        torch.cuda.synchronize(pool.device)
