"""Disk link for the CPU: reads experts directly into their slots, past the page cache, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import ModelShape
from expertcast.runtime.links.base import Link, check_rate
from expertcast.runtime.pools.cache import Pools
from expertcast.runtime.pools.states import ExpertBytes, State
from expertcast.runtime.storage.codecs import Codec
from expertcast.runtime.storage.coded_reader import EVERYTHING, NOTHING, PACKED, PLAIN, CodedRead, CodedReader, Kinds
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.layout import FULL
from expertcast.runtime.storage.memory import trim_heap
from expertcast.runtime.storage.reader import THREADS, Read
from expertcast.runtime.storage.slots import SlotPool, SlotState
from expertcast.runtime.storage.store import ExpertStore
from expertcast.runtime.storage.transfer import Transfer

# Coded parts that the pools keep in memory beside the slots.

_KINDS: dict[State, Kinds] = {
    State.F: NOTHING, State.C: EVERYTHING, State.S: frozenset({PLAIN}), State.E: frozenset({PACKED}), State.M: NOTHING,
}  # fmt: skip
_LEAST_READ = [_KINDS[state] for state in (State.C, State.S, State.E, State.M)]
"""Parts that may be held of a missing expert, those that leave least to read first."""


class KeptParts:
    """Pools and a reader that keeps the parts of experts in the states that the pools choose.

    All methods are called from the thread that runs the model.

    Args:
        codec: codec of the experts.
        shape: shape of the model.
        part_nbytes: bytes of an expert's plain parts and of its packed parts in memory.
        slots: slots of the run; their full experts are pool F.
        memory: bytes of each other pool, for all layers together.
        passing: slots that do not count as pool F, as a multiple of K: for the running layer, and for its forecasts.
        open_reader: creates a reader from the arguments `kept` and `wanted` of :class:`CodedReader`.

    Raises:
        ExpertcastError: a pool is smaller than one expert, or needs parts that the codec does not have.
    """

    def __init__(
        self, codec: Codec, shape: ModelShape, part_nbytes: Sequence[int], slots: SlotPool,
        memory: Mapping[State, int], *, passing: int, open_reader: Callable[..., CodedReader],
    ) -> None:  # fmt: skip
        plain, packed = part_nbytes
        size = ExpertBytes(plane=plain, exponents=packed)
        self._slots, self._open_reader = slots, open_reader
        if not packed and memory.keys() - {State.C}:
            raise ExpertcastError(f"codec {codec.name!r} supports pool C only: give pools='C=...'")
        room = {state: nbytes // size.held(state) for state, nbytes in memory.items()}
        for state, count in room.items():
            if not count:
                raise ExpertcastError(
                    f"pool {state.name} has {memory[state]} bytes, but one expert takes {size.held(state)}: "
                    "give more, or leave it out"
                )
        self.pools = Pools(
            layers=shape.layers,
            experts=shape.experts,
            size=size,
            room=room | {State.F: max(0, slots.count - passing * shape.top_k)},
        )
        self.reader = self._open()
        self._leaving: dict[int, int] = {}
        """Full experts whose plain parts are to be kept before their slot is overwritten, by slot."""
        self._full_slots: set[int] = set()
        """Slots that were last filled in full precision; the plain parts of packed copies are not the expert's."""

    def restart(self) -> None:
        """Discard queued reads and kept parts. The caller updates the pools."""
        self.reader.close()
        self._leaving.clear()
        self._full_slots.clear()
        self.reader = self._open()

    def _open(self) -> CodedReader:
        kept = self.pools.room
        return self._open_reader(
            kept=(kept[State.C] + kept[State.S], kept[State.C] + kept[State.E]),
            wanted=lambda key: _KINDS[self.pools.state(key)],
        )

    def apply_changes(self) -> None:
        """Apply the pools' changes since the last call: free parts, and note full experts whose parts are to stay."""
        for key, state in dict(self.pools.changes()).items():
            slot = self._slots.slots.get(key)
            comes = slot is None or self._slots.state(slot) is SlotState.LOADING
            if key in self.pools.running and comes:
                continue  # the running read uses its parts; at its end the reader keeps those that `wanted` returns
            self.reader.drop(key, _KINDS[state])
            if slot in self._full_slots and state is State.S:
                self._leaving[slot] = key

    def keep_leaving(self) -> None:
        """Copy the plain parts of noted full experts; called while the model's thread would wait anyway."""
        for slot, key in self._leaving.items():
            arrived = self._slots.slots.get(key) == slot and self._slots.state(slot) is not SlotState.LOADING
            if arrived and self.pools.state(key) is State.S:
                self.reader.keep_plain(key, self._slots.block(slot))
        self._leaving.clear()

    def before_fill(self, slot: int, *, full: bool) -> None:
        """Note that a slot is about to be filled, in full precision or not; its former expert's parts are lost."""
        self.apply_changes()
        self._leaving.pop(slot, None)
        (self._full_slots.add if full else self._full_slots.discard)(slot)

    def in_order(self, keys: Sequence[int]) -> Sequence[int]:
        """Order a layer's misses so that threads decode what is held while the disk reads the rest."""
        self.apply_changes()
        return sorted(keys, key=lambda key: _LEAST_READ.index(self.reader.held(key)))


class DiskLink(Link):
    """Reads a disk store's file directly into the slots of a model on the CPU.

    Raw experts take no memory besides the slots. Coded experts need buffers for their parts.

    Args:
        threads: number of concurrent requests of the disk.
        bandwidth: limit of the disk's rate in bytes per second; None: no limit.
        pools: bytes for parts of coded experts that are kept beside the slots, by state; None: none are kept.
        passing: with pools, slots for experts that do not stay, as a multiple of K: 1, or 2 with forecasts.
    """

    name = "disk"
    by_address = False

    def __init__(
        self, threads: int = THREADS, *, bandwidth: float | None = None, pools: Mapping[State, int] | None = None,
        passing: int = 2,
    ) -> None:  # fmt: skip
        super().__init__()
        check_disk(threads, bandwidth)
        self._memory, self._passing = pools, passing
        self._kept: KeptParts | None = None
        self._threads, self.bandwidth = threads, bandwidth
        self._free_at = 0.0
        """End of the latest read counted in `busy_s`, in seconds of the clock."""

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        """
        Raises:
            ExpertcastError: the store has no file, the slots are not in host memory, or the pools do not fit the store.
        """
        super().attach(store, pool)
        self._file = file = file_of(store)
        if pool.device.type != "cpu":
            raise ExpertcastError(
                f"this link fills host memory, but the slots are on {pool.device}: give link='disk', which selects the "
                "link for this device"
            )
        if self._memory:
            if not file.compressed:
                raise ExpertcastError("pools keep compressed experts: give a codec that compresses, such as 'bitsplit'")
            opened = partial(CodedReader, file.file, file.codec, threads=self._threads, pace=self.bandwidth)
            self._kept = KeptParts(
                file.codec, file.shape, file.part_nbytes, pool, self._memory, passing=self._passing, open_reader=opened,
            )  # fmt: skip
            self.pools = self._kept.pools
        self._open()
        self._free_at = 0.0
        if pool.count < file.shape.layers * file.shape.experts:
            trim_heap(always=True)  # memory is short and should go to slots

    def _open(self) -> None:
        """Use the reader as the link's queue; without pools, a new one."""
        reader = self._file.reader(self._threads, self.bandwidth) if self._kept is None else self._kept.reader
        if isinstance(reader, CodedReader):
            reader.defer_forecasts = True
        self._queue = reader

    def unattached_copy(self) -> Link:
        return DiskLink(self._threads, bandwidth=self.bandwidth, pools=self._memory, passing=self._passing)

    def in_order(self, keys: Sequence[int]) -> Sequence[int]:
        return keys if self._kept is None else self._kept.in_order(keys)

    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = FULL) -> Transfer:
        if self._kept is not None:
            self._kept.before_fill(slot, full=precision == FULL)
        copy: Transfer
        if precision == FULL:
            block = self._pool.block(slot)[: self._layer_nbytes[key // self._file.experts]]
            copy = self._file.read(key, block, urgent=urgent, slot=slot, then=self._count_read)
            self._queue.submit(copy)
        else:
            copy = Transfer(key, slot, urgent, precision)
            self._run(copy)
        return copy

    def start(self, copy: Transfer) -> None:
        """Copy an expert in a lower precision now; these copies are in memory."""
        self._copy(copy)
        now = self.clock()
        self._complete(copy, now, now)

    def _pump(self) -> None:
        """Do nothing: the reader's threads start queued requests."""

    def _count_read(self, read: Read | CodedRead) -> None:
        if read.error is None:
            with self._counting:  # reads overlap: the time of several is counted once
                start, self._free_at = max(read.start, self._free_at), max(read.end, self._free_at)
                self.bytes_read += read.bytes_read
            self._count(read, min(start, read.end), read.end)

    def wait(self, copy: Transfer) -> None:
        if self._kept is not None:
            self._kept.keep_leaving()
        super().wait(copy)

    def restart(self) -> None:
        if self._kept is None:
            super().restart()
        else:
            self._kept.restart()
            self._open()

    def close(self) -> None:
        self._queue.close()


def file_of(store: ExpertStore) -> DiskStore:
    """Check that a store is on disk, and return it.

    Raises:
        ExpertcastError: the store is not on disk.
    """
    if not isinstance(store, DiskStore):
        raise ExpertcastError("link 'disk' reads experts from a file: give store='disk'")
    return store


def check_disk(threads: int, bandwidth: float | None) -> None:
    """Validate the arguments of a disk link.

    Raises:
        ExpertcastError: `threads` or `bandwidth` is below 1.
    """
    if threads < 1:
        raise ExpertcastError(f"threads={threads}: give 1 or more")
    check_rate(bandwidth)
