"""The books of :class:`expertcast.runtime.storage.coded_reader.CodedReader` without a file: which parts are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from expertcast.runtime.storage.codecs import Codec, make_codec
from expertcast.runtime.storage.coded_read import Rates
from expertcast.runtime.storage.layout import BlockLayout, Field
from expertcast.runtime.storage.part_memory import NOTHING, PLAIN, Kinds, PartMemory, Taken


class VirtualParts:
    """What is kept of experts, and what is under way; buffers are a sector each, whatever they stand for.

    Args:
        rates: that the link knows.
        most: experts that may be under way.
        kept, wanted: as for :class:`CodedReader`.
    """

    def __init__(self, rates: Rates, most: int, kept: tuple[int, int], wanted: Callable[[int], Kinds]) -> None:
        self._rates, self._wanted = rates, wanted
        self._memory = PartMemory([1, 1], under_way=most, kept=kept)
        self._taken: dict[int, Taken] = {}

    def begin(self, key: int) -> Kinds:
        """An expert is read: what need not be."""
        taken = self._memory.take(key)
        assert taken is not None, "no expert is under way twice"
        self._taken[key] = taken
        return taken.held

    def finish(self, key: int) -> None:
        """It is there: what is wanted of it is kept."""
        self._memory.give(key, self._taken.pop(key), self._wanted(key))

    def held(self, key: int) -> Kinds:
        return self._memory.held(key)

    def drop(self, key: int, keep: Kinds = NOTHING) -> None:
        self._memory.drop(key, keep)

    def keep_plain(self, key: int, block: Tensor) -> None:
        self._memory.put(key, PLAIN)

    def rates(self) -> Rates:
        return self._rates

    def close(self) -> None:
        """There is no thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualStore:
    """What :class:`expertcast.runtime.links.kept_parts.KeptParts` asks of a store of coded experts."""

    layers: int
    """L"""
    experts: int
    """E, of a layer."""
    top_k: int
    """K, experts per token."""
    codec: Codec
    part_nbytes: tuple[int, int]
    """Of an expert, plain and packed."""
    rates: Rates

    @property
    def layout(self) -> BlockLayout:
        """Of an expert's block."""
        return self.codec.layout

    def reader(
        self, threads: int, pace: float | None, *, kept: tuple[int, int], wanted: Callable[[int], Kinds]
    ) -> VirtualParts:
        """Reads nothing: `threads` and `pace` are the link's."""
        return VirtualParts(self.rates, self.layers * self.experts, kept, wanted)


def virtual_codec(text: str, block_bytes: int) -> Codec:
    """A codec of bf16 experts of which no more is known than their bytes.

    Raises:
        ExpertcastError: it is unknown.
    """
    whole = Field(name="block", shape=(block_bytes // 2,), dtype=torch.bfloat16, offset=0)
    return make_codec(text, BlockLayout(fields=(whole,), block_bytes=block_bytes))
