"""Which link a CUDA device is better off with: measured on the real store, once per process.

What is timed is a layer's misses from routing to arrival: ids that are on the device become experts that are there.
The link with the copy engine reads the ids back first; the kernel's link does not, but its copies take
multiprocessors and may be slower.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.links.base import Link
from expertcast.runtime.links.cuda import CudaLink
from expertcast.runtime.links.kernel import KernelLink
from expertcast.runtime.links.readback import Readback
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore

_ROUNDS = 5
_EXPERTS = 8

_CHOSEN: dict[tuple[str, int, int, bool], type[Link]] = {}


def fastest_link(store: ExpertStore, pool: SlotPool) -> Link:
    """A new link for this store and pool, of the kind that was fastest; not attached."""
    locked = all(store.pinned_layers)  # another store may not be: what was chosen for the one cannot read the other
    key = torch.cuda.get_device_name(pool.device), store.layout.block_bytes, min(_EXPERTS, pool.count), locked
    if key not in _CHOSEN:
        _CHOSEN[key] = choose(store, pool, (CudaLink, KernelLink))
    return _CHOSEN[key]()


def choose(store: ExpertStore, pool: SlotPool, kinds: tuple[Callable[[], Link], ...]) -> type[Link]:
    """The fastest kind; the first is the one to fall back on where another cannot be used or copies wrongly."""
    seconds: dict[type[Link], float] = {}
    for kind in kinds:
        link = kind()
        try:
            link.attach(store, pool)
            try:
                seconds[type(link)] = misses_s(link, store, pool)
            finally:
                link.close()
        except Exception as error:
            if not seconds:
                raise
            if not isinstance(error, ExpertcastError):  # no page-locked memory, no Triton: nothing to report
                warnings.warn(f"link {link.name!r} is left out: {error}", stacklevel=2)
    return min(seconds, key=seconds.__getitem__)


def misses_s(link: Link, store: ExpertStore, pool: SlotPool) -> float:
    """Seconds from a layer's ids to its experts in slots, all of them missing; the best of a few rounds.

    Raises:
        RuntimeError: a block arrived with other bytes than it has.
    """
    count = min(_EXPERTS, pool.count, store.experts)
    readback = Readback(pool.device)
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
            link.join(link.ticket())
            slots = link.residency.slots_for(0, ids_TK)
        else:
            copies = [
                link.submit(key, slot, urgent=True) for slot, key in enumerate(readback.start(ids_TK).tolist()[0])
            ]
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


def _synchronize(pool: SlotPool) -> None:
    if pool.device.type == "cuda":
        torch.cuda.synchronize(pool.device)
