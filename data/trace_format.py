"""Format of a trace dataset: file names, columns of the shards, and the schema of trace.json.

    TRACES/
        trace.json                    model, fingerprint, documents with split and domain, versions, digests of all
                                      other files; lists shards in the order of their rows
        data-00000-00000.arrow ...    one row per token; writer number and shard number
        dataset_info.json state.json  for `datasets.load_from_disk`; without digests while a server appends
        default_vectors.safetensors   means over the train split; missing in traces of a server's traffic
        stand_in.safetensors          the stand-in for early attention, if it ran
        README.md                     dataset card for the hub
        skeleton/                     norms and routers of the model (:mod:`expertcast.data.skeleton`)
        progress/                     during collection: sums and finished shards of each rank

trace.json is written last and lists only complete files, so a dataset is readable while it grows.

Columns: `residual` (L x D codes of 8 bits) with `residual_scale`, `router_logits` (L x E), `document`, `position` (in
the document; the first may exceed 0 if a prefix cache had the beginning of a request), `token` (id), and with early
attention `early` and `early_scale` (L - 1 x D, stored like `residual`).

A code of residuals stands for `code * 2**scale`, with one scale for 32 neighbouring codes: the MXINT8 format (OCP
Microscaling Formats, 2023) up to the place of the binary point. bf16 holds every such value exactly.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

import pyarrow as pa
import torch
from pydantic import Field, JsonValue, with_config
from torch import Tensor
from typing_extensions import TypedDict

from expertcast.checkpoints.checkpoint import ShapeValues
from expertcast.checkpoints.hub import Kind
from expertcast.data.batch import TraceBatch
from expertcast.data.plan import SPLITS, PlannedDocument
from expertcast.predictors.artefacts import (
    CLOSED,
    SEAL,
    digest,
    file_digest,
    is_finite,
    read_json,
    replacing,
    seal,
    write_atomically,
)
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.predictors.view import ModelShape

TRACE_FILE = "trace.json"
DEFAULTS_FILE = "default_vectors.safetensors"
STAND_IN_FILE = "stand_in.safetensors"
SKELETON_FOLDER = "skeleton"
PROGRESS_FOLDER = "progress"
DATASET_STATE_FILE = "state.json"
DATASET_INFO_FILE = "dataset_info.json"
FOR_DATASETS = (DATASET_INFO_FILE, DATASET_STATE_FILE)
CARD = "README.md"
FORMAT = "expertcast-traces-6"
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
    shape: tuple[int, ...] = ()
    """Shape of one row."""

    @property
    def width(self) -> int:
        """Number of values per row."""
        return math.prod(self.shape)

    @property
    def type(self) -> pa.DataType:
        """Arrow type."""
        value: pa.DataType = getattr(pa, _name(self.dtype))()
        return pa.list_(value, self.width) if self.shape else value

    @property
    def feature(self) -> Json:
        """Feature in dataset_info.json."""
        value = {"dtype": _name(self.dtype), "_type": "Value"}
        return {"feature": value, "length": self.width, "_type": "List"} if self.shape else value

    def array(self, values: Tensor) -> pa.Array:
        """Convert rows on the CPU to an Arrow array."""
        array = pa.array(values.to(self.dtype).reshape(-1).numpy())
        return pa.FixedSizeListArray.from_arrays(array, self.width) if self.shape else array


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
    return {
        **_coded_columns("residual", shape.layers, shape.hidden),
        LOGITS: Column("logits_TLE", stored, (shape.layers, shape.experts)),
        "document": Column("document_T", torch.int32),
        "position": Column("position_T", torch.int32),
        "token": Column("token_T", torch.int32),
        **(_coded_columns("early", shape.layers - 1, shape.hidden) if early else {}),
    }


def _coded_columns(name: str, layers: int, hidden: int) -> Columns:
    blocks = hidden // math.gcd(hidden, _BLOCK)
    return {
        name: Column(f"{name}_TLD", torch.int8, (layers, hidden)),
        name + SCALE: Column(f"{name}_TLD{SCALE}", torch.int8, (layers, blocks)),
    }


# Residuals in 8 bits: G blocks of values, each with a power of two

SCALE = "_scale"
_BLOCK = 32
_BIAS, _MANTISSA_BITS, _CODE_BITS = 127, 7, 6
"""Bias and mantissa of bf16; bits of a code after its first: a block's largest code is 64 to 127."""


def rounded(values_XD: Tensor) -> Tensor:
    """Round bf16 values to those that codes of 8 bits represent; NaN and infinity stay."""
    scale_XG1 = _scales(values_XD)
    blocks_XGI = _blocks(values_XD, scale_XG1.shape[-2])
    return ((blocks_XGI * _power(-scale_XG1)).round_() * _power(scale_XG1)).flatten(-2)


def coded(values_XD: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [X, D] and scales [X, G] in int8 of finite bf16 values, rounded if they are not."""
    scale_XG1 = _scales(values_XD)
    blocks_XGI = _blocks(values_XD, scale_XG1.shape[-2])
    codes_XGI = (blocks_XGI * _power(-scale_XG1)).round_().to(torch.int8)
    return codes_XGI.flatten(-2), scale_XG1.squeeze(-1).to(torch.int8)


def decoded(codes_XD: Tensor, scale_XG: Tensor) -> Tensor:
    """Return the values of codes in bf16, exactly."""
    blocks_XGI = _blocks(codes_XD.to(torch.bfloat16), scale_XG.shape[-1])
    return blocks_XGI.mul_(_power(scale_XG.unsqueeze(-1))).flatten(-2)


def _blocks(values_XD: Tensor, count: int) -> Tensor:
    """Return values in `count` blocks, [X, G, I]."""
    return values_XD.reshape(*values_XD.shape[:-1], count, -1)


def _scales(values_XD: Tensor) -> Tensor:
    """Return the exponent of each block's scale, [X, G, 1] in int32."""
    blocks_XGI = _blocks(values_XD, values_XD.shape[-1] // math.gcd(values_XD.shape[-1], _BLOCK))
    bits_XG1 = (blocks_XGI.view(torch.int16) & 0x7FFF).amax(-1, keepdim=True).int()
    # bits of positive floats are in their order; one more carries where the largest value would be rounded to 128
    exponent_XG1 = ((bits_XG1 + 1) >> _MANTISSA_BITS) - _BIAS
    return (exponent_XG1 - _CODE_BITS).clamp_(1 - _BIAS, _BIAS - 1)


def _power(exponent_X: Tensor) -> Tensor:
    """Return powers of two in bf16."""
    return ((exponent_X.to(torch.int16) + _BIAS) << _MANTISSA_BITS).view(torch.bfloat16)


def row_bytes(columns: Columns) -> int:
    """Return the bytes of one token on disk."""
    return sum(column.width * column.dtype.itemsize for column in columns.values())


def column_notes(columns: Columns) -> Json:
    """Return the description of the columns for trace.json."""
    return {name: {"dtype": _name(own.dtype), "shape": list(own.shape)} for name, own in columns.items() if own.shape}


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


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return one digest over names, dtypes, shapes and bytes of tensors on the CPU."""
    lines = []
    for name, tensor in sorted(tensors.items()):
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        lines.append(f"{name} {tensor.dtype} {list(tensor.shape)} {digest(content)}")
    return digest("\n".join(lines).encode())


# Atomic writes


def write_shard(path: Path, columns: Columns, rows: TraceBatch) -> str:
    """Write rows with known token ids as one Arrow file.

    Returns:
        The file's digest.

    Raises:
        ExpertcastError: a value is NaN or infinity.
    """
    arrays: dict[str, pa.Array] = {}
    for name, column in columns.items():
        if name in arrays:
            continue
        values: Tensor = getattr(rows, column.field)
        if values.is_floating_point() and not is_finite(values):
            raise ExpertcastError(
                f"the model's {name.replace('_', ' ')} contains NaN or infinity: load it in another dtype "
                "(--dtype), or collect other text"
            )
        parts = {name: values}
        if name + SCALE in columns:
            parts = dict(zip((name, name + SCALE), coded(values.bfloat16()), strict=True))
        arrays |= {each: columns[each].array(part) for each, part in parts.items()}
    table = pa.table(arrays)
    # a single record batch, so that the reader can map a whole column as one tensor
    with replacing(path) as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return file_digest(path)


REMEDY = "collect the traces again into a new folder"

TRACES = Kind(
    what="trace dataset",
    repo_type="dataset",
    files=("*.json", "*.safetensors", "*.arrow", CARD),
    marks=(TRACE_FILE,),
    holds=lambda folder: (folder / TRACE_FILE).is_file(),
    remedy=REMEDY,
)

_Count = Annotated[int, Field(ge=1, le=2**53)]


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
class _Splits(TypedDict):
    train: _Count
    validation: _Count
    test: _Count


@with_config(CLOSED)
class _Piece(TypedDict):
    kind: str
    outputs: _Count


@with_config(CLOSED)
class _Form(TypedDict):
    """A packed matrix."""

    pieces: list[_Piece]
    inputs: _Count


@with_config(CLOSED)
class TraceInfo(TypedDict):
    """trace.json"""

    format: Literal["expertcast-traces-6"]
    id: str
    complete: bool
    settings: _Settings
    columns: dict[str, JsonValue]
    """:func:`column_notes`"""
    model: str
    fingerprint: str
    experts_fingerprint: NotRequired[str]
    """Missing if the experts were not available."""
    shape: ShapeValues
    experts: list[dict[str, _Form]]
    """Forms of packed matrices by layer and the parameter's name."""
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


def columns_in(info: TraceInfo) -> Columns:
    """Return the columns of the shards; router logits are fp32 unless the file says float16."""
    logits = info["columns"].get(LOGITS)
    half = isinstance(logits, dict) and logits.get("dtype") == "float16"
    early = info["settings"]["early_rank"] is not None
    return columns_of(ModelShape.from_dict(info["shape"]), torch.float16 if half else torch.float32, early=early)


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
    if len(info["experts"]) != shape["L"]:
        return f"experts has {len(info['experts'])} layers, shape {shape['L']}"
    documents = info["documents"]
    if len({document["index"] for document in documents}) < len(documents):
        return "documents have a duplicate index"
    counted = dict.fromkeys(SPLITS, 0)
    for document in documents:
        counted[document["split"]] += document["tokens"]
    if sum(counted.values()) != info["tokens"] or counted != info["splits"]:
        return f"documents have {counted} tokens, but tokens and splits are {info['tokens']} and {info['splits']}"
    return None
