"""Memory for experts' coded parts: those that are being read or decoded, and those that are kept for the next time.

An expert's parts lie in two buffers, each in whole sectors: the *plain* one holds the parts of planes that are not
compressed (signs and mantissas), the *packed* one those of planes that are (exponents). Either can be kept alone. All
buffers are made at the start: what is kept costs no more memory than it was given.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from expertcast.runtime.storage.codecs import Codec
from expertcast.runtime.storage.coded_file import CodedFile
from expertcast.runtime.storage.direct_read import SECTOR, sectors
from expertcast.runtime.storage.host_memory import HostMemory

PLAIN, PACKED = 0, 1
KINDS = (PLAIN, PACKED)
Kinds = frozenset[int]
NOTHING: Kinds = frozenset()
EVERYTHING: Kinds = frozenset(KINDS)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part lies."""

    kind: int
    """PLAIN or PACKED."""
    start: int
    """Byte of its buffer, a multiple of a sector."""


class PartPlaces:
    """Where the parts of each expert of a file lie in its buffers."""

    def __init__(self, file: CodedFile, codec: Codec) -> None:
        packed_P = np.array([codec.planes[shard.plane].compressed for shard in codec.shards])
        whole_NP = -(-file.nbytes // SECTOR) * SECTOR
        self.kinds = [PACKED if packed else PLAIN for packed in packed_P.tolist()]
        """Of each part."""
        self.nbytes = [0, 0]
        """Of a buffer of each kind; 0: there are no such parts."""
        self._starts_NP = np.zeros_like(whole_NP)
        for kind in KINDS:
            own = np.flatnonzero(packed_P == kind)
            ends = whole_NP[:, own].cumsum(axis=1)
            self._starts_NP[:, own] = ends - whole_NP[:, own]
            self.nbytes[kind] = int(ends[:, -1].max()) if len(own) else 0

    def of(self, key: int) -> list[Place]:
        """One for each part."""
        return [Place(kind, start) for kind, start in zip(self.kinds, self._starts_NP[key].tolist(), strict=True)]


class Taken:
    """The buffers of one expert that is under way."""

    __slots__ = ("buffers", "held")

    def __init__(self, buffers: list[Tensor | None], held: Kinds) -> None:
        self.buffers = buffers
        """By kind."""
        self.held = held
        """Kinds whose parts were there already, and have been compared with their digests."""


class PartMemory:
    """Buffers, and whose parts are in them. Whoever uses it holds a lock.

    Args:
        nbytes: of a buffer, by kind.
        under_way: experts that may be under way at a time, beside those that are kept.
        kept: most buffers of each kind that are kept.
    """

    def __init__(self, nbytes: list[int], *, under_way: int, kept: tuple[int, int] = (0, 0)) -> None:
        self._may_begin = under_way
        """Experts that may still get under way. Buffers that nothing is kept in so far are not for them."""
        self._room = [count if size else 0 for count, size in zip(kept, nbytes, strict=True)]
        self._present = frozenset(kind for kind in KINDS if nbytes[kind])
        slabs = [
            HostMemory(sectors(size) * (count + under_way)).bytes if size else None
            for size, count in zip(nbytes, self._room, strict=True)
        ]
        self._free: list[list[Tensor]] = [
            [] if slab is None else list(slab.view(-1, sectors(size)).unbind(0))
            for slab, size in zip(slabs, nbytes, strict=True)
        ]
        self.nbytes = sum(slab.numel() for slab in slabs if slab is not None)
        """Bytes of all buffers."""
        self._kept: dict[int, dict[int, Tensor]] = {}
        """Buffers of each expert that is kept and not under way, by kind."""
        self._count = [0, 0]
        """Buffers that are kept, those under way left out."""

    def held(self, key: int) -> Kinds:
        """Of an expert that is not under way."""
        return frozenset(self._kept.get(key, ()))

    def take(self, key: int, spare: int = 0) -> Taken | None:
        """An expert gets under way: its own buffers, and free ones for what is not there.

        Args:
            key: the expert.
            spare: experts that must still be able to get under way afterwards; None is returned otherwise.
        """
        if self._may_begin <= spare:
            return None
        self._may_begin -= 1
        own = self._kept.pop(key, {})
        for kind in own:
            self._count[kind] -= 1
        buffers = [own.get(kind) for kind in KINDS]
        for kind in self._present - own.keys():
            buffers[kind] = self._free[kind].pop()
        return Taken(buffers, frozenset(own))

    def give(self, key: int, taken: Taken, keep: Container[int] = NOTHING) -> None:
        """It is under way no more.

        Args:
            key: the expert.
            taken: what :meth:`take` gave.
            keep: kinds whose parts are whole, and to be kept where there is room.
        """
        self._may_begin += 1
        for kind, buffer in enumerate(taken.buffers):
            if buffer is not None:
                self._settle(key, kind, buffer, kind in keep)

    def put(self, key: int, kind: int) -> Tensor | None:
        """A buffer for parts that come from elsewhere and count as kept from now on; None: there is no room."""
        if self._count[kind] >= self._room[kind] or kind in self._kept.get(key, ()) or not self._free[kind]:
            return None
        buffer = self._free[kind].pop()
        self._settle(key, kind, buffer, True)
        return buffer

    def drop(self, key: int, keep: Container[int] = NOTHING) -> None:
        """Free what is kept of an expert, but for some kinds."""
        own = self._kept.get(key)
        if own is None:
            return
        for kind in [kind for kind in own if kind not in keep]:
            self._count[kind] -= 1
            self._free[kind].append(own.pop(kind))
        if not own:
            del self._kept[key]

    def _settle(self, key: int, kind: int, buffer: Tensor, keep: bool) -> None:
        if keep and self._count[kind] < self._room[kind]:
            self._kept.setdefault(key, {})[kind] = buffer
            self._count[kind] += 1
        else:
            self._free[kind].append(buffer)
