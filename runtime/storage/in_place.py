"""Experts read from the checkpoint's own files, without a second copy on disk.

An expert's bytes are ranges of these files. In plain layers (floats of the model's dtype, or matrices as shipped) they
are the bytes of its block, and are read to their places there. In others each read is followed by the conversion that
fills stores of other kinds.

L MoE layers, E routed experts per layer. An expert's key is layer * E + expert.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertcast.data.packed_experts import OrderedRows
from expertcast.data.weights.files import FileTensor, Part, TensorFile, in_memory
from expertcast.predictors.artefacts import read_range
from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.storage.checkpoint_experts import ExpertSources
from expertcast.runtime.storage.layout import BlockLayout
from expertcast.runtime.storage.memory import HostMemory
from expertcast.runtime.storage.reader import (
    PIECE,
    ConvertedRead,
    OpenFile,
    Range,
    Read,
    pieces_of,
    stamp_of,
)

_ALIGNED = 64
"""Alignment in bytes of the ranges in a conversion's memory; a multiple of the size of every dtype."""
_FINITE = 0x38
"""Floats of any type whose bytes are smaller than this are finite, so that no cast changes the bits of a NaN."""


class ExpertsInPlace:
    """Ranges of the checkpoint's files that hold each expert, and their conversion to its block.

    Args:
        sources: the checkpoint's experts, with open files.
        layout: layout of a block.
        layers: L
        experts: E

    Raises:
        ExpertcastError: experts are not stored one by one, are cut off, or cannot be converted one by one.
    """

    def __init__(self, sources: ExpertSources, layout: BlockLayout, layers: int, experts: int) -> None:
        self._sources, self._layout, self._experts = sources, layout, experts
        self.files: list[OpenFile] = []
        """The files, open as long as this object is."""
        self._numbers: dict[str, int] = {}
        self._ranges: list[list[Range]] = []
        """Ranges of each expert, to places in its block in plain layers, else in the memory of its conversion."""
        self._plain = [False] * layers
        places: dict[object, list[Range] | None] = {}
        for layer in range(layers):
            parts = sources.file_parts(layer)
            ranges = [self._ranges_of(own) for own in parts]
            self._ranges += ranges
            stored = {tuple((tensor.get_dtype(), *tensor.get_shape()) for tensor, _ in own) for own in parts}
            if len(stored) > 1:  # each is converted for itself; raises if one has another shape than the model
                block = HostMemory(layout.block_bytes).bytes
                for key in range(layer * experts, (layer + 1) * experts):
                    self.fill(key, block)
                continue
            form = layout.fields_of(layer), tuple(sources.ordered(layer, layout)), *stored
            if form not in places:
                places[form] = self._places(layer)
            found = places[form]
            if found is not None:
                self._plain[layer] = True
                self._ranges[-experts:] = [
                    [place._replace(offset=each.offset, file=each.file) for each, place in zip(own, found, strict=True)]
                    for own in ranges
                ]

    @property
    def nbytes(self) -> int:
        """Bytes of all experts in the files."""
        return sum(each.nbytes for own in self._ranges for each in own)

    def __str__(self) -> str:
        first, *rest = (file.path for file in self.files)
        return f"in place from {str(first)!r}" + (f" and {len(rest)} more files" if rest else "")

    def read(self, key: int, block: Tensor, **request: Any) -> Read:
        """Create the request that fills a block, to be submitted to a reader of `files`.

        Args:
            key: the expert.
            block: uint8 in host memory; at least the bytes that the expert's layer uses.
            request: further fields of the request.
        """
        pieces = pieces_of(self._ranges[key])
        if self._plain[key // self._experts]:
            return Read(key=key, target=block, pieces=pieces, **request)
        return ConvertedRead(key=key, target=block, pieces=pieces, convert=partial(self._convert, key), **request)

    def fill(self, key: int, block: Tensor) -> None:
        """Fill a block now, in this thread.

        Raises:
            ExpertcastError: a file was changed or truncated.
        """
        plain, ranges = self._plain[key // self._experts], self._ranges[key]
        memory = block if plain else _memory(ranges)
        for each in ranges:
            file = self.files[each.file]
            assert file.handle is not None
            read = read_range(file.handle, each.offset, each.nbytes)
            if len(read) != each.nbytes or stamp_of(file.handle) != file.stamp:
                raise file.changed()
            each.put(torch.frombuffer(read, dtype=torch.uint8).data_ptr(), memory)
        if not plain:
            self._convert(key, memory, block)

    def _ranges_of(self, parts: Iterable[tuple[TensorFile, Part]]) -> list[Range]:
        """Return the ranges of one expert, to aligned places in memory."""
        ranges: list[Range] = []
        start = 0
        for tensor, part in parts:
            if not isinstance(tensor, FileTensor):
                raise ExpertcastError(f"tensors of type {tensor.get_dtype()!r} cannot be read in place")
            offset, nbytes = tensor.place(part)
            number = self._number(tensor)
            stamp = self.files[number].stamp
            assert stamp is not None
            if offset + nbytes > stamp[0]:
                raise ExpertcastError(f"{tensor.file.name} is cut off")
            if nbytes:
                ranges.append(Range(offset, start, nbytes, number))
            start += -(-nbytes // _ALIGNED) * _ALIGNED
        return ranges

    def _number(self, tensor: FileTensor) -> int:
        name = tensor.file.name
        if name not in self._numbers:
            handle = os.dup(tensor.file.fileno())
            weakref.finalize(self, os.close, handle)
            self._numbers[name] = len(self.files)
            self.files.append(OpenFile(Path(name), handle, stamp_of(handle)))
        return self._numbers[name]

    def _places(self, layer: int) -> list[Range] | None:
        """Return the ranges of a plain layer's last expert, to their places in its block; None for other layers.

        Random bytes are converted and then sought in the block, in the order of files, long ranges first.
        """
        key = (layer + 1) * self._experts - 1
        ranges, block = self._ranges[key], HostMemory(self._layout.block_bytes).bytes
        sizes = sum(each.nbytes for each in ranges), sum(each.nbytes for each in self._layout.fields_of(layer))
        with contextlib.suppress(Exception):  # a form that interprets its bytes, which is not plain
            memory = _memory(ranges)
            memory.random_(1, _FINITE, generator=torch.Generator())
            parts = [memory[each.start : each.start + each.nbytes].numpy().tobytes() for each in ranges]
            self._convert(key, memory, block)
            ordered = self._sources.ordered(layer, self._layout)
            for rows in ordered:
                rows.separate(block)
            starts, left = [-1] * len(ranges), bytearray(block.numpy().data)
            for number in sorted(range(len(parts)), key=lambda number: -len(parts[number])):
                starts[number] = left.index(parts[number])
                left[starts[number] : starts[number] + len(parts[number])] = bytes(len(parts[number]))
            if not any(left) and len(set(parts)) == len(parts) and sizes[1] - sizes[0] < _ALIGNED * len(parts):
                return [_placed(each, start, ordered) for each, start in zip(ranges, starts, strict=True)]
        self.fill(key, block)  # raises if this form cannot be converted from the ranges alone
        return None

    def _convert(self, key: int, memory: Tensor, block: Tensor) -> None:
        """Write a block from the bytes of its ranges."""
        layer, expert = divmod(key, self._experts)
        ranges = {
            (str(self.files[each.file].path), each.offset): memory[each.start : each.start + each.nbytes]
            for each in self._ranges[key]
        }
        views = self._layout.views(block, layer).items()
        with torch.no_grad(), in_memory(ranges):
            # the conversion writes one row of a layer's experts: here all rows are the block
            self._sources.read_expert(
                layer, expert, {name: view.expand(self._experts, *view.shape[1:]) for name, view in views}
            )


def _placed(given: Range, start: int, ordered: list[OrderedRows]) -> Range:
    """Return a range to a place in a block, where rows may lie in another order.

    Raises:
        ExpertcastError: the order of memory needs the rows of several ranges.
    """
    for rows in ordered:
        if rows.start <= start < rows.end:
            if (start - rows.start) % rows.unit or given.nbytes % rows.unit or rows.unit > PIECE:
                raise ExpertcastError("rows that are interleaved with those of another range")
            return given._replace(start=start, unit=rows.unit, write=rows.write)
    return given._replace(start=start)


def _memory(ranges: list[Range]) -> Tensor:
    """Allocate the memory of a conversion."""
    return torch.empty(max(each.start + each.nbytes for each in ranges), dtype=torch.uint8)
