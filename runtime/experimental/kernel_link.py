"""A link that decides and copies on the device: tables, the kernel that copies, and the link that drives both.

The tables say which expert lies in which slot: least recently used, no host round trip, static shapes. Their rules are
those of :class:`expertcast.runtime.engine.cache.ExpertCache` with an LRU policy, written so that a decode step can be
captured in a CUDA graph: every table has one row more than it needs, where whatever does not apply is written.

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
"""Up to so many ids are compared with each other; more are counted in a row of all experts."""

COUNTS = ("requests", "hits", "misses", "prefetched", "prefetched_used", "steps", "chunks")
_REQUESTS, _HITS, _MISSES, _PREFETCHED, _USED, _STEPS, _CHUNKS = range(len(COUNTS))


class Moves(NamedTuple):
    """Copies to make: block of `keys_N` into `slots_N` wherever `moved_N`."""

    keys_N: Tensor
    slots_N: Tensor
    moved_N: Tensor


class DeviceResidency:
    """Tables on the device; all calls come on the stream that computes.

    Nothing here looks at a value on the host. What :meth:`bring` and :meth:`expect` return must be copied before a
    kernel reads the slots, and before the next call's copies.

    Args:
        layers: L.
        experts: E.
        slots: S.
        device: where slots and tables are.
    """

    def __init__(self, *, layers: int, experts: int, slots: int, device: torch.device) -> None:
        self.slots = slots
        self._layers, self._experts, self._device = layers, experts, device
        self._nowhere = layers * experts
        """Row of `slot_of` for keys that do not exist; row `slots` of the others for slots that do not."""
        self.slot_of = torch.full((layers * experts + 1,), -1, dtype=torch.int64, device=device)
        self.key_of = torch.full((slots + 1,), -1, dtype=torch.int64, device=device)
        self.used_at = torch.zeros(slots + 1, dtype=torch.int64, device=device)
        self._unused = torch.zeros(slots + 1, dtype=torch.bool, device=device)
        """Prefetched into this slot, not requested so far."""
        self._tick = torch.zeros((), dtype=torch.int64, device=device)
        self.counts = torch.zeros(layers, len(COUNTS), dtype=torch.int64, device=device)
        self._arange = torch.arange(max(FEW_IDS, experts), device=device)
        self._when_free = torch.arange(-slots - 1, 0, device=device)
        """Before any tick: free slots are taken first, and in order."""
        self.clear()

    def clear(self) -> None:
        """Forget what lies where."""
        self.slot_of.fill_(-1)
        self.key_of.fill_(-1)
        self._unused.fill_(False)
        self._tick.fill_(1)
        self.used_at.copy_(self._when_free)

    def width(self, ids_TK: Tensor) -> int:
        """The most distinct experts that some ids can name."""
        return min(ids_TK.numel(), self._experts)

    def bring(self, layer: int, ids_TK: Tensor, within_E: Tensor | None = None) -> Moves:
        """A layer runs with these experts: hits become the most recently used, misses replace the least.

        Args:
            ids_TK: at most S distinct experts.
            within_E: bool [E], only these count (a chunk of a step that does not fit).
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

    def expect(self, layer: int, ids_N: Tensor, running: int) -> Moves:
        """A later layer is forecast to need these experts, most needed first; those without room are left out.

        More than `FEW_IDS` ids are taken in the order of their numbers.

        Args:
            running: slots that the layer which runs now may need; they are not given up.
        """
        keys_N, needed_N = self._candidates(layer, ids_N, None)
        slots_N = self.slot_of[keys_N]
        hit_N, missing_N = needed_N & (slots_N >= 0), needed_N & (slots_N < 0)
        missing_N &= missing_N.cumsum(0) <= self.slots - running - hit_N.sum()
        moves = self._place(keys_N, slots_N, hit_N, missing_N, unused=True)
        self.counts[layer, _PREFETCHED] += missing_N.sum()
        return moves

    def slots_for(self, layer: int, ids_TK: Tensor) -> Tensor:
        """Slot of each id's expert, -1 where it has none."""
        return self.slot_of[layer * self._experts + ids_TK]

    def finish(self, layer: int, *, keep: bool) -> None:
        """A step of the layer has been launched; `keep=False` gives the slots of all its experts back."""
        self.counts[layer, _STEPS] += 1
        if keep:
            return
        first = layer * self._experts
        own_S = (self.key_of >= first) & (self.key_of < first + self._experts)
        self.slot_of[first : first + self._experts] = -1
        self.key_of.masked_fill_(own_S, -1)
        self.used_at.copy_(torch.where(own_S, self._when_free, self.used_at))

    def _candidates(self, layer: int, ids: Tensor, within_E: Tensor | None) -> tuple[Tensor, Tensor]:
        """Keys [N], and which of them count: each distinct one once."""
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
        """Refresh hits, give the least recently used slots to the missing, in order."""
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
        # a forecast leaves a hit as it was: prefetched before and unused, or in use
        touched_N = target_N if unused else torch.where(hit_N, slots_N, target_N)
        self._unused.scatter_(0, touched_N, unused)
        return Moves(keys_N, victim_N, missing_N)


class KernelResidency(DeviceResidency):
    """The same tables, a small call's update done by one Triton kernel in place of some forty of torch's."""

    def __init__(self, *, layers: int, experts: int, slots: int, device: torch.device) -> None:
        super().__init__(layers=layers, experts=experts, slots=slots, device=device)
        from expertcast.runtime.experimental.triton_kernels import place

        self._kernel = place

    def bring(self, layer: int, ids_TK: Tensor, within_E: Tensor | None = None) -> Moves:
        if within_E is not None or ids_TK.numel() > FEW_IDS:
            return super().bring(layer, ids_TK, within_E)
        return self._launch(layer, ids_TK, room=self.slots, forecast=False)

    def expect(self, layer: int, ids_N: Tensor, running: int) -> Moves:
        if ids_N.numel() > FEW_IDS:
            return super().expect(layer, ids_N, running)
        return self._launch(layer, ids_N, room=self.slots - running, forecast=True)

    def _launch(self, layer: int, ids: Tensor, *, room: int, forecast: bool) -> Moves:
        count = ids.numel()
        keys_N, slots_N = torch.empty(2, count, dtype=torch.int64, device=self._device)
        moved_N = torch.empty(count, dtype=torch.bool, device=self._device)
        # Triton launches on the current device, whatever the tensors say
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
"""A quarter of a megabyte on its way, 16 x 2,048 words, as 64 bytes (four loads of 16) a thread.

By Little's law a link needs rate times latency: PCIe 5 (55 GB/s) 55 to 110 kB at 1 to 2 us a read (an estimate),
so that it stays full while programs store what has come. Few programs, for each keeps a persistent matmul off a
multiprocessor; see :mod:`expertcast.runtime.experimental.kernel_link`.
"""
_SHARE = 4
"""A device gives up one multiprocessor in so many at most."""


def has_triton() -> bool:
    """Whether Triton is installed: torch's CUDA builds bring it on Linux."""
    return importlib.util.find_spec("triton") is not None


class BlockCopier(ABC):
    """Copies the blocks of some moves from the store into their slots."""

    programs = 0
    """Multiprocessors that it takes from the kernels that compute meanwhile."""

    @abstractmethod
    def copy(self, moves: Moves) -> None:
        """On the current stream; entries that are not moved cost next to nothing."""


class HostCopier(BlockCopier):
    """The reference, and what runs where a slot is host memory too."""

    def __init__(self, store: ExpertStore, pool: SlotPool) -> None:
        self._store, self._pool = store, pool

    def copy(self, moves: Moves) -> None:
        for key, slot, moved in zip(*(tensor.tolist() for tensor in moves), strict=True):
            if moved:
                self._pool.block(slot).copy_(self._store.block(key))


class KernelCopier(BlockCopier):
    """A Triton kernel that reads the store's page-locked memory where it lies.

    Args:
        addresses: int64 [L * E], the device's address of each block.
        programs: of the kernel at most.
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
    """The copier of the pool's device.

    Raises:
        ExpertcastError: no Triton, or blocks that the device cannot read where they lie.
    """
    if pool.device.type != "cuda":
        return HostCopier(store, pool)
    if not has_triton():
        raise ExpertcastError("link 'kernel' needs the package triton: install it, or use link 'cuda'")
    blocks = [store.block(key) for key in range(store.layers * store.experts)]
    unlocked = next((key for key, block in enumerate(blocks) if not block.is_pinned()), None)
    if unlocked is not None:
        raise ExpertcastError(
            f"link 'kernel' reads page-locked memory only, and expert {unlocked} of the store lies elsewhere: use link "
            "'cuda', or free memory for the page lock"
        )
    # one address space for host and device: kernels find page-locked memory where the host does
    addresses = [block.data_ptr() for block in blocks]
    multiprocessors = torch.cuda.get_device_properties(pool.device).multi_processor_count
    programs = max(1, min(_PROGRAMS, multiprocessors // _SHARE))
    return KernelCopier(torch.tensor(addresses, device=pool.device), pool, programs)


# torch's `grouped_mm` of Hopper and Blackwell is persistent: one block per multiprocessor, with all its registers,
# takes one tile after another. Where another kernel holds a multiprocessor, that block waits until the other one ends,
# and the matmul with it. torch can leave some out (pytorch, aten/src/ATen/Context.h: `_SMCarveout_EXPERIMENTAL`). The
# bits stay: the count says how many blocks share the tiles, while tile and order of summation follow from the shapes
# (aten/src/ATen/native/cuda/GroupMM.cu: `hw_info.sm_count`). cuBLASLt, which torch uses for linear layers with a bias,
# chooses its kernel by the count (aten/src/ATen/cuda/CUDABlas.cpp: `CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET`) and may give
# other bits. So the count is set around the experts only, and not at all where torch is told to prefer cuBLASLt.

_GET, _SET = "_get_sm_carveout_experimental", "_set_sm_carveout_experimental"


class CarveOut:
    """While entered, matmuls leave so many multiprocessors alone; without torch's setting nothing happens.

    It may be entered again inside itself or another one: the larger count holds. The setting is the process's: matmuls
    that other threads launch meanwhile keep to it too. torch says once, on stderr, that it is experimental.
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
    """Moves experts by a kernel that reads page-locked memory (CUDA), or by plain copies (the CPU's reference).

    Copies run on a stream of their own, one call after another, so that no two calls write to a slot out of order. Each
    call waits for the compute stream first (for its table, and for the last readers of the slots it overwrites);
    compute waits for the calls whose slots it reads. Fork and join are events, which a CUDA graph records.

    It keeps its own tables (`residency`); `DeviceEngine` drives it by :meth:`move` and :meth:`join`, not by transfers.

    `bytes_moved` and `copies` are counted on the device and read when they are asked for. `busy_s` is the time
    between events around each call; a CUDA graph's calls are not in it.
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
        self._under_way: list[tuple[torch.cuda.Event, Moves]] = []
        """Calls that compute has not waited for, each with its tables: freed before, they could be written over."""
        self._timed: deque[tuple[torch.cuda.Event, torch.cuda.Event, int, bool]] = deque()
        """Calls whose times are not counted: events before and behind, layer, urgent."""
        self.carve_out = CarveOut(self._copier.programs)
        """Entered where experts run beside copies: their grouped matmul leaves the copies' multiprocessors alone."""

    def move(self, moves: Moves, layer: int = -1, *, urgent: bool = True) -> None:
        """Queue the copies behind everything the current stream has been given so far.

        Args:
            moves: which block goes into which slot.
            layer: for the observer, which gets one span per call.
            urgent: likewise.
        """
        if self._stream is None:
            start = time.perf_counter()
            self._copier.copy(moves)
            self._took(layer, start, time.perf_counter(), urgent)
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
        self._under_way.append((arrived, moves))

    def ticket(self) -> int:
        """Number of calls under way: what :meth:`join` waits for."""
        return len(self._under_way)

    def join(self, ticket: int) -> None:
        """Make the current stream wait for the first `ticket` calls under way."""
        if self.driver is None or not ticket:
            return
        self.driver.current_stream().wait_event(self._under_way[ticket - 1][0])
        del self._under_way[:ticket]

    def beside_copies(self) -> AbstractContextManager[object]:
        """To run kernels in that read slots: :attr:`carve_out` while calls are under way, else nothing."""
        return self.carve_out if self._under_way else nullcontext()

    def follow(self) -> None:
        if self.driver is not None:
            self._last = self.driver.follow(self._last)

    def start(self, copy: Transfer) -> None:
        raise ExpertcastError("link 'kernel' copies what tables on the device say, and no transfer of its own")

    def synchronize(self) -> None:
        """Wait on the host until everything that was launched has run."""
        if self.driver is not None:
            self.driver.synchronize()
            self._under_way.clear()
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
        """Follows `copies`."""

    def reset(self) -> None:
        self.synchronize()
        super().reset()

    def close(self) -> None:
        self.synchronize()
        self.__dict__.pop("_copier", None)  # it may hold the slots' memory, which the experts need to be put back

    def _collect(self) -> None:
        """Count the times of calls that are over."""
        while self._timed and self._timed[0][1].query():  # type: ignore[no-untyped-call]
            begun, arrived, layer, urgent = self._timed.popleft()
            start = self.observer.device_time(begun)
            self._took(layer, start, start + begun.elapsed_time(arrived) / 1e3, urgent)

    def _took(self, layer: int, start: float, end: float, urgent: bool) -> None:
        self.busy_s += end - start
        self._tell(-1, layer, start, end, urgent)


def fill_tables(link: KernelLink, keys: Sequence[int], experts: int) -> int:
    """Load experts of E per layer into free slots, in this order, and wait for them. Counted as prefetched.

    Returns:
        How many were loaded: keys that have a slot, or for which none is free, are left out.
    """
    link.follow()
    tables, held = link.residency, set(held_by_tables(link))
    missing = [key for key in keys if key not in held][: tables.slots - len(held)]
    for key in missing:
        layer, expert = divmod(key, experts)
        ids_N = torch.tensor([expert], device=tables.slot_of.device)
        link.move(tables.expect(layer, ids_N, running=0), layer, urgent=False)
    link.join(link.ticket())
    link.synchronize()
    link.check()
    return len(missing)


def held_by_tables(link: KernelLink) -> list[int]:
    """Keys that have a slot by the device's tables, the least recently used first. Waits for the device."""
    tables = link.residency
    order = tables.used_at[: tables.slots].argsort()
    return [key for key in tables.key_of[: tables.slots][order].tolist() if key >= 0]


class DeviceStatistics(RunStatistics):
    """The run's counters, kept on the device; reading them waits for it.

    Nobody there sees whether a forecast's copy came in time, how long a layer waited, or what was evicted: `waited_s`,
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
