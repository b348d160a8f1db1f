"""A link that is the disk itself: experts are read into their slots past the system's page cache, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import ModelShape
from expertcast.runtime.links.base import Link, check_rate
from expertcast.runtime.pools.cache import Pools
from expertcast.runtime.pools.schedule import makespan, schedule
from expertcast.runtime.pools.states import Costs, ExpertBytes, State
from expertcast.runtime.storage.codecs import Codec
from expertcast.runtime.storage.coded_reader import EVERYTHING, NOTHING, PACKED, PLAIN, CodedRead, CodedReader, Kinds
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.layout import FULL
from expertcast.runtime.storage.memory import give_back_freed
from expertcast.runtime.storage.reader import THREADS, Read
from expertcast.runtime.storage.slots import SlotPool, SlotState
from expertcast.runtime.storage.store import ExpertStore
from expertcast.runtime.storage.transfer import Transfer

# Coded parts that are kept in memory beside the slots, as the pools decide.

_KINDS: dict[State, Kinds] = {
    State.F: NOTHING, State.C: EVERYTHING, State.S: frozenset({PLAIN}), State.E: frozenset({PACKED}), State.M: NOTHING,
}  # fmt: skip
_STATES = {kinds: state for state, kinds in _KINDS.items() if state is not State.F} | {NOTHING: State.M}


class KeptParts:
    """A reader that keeps parts, and what is done about them as their pools change.

    Calls come from the thread that runs the model.

    Args:
        codec: of the experts.
        shape: of the model.
        part_nbytes: of an expert in memory, plain and packed.
        slots: whose full experts are the first of the pools.
        memory: bytes of each other pool, of all layers together.
        passing: slots that are no pool, as a multiple of K: the running layer's, and those of its forecasts.
        opened: makes a reader, by `kept` and `wanted` of :class:`CodedReader`.

    Raises:
        ExpertcastError: less memory than one expert takes, or states that the codec does not have.
    """

    def __init__(
        self, codec: Codec, shape: ModelShape, part_nbytes: Sequence[int], slots: SlotPool,
        memory: Mapping[State, int], *, passing: int, opened: Callable[..., CodedReader],
    ) -> None:  # fmt: skip
        plain, packed = part_nbytes
        self._size = ExpertBytes(plane=plain, exponents=packed)
        self._codec, self._slots, self._opened = codec, slots, opened
        if not packed and memory.keys() - {State.C}:
            raise ExpertcastError(f"codec {codec.text!r} has no parts that can be kept alone: give pools='C=...'")
        room = {state: nbytes // self._size.held(state) for state, nbytes in memory.items()}
        for state, count in room.items():
            if not count:
                raise ExpertcastError(
                    f"pool {state.name} of {memory[state]} bytes holds no expert of {self._size.held(state)}: "
                    "give more, or leave it out"
                )
        self.pools = Pools(
            layers=shape.layers,
            experts=shape.experts,
            size=self._size,
            room=room | {State.F: max(0, slots.count - passing * shape.top_k)},
        )
        self.reader = self._open()
        self._leaving: dict[int, int] = {}
        """Full experts that are to be taken apart before their slot is given away, by slot."""
        self._whole: set[int] = set()
        """Slots that were last filled with a full expert: one in less precision has other parts."""

    def restart(self) -> None:
        """Drop what is queued and kept; the caller informs the pools."""
        self.reader.close()
        self._leaving.clear()
        self._whole.clear()
        self.reader = self._open()

    def _open(self) -> CodedReader:
        kept = self.pools.room
        return self._opened(
            kept=(kept[State.C] + kept[State.S], kept[State.C] + kept[State.E]),
            wanted=lambda key: _KINDS[self.pools.state(key)],
        )

    def settle(self) -> None:
        """Do what the pools have decided since the last call: forget parts, and note what is to be taken apart."""
        for key, state in dict(self.pools.changes()).items():
            slot = self._slots.slots.get(key)
            comes = slot is None or self._slots.state(slot) is SlotState.LOADING
            if key in self.pools.running and comes:
                continue  # its parts are about to be used; the reader decides at its end
            self.reader.drop(key, _KINDS[state])
            if slot in self._whole and state is State.S:
                self._leaving[slot] = key

    def take_apart(self) -> None:
        """Keep the plain parts of full experts that leave: the model's thread has nothing better to do."""
        for slot, key in self._leaving.items():
            arrived = self._slots.slots.get(key) == slot and self._slots.state(slot) is not SlotState.LOADING
            if arrived and self.pools.state(key) is State.S:
                self.reader.keep_plain(key, self._slots.block(slot))
        self._leaving.clear()

    def fills(self, slot: int, *, full: bool) -> None:
        """A slot is filled with another expert, in full precision or less: too late for the one that was in it."""
        self.settle()
        self._leaving.pop(slot, None)
        (self._whole.add if full else self._whole.discard)(slot)

    def in_order(self, keys: Sequence[int]) -> Sequence[int]:
        """The order in which a layer's misses keep disk and processors busy."""
        if len(keys) < 2:
            return keys
        self.settle()
        states = {key: _STATES[self.reader.held(key)] for key in sorted(keys)}
        if len(set(states.values())) < 2:
            return keys
        ordered = list(states)
        return [ordered[place] for block in schedule(list(states.values()), self._costs()) for place in block]

    def seconds(self, key: int) -> float:
        """Until an expert would be ready if nothing else were read or decoded."""
        states, costs = [_STATES[self.reader.held(key)]], self._costs()
        return makespan(states, schedule(states, costs), costs)

    def _costs(self) -> Costs:
        rates, codec = self.reader.rates(), self._codec
        shards = sum(codec.planes[shard.plane].compressed for shard in codec.shards)
        return Costs(
            read_s=self._size.plane / rates.disk,
            ratio=self._size.exponents / self._size.plane,
            decode_s=codec.layout.block_bytes / max(1, shards) / rates.decoding,
            shards=max(1, shards),
            threads=rates.threads,
        )


class DiskLink(Link):
    """Reads a disk store's file directly into the slots of a model on the CPU: no memory but the slots is used.

    Args:
        threads: reads under way at a time.
        bandwidth: bytes per second that the disk is taken for, at most; None: as it is.
        pools: bytes in which parts of coded experts are kept beside the slots, by state; None: nothing is.
        passing: with pools, slots for experts that are not to stay, as a multiple of K: 1, or 2 with forecasts.
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
        """When the last read that was counted ended."""

    def attach(self, store: ExpertStore, pool: SlotPool) -> None:
        """
        Raises:
            ExpertcastError: the experts do not lie in a file, or the slots not in host memory.
        """
        super().attach(store, pool)
        self._file = file = file_of(store)
        if pool.device.type != "cpu":
            raise ExpertcastError(
                f"this link fills host memory, and the slots are on {pool.device}: give link='disk', which goes by that"
            )
        if self._memory:
            if file.addressable:
                raise ExpertcastError("pools keep compressed experts: give a codec that compresses, such as 'bitsplit'")
            opened = partial(CodedReader, file.file, file.codec, threads=self._threads, pace=self.bandwidth)
            self._kept = KeptParts(
                file.codec, file.shape, file.part_nbytes, pool, self._memory, passing=self._passing, opened=opened
            )
            self.pools = self._kept.pools
        self._open()
        self._free_at = 0.0
        if pool.count < file.shape.layers * file.shape.experts:
            give_back_freed(at_once=True)  # memory is short: it is for slots

    def _open(self) -> None:
        """The queue is a new reader's, which carries out what is in it."""
        reader = self._file.reader(self._threads, self.bandwidth) if self._kept is None else self._kept.reader
        if isinstance(reader, CodedReader):
            reader.held_back = True
        self._queue = reader

    def unattached_copy(self) -> Link:
        return DiskLink(self._threads, bandwidth=self.bandwidth, pools=self._memory, passing=self._passing)

    def seconds(self, key: int) -> float:
        return self.copy_s if self._kept is None else self._kept.seconds(key)

    def in_order(self, keys: Sequence[int]) -> Sequence[int]:
        return keys if self._kept is None else self._kept.in_order(keys)

    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = FULL) -> Transfer:
        if self._kept is not None:
            self._kept.fills(slot, full=precision == FULL)
        copy: Transfer
        if precision == FULL:
            block = self._pool.block(slot)[: self._file.layout.nbytes_of(key // self._file.experts)]
            copy = self._file.read(key, block, urgent=urgent, slot=slot, then=self._count_read)
            self._queue.submit(copy)
        else:
            copy = Transfer(key, slot, urgent, precision)
            self._run(copy)
        return copy

    def start(self, copy: Transfer) -> None:
        """Copy an expert of less than full precision at once: it lies in memory, and the disk is not used."""
        self._copy(copy)
        now = self.clock()
        self._complete(copy, now, now)

    def _pump(self) -> None:
        """The reader starts what is queued."""

    def _count_read(self, read: Read | CodedRead) -> None:
        if read.error is None:
            with self._counting:  # reads overlap: the time in which any was under way is counted once
                start, self._free_at = max(read.start, self._free_at), max(read.end, self._free_at)
                self.bytes_read += read.bytes_read
            self._count(read, min(start, read.end), read.end)

    def wait(self, copy: Transfer) -> None:
        if self._kept is not None:
            self._kept.take_apart()
        super().wait(copy)

    def read_ahead(self, keys: object) -> None:
        """Do nothing: pages of the mapped file are not used."""

    def restart(self) -> None:
        if self._kept is None:
            super().restart()
        else:
            self._kept.restart()
            self._open()

    def close(self) -> None:
        self._queue.close()


def file_of(store: ExpertStore) -> DiskStore:
    """The store, if it is one that a disk's link can read.

    Raises:
        ExpertcastError: its experts do not lie in a file.
    """
    if not isinstance(store, DiskStore):
        raise ExpertcastError("link 'disk' reads experts from a file: give store='disk'")
    return store


def check_disk(threads: int, bandwidth: float | None) -> None:
    """
    Raises:
        ExpertcastError: no threads, or no bandwidth.
    """
    if threads < 1:
        raise ExpertcastError(f"threads={threads}: give 1 or more")
    check_rate(bandwidth)
