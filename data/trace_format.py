"""The format of a trace dataset: names of its files, columns of its shards, and the schema of trace.json.

    TRACES/
        trace.json                    model, fingerprint, documents with their split and domain, versions, and the
                                      digests of all other files, shards in the order of their rows
        data-00000-00000.arrow ...    one row per token; number of the writer, number of its shard
        dataset_info.json state.json  for `datasets.load_from_disk`; without digests while a server appends
        default_vectors.safetensors   means over the documents of the train split; not of a server's traffic
        stand_in.safetensors          the stand-in for early attention, where it ran
        skeleton/                     norms and routers of the model (:mod:`expertcast.data.skeleton`)
        progress/                     while collecting only: per rank, sums and shards that are done

trace.json is written last, so what it names is complete: a dataset may be read while it grows.

Columns: `residual` (L x D, bf16 stored as its 16 bits, Arrow has no bf16), `router_logits` (L x E), `document`,
`position` (in the document; it begins above 0 where the beginning of a request was in a prefix cache), `token` (id),
and with early attention `early` (L - 1 x D, stored as `residual` is).
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
"""In `settings.text`, in the place of a text's digest."""

SHARD_PATTERN = r"^data-[0-9]{5,}-[0-9]{5,}\.arrow$"
"""Of the names that :func:`shard_file` gives."""

LOGITS = "router_logits"


def shard_file(rank: int, number: int) -> str:
    """Name of a rank's shard."""
    return f"data-{rank:05d}-{number:05d}.arrow"


def progress_file(rank: int) -> str:
    """Name, in the progress folder, of a rank's account of what it has committed."""
    return f"rank-{rank:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the shards."""

    field: str
    """Of a :class:`TraceBatch`."""
    dtype: torch.dtype
    """Of the values; Arrow holds those of bf16 as their 16 bits."""
    shape: tuple[int, ...] = ()
    """Of one row."""

    @property
    def width(self) -> int:
        """Values of one row."""
        return math.prod(self.shape)

    @property
    def type(self) -> pa.DataType:
        """In Arrow."""
        value: pa.DataType = getattr(pa, self._stored)()
        return pa.list_(value, self.width) if self.shape else value

    @property
    def feature(self) -> Json:
        """In `datasets`, as dataset_info.json names it."""
        value = {"dtype": self._stored, "_type": "Value"}
        return {"feature": value, "length": self.width, "_type": "List"} if self.shape else value

    @property
    def note(self) -> Json:
        """In trace.json."""
        bits = {"stored_as": f"{self._stored} holding the bits"} if self.dtype == torch.bfloat16 else {}
        return {"dtype": _name(self.dtype), **bits, "shape": list(self.shape)}

    @property
    def _stored(self) -> str:
        return "uint16" if self.dtype == torch.bfloat16 else _name(self.dtype)

    def array(self, values: Tensor) -> pa.Array:
        """The values of some rows, on the CPU."""
        values = values.to(self.dtype).contiguous().reshape(-1)
        bits = values.view(torch.int16).numpy().view(np.uint16) if self.dtype == torch.bfloat16 else values.numpy()
        return pa.FixedSizeListArray.from_arrays(pa.array(bits), self.width) if self.shape else pa.array(bits)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


Columns: TypeAlias = dict[str, Column]
"""By name, in their order."""


def columns_of(shape: ModelShape, logits: torch.dtype, *, early: bool = False) -> Columns:
    """The columns of a dataset.

    Args:
        shape: of the model.
        logits: dtype of its router logits. They are stored in the narrower of fp16 and fp32 that holds each exactly:
            fp16 cannot hold bf16 numbers under 2^-17 in size, and rounding them makes ties that routing would break in
            another way.
        early: whether early attention ran.
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
    """Bytes of one token on disk."""
    return sum(column.width * column.dtype.itemsize for column in columns.values())


def column_notes(columns: Columns) -> Json:
    """Description of the columns, for trace.json."""
    return {name: column.note for name, column in columns.items() if column.shape}


def write_dataset_files(folder: Path, columns: Columns, shards: list[str], mark: str) -> None:
    """dataset_info.json and state.json, with which `datasets.load_from_disk` reads the files `shards` in this order.

    The `columns` are those of the dataset in `folder`; `mark`, hexadecimal digits, tells it from others.
    """
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
    """The tensors of a file, on the CPU, and the texts in its header.

    Args:
        path: of the file.
        like: the names that it has, and for each a tensor of its shape, floating or integer like it, on any device.
        remedy: what to do where the file is not right, for messages.

    Raises:
        ExpertcastError: it cannot be read, holds other tensors, or values that are not finite.
    """
    try:
        open_file(path).close()
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if names != set(like):
                odd = sorted(names ^ set(like))[0]
                raise ExpertcastError(
                    f"{path} {'lacks' if odd in like else 'also holds'} tensor {odd[:60]!r}; {remedy}"
                )
            for name, tensor in like.items():
                part = file.get_slice(name)
                kinds = _FLOATS if tensor.is_floating_point() else _INTEGERS
                if part.get_shape() != list(tensor.shape) or part.get_dtype() not in kinds:
                    raise ExpertcastError(
                        f"{path}: tensor {name} is {part.get_dtype()} {part.get_shape()}, expected are "
                        f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}; {remedy}"
                    )
            tensors = {name: file.get_tensor(name) for name in like}
            notes = dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise ExpertcastError(f"cannot read {path}: {first_line(error)}; {remedy}") from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not is_finite(tensor):
            raise ExpertcastError(f"{path}: tensor {name} holds NaN or infinity; {remedy}")
    return tensors, notes


def read_range(file: int, start: int, nbytes: int) -> bytearray:
    """Bytes of an open file from `start` on; fewer where it ends before.

    Linux gives 2 GiB at most at a time, network file systems may give less.
    """
    read, done = bytearray(nbytes), 0
    while done < nbytes and (count := os.preadv(file, [memoryview(read)[done:]], start + done)):
        done += count
    del read[done:]
    return read


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """One digest over names, dtypes, shapes and bytes of tensors on the CPU."""
    lines = []
    for name, tensor in sorted(tensors.items()):
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        lines.append(f"{name} {tensor.dtype} {list(tensor.shape)} {digest(content)}")
    return digest("\n".join(lines).encode())


def is_finite(tensor: Tensor) -> bool:
    """Whether it holds neither NaN nor infinity: one pass without a copy."""
    return not tensor.numel() or all(math.isfinite(value) for value in torch.stack(tensor.aminmax()).tolist())


# Writing files: each is the old one or the new one, never a part


def write_shard(path: Path, columns: Columns, rows: TraceBatch) -> str:
    """Write rows, whose tokens' ids are known, as one Arrow file.

    Returns:
        The file's digest.

    Raises:
        ExpertcastError: the model gave NaN or infinity.
    """
    arrays = {}
    for name, column in columns.items():
        values: Tensor = getattr(rows, column.field)
        if values.is_floating_point() and not is_finite(values):
            raise ExpertcastError(
                f"the model gives NaN or infinity among its {name.replace('_', ' ')} values: load it in another dtype "
                "(--dtype), or collect other text"
            )
        arrays[name] = column.array(values)
    table = pa.table(arrays)
    with _replacing(path) as file:
        sink = DigestingFile(file)
        # in one piece, so that the reader can look at a whole column as one tensor
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return sink.digest


def write_atomically(path: Path, content: bytes | memoryview) -> None:
    """The file is the old one or the new one, never a part."""
    with _replacing(path) as file:
        file.write(content)


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of another once it is on disk as a whole."""
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
    """What must be the same for a collection to go on."""

    fingerprint: str
    dtype: str
    window: _Count
    tokens: _Count
    batch_size: _Count
    ranks: _Count
    text: str
    early_rank: Annotated[int, Field(ge=0, le=4096)] | None
    """Rank of the stand-in for early attention; None where that did not run."""
    not_early: list[Annotated[int, Field(ge=1, lt=10_000)]]
    """Layers that it could not run at: their column holds the stand-in."""


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
    """Where the experts were at hand."""
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
    """Seconds of running the model over the text, as measured by the first rank, with those before a kill; of a
    collection that is not complete, those of fitting the stand-in."""
    files: dict[str, str]
    """Path in the folder to digest, of every other file; empty until the collection is complete."""
    digest: str


def read_info(folder: Path) -> TraceInfo | None:
    """trace.json of a folder, whose parts fit each other; None where there is none.

    Raises:
        ExpertcastError: it is not right, or not of traces.
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
    """Write trace.json, sealed."""
    sealed = seal({name: value for name, value in info.items() if name != SEAL})
    write_atomically(folder / TRACE_FILE, (json.dumps(sealed, indent=1) + "\n").encode())


def documents_in(info: TraceInfo) -> list[PlannedDocument]:
    """The documents, in the order of their rows in the shards."""
    return [PlannedDocument(**document) for document in info["documents"]]


def shape_in(info: TraceInfo) -> ModelShape:
    """L, E, K and D of the model that was run."""
    shape = info["shape"]
    return ModelShape(layers=shape["L"], experts=shape["E"], top_k=shape["K"], hidden=shape["D"])


def columns_in(info: TraceInfo) -> Columns:
    """The columns of the shards; the dtype of router logits is fp32 where the file names none that is known."""
    logits = info["columns"].get(LOGITS)
    half = isinstance(logits, dict) and logits.get("dtype") == "float16"
    early = info["settings"]["early_rank"] is not None
    return columns_of(shape_in(info), torch.float16 if half else torch.float32, early=early)


def is_live(info: Mapping[str, Any]) -> bool:
    """Whether the traces are of a server's traffic."""
    return bool(info.get("settings", {}).get("text") == TRAFFIC)


def shard_names(info: TraceInfo) -> list[str]:
    """The shards of a complete collection, in the order of their rows."""
    return [name for name in info["files"] if re.match(SHARD_PATTERN, name)]


def _contradiction(info: TraceInfo) -> str | None:
    """What of a file that keeps to the schema does not fit the rest of it."""
    shape, columns = info["shape"], info["columns"]
    if shape["K"] > shape["E"]:
        return f"shape.K is {shape['K']}, more than the {shape['E']} experts"
    if columns != column_notes(columns_in(info)):
        return f"columns are not those of a model of {shape} with settings.early_rank {info['settings']['early_rank']}"
    documents = info["documents"]
    if len({document["index"] for document in documents}) < len(documents):
        return "documents has an index twice"
    counted = dict.fromkeys(SPLITS, 0)
    for document in documents:
        counted[document["split"]] += document["tokens"]
    if sum(counted.values()) != info["tokens"] or counted != info["splits"]:
        return f"documents have {counted} tokens, tokens and splits say {info['tokens']} and {info['splits']}"
    return None
