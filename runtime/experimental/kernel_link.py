"""A link that decides and copies on the device: residency tables, a copy kernel, and the link that drives both.

The tables map experts to slots with LRU eviction, static shapes and no host round trip. They follow the rules of
:class:`expertcast.runtime.engine.cache.ExpertCache` with an LRU policy, in a form that a CUDA graph can capture: every
table has one extra row that takes the writes of entries that do not apply.

L MoE layers, E routed experts per layer, T tokens, K experts per token, S slots, N candidates of one call (the T x K
ids of a small step, or all E experts of the layer). An expert's key is layer * E + expert.
"""

from __future__ import annotations

import importlib.util
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.links.base import Link
from expertcast.runtime.recording.statistics import LayerStatistics, RunStatistics
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from expertcast.runtime.storage.transfer import Transfer

FEW_IDS = 64
"""Up to this many ids are deduplicated by comparing pairs; more are marked in a row of all experts."""

COUNTS = ("requests", "hits", "misses", "prefetched", "prefetched_used", "steps", "chunks")
_REQUESTS, _HITS, _MISSES, _PREFETCHED, _USED, _STEPS, _CHUNKS = range(len(COUNTS))


class Moves(NamedTuple):
    """Copies to make: the block of `keys_N` into `slots_N` for each `moved_N`."""

    keys_N: Tensor
    slots_N: Tensor
    moved_N: Tensor


class DeviceResidency:
    """Residency tables on the device; all calls run on the compute stream.

    No method reads a value on the host. The copies returned by :meth:`request` and :meth:`prefetch` must run before a
    kernel reads the slots and before the next call's copies.

    Args:
        layers: L.
        experts: E.
        slots: S.
        device: device of slots and tables.
    """

    def __init__(self, *, layers: int, experts: int, slots: int, device: torch.device) -> None:
        self.slots = slots
        self._layers, self._experts, self._device = layers, experts, device
        self._nowhere = layers * experts
        """Extra row of `slot_of`; the extra row of the tables by slot is `slots`."""
        self.slot_of = torch.full((layers * experts + 1,), -1, dtype=torch.int64, device=device)
        self.key_of = torch.full((slots + 1,), -1, dtype=torch.int64, device=device)
        self.used_at = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self._unused = torch.zeros(slots + 1, dtype=torch.bool, device=device)
        """True for a slot whose prefetched expert has not been requested."""
        self._tick = torch.zeros((), dtype=torch.int64, device=device)
        self.counts = torch.zeros(layers, len(COUNTS), dtype=torch.int64, device=device)
        self._arange = torch.arange(max(FEW_IDS, experts), device=device)
        self._when_free = torch.arange(-slots - 1, 0, device=device)
        """Ages below any tick: free slots are used first, in order."""
        self.clear()

    def clear(self) -> None:
        """Mark all slots as free."""
        self.slot_of.fill_(-1)
        self.key_of.fill_(-1)
        self._unused.fill_(False)
        self._tick.fill_(1)
        self.used_at.copy_(self._when_free)

    def width(self, ids_TK: Tensor) -> int:
        """Return the largest possible number of distinct experts in `ids_TK`."""
        return min(ids_TK.numel(), self._experts)

    def request(self, layer: int, ids_TK: Tensor, within_E: Tensor | None = None) -> Moves:
        """Request a layer's experts: hits become the most recently used, misses replace the least recently used.

        Args:
            layer: the layer that runs.
            ids_TK: at most S distinct experts.
            within_E: bool [E]; other experts are ignored (a chunk of a step that does not fit).

        Returns:
            The copies of the misses.
        """
        keys_N, needed_N = self._candidates(layer, ids_TK, within_E)
        slots_N = self.slot_of[keys_N]
        hit_N, missing_N = needed_N & (slots_N >= 0), needed_N & (slots_N < 0)
        used_N = hit_N & self._unused[slots_N]
        moves = self._place(keys_N, slots_N, hit_N, missing_N, unused=False)
        count = self.counts[layer]
        count[_REQUESTS] += needed_N.sum()
        count[_HITS] += hit_N.sum()
        count[_MISSES] += missing_N.sum()
        count[_USED] += used_N.sum()
        count[_CHUNKS] += 1
        return moves

    def prefetch(self, layer: int, ids_N: Tensor, running: int) -> Moves:
        """Prefetch experts of a later layer, most needed first, as far as there is room.

        More than `FEW_IDS` ids are handled in ascending order.

        Args:
            layer: the later layer.
            ids_N: its forecast experts.
            running: slots that the current layer may need; they are not evicted.

        Returns:
            The copies of the missing experts.
        """
        keys_N, needed_N = self._candidates(layer, ids_N, None)
        slots_N = self.slot_of[keys_N]
        hit_N, missing_N = needed_N & (slots_N >= 0), needed_N & (slots_N < 0)
        missing_N &= missing_N.cumsum(0) <= self.slots - running - hit_N.sum()
        moves = self._place(keys_N, slots_N, hit_N, missing_N, unused=True)
        self.counts[layer, _PREFETCHED] += missing_N.sum()
        return moves

    def slots_for(self, layer: int, ids_TK: Tensor) -> Tensor:
        """Return the slot of each id's expert, -1 if it has none."""
        return self.slot_of[layer * self._experts + ids_TK]

    def finish(self, layer: int, *, keep: bool) -> None:
        """Count a step of the layer as launched; `keep=False` frees the slots of its experts."""
        self.counts[layer, _STEPS] += 1
        if keep:
            return
        first = layer * self._experts
        own_S = (self.key_of >= first) & (self.key_of < first + self._experts)
        self.slot_of[first : first + self._experts] = -1
        self.key_of.masked_fill_(own_S, -1)
        self.used_at.copy_(torch.where(own_S, self._when_free, self.used_at))

    def _candidates(self, layer: int, ids: Tensor, within_E: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return keys [N] and a mask that selects each distinct expert once."""
        first = layer * self._experts
        if within_E is None and ids.numel() <= FEW_IDS:
            ids_N = ids.reshape(-1)
            again_N = (ids_N[:, None] == ids_N[None, :]).tril(-1).any(1)
            return first + ids_N, ~again_N
        needed_E = torch.zeros(self._experts, dtype=torch.bool, device=self._device)
        needed_E.scatter_(0, ids.reshape(-1), True)
        if within_E is not None:
            needed_E &= within_E
        return first + self._arange[: self._experts], needed_E

    def _place(self, keys_N: Tensor, slots_N: Tensor, hit_N: Tensor, missing_N: Tensor, *, unused: bool) -> Moves:
        """Refresh hits and assign the least recently used slots to the misses, in order."""
        count = keys_N.shape[0]
        order_N = self._tick + self._arange[:count]
        self._tick += count
        self.used_at.scatter_(0, torch.where(hit_N, slots_N, self.slots), order_N)
        oldest_N = self.used_at[: self.slots].topk(min(count, self.slots), largest=False, sorted=True).indices
        victim_N = oldest_N[(missing_N.cumsum(0) - 1).clamp(0, oldest_N.shape[0] - 1)]
        target_N = torch.where(missing_N, victim_N, self.slots)
        lost_N = torch.where(missing_N, self.key_of[victim_N], -1)
        self.slot_of.scatter_(0, torch.where(lost_N >= 0, lost_N, self._nowhere), -1)
        self.slot_of.scatter_(0, torch.where(missing_N, keys_N, self._nowhere), victim_N)
        self.key_of.scatter_(0, target_N, keys_N)
        self.used_at.scatter_(0, target_N, order_N)
        # A prefetch leaves a hit's mark unchanged.
        touched_N = target_N if unused else torch.where(hit_N, slots_N, target_N)
        self._unused.scatter_(0, touched_N, unused)
        return Moves(keys_N, victim_N, missing_N)


class KernelResidency(DeviceResidency):
    """The same tables; one Triton kernel updates them in a small call instead of some forty torch kernels."""

    def __init__(self, *, layers: int, experts: int, slots: int, device: torch.device) -> None:
        super().__init__(layers=layers, experts=experts, slots=slots, device=device)
        from expertcast.runtime.experimental.triton_kernels import place

        self._kernel = place

    def request(self, layer: int, ids_TK: Tensor, within_E: Tensor | None = None) -> Moves:
        if within_E is not None or ids_TK.numel() > FEW_IDS:
            return super().request(layer, ids_TK, within_E)
        return self._launch(layer, ids_TK, room=self.slots, forecast=False)

    def prefetch(self, layer: int, ids_N: Tensor, running: int) -> Moves:
        if ids_N.numel() > FEW_IDS:
            return super().prefetch(layer, ids_N, running)
        return self._launch(layer, ids_N, room=self.slots - running, forecast=True)

    def _launch(self, layer: int, ids: Tensor, *, room: int, forecast: bool) -> Moves:
        count = ids.numel()
        keys_N, slots_N = torch.empty(2, count, dtype=torch.int64, device=self._device)
        moved_N = torch.empty(count, dtype=torch.bool, device=self._device)
        # Triton launches on the current device, not on that of its arguments.
        with torch.cuda.device_of(self.slot_of):  # type: ignore[no-untyped-call]
            self._kernel[(1,)](
                ids.contiguous(), self.slot_of, self.key_of, self.used_at, self._unused, self._tick, self.counts,
                keys_N, slots_N, moved_N, layer, room,
                N=count, PADDED_N=_power_of_two(count), S=self.slots, PADDED_S=_power_of_two(self.slots),
                E=self._experts, COLUMNS=len(COUNTS), FORECAST=forecast,
            )  # fmt: skip
        return Moves(keys_N, slots_N, moved_N)


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


# Copies

_WORD = 8
_WIDTH = 2048
_WARPS = 8
_PROGRAMS = 16
"""Programs of a copy: 16 x 2,048 words = 256 KiB in flight, as 64 bytes (four loads of 16) per thread.

By Little's law a link needs rate times latency in flight: 55 to 110 kB for PCIe 5 (55 GB/s) at 1 to 2 us per read (an
estimate). More keep the link full while programs store arrived data. The number is small because each program keeps a
persistent matmul off one multiprocessor; see :class:`ReservedMultiprocessors`.
"""
_SHARE = 4
"""A copy uses at most one in this many multiprocessors."""


def has_triton() -> bool:
    """Return whether Triton is installed. torch's CUDA builds for Linux include it."""
    return importlib.util.find_spec("triton") is not None


class BlockCopier(ABC):
    """Copies blocks from the store into their slots."""

    programs = 0
    """Multiprocessors that the copy takes from compute kernels."""

    @abstractmethod
    def copy(self, moves: Moves) -> None:
        """Copy on the current stream. Entries without `moved_N` cost almost nothing."""


class HostCopier(BlockCopier):
    """Reference copier, also for slots in host memory."""

    def __init__(self, store: ExpertStore, pool: SlotPool) -> None:
        self._store, self._pool = store, pool

    def copy(self, moves: Moves) -> None:
        for key, slot, moved in zip(*(tensor.tolist() for tensor in moves), strict=True):
            if moved:
                self._pool.block(slot).copy_(self._store.block(key))


class KernelCopier(BlockCopier):
    """Triton kernel that reads the store's page-locked memory directly.

    Args:
        addresses: int64 [L * E], device address of each block.
        pool: the slots.
        programs: programs of the kernel at most.
    """

    def __init__(self, addresses: Tensor, pool: SlotPool, programs: int = _PROGRAMS) -> None:
        from expertcast.runtime.experimental.triton_kernels import copy_blocks

        self._kernel = copy_blocks
        self._addresses = addresses
        self._pool_words = pool.block(0).view(torch.int64)
        self._words = pool.layout.block_bytes // _WORD
        chunks = -(-self._words // _WIDTH)
        self.programs = min(programs, chunks)
        self._turns = -(-chunks // self.programs)

    def copy(self, moves: Moves) -> None:
        self._kernel[(self.programs,)](
            self._addresses, *moves, self._pool_words,
            N=moves.keys_N.shape[0], WORDS=self._words, WIDTH=_WIDTH, TURNS=self._turns, num_warps=_WARPS,
        )  # fmt: skip


def block_copier(store: ExpertStore, pool: SlotPool) -> BlockCopier:
    """Return the copier for the pool's device.

    Raises:
        ExpertcastError: Triton is missing, or the device cannot read the blocks' memory.
    """
    if pool.device.type != "cuda":
        return HostCopier(store, pool)
    if not has_triton():
        raise ExpertcastError("link 'kernel' needs the package triton: install it, or use link 'cuda'")
    blocks = [store.block(key) for key in range(store.layers * store.experts)]
    unlocked = next((key for key, block in enumerate(blocks) if not block.is_pinned()), None)
    if unlocked is not None:
        raise ExpertcastError(
            f"link 'kernel' reads page-locked memory only, but expert {unlocked} of the store is not page-locked: "
            "use link 'cuda', or free memory for the page lock"
        )
    # Host and device share one address space: kernels use the host's address of page-locked memory.
    addresses = [block.data_ptr() for block in blocks]
    multiprocessors = torch.cuda.get_device_properties(pool.device).multi_processor_count
    programs = max(1, min(_PROGRAMS, multiprocessors // _SHARE))
    return KernelCopier(torch.tensor(addresses, device=pool.device), pool, programs)


# torch's `grouped_mm` for Hopper and Blackwell is persistent: one thread block per multiprocessor, with all of its
# registers, processes one tile after another. If another kernel occupies a multiprocessor, that thread block waits for
# it to end, and the matmul waits too. torch can leave some multiprocessors free (pytorch, aten/src/ATen/Context.h:
# `_SMCarveout_EXPERIMENTAL`). The results keep their bits: the setting changes how many thread blocks share the tiles,
# while tile and summation order follow from the shapes (aten/src/ATen/native/cuda/GroupMM.cu: `hw_info.sm_count`).
# cuBLASLt, which torch uses for linear layers with a bias, chooses its kernel by the count
# (aten/src/ATen/cuda/CUDABlas.cpp: `CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET`) and may change bits. So the setting is
# active only around the experts, and never if torch prefers cuBLASLt.

_GET, _SET = "_get_sm_carveout_experimental", "_set_sm_carveout_experimental"


class ReservedMultiprocessors:
    """Context in which matmuls leave `multiprocessors` free. Without torch's setting it does nothing.

    It may be nested; the largest number applies. The setting belongs to the process, so it affects matmuls of other
    threads too. torch warns once on stderr that it is experimental.
    """

    def __init__(self, multiprocessors: int) -> None:
        known = hasattr(torch._C, _GET) and hasattr(torch._C, _SET)
        preferred = torch.backends.cuda.preferred_blas_library()
        self.multiprocessors = multiprocessors if known and preferred != torch._C._BlasBackend.Cublaslt else 0
        self._before: list[int | None] = []

    def __enter__(self) -> None:
        if self.multiprocessors:
            before = torch._C._get_sm_carveout_experimental()
            torch._C._set_sm_carveout_experimental(max(before or 0, self.multiprocessors))
            self._before.append(before)

    def __exit__(self, *_error: object) -> None:
        if self.multiprocessors:
            torch._C._set_sm_carveout_experimental(self._before.pop())


_COPIED = [COUNTS.index("misses"), COUNTS.index("prefetched")]


class KernelLink(Link):
    """Moves experts by a kernel that reads page-locked memory (CUDA), or by plain copies (CPU reference).

    Copies run on a separate stream, one call after another, so that two calls never write to a slot out of order. Each
    call first waits for the compute stream (for its tables, and for the last readers of the slots that it overwrites);
    compute waits for the calls whose slots it reads. Both waits are events, which a CUDA graph records.

    The link has its own tables (`residency`). `DeviceEngine` drives it by :meth:`move` and :meth:`join`, not by
    transfers.

    `bytes_moved` and `copies` are counted on the device; reading them waits for it. `busy_s` sums the times between
    events around each call, without the calls of CUDA graphs.
    """

    name = "kernel"
    decides_on_device = True

    def __init__(self) -> None:
        self._counts = torch.zeros(0, len(COUNTS))
        super().__init__()

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        super().attach(store, pool)
        self._copier: BlockCopier = block_copier(store, pool)
        tables = KernelResidency if pool.device.type == "cuda" else DeviceResidency
        self.residency = tables(layers=store.layers, experts=store.experts, slots=pool.count, device=pool.device)
        self._counts = self.residency.counts
        self._stream = None
        if self.driver is not None:
            self._stream, self._last = self.driver.new_stream(), self.driver.current_stream()
        self._in_flight: list[tuple[torch.cuda.Event, Moves]] = []
        """Calls that compute has not waited for, each with its tables, whose memory must not be reused before."""
        self._timed: deque[tuple[torch.cuda.Event, torch.cuda.Event, int, bool]] = deque()
        """Calls whose times are not counted yet: start event, end event, layer, urgent."""
        self.reserved = ReservedMultiprocessors(self._copier.programs)
        """Context for experts that run beside copies: their grouped matmul leaves the copies' multiprocessors free."""

    def move(self, moves: Moves, layer: int = -1, *, urgent: bool = True) -> None:
        """Queue copies after the current stream's work so far.

        Args:
            moves: the copies.
            layer: for the observer, which gets one span per call.
            urgent: for the observer.
        """
        if self._stream is None:
            start = time.perf_counter()
            self._copier.copy(moves)
            self._report(layer, start, time.perf_counter(), urgent)
            return
        device, stream = self.driver, self._stream
        assert device is not None
        stream.wait_stream(device.current_stream())
        with device.use(stream):
            if device.capturing():  # a graph's calls are not timed
                self._copier.copy(moves)
                arrived = device.record(stream)
            else:
                begun = device.record(stream, timing=True)
                self._copier.copy(moves)
                arrived = device.record(stream, timing=True)
                self._timed.append((begun, arrived, layer, urgent))
                self._collect()
        self._in_flight.append((arrived, moves))

    def calls_in_flight(self) -> int:
        """Return the number of calls in flight, for :meth:`join`."""
        return len(self._in_flight)

    def join(self, calls: int) -> None:
        """Make the current stream wait for the first `calls` calls in flight."""
        if self.driver is None or not calls:
            return
        self.driver.current_stream().wait_event(self._in_flight[calls - 1][0])
        del self._in_flight[:calls]

    def reserved_if_copying(self) -> AbstractContextManager[object]:
        """Return :attr:`reserved` if calls are in flight, else an empty context."""
        return self.reserved if self._in_flight else nullcontext()

    def follow(self) -> None:
        if self.driver is not None:
            self._last = self.driver.follow(self._last)

    def start(self, copy: Transfer) -> None:
        raise ExpertcastError("link 'kernel' does not start single transfers: its device tables choose the copies")

    def synchronize(self) -> None:
        """Block the host until all work on the device is done."""
        if self.driver is not None:
            self.driver.synchronize()
            self._in_flight.clear()
            self._collect()

    @property
    def copies(self) -> int:
        return int(self._counts[:, _COPIED].sum())

    @copies.setter
    def copies(self, value: int) -> None:
        assert not value
        self._counts[:, _COPIED] = 0

    @property
    def bytes_moved(self) -> int:
        copies = self.copies
        return copies and copies * self._store.layout.block_bytes

    @bytes_moved.setter
    def bytes_moved(self, value: int) -> None:
        """Do nothing: the value follows from `copies`."""

    def reset(self) -> None:
        self.synchronize()
        super().reset()

    def close(self) -> None:
        self.synchronize()
        self.__dict__.pop("_copier", None)  # it may reference the slots' memory, which must be freed

    def _collect(self) -> None:
        """Count the times of finished calls."""
        while self._timed and self._timed[0][1].query():  # type: ignore[no-untyped-call]
            begun, arrived, layer, urgent = self._timed.popleft()
            start = self.observer.device_time(begun)
            self._report(layer, start, start + begun.elapsed_time(arrived) / 1e3, urgent)

    def _report(self, layer: int, start: float, end: float, urgent: bool) -> None:
        self.busy_s += end - start
        self._observe(-1, layer, start, end, urgent)


def prefill_tables(link: KernelLink, keys: Sequence[int], experts: int) -> int:
    """Prefetch experts into free slots, in this order, and wait for the copies.

    Args:
        link: the link.
        keys: experts. Resident experts are skipped, and so are experts without a free slot.
        experts: E.

    Returns:
        Number of copies.
    """
    link.follow()
    tables, held = link.residency, set(resident_keys(link))
    missing = [key for key in keys if key not in held][: tables.slots - len(held)]
    for key in missing:
        layer, expert = divmod(key, experts)
        ids_N = torch.tensor([expert], device=tables.slot_of.device)
        link.move(tables.prefetch(layer, ids_N, running=0), layer, urgent=False)
    link.join(link.calls_in_flight())
    link.synchronize()
    link.check()
    return len(missing)


def resident_keys(link: KernelLink) -> list[int]:
    """Return the resident keys, the least recently used first. Waits for the device."""
    tables = link.residency
    order = tables.used_at[: tables.slots].argsort()
    return [key for key in tables.key_of[: tables.slots][order].tolist() if key >= 0]


class DeviceStatistics(RunStatistics):
    """Counters of a run kept on the device; reading them waits for it.

    The device does not record whether a prefetch was in time, how long a layer waited, or what was evicted: `waited_s`,
    `prefetched_in_time`, `evicted` and `collisions` stay 0.
    """

    uncounted = frozenset({*LayerStatistics.__slots__} - {*COUNTS, "bytes_moved"})

    def __init__(self, link: KernelLink, block_bytes: int) -> None:
        self._counts = link.residency.counts
        self._block_bytes = block_bytes

    @property
    def layers(self) -> list[LayerStatistics]:  # type: ignore[override]
        layers = []
        for row in self._counts.tolist():
            counted = dict(zip(COUNTS, row, strict=True))
            moved = counted["misses"] + counted["prefetched"]
            layers.append(LayerStatistics(**counted, bytes_moved=moved * self._block_bytes))
        return layers

    def reset(self) -> None:
        with self.resetting():
            self._counts.zero_()
