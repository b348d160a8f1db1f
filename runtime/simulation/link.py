"""Links in virtual time, on the clock of the model's thread, for the simulator. They move and read nothing."""

from __future__ import annotations

import math
import statistics
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import cast

import torch
from torch import Tensor

from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import ModelShape
from expertcast.runtime.links.base import Link
from expertcast.runtime.links.disk import KeptParts
from expertcast.runtime.pools.states import POOLS, State, pools_text
from expertcast.runtime.storage.codecs import Codec, make_codec
from expertcast.runtime.storage.coded_reader import (
    NOTHING,
    PACKED,
    PLAIN,
    SPARE,
    UNDER_WAY,
    CodedReader,
    Kinds,
    PartBuffers,
    PartMemory,
    Rates,
)
from expertcast.runtime.storage.layout import FULL, BlockLayout, Field
from expertcast.runtime.storage.reader import PIECE, THREADS
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.transfer import Transfer


class VirtualLink(Link):
    """Simulates a link: copies take their computed time, and nothing is moved.

    Args:
        block_bytes: bytes of one expert by precision, including the full one.
        bandwidth: bytes per second.
        latency: seconds per copy.
        window: prefetches in flight; these can no longer be overtaken or cancelled.
        expand_s: seconds of the model's thread per expansion of a packed copy.
        write_back: link time per eviction, as a share of one full copy; it delays later copies.

    Raises:
        ExpertcastError: the bandwidth is not positive and finite, or the latency is negative.
    """

    name = "virtual"

    def __init__(
        self, block_bytes: Mapping[str, int], bandwidth: float, latency: float = 0.0, *, window: int = 1,
        expand_s: float = 0.0, write_back: float = 0.0,
    ) -> None:  # fmt: skip
        if not 0 < bandwidth < math.inf:
            raise ExpertcastError(f"bandwidth={bandwidth:g} is out of range: use a finite value above 0, such as 4e9")
        if not latency >= 0:
            raise ExpertcastError(f"latency={latency:g} is out of range: use 0 or more seconds")
        super().__init__()
        self.now = 0.0
        self.latency = latency
        self._block_bytes = block_bytes
        self._seconds = {name: latency + count / bandwidth for name, count in block_bytes.items()}
        self._window, self._expand_s = window, expand_s
        self.write_back_s = write_back * self._seconds[FULL]
        self._free_at = 0.0
        """Time at which the last issued copy arrives."""
        self._issued: deque[tuple[float, Transfer]] = deque()
        """Copies in flight, each with its final arrival time."""

    @property
    def copy_s(self) -> float:
        return self._seconds[FULL]

    def block_bytes(self, precision: str) -> int:
        return self._block_bytes[precision]

    def copy_bytes(self, key: int, precision: str) -> int:
        return self._block_bytes[precision]

    def clock(self) -> float:
        return self.now

    def _may_start(self, copy: Transfer) -> bool:
        return copy.urgent or len(self._issued) < self._window

    def start(self, copy: Transfer) -> None:
        self._issue(copy, self.now)

    def wait(self, copy: Transfer) -> None:
        """Advance the time until the copy has arrived."""
        while not copy.done:
            self.run_until(self._issued[0][0])

    def read_ahead(self, keys: Sequence[int]) -> None:
        """Do nothing: there is no store."""

    def expand(self, copy: Transfer) -> None:
        """Advance the time by one expansion."""
        self.spend(self._expand_s)

    def write_back(self) -> None:
        """Occupy the link with the evicted expert's copy back to the host."""
        self._free_at = max(self._free_at, self.now) + self.write_back_s

    def restart(self) -> None:
        self._issued.clear()
        self._queue.clear()
        self._free_at = self.now

    def run_until(self, time: float) -> None:
        """Advance the model's thread to `time`; copies proceed meanwhile."""
        self.now = time
        issued = self._issued
        while issued and issued[0][0] <= time:
            at, copy = issued.popleft()
            copy.finish(at)
            if len(issued) < self._window and (waiting := self._queue.first()) is not None:
                waiting.begin()
                self._issue(waiting, at)

    def spend(self, seconds: float) -> None:
        """Advance the model's thread by `seconds`; copies proceed meanwhile."""
        self.run_until(self.now + seconds)

    def _issue(self, copy: Transfer, time: float) -> None:
        """Put the copy after all issued ones, at `time` at the earliest."""
        seconds = self._seconds[copy.precision]
        self._free_at = max(self._free_at, time) + seconds
        self._issued.append((self._free_at, copy))
        self.copies += 1
        self.busy_s += seconds


# A reader of coded experts without a file


class VirtualParts:
    """Tracks the parts of experts in host memory as :class:`CodedReader` does, without a file. A buffer is one sector.

    Args:
        rates: the simulated speeds of disk and decoding.
        most: maximum number of experts in flight.
        kept: as for :class:`CodedReader`.
        wanted: as for :class:`CodedReader`.
    """

    def __init__(self, rates: Rates, most: int, kept: tuple[int, int], wanted: Callable[[int], Kinds]) -> None:
        self._rates, self._wanted = rates, wanted
        self._memory = PartMemory([1, 1], under_way=most, kept=kept)
        self._taken: dict[int, PartBuffers] = {}

    def begin(self, key: int) -> Kinds:
        """Start to read an expert; return the kinds of its parts that are already in memory."""
        taken = self._memory.take(key)
        assert taken is not None, "no expert is under way twice"
        self._taken[key] = taken
        return taken.held

    def finish(self, key: int) -> None:
        """End the read of an expert and keep its wanted parts."""
        self._memory.release(key, self._taken.pop(key), self._wanted(key))

    def held(self, key: int) -> Kinds:
        return self._memory.held(key)

    def drop(self, key: int, keep: Kinds = NOTHING) -> None:
        self._memory.drop(key, keep)

    def keep_plain(self, key: int, block: Tensor) -> None:
        self._memory.put(key, PLAIN)

    def rates(self) -> Rates:
        return self._rates

    def close(self) -> None:
        """Do nothing: there is no thread."""


def virtual_codec(text: str, block_bytes: int) -> Codec:
    """Return a codec for bf16 experts of `block_bytes` bytes, treated as one field.

    Raises:
        ExpertcastError: the codec's name is unknown.
    """
    whole = Field(name="block", shape=(block_bytes // 2,), dtype=torch.bfloat16, offset=0)
    return make_codec(text, BlockLayout(fields=(whole,), block_bytes=block_bytes))


# The disk link in virtual time: reads follow one another, and L threads decode the shards of each expert.
#
# N is the number of experts of all layers, E of one layer. An expert's key is layer * E + expert.

_CODED_WINDOW = UNDER_WAY - SPARE


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredExperts:
    """Stored form of a codec's experts on a disk, and their decoding costs.

    Raises:
        ExpertcastError: a number is out of range, `pools` names the full or missing state, or `pools` is set for
            experts that are not coded.
    """

    codec: str = "raw"
    plain: int
    """Uncompressed bytes per expert: all of them if nothing is compressed."""
    coded: tuple[int, ...] = ()
    """Compressed bytes of every expert [N], or one number for all; empty if nothing is compressed."""
    shards: int = 1
    """Shards per expert (K), decoded one by one; 1 if nothing is compressed."""
    decode_s: float = 0.0
    """Thread seconds per shard, including its share of assembling the expert."""
    threads: int = 1
    """Decoding threads (L)."""
    pools: Mapping[State, int] = field(default_factory=dict)
    """Bytes of the pools C, S and E beside the slots, for all layers together."""

    def __post_init__(self) -> None:
        if self.plain < 1 or any(count < 1 for count in self.coded):
            raise ExpertcastError(f"plain={self.plain}, coded={self.coded[:3]} is out of range: use 1 or more bytes")
        if self.shards < 1 or self.threads < 1 or not self.decode_s >= 0:
            raise ExpertcastError(
                f"shards={self.shards}, threads={self.threads}, decode_s={self.decode_s} is out of range: use 1 or "
                "more shards and threads, and 0 or more seconds"
            )
        wrong = [state.name for state, count in self.pools.items() if count < 0 or state not in POOLS[1:]]
        if wrong:
            raise ExpertcastError(f"pools {wrong} are invalid: use 0 or more bytes for C, S and E")
        if any(self.pools.values()) and not self.coded:
            raise ExpertcastError("pools hold parts of compressed experts: choose a codec or leave the pools out")

    @property
    def window(self) -> int:
        """Prefetches in flight at most; these can no longer be overtaken."""
        return _CODED_WINDOW if self.coded else max(1, min(THREADS, THREADS * PIECE // self.plain))

    @property
    def pools_text(self) -> str:
        """The pools' bytes in the format of `OffloadConfig.pools`."""
        return pools_text(self.pools)

    @property
    def mean_coded(self) -> float:
        """Mean compressed bytes per expert."""
        return statistics.fmean(self.coded) if self.coded else 0.0

    @property
    def decoding_s(self) -> float:
        """Thread seconds per expert."""
        return self.shards * self.decode_s

    def coded_of(self, key: int) -> int:
        """Return the compressed bytes of an expert."""
        if not self.coded:
            return 0
        return self.coded[key] if len(self.coded) > 1 else self.coded[0]

    def copy_s(self, rate: float) -> float:
        """Return the seconds per expert back to back: of the disk or of the threads, whichever is slower."""
        return max((self.plain + self.mean_coded) / rate, self.decoding_s / self.threads)


class VirtualDisk(VirtualLink):
    """Simulates the disk link: reads and decoding take their computed time, and nothing is read.

    Args:
        stored: stored form of the experts and their decoding costs.
        rate: disk bandwidth in bytes per second.
        latency: seconds of the disk per expert.
        block_bytes: bytes of one expert in memory, by precision. Copies in a lower precision are in memory and take
            no time.

    Raises:
        ExpertcastError: the rate is not positive and finite, or the latency is negative.
    """

    name = "virtual disk"

    def __init__(
        self, stored: StoredExperts, rate: float, latency: float = 0.0, *, block_bytes: Mapping[str, int]
    ) -> None:
        super().__init__(block_bytes, rate, latency, window=stored.window)
        self._stored, self._rate = stored, rate
        self._kept: KeptParts | None = None
        self._threads: list[list[tuple[float, float]]] = [[] for _ in range(stored.threads)]
        """Planned decoding of each thread: intervals of begin and end in seconds, in order."""

    def use_pools(self, slots: SlotPool, shape: ModelShape, *, passing: int) -> None:
        """Use the pools of `stored`, if it has any, from now on; they appear as `pools`.

        Args:
            slots: the run's slots.
            shape: the model's shape.
            passing: as for :class:`expertcast.runtime.links.disk.DiskLink`.

        Raises:
            ExpertcastError: a pool is smaller than one expert, or the codec's parts do not fit the pools.
        """
        memory = {state: count for state, count in self._stored.pools.items() if count}
        if not memory:
            return
        stored, nbytes = self._stored, self._block_bytes[FULL]
        decoding = nbytes / stored.decoding_s if stored.decoding_s else math.inf
        rates = Rates(disk=self._rate, decoding=decoding, threads=stored.threads)
        # KeptParts uses only the reader methods that VirtualParts has.
        open_reader = cast(Callable[..., CodedReader], partial(VirtualParts, rates, shape.layers * shape.experts))
        self._kept = KeptParts(
            virtual_codec(stored.codec, nbytes), shape, (stored.plain, max(stored.coded)), slots, memory,
            passing=passing, open_reader=open_reader,
        )  # fmt: skip
        self.pools = self._kept.pools

    @property
    def copy_s(self) -> float:
        return self.latency + self._stored.copy_s(self._rate)

    @property
    def _parts(self) -> VirtualParts | None:
        return None if self._kept is None else cast(VirtualParts, self._kept.reader)

    def in_order(self, keys: Sequence[int]) -> Sequence[int]:
        return keys if self._kept is None else self._kept.in_order(keys)

    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = FULL) -> Transfer:
        for thread in self._threads:  # remove finished decoding: no copy begins before now
            while thread and thread[0][1] <= self.now:
                del thread[0]
        if self._kept is not None:
            self._kept.before_fill(slot, full=precision == FULL)
        return super().submit(key, slot, urgent=urgent, precision=precision)

    def wait(self, copy: Transfer) -> None:
        if self._kept is not None:
            self._kept.keep_leaving()
        super().wait(copy)

    def restart(self) -> None:
        super().restart()
        for thread in self._threads:
            thread.clear()
        if self._kept is not None:
            self._kept.restart()

    def _issue(self, copy: Transfer, time: float) -> None:
        """Put the copy after all earlier reads, at `time` at the earliest."""
        self.copies += 1
        arrives = time if copy.precision != FULL else self._read(copy, time)
        insort(self._issued, (arrives, copy), key=itemgetter(0))

    def _read(self, copy: Transfer, begin: float) -> float:
        """Schedule an expert's read and decoding; return its arrival time."""
        stored, parts, key, held = self._stored, self._parts, copy.key, NOTHING
        if parts is not None:
            held = parts.begin(key)
            copy.then = lambda _copy: parts.finish(key)
        plain = 0 if PLAIN in held else stored.plain
        coded = 0 if PACKED in held else stored.coded_of(key)
        there = begin
        if plain + coded:
            there = self._free_at = max(self._free_at, begin) + self.latency + (plain + coded) / self._rate
            self.bytes_read += plain + coded
            self.busy_s += self.latency + (plain + coded) / self._rate
        if not stored.decode_s:
            return there
        # Shards arrive after the uncompressed bytes. If the shards are in memory, each needs its share of those bytes.
        last = (coded or plain) / self._rate
        left = [1 - (shard + 1) / stored.shards for shard in range(stored.shards)]
        return max(there, *(self._decode(there - share * last) for share in left))

    def _decode(self, arrival: float) -> float:
        """Decode a shard that arrives at `arrival` in the first sufficient gap of a thread; return the end.

        Shards scheduled earlier keep their time.
        """
        seconds = self._stored.decode_s
        begins = []
        for thread in self._threads:
            begin = arrival
            for start, end in thread:
                if begin + seconds <= start:
                    break
                begin = max(begin, end)
            begins.append(begin)
        begin = min(begins)
        insort(self._threads[begins.index(begin)], (begin, begin + seconds))
        return begin + seconds
