"""The format of a trace dataset: names of its files, columns of its shards, and the schema of trace.json.

    TRACES/
        trace.json                    model, fingerprint, documents with their split and domain, versions, and the
                                      digests of all other files, shards in the order of their rows
        data-00000-00000.arrow ...    one row per token; number of the writer, number of its shard
        dataset_info.json state.json  for `datasets.load_from_disk`; not read here
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
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal, NotRequired

import numpy as np
import numpy.typing as npt
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

if TYPE_CHECKING:
    from datasets import Features


TRACE_FILE = "trace.json"
DEFAULTS_FILE = "default_vectors.safetensors"
STAND_IN_FILE = "stand_in.safetensors"
SKELETON_FOLDER = "skeleton"
PROGRESS_FOLDER = "progress"
DATASET_STATE_FILE = "state.json"
DATASET_INFO_FILE = "dataset_info.json"
PARTIAL = ".partial"
FORMAT = "expertcast-traces-3"
TRAFFIC = "a server's traffic"
"""In `settings.text`, in the place of a text's digest."""

SHARD_PATTERN = r"^data-[0-9]{5,}-[0-9]{5,}\.arrow$"
"""Of the names that :func:`shard_file` gives."""

RESIDUAL, LOGITS, DOCUMENT, POSITION, TOKEN = "residual", "router_logits", "document", "position", "token"
EARLY = "early"


def shard_file(rank: int, number: int) -> str:
    """Name of a rank's shard."""
    return f"data-{rank:05d}-{number:05d}.arrow"


def progress_file(rank: int) -> str:
    """Name, in the progress folder, of a rank's account of what it has committed."""
    return f"rank-{rank:05d}.safetensors"


def stored_logits_dtype(dtype: torch.dtype) -> torch.dtype:
    """The narrowest of fp16 and fp32 that holds every router logit of this dtype exactly.

    bf16 goes to fp32: fp16 cannot hold bf16 numbers under 2^-17 in size, and rounding them makes ties that routing
    would break in another way.
    """
    return torch.float16 if dtype == torch.float16 else torch.float32


@dataclass(frozen=True, slots=True)
class Columns:
    """What makes a dataset's columns."""

    shape: ModelShape
    logits: torch.dtype
    """What router logits are stored in."""
    early: bool = False
    """Whether early attention ran."""

    @property
    def names(self) -> list[str]:
        """In their order."""
        return [RESIDUAL, LOGITS, DOCUMENT, POSITION, TOKEN, *[EARLY] * self.early]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token on disk."""
        shape = self.shape
        early = (shape.layers - 1) * shape.hidden * 2 if self.early else 0
        return shape.layers * (shape.hidden * 2 + shape.experts * self.logits.itemsize) + early + 3 * 4

    def features(self) -> Features:
        """The `datasets.Features` of a trace dataset."""
        from datasets import Features, List, Value  # slow to import, and only writing needs it

        shape = self.shape
        made = {
            RESIDUAL: List(Value("uint16"), length=shape.layers * shape.hidden),
            LOGITS: List(Value(str(self.logits).removeprefix("torch.")), length=shape.layers * shape.experts),
            DOCUMENT: Value("int32"),
            POSITION: Value("int32"),
            TOKEN: Value("int32"),
        }
        if self.early:
            made[EARLY] = List(Value("uint16"), length=(shape.layers - 1) * shape.hidden)
        return Features(made)

    def note(self) -> Json:
        """Description of the columns, for trace.json."""
        shape = self.shape
        bits = {"dtype": "bfloat16", "stored_as": "uint16 holding the bits"}
        note = {
            RESIDUAL: {**bits, "shape": [shape.layers, shape.hidden]},
            LOGITS: {"dtype": str(self.logits).removeprefix("torch."), "shape": [shape.layers, shape.experts]},
            POSITION: "of the token in its document",
        }
        return note | ({EARLY: {**bits, "shape": [shape.layers - 1, shape.hidden]}} if self.early else {})


def write_dataset_files(folder: Path, columns: Columns, shards: list[str], mark: str) -> None:
    """dataset_info.json and state.json, with which `datasets.load_from_disk` reads the files `shards` in this order.

    The `columns` are those of the dataset in `folder`; `mark`, hexadecimal digits, tells it from others.
    """
    from datasets import DatasetInfo

    with tempfile.TemporaryDirectory(prefix="expertcast-") as made:
        DatasetInfo(features=columns.features()).write_to_directory(made)
        write_atomically(folder / DATASET_INFO_FILE, Path(made, DATASET_INFO_FILE).read_bytes())
    state: Json = {
        "_data_files": [{"filename": name} for name in shards],
        "_fingerprint": mark[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    write_atomically(folder / DATASET_STATE_FILE, json.dumps(state, indent=2).encode())


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

_ODD_REMEDY = "load it in another dtype (--dtype), or collect other text"


def write_shard(path: Path, columns: Columns, parts: list[TraceBatch]) -> str:
    """Write rows, whose tokens' ids are known, as one Arrow file.

    Args:
        path: of the file.
        columns: what is written of a token.
        parts: rows.

    Returns:
        The file's digest.

    Raises:
        ExpertcastError: the model gave NaN or infinity.
    """
    from datasets.arrow_writer import ArrowWriter  # slow to import, and only collection needs it

    features = columns.features()
    rows = _table(columns, TraceBatch.cat(parts), features.arrow_schema)
    with _replacing(path) as file:
        sink = DigestingFile(file)
        # in one piece, so that the reader can look at a whole column as one tensor
        with ArrowWriter(features=features, stream=sink, writer_batch_size=rows.num_rows) as writer:
            writer.write_table(rows)
            writer.finalize(close_stream=False)
    return sink.digest


def _table(columns: Columns, batch: TraceBatch, schema: pa.Schema) -> pa.Table:
    """The rows. Built by hand: ArrowWriter.write_batch, given the same arrays, takes 2.7 times as long
    (38,300 against 103,200 tokens/s), for it builds every list anew."""
    assert batch.token_T is not None
    early = [] if batch.early_TLD is None else [("early residuals", batch.early_TLD)]
    for what, tensor in (("residuals", batch.residual_TLD), ("router logits", batch.logits_TLE), *early):
        if not is_finite(tensor):
            raise ExpertcastError(f"the model gives NaN or infinity among its {what}: {_ODD_REMEDY}")
    arrays = [
        _lists(_bits(batch.residual_TLD)),
        _lists(batch.logits_TLE.to(columns.logits).contiguous().numpy()),
        *(pa.array(x.to(torch.int32).numpy()) for x in (batch.document_T, batch.position_T, batch.token_T)),
        *(_lists(_bits(tensor)) for _, tensor in early),
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _bits(values: Tensor) -> npt.NDArray[np.uint16]:
    return values.contiguous().view(torch.int16).numpy().view(np.uint16)


def _lists(values: npt.NDArray[np.generic]) -> pa.FixedSizeListArray:
    """A row of the array as a list."""
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values[0].size)


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

    format: Literal["expertcast-traces-3"]
    id: str
    complete: bool
    settings: _Settings
    columns: dict[str, JsonValue]
    """:meth:`Columns.note`"""
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
    """The documents, in the order of their rows."""
    return [PlannedDocument(**document) for document in info["documents"]]


def shape_in(info: TraceInfo) -> ModelShape:
    """L, E, K and D of the model that was run."""
    shape = info["shape"]
    return ModelShape(layers=shape["L"], experts=shape["E"], top_k=shape["K"], hidden=shape["D"])


def columns_in(info: TraceInfo) -> Columns:
    """The columns of the shards; the dtype of router logits is fp32 where the file names none that is known."""
    logits = info["columns"].get(LOGITS)
    half = isinstance(logits, dict) and logits.get("dtype") == "float16"
    return Columns(shape_in(info), torch.float16 if half else torch.float32, EARLY in info["columns"])


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
    if columns != columns_in(info).note():
        return f"columns are not those of a model of {shape}"
    if (EARLY in columns) != (info["settings"]["early_rank"] is not None):
        return "of columns.early and settings.early_rank one is missing"
    documents = info["documents"]
    if len({document["index"] for document in documents}) < len(documents):
        return "documents has an index twice"
    order = [document["split"] for document in documents]
    if order != sorted(order, key=SPLITS.index):
        return f"documents are not in the order {', '.join(SPLITS)}"
    counted = dict.fromkeys(SPLITS, 0)
    for document in documents:
        counted[document["split"]] += document["tokens"]
    if sum(counted.values()) != info["tokens"] or counted != info["splits"]:
        return f"documents have {counted} tokens, tokens and splits say {info['tokens']} and {info['splits']}"
    return None
