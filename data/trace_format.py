"""Format of a trace dataset: file names, columns of the shards, and the schema of trace.json.

    TRACES/
        trace.json                    model, fingerprint, documents with split and domain, versions, digests of all
                                      other files; lists shards in the order of their rows
        data-00000-00000.arrow ...    one row per token; writer number and shard number
        dataset_info.json state.json  for `datasets.load_from_disk`; without digests while a server appends
        default_vectors.safetensors   means over the train split; missing in traces of a server's traffic
        stand_in.safetensors          the stand-in for early attention, if it ran
        skeleton/                     norms and routers of the model (:mod:`expertcast.data.skeleton`)
        progress/                     during collection: sums and finished shards of each rank

trace.json is written last and lists only complete files, so a dataset is readable while it grows.

Columns: `residual` (L x D, bf16 stored as its 16 bits because Arrow has no bf16), `router_logits` (L x E), `document`,
`position` (in the document; the first may exceed 0 if a prefix cache had the beginning of a request), `token` (id), and
with early attention `early` (L - 1 x D, stored like `residual`).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NotRequired, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from pydantic import Field, JsonValue, with_config
from safetensors import SafetensorError, safe_open
from torch import Tensor
from typing_extensions import TypedDict

from expertcast.checkpoints.hub import Kind
from expertcast.data.batch import TraceBatch
from expertcast.data.plan import SPLITS, PlannedDocument
from expertcast.predictors.artefacts import CLOSED, SEAL, DigestingFile, digest, open_file, read_json, seal
from expertcast.predictors.messages import ExpertcastError, Json, first_line
from expertcast.predictors.view import ModelShape

TRACE_FILE = "trace.json"
DEFAULTS_FILE = "default_vectors.safetensors"
STAND_IN_FILE = "stand_in.safetensors"
SKELETON_FOLDER = "skeleton"
PROGRESS_FOLDER = "progress"
DATASET_STATE_FILE = "state.json"
DATASET_INFO_FILE = "dataset_info.json"
FOR_DATASETS = (DATASET_INFO_FILE, DATASET_STATE_FILE)
PARTIAL = ".partial"
FORMAT = "expertcast-traces-4"
TRAFFIC = "a server's traffic"
"""Value of `settings.text` for a server's traffic, in place of a text's digest."""

SHARD_PATTERN = r"^data-[0-9]{5,}-[0-9]{5,}\.arrow$"
"""Pattern of :func:`shard_file`."""

LOGITS = "router_logits"


def shard_file(rank: int, number: int) -> str:
    """Return the file name of a shard."""
    return f"data-{rank:05d}-{number:05d}.arrow"


def progress_file(rank: int) -> str:
    """Return the file name of a rank's progress, in the progress folder."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the shards."""

    field: str
    """Field of :class:`TraceBatch`."""
    dtype: torch.dtype
    """Dtype of the values; Arrow stores bf16 as its 16 bits."""
    shape: tuple[int, ...] = ()
    """Shape of one row."""

    @property
    def width(self) -> int:
        """Number of values per row."""
        return math.prod(self.shape)

    @property
    def type(self) -> pa.DataType:
        """Arrow type."""
        value: pa.DataType = getattr(pa, self._stored)()
        return pa.list_(value, self.width) if self.shape else value

    @property
    def feature(self) -> Json:
        """Feature in dataset_info.json."""
        value = {"dtype": self._stored, "_type": "Value"}
        return {"feature": value, "length": self.width, "_type": "List"} if self.shape else value

    @property
    def note(self) -> Json:
        """Description in trace.json."""
        bits = {"stored_as": f"{self._stored} holding the bits"} if self.dtype == torch.bfloat16 else {}
        return {"dtype": _name(self.dtype), **bits, "shape": list(self.shape)}

    @property
    def _stored(self) -> str:
        return "uint16" if self.dtype == torch.bfloat16 else _name(self.dtype)

    def array(self, values: Tensor) -> pa.Array:
        """Convert rows on the CPU to an Arrow array."""
        values = values.to(self.dtype).contiguous().reshape(-1)
        bits = values.view(torch.int16).numpy().view(np.uint16) if self.dtype == torch.bfloat16 else values.numpy()
        return pa.FixedSizeListArray.from_arrays(pa.array(bits), self.width) if self.shape else pa.array(bits)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Columns: TypeAlias = dict[str, Column]
"""Columns by name, in order."""


def columns_of(shape: ModelShape, logits: torch.dtype, *, early: bool = False) -> Columns:
    """Return the columns of a dataset.

    Args:
        shape: L, E, K and D of the model.
        logits: dtype of its router logits. They are stored as fp16 or fp32, whichever is exact: fp16 cannot represent
            bf16 values below 2^-17, and rounding would create ties that change the routing.
        early: whether there is a column of early attention.
    """
    stored = torch.float16 if logits == torch.float16 else torch.float32
    columns = {
        "residual": Column("residual_TLD", torch.bfloat16, (shape.layers, shape.hidden)),
        LOGITS: Column("logits_TLE", stored, (shape.layers, shape.experts)),
        "document": Column("document_T", torch.int32),
        "position": Column("position_T", torch.int32),
        "token": Column("token_T", torch.int32),
    }
    if early:
        columns["early"] = Column("early_TLD", torch.bfloat16, (shape.layers - 1, shape.hidden))
    return columns


def row_bytes(columns: Columns) -> int:
    """Return the bytes of one token on disk."""
    return sum(column.width * column.dtype.itemsize for column in columns.values())


def column_notes(columns: Columns) -> Json:
    """Return the description of the columns for trace.json."""
    return {name: column.note for name, column in columns.items() if column.shape}


def write_dataset_files(folder: Path, columns: Columns, shards: list[str], mark: str) -> None:
    """Write dataset_info.json and state.json for `datasets.load_from_disk`; `mark` is a hexadecimal fingerprint."""
    state: Json = {
        "_data_files": [{"filename": name} for name in shards],
        "_fingerprint": mark[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    features = {name: column.feature for name, column in columns.items()}
    for name, content in zip(FOR_DATASETS, ({"features": features}, state), strict=True):
        write_atomically(folder / name, json.dumps(content, indent=2).encode())


# Reading files

_FLOATS = ("F64", "F32", "F16", "BF16")
_INTEGERS = ("I64", "I32", "I16", "I8", "U8", "BOOL")


def read_tensors(path: Path, like: Mapping[str, Tensor], remedy: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors of a safetensors file to the CPU, and the text of its header.

    Args:
        path: the file.
        like: tensors of the expected names, shapes and kinds (floating or integer) on any device.
        remedy: end of error messages.

    Raises:
        ExpertcastError: the file is unreadable, has other tensors, or contains NaN or infinity.
    """
    try:
        open_file(path).close()
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if names != set(like):
                odd = sorted(names ^ set(like))[0]
                raise ExpertcastError(
                    f"{path} {'lacks' if odd in like else 'has unexpected'} tensor {odd[:60]!r}; {remedy}"
                )
            for name, tensor in like.items():
                part = file.get_slice(name)
                kinds = _FLOATS if tensor.is_floating_point() else _INTEGERS
                if part.get_shape() != list(tensor.shape) or part.get_dtype() not in kinds:
                    raise ExpertcastError(
                        f"{path}: tensor {name} is {part.get_dtype()} {part.get_shape()}, expected "
                        f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}; {remedy}"
                    )
            tensors = {name: file.get_tensor(name) for name in like}
            notes = dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise ExpertcastError(f"cannot read {path}: {first_line(error)}; {remedy}") from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not is_finite(tensor):
            raise ExpertcastError(f"{path}: tensor {name} contains NaN or infinity; {remedy}")
    return tensors, notes


def read_range(file: int, start: int, nbytes: int) -> bytearray:
    """Read bytes of an open file from `start`; fewer at the end of the file.

    A single read returns at most 2 GiB on Linux, and may return less on network file systems.
    """
    read, done = bytearray(nbytes), 0
    while done < nbytes and (count := os.preadv(file, [memoryview(read)[done:]], start + done)):
        done += count
    del read[done:]
    return read


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return one digest over names, dtypes, shapes and bytes of tensors on the CPU."""
    lines = []
    for name, tensor in sorted(tensors.items()):
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        lines.append(f"{name} {tensor.dtype} {list(tensor.shape)} {digest(content)}")
    return digest("\n".join(lines).encode())


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinity, in one pass without a copy."""
    return not tensor.numel() or all(math.isfinite(value) for value in torch.stack(tensor.aminmax()).tolist())


# Atomic writes


def write_shard(path: Path, columns: Columns, rows: TraceBatch) -> str:
    """Write rows with known token ids as one Arrow file.

    Returns:
        The file's digest.

    Raises:
        ExpertcastError: a value is NaN or infinity.
    """
    arrays = {}
    for name, column in columns.items():
        values: Tensor = getattr(rows, column.field)
        if values.is_floating_point() and not is_finite(values):
            raise ExpertcastError(
                f"the model's {name.replace('_', ' ')} contains NaN or infinity: load it in another dtype "
                "(--dtype), or collect other text"
            )
        arrays[name] = column.array(values)
    table = pa.table(arrays)
    with _replacing(path) as file:
        sink = DigestingFile(file)
        # a single record batch, so that the reader can map a whole column as one tensor
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return sink.digest


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """Replace a file atomically."""
    with _replacing(path) as file:
        file.write(content)


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that replaces `path`, or the file behind a link, once it is completely on disk."""
    path = Path(os.path.realpath(path))
    partial = path.with_name(path.name + PARTIAL)
    with partial.open("wb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    os.replace(partial, path)


REMEDY = "collect the traces again into a new folder"

TRACES = Kind(
    what="trace dataset",
    repo_type="dataset",
    files=("*.json", "*.safetensors", "*.arrow", "README.md"),
    marks=(TRACE_FILE,),
    holds=lambda folder: (folder / TRACE_FILE).is_file(),
    remedy=REMEDY,
)

_Count = Annotated[int, Field(ge=1, le=2**53)]
_Layers = Annotated[int, Field(ge=1, le=10_000)]
_Experts = Annotated[int, Field(ge=1, le=65_536)]
_Hidden = Annotated[int, Field(ge=1, le=1_000_000)]


@with_config(CLOSED)
class _Document(TypedDict):
    """A :class:`PlannedDocument`."""

    index: Annotated[int, Field(ge=0, lt=2**31)]
    domain: str
    tokens: _Count
    split: Literal["train", "validation", "test"]
    hash: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]


@with_config(CLOSED)
class _Settings(TypedDict):
    """Settings that must be unchanged for a collection to resume."""

    fingerprint: str
    dtype: str
    window: _Count
    tokens: _Count
    batch_size: _Count
    ranks: _Count
    text: str
    early_rank: Annotated[int, Field(ge=0, le=4096)] | None
    """Rank of the stand-in for early attention; None without early attention."""
    not_early: list[Annotated[int, Field(ge=1, lt=10_000)]]
    """Layers without early attention; their column has the stand-in."""


@with_config(CLOSED)
class _Shape(TypedDict):
    L: _Layers
    E: _Experts
    K: _Experts
    D: _Hidden


@with_config(CLOSED)
class _Splits(TypedDict):
    train: _Count
    validation: _Count
    test: _Count


@with_config(CLOSED)
class TraceInfo(TypedDict):
    """trace.json"""

    format: Literal["expertcast-traces-4"]
    id: str
    complete: bool
    settings: _Settings
    columns: dict[str, JsonValue]
    """:func:`column_notes`"""
    model: str
    fingerprint: str
    experts_fingerprint: NotRequired[str]
    """Missing if the experts were not available."""
    shape: _Shape
    tokens: _Count
    window: _Count
    seed: int
    splits: _Splits
    expertcast_version: str
    command: str
    git_revision: str | None
    python_version: str
    versions: dict[str, JsonValue]
    documents: list[_Document]
    collection_s: NotRequired[Annotated[float, Field(ge=0)]]
    """Seconds of the model run on the first rank, including killed runs; in an incomplete collection, seconds of the
    stand-in's fit."""
    files: dict[str, str]
    """Digest of every other file by path in the folder; empty until the collection is complete."""
    digest: str


def read_info(folder: Path) -> TraceInfo | None:
    """Read trace.json and check its consistency; None if it does not exist.

    Raises:
        ExpertcastError: the file is invalid.
    """
    path = folder / TRACE_FILE
    if not path.exists():
        return None
    info = read_json(path, TraceInfo, REMEDY)
    wrong = _contradiction(info)
    if wrong:
        raise ExpertcastError(f"{path}: {wrong}; {REMEDY}")
    return info


def write_info(folder: Path, info: Json) -> None:
    """Write trace.json with its digest."""
    sealed = seal({name: value for name, value in info.items() if name != SEAL})
    write_atomically(folder / TRACE_FILE, (json.dumps(sealed, indent=1) + "\n").encode())


def documents_in(info: TraceInfo) -> list[PlannedDocument]:
    """Return the documents in the order of their rows."""
    return [PlannedDocument(**document) for document in info["documents"]]


def shape_in(info: TraceInfo) -> ModelShape:
    """Return L, E, K and D of the model."""
    shape = info["shape"]
    return ModelShape(layers=shape["L"], experts=shape["E"], top_k=shape["K"], hidden=shape["D"])


def columns_in(info: TraceInfo) -> Columns:
    """Return the columns of the shards; router logits are fp32 unless the file says float16."""
    logits = info["columns"].get(LOGITS)
    half = isinstance(logits, dict) and logits.get("dtype") == "float16"
    early = info["settings"]["early_rank"] is not None
    return columns_of(shape_in(info), torch.float16 if half else torch.float32, early=early)


def is_live(info: Mapping[str, Any]) -> bool:
    """Return whether the traces come from a server's traffic."""
    return bool(info.get("settings", {}).get("text") == TRAFFIC)


def shard_names(info: TraceInfo) -> list[str]:
    """Return the shards of a complete collection in the order of their rows."""
    return [name for name in info["files"] if re.match(SHARD_PATTERN, name)]


def _contradiction(info: TraceInfo) -> str | None:
    """Describe an inconsistency in a file that satisfies the schema; None if there is none."""
    shape, columns = info["shape"], info["columns"]
    if shape["K"] > shape["E"]:
        return f"shape.K is {shape['K']}, more than the {shape['E']} experts"
    if columns != column_notes(columns_in(info)):
        return f"columns are not those of a model of {shape} with settings.early_rank {info['settings']['early_rank']}"
    documents = info["documents"]
    if len({document["index"] for document in documents}) < len(documents):
        return "documents have a duplicate index"
    counted = dict.fromkeys(SPLITS, 0)
    for document in documents:
        counted[document["split"]] += document["tokens"]
    if sum(counted.values()) != info["tokens"] or counted != info["splits"]:
        return f"documents have {counted} tokens, but tokens and splits are {info['tokens']} and {info['splits']}"
    return None
