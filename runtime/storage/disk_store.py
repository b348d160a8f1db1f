"""Store of a model's experts in a file, for models larger than memory: uncoded, or coded in fewer bytes.

The store holds no expert in memory: experts are read at every request, and decoded unless their codec is `raw`. The
disk link bypasses the system's page cache. A store in place has no file of its own and reads those of the checkpoint.

L MoE layers, E routed experts per layer. An expert's key is layer * E + expert.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from expertcast.data.machine import run_alone, usable_processors
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import MoEView
from expertcast.runtime.storage.codecs import Codec, make_codec
from expertcast.runtime.storage.coded_reader import CodedRead, CodedReader, PartPlaces
from expertcast.runtime.storage.expert_file import (
    FILE_NAME,
    ExpertFile,
    ExpertWriter,
    Header,
    StaleFileError,
    check_room,
    layout_text,
    read_header,
)
from expertcast.runtime.storage.layout import ExpertsForm
from expertcast.runtime.storage.memory import HostMemory, trim_heap
from expertcast.runtime.storage.reader import DirectReader, OpenFile, Read, shown
from expertcast.runtime.storage.store import ExpertStore, Write

if TYPE_CHECKING:
    from expertcast.runtime.storage.in_place import ExpertsInPlace


class DiskStore(ExpertStore):
    """Experts in one file (:mod:`expertcast.runtime.storage.expert_file`), each encoded by a codec.

    Args:
        view: the model's MoE layers, or the form of its experts.
        folder: folder of the file, created if needed; one folder per model. None: the file has no name, and is
            deleted by `close` or when the process ends, even if it is killed.
        codec: name of a codec.
        fingerprint: fingerprint of the weights that the experts come from. A file in `folder` with the same fingerprint
            is reused, one with another is rebuilt. None: the file is always rebuilt.
        device: where the model computes. None: the device of the experts.

    Raises:
        ExpertcastError: the codec is unknown or cannot hold these experts, or `folder` has no such file and holds
            something else, or one that expertcast did not write.
    """

    name = "disk"
    addressable = False
    codec: Codec

    def __init__(
        self, view: MoEView | ExpertsForm, folder: str | Path | None = None, *, codec: str = "raw",
        device: torch.device | None = None, fingerprint: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(view, device=device)
        self.codec = make_codec(codec, self.layout)
        self._target = None if folder is None else Path(os.path.realpath(Path(folder) / FILE_NAME))
        self.path = self._target or Path(tempfile.gettempdir())
        """Path of the file. For a file without a name: the temporary folder, then a path valid in this process only."""
        self._header = Header(
            layers=self.layers, experts=self.experts, block_bytes=self.layout.block_bytes,
            layout=layout_text(self.layout), model_id=view.model_id, fingerprint=fingerprint or "",
            codec=self.codec.name, parts=len(self.codec.shards),
        )  # fmt: skip
        self._writer: ExpertWriter | None = None
        self._file: ExpertFile | None = None
        self.in_place: ExpertsInPlace | None = None
        """The checkpoint's own files, if the store reads these."""
        if self._target is not None and self._target.exists():
            try:
                self._open_existing(self._target, used=fingerprint is not None)
            except StaleFileError as reason:
                warnings.warn(f"{str(self.path)!r} is rebuilt: {reason}", stacklevel=2)
        elif folder is not None:
            for other in Path(folder).glob("[!.]*"):
                if not other.name.startswith(FILE_NAME):  # else left by a process that was killed while packing
                    raise ExpertcastError(f"{str(folder)!r} contains {other.name!r}: give a new or empty store_folder")

    def _open_existing(self, path: Path, *, used: bool) -> None:
        """Open an existing file. Without `used`, only check that it may be overwritten.

        Raises:
            StaleFileError: the file holds other experts, or is damaged.
        """
        if not used:
            read_header(path)
            return
        file = ExpertFile(path)
        if file.header.codec != self._header.codec:
            raise StaleFileError(f"it was written with codec {file.header.codec!r}")
        if file.header.layout != self._header.layout:
            raise StaleFileError("its experts have another size or were packed in another form (--experts)")
        if file.header != self._header:
            raise StaleFileError(f"it was written from other weights, of {file.header.model_id!r}")
        self._file, self.path = file, file.path

    def read_in_place(self, experts: ExpertsInPlace) -> None:
        """Read the checkpoint's own files instead of one of the store."""
        self._drop()
        self.in_place, self.codec = experts, make_codec("raw", self.layout)
        self.name, self.path = "checkpoint", experts.files[0].path

    def check_room(self) -> None:
        """Check that the disk has room for the bytes of the file that are known before packing.

        Raises:
            ExpertcastError: it has less.
        """
        check_room(self.path.parent if self._target else self.path, self._least)

    @property
    def _least(self) -> int:
        return self._header.count * sum(plane.nbytes for plane in self.codec.planes if not plane.compressed)

    @property
    def file(self) -> ExpertFile:
        """File of the experts, open as long as the store is."""
        assert self._file is not None, "the store has not been filled"
        return self._file

    @property
    def compressed(self) -> bool:
        """Whether experts are decoded after they are read."""
        return self.codec.name != "raw"

    @property
    def stored_nbytes(self) -> int:
        """Bytes of all experts' parts in the file, without padding."""
        if self.in_place is not None:
            return self.in_place.nbytes
        return int(self.file.nbytes.sum())

    @property
    def part_nbytes(self) -> list[int]:
        """Bytes of a buffer for an expert's plain parts, and of one for its packed parts."""
        return PartPlaces(self.file, self.codec).nbytes

    def holds(self, layer: int) -> bool:
        return self._file is not None or self.in_place is not None

    def open(self, layer: int) -> dict[str, Tensor]:
        """
        Raises:
            ExpertcastError: always, since a file is written layer by layer.
        """
        raise ExpertcastError("a store on disk does not support open: fill its layers in order")

    def fill(self, layer: int, write: Write) -> None:
        if self._writer is None:
            self._drop()
            self._writer = ExpertWriter(self._target, self._header, least=self._least)
        with ThreadPoolExecutor(usable_processors(), initializer=run_alone) as threads:
            memory = HostMemory(self.layer_nbytes)
            write(self.layout.views(memory.bytes, layer))
            for parts in threads.map(self.codec.encode, memory.bytes.view(self.experts, -1).unbind(0)):
                self._writer.add(parts)
        self._writer.flush()  # the caller frees the model's weights next
        trim_heap()

    def finish(self) -> None:
        """Complete the file and open it."""
        assert self._writer is not None
        self._file, self._writer = self._writer.commit(), None
        self.path = self._file.path

    def block(self, key: int) -> Tensor:
        """Return the bytes of one expert that its layer uses, uint8, read and decoded now in this thread."""
        block = HostMemory(self.layout.block_bytes).bytes
        self._decode(key, block)
        return block[: self.layout.nbytes_of(key // self.experts)]

    def views(self, layer: int) -> dict[str, Tensor]:
        """Return one layer's parameters, [E, ...] by name, read and decoded now.

        The file may be incomplete, so that weights can be recovered after packing failed.

        Raises:
            ExpertcastError: the file is damaged, cannot be read, or was truncated.
        """
        blocks = HostMemory(self.layer_nbytes).bytes
        keys = range(layer * self.experts, (layer + 1) * self.experts)
        with ThreadPoolExecutor(usable_processors(), initializer=run_alone) as threads:
            list(threads.map(self._decode, keys, blocks.view(self.experts, -1).unbind(0)))
        return self.layout.views(blocks, layer)

    def _decode(self, key: int, block: Tensor) -> None:
        try:
            if self.in_place is not None:
                self.in_place.fill(key, block)
                return
            parts = (self._writer or self.file).read(key)
        except OSError as error:
            raise ExpertcastError(f"{shown(self.path)} cannot be read: {error.strerror or error}") from error
        self.codec.decode(parts, block)

    def reader(self, threads: int, pace: float | None) -> DirectReader | CodedReader:
        """Create a reader of the file that bypasses the page cache, for the requests of :meth:`read`.

        Args:
            threads: number of concurrent requests.
            pace: limit of the rate in bytes per second; None: no limit.
        """
        if self.in_place is not None:
            return DirectReader(*self.in_place.files, threads=threads, pace=pace)
        if self.compressed:
            return CodedReader(self.file, self.codec, threads=threads, pace=pace)
        return DirectReader(OpenFile(self.path, self.file.handle, self.file.stamp), threads=threads, pace=pace)

    def read(
        self, key: int, block: Tensor, *, urgent: bool, slot: int = -1, then: Callable[[Any], None] | None = None
    ) -> Read | CodedRead:
        """Create the request for one expert's block, to be submitted to a :meth:`reader`.

        Args:
            key: the expert.
            block: uint8 in host memory, to be filled; a shorter one takes the first bytes of the expert.
            urgent: whether the request precedes all forecasts.
            slot: slot of the block, or slot to which it is copied afterwards.
            then: called by the thread that filled the block.
        """
        if self.in_place is not None:
            return self.in_place.read(key, block, urgent=urgent, slot=slot, then=then)
        if self.compressed:
            return CodedRead(key, slot, urgent, target=block, then=then)
        return Read(key, slot, urgent, target=block, then=then, offset=int(self.file.offsets[key, 0]))

    def close(self) -> None:
        self._drop()
        super().close()

    def _drop(self) -> None:
        """Close the file, and remove an incomplete one."""
        if self._writer is not None:
            self._writer.drop()
        self._file = self._writer = self.in_place = None
