"""A disk and the threads that decode what it reads, in virtual time: what :mod:`expertcast.runtime.links.disk` does.

Reads follow one another, as they share the disk's rate; an expert's parts are decoded one by one, by whichever of L
threads is free, while the disk reads on.

N experts of all layers, E of one. An expert's key is layer * E + expert.
"""

from __future__ import annotations

import statistics
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.links.base import Copy
from expertcast.runtime.links.virtual import VirtualCopy, VirtualLink, check_speed
from expertcast.runtime.pools.cache import PoolCache
from expertcast.runtime.pools.states import POOLS, ExpertBytes, State
from expertcast.runtime.storage.precision import FULL

CODED_WINDOW = 2
"""Coded experts of forecasts that are begun at a time."""


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
    """K, that are decoded one by one."""
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
    def pools_text(self) -> str:
        """Bytes of the pools, as `C=2000000,E=300000`."""
        return ",".join(f"{state.name}={self.pools[state]}" for state in POOLS if self.pools.get(state))

    @property
    def mean_coded(self) -> float:
        """Bytes that are compressed, of the mean expert."""
        return statistics.fmean(self.coded) if self.coded else 0.0

    @property
    def decoding_s(self) -> float:
        """Seconds of a thread for a whole expert."""
        return self.shards * self.decode_s if self.coded else 0.0

    def coded_of(self, key: int) -> int:
        """Bytes of an expert that are compressed."""
        if not self.coded:
            return 0
        return self.coded[key] if len(self.coded) > 1 else self.coded[0]

    def copy_s(self, rate: float) -> float:
        """Seconds of one expert among others back to back: of the disk or of the threads, whoever takes longer."""
        return max((self.plain + self.mean_coded) / rate, self.decoding_s / self.threads)

    def caches(self, layers: int, experts: int) -> list[PoolCache]:
        """The pools of each layer, all of the same size; none where there are no pools."""
        memory = {state: count // layers for state, count in self.pools.items() if count}
        if not memory:
            return []
        size = ExpertBytes(plane=self.plain, exponents=round(self.mean_coded))
        return [PoolCache(experts, size=size, memory=memory) for _ in range(layers)]


class VirtualDisk(VirtualLink):
    """Experts take as long as the disk and the threads say; nothing is read.

    Args:
        stored: how experts lie there.
        rate: bytes per second that the disk reads.
        latency: seconds of the disk per expert.
        layers: L, of the model.
        experts: E
        lower: bytes of copies in each lower precision, which lie in memory and take no time.
        window: experts of forecasts that are begun and can no longer be overtaken.

    Raises:
        ExpertcastError: no rate, or a negative latency.
    """

    name = "virtual disk"

    def __init__(
        self, stored: Stored, rate: float, latency: float = 0.0, *, layers: int, experts: int,
        lower: Mapping[str, int] | None = None, window: int = 1,
    ) -> None:  # fmt: skip
        check_speed(rate, latency)
        in_memory = {name: (nbytes, 0.0) for name, nbytes in (lower or {}).items()}
        super().__init__(latency + stored.copy_s(rate), lower=in_memory, window=window)
        self._stored, self._rate, self.latency, self._experts = stored, rate, latency, experts
        self.caches = stored.caches(layers, experts)
        """Of each layer, or none."""
        self._used: list[list[int]] = [[] for _ in range(layers)]
        """Experts of each layer that were read since it was last waited for."""
        self._threads: list[list[tuple[float, float]]] = [[] for _ in range(stored.threads)]
        """What each is going to do: first and last second, in order."""
        self.bytes_read = 0

    def submit(self, key: int, slot: int, *, urgent: bool, precision: str = FULL) -> VirtualCopy:
        for thread in self._threads:  # no copy is begun before now any more
            while thread and thread[0][1] <= self.now:
                del thread[0]
        return super().submit(key, slot, urgent=urgent, precision=precision)

    def wait(self, copy: Copy) -> None:
        if self.caches:
            self._keep(copy.key // self._experts)
        super().wait(copy)

    def restart(self) -> None:
        super().restart()
        for thread in self._threads:
            thread.clear()

    def _keep(self, layer: int) -> None:
        """What was read for a step of the layer has a state from now on."""
        used, self._used[layer] = self._used[layer], []
        if used:
            self.caches[layer].use(list(dict.fromkeys(used)))

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
        stored, layer, expert = self._stored, *divmod(key, self._experts)
        state = State.M
        if self.caches:
            state = self.caches[layer].state(expert)
            self._used[layer].append(expert)
        plain = stored.plain * state.reads_mantissas
        coded = stored.coded_of(key) * state.reads_exponents
        there = come = begin
        if plain + coded:
            seconds = self.latency + (plain + coded) / self._rate
            there = self._free_at = max(self._free_at, begin) + seconds
            self.bytes_read += plain + coded
            self.busy_s += seconds
        if coded:  # what is stored as it is comes first, as it lies there
            come = there - coded / self._rate
        if not stored.coded:
            return there
        end = begin
        for shard in range(1, stored.shards + 1):  # one after another: each expert is one worker's
            end = self._decode(max(end, come + shard / stored.shards * coded / self._rate))
        return max(end, there)

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
