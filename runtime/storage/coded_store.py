"""The experts of a model in a file, coded: fewer bytes to read from the disk, the same bits in the slots.

L MoE layers, E routed experts per layer. An expert's key is layer * E + expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from expertcast.data.memory import usable_processors
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.view import MoEView
from expertcast.runtime.storage.codecs import Part, make_codec
from expertcast.runtime.storage.codecs.scaled import Scaled
from expertcast.runtime.storage.coded_file import FILE_NAME, CodedFile, CodedWriter
from expertcast.runtime.storage.coded_header import CodedHeader, read_coded_header
from expertcast.runtime.storage.coded_read import CodedRead
from expertcast.runtime.storage.coded_reader import CodedReader
from expertcast.runtime.storage.file_store import FileStore
from expertcast.runtime.storage.host_memory import HostMemory, give_back_freed
from expertcast.runtime.storage.layout import ExpertsForm
from expertcast.runtime.storage.part_memory import NOTHING, Kinds, PartPlaces
from expertcast.runtime.storage.store import Write
from expertcast.runtime.storage.store_header import StaleFileError

if TYPE_CHECKING:
    from expertcast.runtime.storage.shipped_experts import Shipped


class CodedStore(FileStore):
    """Experts in one file (:mod:`expertcast.runtime.storage.coded_file`), each as a codec makes it.

    Nothing of them is held in memory. What a layer's `views` gives is read and decoded when it is asked for.

    Args:
        view: the model's MoE layers, or the form of its experts.
        folder, device, fingerprint: as for :class:`FileStore`.
        codec: as :func:`expertcast.runtime.storage.codecs.make_codec` takes it; one that loses nothing.

    Raises:
        ExpertcastError: a codec that is unknown, lossy or cannot hold these experts, or a file that is not ours.
    """

    file_name = FILE_NAME
    addressable = False

    def __init__(
        self, view: MoEView | ExpertsForm, folder: str | Path | None = None, *, codec: str,
        device: torch.device | None = None, fingerprint: str | None = None,
    ) -> None:  # fmt: skip
        self._asked = codec
        self.shipped: Callable[[int, int], Shipped] | None = None
        """What a checkpoint ships of an expert of a layer, for a codec that moves it so; layers are then filled from
        it."""
        super().__init__(view, folder, device=device, fingerprint=fingerprint)

    def _begin(self) -> None:
        self.codec = make_codec(self._asked, self.layout)
        if not self.codec.lossless:
            raise ExpertcastError(
                f"codec {self._asked!r} loses bits, and a store keeps the model's own: choose a lossless one, and a "
                "miss policy such as fetch_lowest for copies in lower precision"
            )
        self._header = CodedHeader(form=self._form, codec=self.codec.text, parts=len(self.codec.shards))
        self._file: CodedFile | None = None
        self._writer: CodedWriter | None = None

    def _check(self) -> None:
        read_coded_header(self.path)

    def _open(self) -> None:
        file = CodedFile(self.path)
        if file.header.form != self._form:
            raise StaleFileError(f"it was made from other weights, of {file.header.form.model_id!r}")
        if (file.header.codec, file.header.parts) != (self._header.codec, self._header.parts):
            raise StaleFileError(f"it was made by codec {file.header.codec!r}")
        self._file = file

    @property
    def file(self) -> CodedFile:
        """Where the experts lie, open as long as the store is."""
        assert self._file is not None, "the store has not been filled"
        return self._file

    @property
    def stored_nbytes(self) -> int:
        """Bytes of all experts' parts in the file."""
        return int(self.file.nbytes.sum())

    def holds(self, layer: int) -> bool:
        return self._file is not None

    def fill(self, layer: int, write: Write) -> None:
        if self._writer is None:
            self._file = None
            self._writer = CodedWriter(self._new_draft(), self._header)
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
        write(self.layout.views(memory.bytes))
        return threads.map(codec.encode, memory.bytes.view(self.experts, -1).unbind(0))

    def finish(self) -> None:
        assert self._writer is not None
        self._file, self._writer = self._writer.commit(), None
        self.path = self._file.path

    def block(self, key: int) -> Tensor:
        """uint8 [block_bytes] of one expert, read and decoded now, in this thread."""
        block = HostMemory(self.layout.block_bytes).bytes
        self._decode(key, block)
        return block

    def views(self, layer: int) -> dict[str, Tensor]:
        """One layer's parameters, [E, ...] by name, read and decoded now; of a file that could not be completed too.

        Raises:
            ExpertcastError: the file was damaged or cannot be read.
        """
        blocks = HostMemory(self.layer_nbytes).bytes
        keys = range(layer * self.experts, (layer + 1) * self.experts)
        with ThreadPoolExecutor(usable_processors()) as threads:
            list(threads.map(self._decode, keys, blocks.view(self.experts, -1).unbind(0)))
        return self.layout.views(blocks)

    def _decode(self, key: int, block: Tensor) -> None:
        source = self._writer if self._file is None else self._file
        assert source is not None, "the store has not been filled"
        try:
            parts = source.read(key)
        except OSError as error:
            raise ExpertcastError(f"{str(self.path)!r} cannot be read: {error.strerror or error}") from error
        self.codec.decode(parts, block)

    @property
    def part_nbytes(self) -> list[int]:
        """Bytes that an expert's plain, and its packed parts take in memory."""
        return PartPlaces(self.file, self.codec).nbytes

    def reader(
        self,
        threads: int,
        pace: float | None,
        *,
        kept: tuple[int, int] = (0, 0),
        wanted: Callable[[int], Kinds] = lambda _key: NOTHING,
    ) -> CodedReader:
        """As :meth:`FileStore.reader`; `kept` and `wanted` as for :class:`CodedReader`."""
        return CodedReader(self.file, self.codec, threads=threads, pace=pace, kept=kept, wanted=wanted)

    def read(self, key: int, block: Tensor, arrival: Callable[[Any], None] | None, urgent: bool) -> CodedRead:
        return CodedRead(block, arrival, urgent, key=key)

    def _drop(self) -> None:
        if self._writer is not None:
            self._writer.drop()
            self._writer = None
        self._file = None
