"""The experts of a model in a file, for models larger than memory: as they are, or coded in fewer bytes.

The store holds no expert in memory. The experts of codec `raw` are mapped: the system's file cache is the memory,
experts that are copied often stay in it, and the system reads forecast ones ahead. Coded experts are read and decoded
at every request. The disk's own link reads either past the cache.

L MoE layers, E routed experts per layer. An expert's key is layer * E + expert.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from expertcast.data.machine import usable_processors
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import MoEView
from expertcast.runtime.storage.codecs import Part, make_codec
from expertcast.runtime.storage.codecs.quantised import Scaled
from expertcast.runtime.storage.coded_reader import CodedRead, CodedReader, PartPlaces
from expertcast.runtime.storage.expert_file import (
    FILE_NAME,
    ExpertFile,
    ExpertWriter,
    Header,
    MappedBlocks,
    StaleFileError,
    layout_text,
    read_header,
)
from expertcast.runtime.storage.layout import ExpertsForm
from expertcast.runtime.storage.memory import HostMemory, give_back_freed
from expertcast.runtime.storage.reader import DirectReader, Read
from expertcast.runtime.storage.store import ExpertStore, Write

if TYPE_CHECKING:
    from expertcast.runtime.storage.checkpoint_experts import Shipped


class DiskStore(ExpertStore):
    """Experts in one file (:mod:`expertcast.runtime.storage.expert_file`), each as a codec makes it.

    Args:
        view: the model's MoE layers, or the form of its experts.
        folder: where the file lies; made if need be, one folder per model. None: it has no name, and is
            gone after `close` or when the process ends, however that does.
        codec: as :func:`expertcast.runtime.storage.codecs.make_codec` takes it.
        fingerprint: of what the experts are made from. A file in `folder` with the same is used as it is, another is
            made again. None: it is made again in any case.
        device: where the model computes. None: where the experts lie.

    Raises:
        ExpertcastError: a codec that is unknown or cannot hold these experts, or a folder that holds a file of
            that name that is not ours.
    """

    name = "disk"

    def __init__(
        self, view: MoEView | ExpertsForm, folder: str | Path | None = None, *, codec: str = "raw",
        device: torch.device | None = None, fingerprint: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(view, device=device)
        self.codec = make_codec(codec, self.layout)
        self.shipped: Callable[[int, int], Shipped] | None = None
        """Reads an expert of a layer as its checkpoint ships it, for a codec of that form; layers are then filled by
        it."""
        self._target = None if folder is None else Path(folder) / FILE_NAME
        self.path = self._target or Path(tempfile.gettempdir())
        """Path of the file; a file without a name has one for this process once it is written."""
        self._header = Header(
            layers=self.layers, experts=self.experts, block_bytes=self.layout.block_bytes,
            layout=layout_text(self.layout), model_id=view.model_id, fingerprint=fingerprint or "",
            codec=self.codec.text, parts=len(self.codec.shards),
        )  # fmt: skip
        self.addressable = self._header.plain
        self._writer: ExpertWriter | None = None
        self._file: ExpertFile | None = None
        self._mapped: MappedBlocks | None = None
        if self._target is not None and self._target.exists():
            try:
                self._find(self._target, used=fingerprint is not None)
            except StaleFileError as reason:
                warnings.warn(f"{str(self.path)!r} is made again: {reason}", stacklevel=2)

    def _find(self, path: Path, *, used: bool) -> None:
        """Look at the file that is there, and use it."""
        if not used:
            read_header(path)
            return
        file = ExpertFile(path)
        if file.header.codec != self._header.codec:
            raise StaleFileError(f"it was made by codec {file.header.codec!r}")
        if file.header.layout != self._header.layout:
            raise StaleFileError("its experts have another size or are packed in another form (--experts)")
        if file.header != self._header:
            raise StaleFileError(f"it was made from other weights, of {file.header.model_id!r}")
        self._use(file)

    def _use(self, file: ExpertFile) -> None:
        self._file, self.path = file, file.path
        if self.addressable:
            self._mapped = MappedBlocks(file)
            for layer, blocks in enumerate(self._mapped.layers):
                self._hold(layer, blocks)

    @property
    def file(self) -> ExpertFile:
        """Where the experts lie, open as long as the store is."""
        assert self._file is not None, "the store has not been filled"
        return self._file

    @property
    def stored_nbytes(self) -> int:
        """Bytes of all experts' parts in the file."""
        return int(self.file.nbytes.sum())

    @property
    def part_nbytes(self) -> list[int]:
        """Bytes that an expert's plain, and its packed parts take in memory."""
        return PartPlaces(self.file, self.codec).nbytes

    def holds(self, layer: int) -> bool:
        return self._file is not None

    def open(self, layer: int) -> dict[str, Tensor]:
        """
        Raises:
            ExpertcastError: always: a file is written one layer after another.
        """
        raise ExpertcastError("a store on disk is written first layer to last, each by fill: open is for memory")

    def fill(self, layer: int, write: Write) -> None:
        if self._writer is None:
            self._drop()
            plain = sum(plane.nbytes for plane in self.codec.planes if not plane.compressed)
            self._writer = ExpertWriter(self._target, self._header, least=self._header.count * plain)
        with ThreadPoolExecutor(usable_processors()) as threads:
            for parts in self._encoded(layer, write, threads):
                self._writer.add(parts)
        self._writer.flush()  # the weights are about to go from the model
        give_back_freed()

    def _encoded(self, layer: int, write: Write, threads: ThreadPoolExecutor) -> Iterator[tuple[Part, ...]]:
        """The parts of a layer's experts."""
        codec, shipped = self.codec, self.shipped
        if shipped is not None and isinstance(codec, Scaled):
            return threads.map(lambda expert: codec.encode_shipped(*shipped(layer, expert)), range(self.experts))
        memory = HostMemory(self.layer_nbytes)
        write(self.layout.views(memory.bytes, layer))
        return threads.map(codec.encode, memory.bytes.view(self.experts, -1).unbind(0))

    def finish(self) -> None:
        """Give the file its name, and use it."""
        assert self._writer is not None
        complete, self._writer = self._writer.commit(), None
        self._use(complete)

    def block(self, key: int) -> Tensor:
        """uint8 of one expert, as many bytes as its layer uses, mapped, or read and decoded now in this thread."""
        if self._mapped is not None:
            return super().block(key)
        block = HostMemory(self.layout.block_bytes).bytes
        self._decode(key, block)
        return block

    def views(self, layer: int) -> dict[str, Tensor]:
        """One layer's parameters, [E, ...] by name, mapped, or read and decoded now, also of an incomplete
        file.

        Raises:
            ExpertcastError: the file was damaged, cannot be read, or is shorter than it was: touching what it lacks of
                a mapping would kill the process.
        """
        if self._mapped is not None:
            if self._mapped.cut_off:
                raise ExpertcastError(f"{str(self.path)!r} was cut off while it was in use: load the model again")
            return super().views(layer)
        blocks = HostMemory(self.layer_nbytes).bytes
        keys = range(layer * self.experts, (layer + 1) * self.experts)
        with ThreadPoolExecutor(usable_processors()) as threads:
            list(threads.map(self._decode, keys, blocks.view(self.experts, -1).unbind(0)))
        return self.layout.views(blocks, layer)

    def _decode(self, key: int, block: Tensor) -> None:
        source = self._writer or self.file
        try:
            parts = source.read(key)
        except OSError as error:
            raise ExpertcastError(f"{str(self.path)!r} cannot be read: {error.strerror or error}") from error
        self.codec.decode(parts, block)

    def reader(self, threads: int, pace: float | None) -> DirectReader | CodedReader:
        """A new reader of the file, past the system's page cache, for what :meth:`read` makes.

        Args:
            threads: reads under way at a time.
            pace: bytes per second that the disk is taken for, at most; None: as it is.
        """
        if self._mapped is None:
            return CodedReader(self.file, self.codec, threads=threads, pace=pace)
        self._mapped.forget()
        return DirectReader(self.path, threads=threads, pace=pace, handle=self.file.handle, stamp=self.file.stamp)

    def read(
        self, key: int, block: Tensor, *, urgent: bool, slot: int = -1, then: Callable[[Any], None] | None = None
    ) -> Read | CodedRead:
        """Make the request for one expert's block, for :meth:`reader`.

        Args:
            key: the expert.
            block: uint8 in host memory, as many of its first bytes as are to be read.
            urgent: it comes before all forecasts.
            slot: where the block lies, or goes afterwards.
            then: called by the thread that filled it.
        """
        if self._mapped is None:
            return CodedRead(key, slot, urgent, target=block, then=then)
        return Read(key, slot, urgent, target=block, then=then, offset=int(self.file.offsets[key, 0]))

    def read_ahead(self, keys: Iterable[int]) -> None:
        """Have the system read these experts' pages; does nothing for coded ones."""
        if self._mapped is not None:
            self._mapped.read_ahead(keys)

    def close(self) -> None:
        self._drop()
        super().close()

    def _drop(self) -> None:
        """Let go of the file, and remove one that was not completed."""
        if self._writer is not None:
            self._writer.drop()
        self._mapped = self._file = self._writer = None
