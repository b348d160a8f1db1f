"""The experts of a model in a mapped file, for models larger than memory.

The system's file cache is the memory: what is copied often stays in it, what is forecast is read ahead by a thread.

L MoE layers, E routed experts per layer. An expert's key is layer * E + expert.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import tempfile
import threading
import warnings
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from expertcast.data.machine import usable_processors
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import MoEView
from expertcast.runtime.storage.codecs import Part, make_codec
from expertcast.runtime.storage.codecs.quantised import Scaled
from expertcast.runtime.storage.coded_reader import NOTHING, CodedRead, CodedReader, Kinds, PartPlaces
from expertcast.runtime.storage.expert_file import (
    CODED_FILE_NAME,
    FILE_NAME,
    CodedFile,
    CodedHeader,
    CodedWriter,
    Draft,
    StaleFileError,
    StoreFile,
    StoreFormat,
    can_be_nameless,
    layout_text,
    read_coded_header,
    read_header,
)
from expertcast.runtime.storage.layout import ExpertsForm
from expertcast.runtime.storage.memory import HostMemory, give_back_freed
from expertcast.runtime.storage.reader import Arrival, DirectReader, Read, Reader
from expertcast.runtime.storage.store import ExpertStore, Write

if TYPE_CHECKING:
    from expertcast.runtime.storage.checkpoint_experts import Shipped


# What every store whose experts lie in a file of its own has in common: the folder, and whether its file is used.


class FileStore(ExpertStore):
    """Experts in one file.

    Args:
        view: the model's MoE layers, or the form of its experts.
        folder: where the file lies; made if need be, one folder per model. None: it has no name, and is
            gone after `close` or when the process ends, however that does (on systems other than Linux it is in a
            temporary folder, which `close` removes).
        fingerprint: of what the blocks are made from. A file in `folder` with the same is used as it is, another is
            made again. None: it is made again in any case.
        device: where the model computes. None: where the experts lie.

    Raises:
        ExpertcastError: the folder holds a file of that name that is not ours.
    """

    name = "disk"
    file_name: ClassVar[str]

    def __init__(
        self,
        view: MoEView | ExpertsForm,
        folder: str | Path | None = None,
        *,
        device: torch.device | None = None,
        fingerprint: str | None = None,
    ) -> None:
        super().__init__(view, device=device)
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._nameless = folder is None and can_be_nameless()
        self._draft: Draft | None = None
        """Of a file without a name, which goes with it."""
        if folder is None and not self._nameless:
            self._temporary = tempfile.TemporaryDirectory(prefix="expertcast-")
            folder = self._temporary.name
        self.path = Path(tempfile.gettempdir() if folder is None else folder) / self.file_name
        """Of the file; of one without a name once it is written, for this process."""
        self._form = StoreFormat(
            layers=self.layers, experts=self.experts, block_bytes=self.layout.block_bytes,
            layout=layout_text(self.layout), model_id=view.model_id, fingerprint=fingerprint or "",
        )  # fmt: skip
        self._begin()
        if not self._nameless and self.path.exists():
            try:
                self._check()
                if fingerprint is not None:
                    self._open()
            except StaleFileError as reason:
                warnings.warn(f"{str(self.path)!r} is made again: {reason}", stacklevel=3)

    def open(self, layer: int) -> dict[str, Tensor]:
        """
        Raises:
            ExpertcastError: always: a file's layers are closed, with their digests, one after another.
        """
        raise ExpertcastError("a store on disk is written first layer to last, each by fill: open is for memory")

    def _new_draft(self) -> Draft:
        """Where all layers are written."""
        if not self._nameless:
            return Draft(self.path)
        self._draft = Draft(None)
        return self._draft

    @abstractmethod
    def _begin(self) -> None:
        """No file is used yet; `_form` says what one that can be used holds."""

    @abstractmethod
    def _check(self) -> None:
        """Look at the file that is there.

        Raises:
            ExpertcastError: it is not ours.
            StaleFileError: it is damaged; the text says how.
        """

    @abstractmethod
    def _open(self) -> None:
        """Use the file that is there.

        Raises:
            StaleFileError: it must be made again; the text says why.
        """

    @abstractmethod
    def _drop(self) -> None:
        """Let go of the file, and remove one that was not completed."""

    @abstractmethod
    def reader(self, threads: int, pace: float | None) -> Reader:
        """A new reader of the file, past the system's page cache, for what :meth:`read` makes.

        Args:
            threads: reads under way at a time.
            pace: bytes per second that the disk is taken for, at most; None: as it is.
        """

    @abstractmethod
    def read(self, key: int, block: Tensor, arrival: Callable[[Any], None], urgent: bool) -> Arrival:
        """What is to be asked of a :meth:`reader` for one expert's block.

        Args:
            key: the expert.
            block: uint8 [block_bytes] in host memory, to be filled.
            arrival: called by the thread that filled it.
            urgent: it comes before all forecasts.
        """

    def close(self) -> None:
        self._drop()
        super().close()
        if self._draft is not None:
            self._draft.drop()
        if self._temporary is not None:
            self._temporary.cleanup()


_MADV_WILLNEED = 3
_MADV_POPULATE_READ = 22
"""Linux 5.14 and later: read and map the pages, and return when they are there."""


class DiskStore(FileStore):
    """Blocks as they are, in a file (:mod:`expertcast.runtime.storage.expert_file`) that is mapped, or read directly.

    Raises:
        ExpertcastError: the folder holds a file of that name that is not ours.
    """

    file_name = FILE_NAME

    def _begin(self) -> None:
        self._file: StoreFile | None = None
        self._ahead: ReadAhead | None = None

    def _check(self) -> None:
        read_header(self.path)

    def _open(self) -> None:
        self._use(StoreFile.open(self.path, self._form))

    def _use(self, file: StoreFile) -> None:
        self._file = file
        for layer in range(self.layers):
            self._hold(layer, file.layer(layer))
        self._ahead = ReadAhead()
        weakref.finalize(self, self._ahead.close)

    def fill(self, layer: int, write: Write) -> None:
        if self._file is None or self._ahead is not None:
            self._drop()
            self._file = StoreFile.create(self._new_draft(), self._form)
        self._hold(layer, self._file.layer(layer))
        write(self.views(layer))
        self._file.close_layer(layer)

    def finish(self) -> None:
        """Give the file its name, and use it so that nothing can be written to it any more."""
        assert self._file is not None
        complete = self._file.commit()
        self.path = complete.path
        self._use(complete)

    def views(self, layer: int) -> dict[str, Tensor]:
        """One layer's parameters in the mapped file.

        Raises:
            ExpertcastError: the file is shorter than it was: touching what it lacks would kill the process.
        """
        if self._file is not None and self._file.cut_off():
            raise ExpertcastError(f"{str(self.path)!r} was cut off while it was in use: load the model again")
        return super().views(layer)

    @property
    def handle(self) -> int:
        """Of the file, open as long as the store is."""
        assert self._file is not None
        return self._file.handle

    def reader(self, threads: int, pace: float | None) -> Reader:
        assert self._file is not None
        self._file.forget()
        self._file.drop_cached()
        return DirectReader(self.path, threads=threads, pace=pace, handle=self._file.handle, stamp=self._file.stamp)

    def read(self, key: int, block: Tensor, arrival: Callable[[Any], None], urgent: bool) -> Read:
        assert self._file is not None
        layer, expert = divmod(key, self.experts)
        return Read(block, arrival, urgent, offset=self._file.offset(layer) + expert * self.layout.block_bytes)

    def read_ahead(self, keys: Iterable[int]) -> None:
        """Read these experts' pages in a thread, in the order in which they are asked for."""
        if self._ahead is not None:
            size = self.layout.block_bytes
            self._ahead.ask((block.data_ptr(), size) for key in keys if (block := self._blocks[key]) is not None)

    def _drop(self) -> None:
        """Stop reading, and remove a file that was not completed."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        if self._file is not None and self._file.draft is not None:
            self._file.draft.drop()
        self._file = None


class ReadAhead:
    """A thread that brings ranges of mapped files into memory."""

    def __init__(self, limit: int = 256) -> None:
        self._queue: deque[tuple[int, int]] = deque(maxlen=limit)
        """(pointer, bytes); a full queue forgets what was asked for first."""
        self._changed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="expertcast-read-ahead", daemon=True)
        self._thread.start()
        self.ranges_read = 0

    def ask(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Read these ranges (pointer, bytes) next, after those that were asked for before."""
        self._queue.extend(ranges)
        self._changed.set()

    def close(self) -> None:
        """Return when nothing is being read: the mapping may go then."""
        self._closed = True
        self._queue.clear()
        self._changed.set()
        if threading.current_thread() is not self._thread:  # where garbage may be collected too
            self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            self._changed.wait()
            self._changed.clear()
            while self._queue and not self._closed:
                try:
                    pointer, size = self._queue.popleft()
                except IndexError:  # cleared meanwhile
                    break
                populate(pointer, size)
                self.ranges_read += 1


def populate(pointer: int, size: int) -> None:
    """Bring the pages that hold these bytes into memory; on older systems, ask for them and return."""
    start = pointer - pointer % mmap.PAGESIZE
    length = pointer + size - start
    advise = ctypes.CDLL(None).madvise  # with the interpreter's lock released, as mmap.madvise is not
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if sys.platform != "linux" or advise(start, length, _MADV_POPULATE_READ) != 0:
        advise(start, length, _MADV_WILLNEED)


# The experts of a model in a file, coded: fewer bytes to read from the disk, the same bits in the slots.
#
# L MoE layers, E routed experts per layer. An expert's key is layer * E + expert.


class CodedStore(FileStore):
    """Experts in one file (:mod:`expertcast.runtime.storage.expert_file`), each as a codec makes it.

    Nothing of them is held in memory. What a layer's `views` gives is read and decoded when it is asked for.

    Args:
        view: the model's MoE layers, or the form of its experts.
        folder, device, fingerprint: as for :class:`FileStore`.
        codec: as :func:`expertcast.runtime.storage.codecs.make_codec` takes it; one that loses nothing.

    Raises:
        ExpertcastError: a codec that is unknown, lossy or cannot hold these experts, or a file that is not ours.
    """

    file_name = CODED_FILE_NAME
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
