"""Measurement of a link's undisturbed speed."""

from __future__ import annotations

import time
from dataclasses import dataclass

from expertcast.runtime.links.base import Link
from expertcast.runtime.links.cuda import CudaLink, PacedCudaLink
from expertcast.runtime.links.disk import DiskLink
from expertcast.runtime.links.disk_cuda import CudaDiskLink
from expertcast.runtime.links.driver import CudaDevice, copy_seconds
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore

_LARGE = 256 * 2**20
"""Bytes of the large copy; the store's size if that is less."""
_SMALL = 4096
_REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """Undisturbed speed of a link."""

    rate: float
    """Bytes per second of a large copy, or of blocks back to back on links that move only blocks."""
    copy_s: float
    """Seconds per expert among copies back to back."""
    latency_s: float
    """Fixed seconds per copy, independent of its size."""


def link_speed(link: Link, store: ExpertStore) -> LinkSpeed:
    """Measure an attached link between two forward passes. The run's slots are not touched.

    On CUDA: time page-locked copies with events, a large one for the rate and a small one for the latency, and add the
    delays of a paced link. Other links: copy blocks back to back through a second link of the same kind.

    Raises:
        ExpertcastError: the speed of this kind of link is unknown on the CPU.
    """
    if link.driver is not None and not isinstance(link, CudaDiskLink | DiskLink):
        return _cuda_speed(link, link.driver, store)
    block_bytes = store.layout.block_bytes
    copy_s = _block_seconds(store, link.unattached_copy())
    return LinkSpeed(rate=block_bytes / copy_s, copy_s=copy_s, latency_s=link.latency)


def _block_seconds(store: ExpertStore, link: Link) -> float:
    """Return the seconds per block of the fastest of several series back to back."""
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
