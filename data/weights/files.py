"""Files of a checkpoint: tensors by name, each read with `pread` when it is needed.

Pages of a mapped file would count as this process's memory once they are read.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import EllipsisType
from typing import Any, BinaryIO, Protocol, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.core_model_loading import dot_natural_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import get_checkpoint_shard_files

from expertcast.data.packed_experts import Piece
from expertcast.data.source import ModelSource, damaged
from expertcast.predictors.artefacts import read_range
from expertcast.predictors.messages import ExpertcastError, first_line

_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES = _FLOATS | {
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
_NUMBERS = ("BOOL", "I16", "U16", "I32", "U32", "I64", "U64")
"""Types of tensors beside the weights, such as tables of ids; codes of 32 bits have names of their own."""
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


_MOST_HEADER = 2**26
"""Bytes of a header that are read ahead, and that a fingerprint covers, at most."""
_SAMPLE, _MOST_SAMPLES, _AT_ONCE = 4096, 2**15, 512
"""Bytes of a tensor that a fingerprint covers, tensors at most (then every second one, and so on), and those that are
read at a time."""
Part = slice | EllipsisType
"""Rows of a tensor one after another, or all of it."""


class TensorFile(Protocol):
    """One tensor of a checkpoint, as `safe_open(...).get_slice` returns it; read when indexed, each time anew."""

    def get_shape(self) -> list[int]:
        """Return its sizes."""

    def get_dtype(self) -> str:
        """Return its dtype as safetensors names it."""

    def __getitem__(self, part: Part) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class ComputedTensor:
    """A tensor that is computed when it is read."""

    shape: Sequence[int]
    dtype: str
    """Dtype as safetensors names it; the tensor may be read in a narrower one."""
    make: Callable[[Part], Tensor]
    """Computes some rows, or all."""
    pieces: Callable[[], tuple[Piece, ...] | None] = lambda: None
    """Returns the types of ggml that hold the rows of a matrix; None if none does."""
    blocks: Callable[[Part], Tensor] | None = None
    """Reads some rows, or all, as blocks: uint8 [..., N, bytes of the longest row]."""

    def get_shape(self) -> list[int]:
        """Return its sizes."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return its dtype as safetensors names it."""
        return self.dtype

    def __getitem__(self, part: Part) -> Tensor:
        return self.make(part)


class _InMemory(threading.local):
    """Ranges of files that are in memory, by file name and first byte, for reads of the running thread."""

    ranges: Mapping[tuple[str, int], Tensor] | None = None


_IN_MEMORY = _InMemory()


@contextmanager
def in_memory(ranges: Mapping[tuple[str, int], Tensor]) -> Iterator[None]:
    """Make each :class:`FileTensor` that this thread reads take its bytes from memory instead of its file.

    Args:
        ranges: bytes, uint8, by file name and first byte. Reading any other range raises ExpertcastError.
    """
    _IN_MEMORY.ranges = ranges
    try:
        yield
    finally:
        _IN_MEMORY.ranges = None


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor that begins at a byte of a file; some of its rows are read alone.

    The slices of safetensors read the whole tensor with `pread`: where a layer's experts are one tensor, each expert
    would cost as much as all. Reading raises OSError where the file ends too early.
    """

    file: BinaryIO
    start: int
    """First byte in the file."""
    shape: Sequence[int]
    dtype: torch.dtype

    def get_shape(self) -> list[int]:
        """Return its sizes."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return its dtype as safetensors names it."""
        return _NAMES[self.dtype]

    def place(self, part: Part) -> tuple[int, int]:
        """Return the first byte of some rows in the file, and their bytes."""
        first, rows = self._rows(part)
        size = math.prod(self.shape[1:]) * self.dtype.itemsize
        return self.start + first * size, rows * size

    def sample(self) -> tuple[BinaryIO, int, int]:
        """Return the file, and first byte and number of bytes in the middle of the tensor."""
        start, nbytes = self.place(...)
        return self.file, start + max(0, nbytes - _SAMPLE) // 2, min(nbytes, _SAMPLE)

    def __getitem__(self, part: Part) -> Tensor:
        octets = self._octets(*self.place(part))
        return octets.view(self.dtype).view([self._rows(part)[1], *self.shape[1:]] if self.shape else [])

    def _rows(self, part: Part) -> tuple[int, int]:
        count = self.shape[0] if self.shape else 1
        first, last, _ = (0, count, 1) if part is ... else part.indices(count)
        return first, max(0, last - first)

    def _octets(self, start: int, nbytes: int) -> Tensor:
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        if _IN_MEMORY.ranges is not None:
            found = _IN_MEMORY.ranges.get((self.file.name, start))
            if found is None or len(found) != nbytes:
                raise ExpertcastError(f"{nbytes} bytes of {self.file.name} from {start} on are not an expert's own")
            return found
        read = read_range(self.file.fileno(), start, nbytes)
        if len(read) != nbytes:
            raise OSError(f"{self.file.name} is cut off")
        return torch.frombuffer(read, dtype=torch.uint8)


Join: TypeAlias = Callable[[Mapping[str, TensorFile]], dict[str, TensorFile]]
"""Tensors of a checkpoint by name to its weights by name."""


class WeightFiles(ExitStack):
    """Open files of one checkpoint; a context manager that closes them.

    Args:
        paths: the files' paths.
    """

    def __init__(self, paths: list[str]) -> None:
        super().__init__()
        self.paths = paths
        self.tensors: dict[str, TensorFile] = {}
        """Tensors by name, in the order in which transformers reads them."""
        self._stored: dict[str, TensorFile] = {}
        self._names: list[str] = []
        """Sorted names of the files' tensors."""
        self._joiner: Join | None = None

    def join(self, joiner: Join) -> None:
        """Make weights of several tensors of the files, by a function from tensors to weights, both by name."""
        self._stored, self._names, self._joiner = self.tensors, sorted(self.tensors), joiner
        self.tensors = joiner(self.tensors)

    def quantised(self, name: str) -> bool:
        """Return whether a weight is none of the files' tensors of plain floats."""
        return self._joiner is not None and self.tensors[name] is not self._stored.get(name)

    def stored(self, name: str) -> list[TensorFile]:
        """Return the tensors of the files that make up a weight."""
        if self._joiner is None or not self.quantised(name):
            return [self.tensors[name]]
        stem = name.removesuffix(".weight")
        first = bisect_left(self._names, stem)
        after = (self._names[at] for at in range(first, len(self._names)))
        near = itertools.takewhile(lambda each: each.startswith(stem), after)
        found = {each: self._stored[each] for each in near if each[len(stem) :][:1] in ("", ".", "_")}
        joined = self._joiner(found)
        return [tensor for each, tensor in found.items() if joined.get(each) is not tensor]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first floating tensor."""
        names = (tensor.get_dtype() for tensor in self.tensors.values())
        return next((_FLOATS[name] for name in names if name in _FLOATS), torch.float32)

    def fingerprint(self) -> str:
        """Return SHA-256 over the files' names, sizes, times of change and headers, and some bytes of each tensor.

        Names, sizes and times can be those of another checkpoint: images and copies may give all files one time.
        """
        digest = hashlib.sha256()
        for path in map(Path, self.paths):
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
            with path.open("rb") as file:
                digest.update(file.read(min(int.from_bytes(file.read(8), "little"), _MOST_HEADER)))
        places = sorted((tensor.sample() for tensor in self._in_files()), key=lambda place: (place[0].name, place[1]))
        places = places[:: -(-len(places) // _MOST_SAMPLES) or 1]
        for begin in range(0, len(places), _AT_ONCE):
            ahead = places[begin : begin + _AT_ONCE]
            for opened, start, nbytes in ahead if hasattr(os, "posix_fadvise") else []:
                os.posix_fadvise(opened.fileno(), start, nbytes, os.POSIX_FADV_WILLNEED)  # the disk reads many at once
            for opened, start, nbytes in ahead:
                digest.update(read_range(opened.fileno(), start, nbytes))
        return digest.hexdigest()

    def _in_files(self) -> Iterator[FileTensor]:
        return (tensor for tensor in (self._stored or self.tensors).values() if isinstance(tensor, FileTensor))


class SafetensorsFiles(WeightFiles):
    """Tensors of one checkpoint in safetensors.

    Raises:
        ExpertcastError: the checkpoint has no safetensors, or damaged ones.
    """

    def __init__(self, source: ModelSource) -> None:
        super().__init__(weight_files(source))
        tensors: dict[str, TensorFile] = {}
        for path in self.paths:
            try:
                file = self.enter_context(Path(path).open("rb"))  # noqa: SIM115
                _cache_header(file)
                opened = self.enter_context(safe_open(path, framework="pt", device="cpu", backend="pread"))
                tensors.update(self._tensors_of(file, opened))
            except (OSError, SafetensorError) as error:
                self.close()
                raise damaged(path, error) from error
        self.tensors = {name: tensors[name] for name in sorted(tensors, key=_place)}

    def check_plain(self) -> None:
        """Raise an error if a tensor has codes of 8 bits or fewer, whose scales nothing describes.

        Raises:
            ExpertcastError: names the tensor.
        """
        for name, tensor in self.tensors.items():
            if (kind := tensor.get_dtype()) not in _FLOATS and kind not in _NUMBERS:
                raise ExpertcastError(
                    f"{name} has codes of type {kind}, and config.json has no quantization_config that says how they "
                    "are scaled: download config.json again, or load another checkpoint"
                )

    def _tensors_of(self, file: BinaryIO, opened: Any) -> dict[str, TensorFile]:
        """Return the tensors of a file that `safe_open` has checked; its slices are slow to make and to read."""
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {
            name: FileTensor(file, 8 + length + each["data_offsets"][0], each["shape"], dtype)
            if (dtype := _DTYPES.get(each["dtype"])) is not None
            else opened.get_slice(name)
            for name, each in header.items()
        }


def _place(name: str) -> list[object]:
    """Return transformers' sort key of a name; 92,000 names have some hundred parts."""
    return [_place_of_part(part) for part in name.split(".")]


@cache
def _place_of_part(part: str) -> object:
    return dot_natural_key(part)[0]


def _cache_header(file: BinaryIO) -> None:
    """Read a header into the page cache, and no readahead: that takes up to 8 MB of each of a checkpoint's shards."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.read(min(int.from_bytes(file.read(8), "little"), _MOST_HEADER))
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_NORMAL)
        file.seek(0)


def check_complete(missing: Collection[str]) -> None:
    """Check that no weight is missing.

    Args:
        missing: names of tensors or parameters.

    Raises:
        ExpertcastError: `missing` is not empty.
    """
    if missing:
        first, *others = sorted(missing)
        more = f" ({len(others)} more are missing)" if others else ""
        raise ExpertcastError(f"the checkpoint has no weights for {first}: it is incomplete{more}")


def weight_files(source: ModelSource) -> list[str]:
    """Return the paths of a checkpoint's safetensors: one file, or the shards that its index names.

    Files of a hub id are downloaded into the hub's cache.

    Raises:
        ExpertcastError: the checkpoint has none, or its index names files outside of its folder.
    """
    try:
        if (single := source.file(SAFE_WEIGHTS_NAME)) is not None:
            return [single]
        if (index := source.file(SAFE_WEIGHTS_INDEX_NAME)) is not None:
            try:
                names = sorted(json.loads(Path(index).read_text())["weight_map"].values())
                if outside := [name for name in names if os.path.isabs(name) or os.pardir in Path(name).parts]:
                    raise ExpertcastError(
                        f"{index} names a file outside of its folder, {outside[0]}: take the checkpoint from its source"
                    )
                return list(get_checkpoint_shard_files(source.path, index, **source.files)[0])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise damaged(index, error) from error
    except OSError as error:
        raise ExpertcastError(f"cannot find the weights of {source.name!r}: {first_line(error)}") from error
    if shards := sorted(Path(source.path).glob("*.safetensors")):
        raise ExpertcastError(
            f"{source.name!r} has {shards[0].name} and no {SAFE_WEIGHTS_INDEX_NAME}: download that too"
        )
    raise ExpertcastError(
        f"{source.name!r} has no {SAFE_WEIGHTS_NAME}: load it with transformers and save it once with save_pretrained"
    )
