"""A disk and the threads that decode what it reads, in virtual time: what :mod:`expertcast.runtime.links.disk` does.

Reads follow one another, as they share the disk's rate; an expert's shards are decoded by whichever of L threads is
free, while the disk reads on. Which parts are kept beside the slots is decided by the same books as in a run.

N experts of all layers, E of one. An expert's key is layer * E + expert.
"""

from __future__ import annotations

import math
import statistics
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import cast

from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.view import ModelShape
from expertcast.runtime.links.base import Copy
from expertcast.runtime.links.kept_parts import KeptParts
from expertcast.runtime.links.virtual import VirtualCopy, VirtualLink, check_speed
from expertcast.runtime.links.virtual_parts import VirtualParts, VirtualStore, virtual_codec
from expertcast.runtime.pools.states import POOLS, State, pools_text
from expertcast.runtime.storage.coded_read import Rates
from expertcast.runtime.storage.coded_reader import SPARE, UNDER_WAY
from expertcast.runtime.storage.coded_store import CodedStore
from expertcast.runtime.storage.direct_read import PIECE
from expertcast.runtime.storage.direct_reader import THREADS
from expertcast.runtime.storage.part_memory import NOTHING, PACKED, PLAIN
from expertcast.runtime.storage.precision import FULL
from expertcast.runtime.storage.slots import SlotPool

_CODED_WINDOW = UNDER_WAY - SPARE


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """How a codec's experts lie on a disk, and what decoding them takes.

    Raises:
        ExpertcastError: a number out of range, pools of full or missing experts, or of experts that are not coded.
    """

    codec: str = "raw"
    plain: int
    """Bytes of an expert that are stored as they are: all of it where nothing is compressed."""
    coded: tuple[int, ...] = ()
    """Bytes of what is compressed, of every expert [N], or one number for all of them; none: nothing is."""
    shards: int = 1
    """K, that are decoded one by one; 1 where nothing is compressed."""
    decode_s: float = 0.0
    """Seconds of a thread for one of them, with its share of putting the expert together."""
    threads: int = 1
    """L, that decode."""
    pools: Mapping[State, int] = field(default_factory=dict)
    """Bytes of the pools C, S and E beside the slots, of all layers together."""

    def __post_init__(self) -> None:
        if self.plain < 1 or any(count < 1 for count in self.coded):
            raise ExpertcastError(f"an expert of {self.plain} bytes and {self.coded[:3]}: give 1 or more of each")
        if self.shards < 1 or self.threads < 1 or not self.decode_s >= 0:
            raise ExpertcastError(
                f"shards={self.shards}, threads={self.threads}, decode_s={self.decode_s}: give 1 or more of both, and "
                "seconds of 0 or more"
            )
        wrong = [state.name for state, count in self.pools.items() if count < 0 or state not in POOLS[1:]]
        if wrong:
            raise ExpertcastError(f"pools {wrong}: give bytes of 0 or more for C, S and E")
        if any(self.pools.values()) and not self.coded:
            raise ExpertcastError("pools hold parts of compressed experts: choose a codec, or leave the pools out")

    @property
    def window(self) -> int:
        """Experts of forecasts that are begun at a time, and can no longer be overtaken."""
        return _CODED_WINDOW if self.coded else max(1, min(THREADS, THREADS * PIECE // self.plain))

    @property
    def pools_text(self) -> str:
        """Bytes of the pools, as `OffloadConfig.pools` takes them."""
        return pools_text(self.pools)

    @property
    def mean_coded(self) -> float:
        """Bytes that are compressed, of the mean expert."""
        return statistics.fmean(self.coded) if self.coded else 0.0

    @property
    def decoding_s(self) -> float:
        """Seconds of a thread for a whole expert."""
        return self.shards * self.decode_s

    def coded_of(self, key: int) -> int:
        """Bytes of an expert that are compressed."""
        if not self.coded:
            return 0
        return self.coded[key] if len(self.coded) > 1 else self.coded[0]

    def copy_s(self, rate: float) -> float:
        """Seconds of one expert among others back to back: of the disk or of the threads, whoever takes longer."""
        return max((self.plain + self.mean_coded) / rate, self.decoding_s / self.threads)


class VirtualDisk(VirtualLink):
    """Experts take as long as the disk and the threads say; nothing is read.

    Args:
        stored: how experts lie there.
        rate: bytes per second that the disk reads.
        latency: seconds of the disk per expert.
        block_bytes: of one expert in memory.
        lower: bytes of copies in each lower precision, which lie in memory and take no time.

    Raises:
        ExpertcastError: no rate, or a negative latency.
    """

    name = "virtual disk"

    def __init__(
        self, stored: Stored, rate: float, latency: float = 0.0, *, block_bytes: int,
        lower: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        check_speed(rate, latency)
        in_memory = {name: (nbytes, 0.0) for name, nbytes in (lower or {}).items()}
        super().__init__(latency + stored.copy_s(rate), lower=in_memory, window=stored.window)
        self._stored, self._rate, self.latency, self._block_bytes = stored, rate, latency, block_bytes
        self._kept: KeptParts | None = None
        self._threads: list[list[tuple[float, float]]] = [[] for _ in range(stored.threads)]
        """What each is going to do: first and last second, in order."""

    def keep_parts(self, slots: SlotPool, shape: ModelShape, *, passing: int) -> None:
        """Have the pools that were asked for, if any, decide from now on; `pools` are theirs.

        Args:
            slots: the books of the run's slots.
            shape: of the model.
            passing: as :class:`expertcast.runtime.links.disk.DiskLink` takes it.

        Raises:
            ExpertcastError: a pool with room for less than an expert of each layer.
        """
        memory = {state: count for state, count in self._stored.pools.items() if count}
        if not memory:
            return
        seconds = self._stored.decoding_s
        store = VirtualStore(
            layers=shape.layers, experts=shape.experts, top_k=shape.top_k,
            codec=virtual_codec(self._stored.codec, self._block_bytes),
            part_nbytes=(self._stored.plain, max(self._stored.coded)),
            rates=Rates(
                disk=self._rate, decoding=self._block_bytes / seconds if seconds else math.inf,
                threads=self._stored.threads,
            ),
        )  # fmt: skip
        # it asks no more of a store than this one has
        self._kept = KeptParts(cast(CodedStore, store), slots, memory, passing=passing, threads=1, pace=None)
        self.pools = self._kept.pools

    @property
    def _parts(self) -> VirtualParts | None:
        return None if self._kept is None else cast(VirtualParts, self._kept.reader)

    def seconds(self, key: int) -> float:
        return self.copy_s if self._kept is None else self._kept.seconds(key)

    def in_order(self, keys: Sequence[int]) -> Sequence[int]:
        return keys if self._kept is None else self._kept.in_order(keys)

    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = FULL) -> VirtualCopy:
        for thread in self._threads:  # no copy is begun before now any more
            while thread and thread[0][1] <= self.now:
                del thread[0]
        if self._kept is not None:
            self._kept.fills(slot)
        return super().submit(key, slot, urgent=urgent, precision=precision)

    def wait(self, copy: Copy) -> None:
        if self._kept is not None:
            self._kept.take_apart()
        super().wait(copy)

    def restart(self) -> None:
        super().restart()
        for thread in self._threads:
            thread.clear()
        if self._kept is not None:
            self._kept.restart()

    def _came(self, copy: Copy) -> None:
        parts = self._parts
        if parts is not None and copy.precision == FULL:
            parts.finish(copy.key)

    def _issue(self, copy: Copy, time: float | None = None) -> None:
        """Behind everything that the disk was asked for before, at `time` (now) at the earliest."""
        assert isinstance(copy, VirtualCopy)
        begin = self.now if time is None else time
        copy.started = True
        self.copies += 1
        copy.arrives = begin if copy.precision != FULL else self._read(copy.key, begin)
        insort(self._issued, copy, key=attrgetter("arrives"))

    def _read(self, key: int, begin: float) -> float:
        """Have an expert read and decoded; returns when it is there."""
        stored, parts = self._stored, self._parts
        held = NOTHING if parts is None else parts.begin(key)
        plain = 0 if PLAIN in held else stored.plain
        coded = 0 if PACKED in held else stored.coded_of(key)
        there = begin
        if plain + coded:
            there = self._free_at = max(self._free_at, begin) + self.latency + (plain + coded) / self._rate
            self.bytes_read += plain + coded
            self.busy_s += self.latency + (plain + coded) / self._rate
        if not stored.decode_s:
            return there
        # shards follow what is stored as it is; where they are in memory, each needs its share of that
        last = (coded or plain) / self._rate
        left = [1 - (shard + 1) / stored.shards for shard in range(stored.shards)]
        return max(there, *(self._decode(there - share * last) for share in left))

    def _decode(self, come: float) -> float:
        """Decode a shard that is there at `come` in the first pause of a thread that is long enough; returns when that
        is done. What was asked for before keeps its time."""
        seconds = self._stored.decode_s
        begins = []
        for thread in self._threads:
            begin = come
            for start, end in thread:
                if begin + seconds <= start:
                    break
                begin = max(begin, end)
            begins.append(begin)
        begin = min(begins)
        insort(self._threads[begins.index(begin)], (begin, begin + seconds))
        return begin + seconds
