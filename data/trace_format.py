"""trace.json, which says what a trace dataset is, and state.json, which names its shards: schema, reader and writer."""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal, NotRequired

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from pydantic import Field, JsonValue, with_config
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from typing_extensions import TypedDict

from expertcast.checkpoints.hub import Kind
from expertcast.checkpoints.provenance import without_folders
from expertcast.data.batch import TraceBatch
from expertcast.data.plan import SPLITS, PlannedDocument
from expertcast.predictors.artefacts import (
    CLOSED,
    SEAL,
    DigestingFile,
    digest,
    open_file,
    read_json,
    seal,
    warn_unsealed,
)
from expertcast.predictors.messages import ExpertcastError, Json, first_line
from expertcast.predictors.view import ModelShape, MoEView

if TYPE_CHECKING:
    from datasets import Features


# Names, columns and Arrow form of a trace dataset on disk.
#
#     TRACES/
#         trace.json                    what it is: model, fingerprint, documents with their split and domain, versions,
#                                       and the digests of all other files
#         data-00000-00000.arrow ...    one row per token; rank and number of the shard
#         dataset_info.json state.json  what `datasets.load_from_disk` reads
#         default_vectors.safetensors   means over the documents of the train split
#         stand_in.safetensors          what early attention ran on, where it did
#         skeleton/                     norms and routers of the model
#         progress/                     while collecting only: per rank, sums and shards that are done
#
# Traces of a server's traffic (:mod:`expertcast.data.live`) may be read while they grow: trace.json names their shards
# and is written last. They hold no default vectors, and their skeleton leaves it to its reader where in the model its
# layers are.
#
# Columns: `residual` (L x D, bf16 stored as its 16 bits, Arrow has no bf16), `router_logits` (L x E), `document`,
# `position` (in the document; it begins above 0 where the beginning of a request was in a prefix cache), `token` (id),
# and with early attention `early` (L - 1 x D, stored as `residual` is).

TRACE_FILE = "trace.json"
DEFAULTS_FILE = "default_vectors.safetensors"
STAND_IN_FILE = "stand_in.safetensors"
SKELETON_FOLDER = "skeleton"
PROGRESS_FOLDER = "progress"
DATASET_STATE_FILE = "state.json"
DATASET_INFO_FILE = "dataset_info.json"
PARTIAL = ".partial"
FORMAT = "expertcast-traces-1"
LIVE_FORMAT = "expertcast-traces-2"
"""Of a server's traffic."""

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
        """How to read the columns, for trace.json."""
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


# Reading safetensors files of ours: names, shapes and kinds are compared with what is expected before a tensor is.
#
# Ranges of any file are read here too.

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


# Writing files of a trace dataset: each is the old one or the new one, never a part. Shards hold rows of tokens.

_ODD_REMEDY = "load it in another dtype (--dtype), or collect other text"


def write_shard(path: Path, columns: Columns, parts: Sequence[tuple[TraceBatch, Tensor]]) -> tuple[str, int]:
    """Write rows as one Arrow file.

    Args:
        path: of the file.
        columns: what is written of a token.
        parts: rows, and their tokens' ids [T].

    Returns:
        The file's digest, and how many rows it has.

    Raises:
        ExpertcastError: the model gave NaN or infinity.
    """
    from datasets.arrow_writer import ArrowWriter  # slow to import, and only collection needs it

    features = columns.features()
    rows = _table(columns, parts, features.arrow_schema)
    with _replacing(path) as file:
        sink = DigestingFile(file)
        # in one piece, so that the reader can look at a whole column as one tensor
        with ArrowWriter(features=features, stream=sink, writer_batch_size=rows.num_rows) as writer:
            writer.write_table(rows)
            writer.finalize(close_stream=False)
    return sink.digest, rows.num_rows


def _table(columns: Columns, parts: Sequence[tuple[TraceBatch, Tensor]], schema: pa.Schema) -> pa.Table:
    """The rows. Built by hand: ArrowWriter.write_batch, given the same arrays, takes 2.7 times as long
    (38,300 against 103,200 tokens/s), for it builds every list anew."""
    batch = TraceBatch.cat([batch for batch, _ in parts])
    early = [] if batch.early_TLD is None else [("early residuals", batch.early_TLD)]
    for what, tensor in (("residuals", batch.residual_TLD), ("router logits", batch.logits_TLE), *early):
        if not is_finite(tensor):
            raise ExpertcastError(f"the model gives NaN or infinity among its {what}: {_ODD_REMEDY}")
    token_T = torch.cat([token_T for _, token_T in parts])
    arrays = [
        _lists(_bits(batch.residual_TLD)),
        _lists(batch.logits_TLE.to(columns.logits).contiguous().numpy()),
        *(pa.array(x.to(torch.int32).numpy()) for x in (batch.document_T, batch.position_T, token_T)),
        *([] if batch.early_TLD is None else [_lists(_bits(batch.early_TLD))]),
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
_Pair = Annotated[list[_Count], Field(min_length=2, max_length=2)]


@with_config(CLOSED)
class _Document(TypedDict):
    """A :class:`PlannedDocument`."""

    index: Annotated[int, Field(ge=0, lt=2**31)]
    domain: str
    tokens: _Count
    split: Literal["train", "validation", "test"]
    hash: NotRequired[Annotated[str, Field(pattern="^[0-9a-f]{16}$")]]


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
    early_rank: NotRequired[Annotated[int, Field(ge=0, le=4096)]]
    """Of the stand-in that early attention ran on, where it did."""
    not_early: NotRequired[list[Annotated[int, Field(ge=1, lt=10_000)]]]
    """Layers that it could not run at: their column holds the stand-in."""


@with_config(CLOSED)
class _Residual(TypedDict):
    dtype: Literal["bfloat16"]
    stored_as: str
    shape: _Pair


@with_config(CLOSED)
class _Logits(TypedDict):
    dtype: Literal["float16", "float32"]
    shape: _Pair


@with_config(CLOSED)
class _Columns(TypedDict):
    residual: _Residual
    router_logits: _Logits
    position: str
    early: NotRequired[_Residual]


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
class _Vectors(TypedDict):
    split: Literal["train"]
    tokens: _Count


@with_config(CLOSED)
class TraceInfo(TypedDict):
    """trace.json"""

    format: Literal["expertcast-traces-1", "expertcast-traces-2"]
    id: str
    complete: bool
    settings: _Settings
    columns: _Columns
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
    default_vectors: NotRequired[_Vectors]
    """Of a complete collection, as `files`; not of a server's traffic."""
    files: NotRequired[dict[str, str]]
    """Path in the folder to digest, of every other file."""
    digest: NotRequired[str]


@with_config(CLOSED)
class _File(TypedDict):
    filename: Annotated[str, Field(pattern=SHARD_PATTERN)]


@with_config(CLOSED)
class _State(TypedDict):
    """state.json, of which `datasets` reads more than we do."""

    _data_files: list[_File]
    _fingerprint: str
    _format_columns: JsonValue
    _format_kwargs: JsonValue
    _format_type: JsonValue
    _output_all_columns: bool
    _split: JsonValue


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
    if info["complete"] and "files" not in info:
        warn_unsealed(path)
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


def is_live(info: Mapping[str, object]) -> bool:
    """Whether the traces are of a server's traffic."""
    return info.get("format") == LIVE_FORMAT


def shard_names(folder: Path, info: TraceInfo) -> list[str]:
    """The shards of a complete collection, in order: from state.json, or from trace.json where it is written last.

    Raises:
        ExpertcastError: state.json is not right.
    """
    if is_live(info):
        return [name for name in info.get("files", {}) if re.match(SHARD_PATTERN, name)]
    path = folder / DATASET_STATE_FILE
    names = [file["filename"] for file in read_json(path, _State, REMEDY)["_data_files"]]
    if len(set(names)) < len(names):
        raise ExpertcastError(f"{path} names a shard twice; {REMEDY}")
    return names


def _contradiction(info: TraceInfo) -> str | None:
    """What of a file that keeps to the schema does not fit the rest of it."""
    shape, columns = info["shape"], info["columns"]
    if shape["K"] > shape["E"]:
        return f"shape.K is {shape['K']}, more than the {shape['E']} experts"
    early = [("early", columns["early"]["shape"], [shape["L"] - 1, shape["D"]])] if "early" in columns else []
    for name in ("early_rank", "not_early") if early else ():
        if name not in info["settings"]:
            return f"settings.{name} is missing, and there is a column early"
    if not early and "early_rank" in info["settings"]:
        return "columns.early is missing, and settings have early_rank"
    for name, found, wanted in (
        ("residual", columns["residual"]["shape"], [shape["L"], shape["D"]]),
        ("router_logits", columns["router_logits"]["shape"], [shape["L"], shape["E"]]),
        *early,
    ):
        if found != wanted:
            return f"columns.{name}.shape is {found}, the model's shape makes it {wanted}"
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
    vectors = info.get("default_vectors")
    if info["complete"] and vectors is None and not is_live(info):
        return "default_vectors is missing"
    if vectors is not None and vectors["tokens"] != counted["train"]:
        return f"default_vectors.tokens is {vectors['tokens']}, the train split has {counted['train']}"
    if "files" in info and not (info["complete"] and SEAL in info):
        return f"files are named, {'complete is false' if SEAL in info else 'digest is missing'}"
    return None


# The router skeleton of a model that a server runs in modules of its own: weights by layer, no paths.

CONFIG, WEIGHTS, LAYERS = "config.json", "model.safetensors", "layers.json"
FOUND = "found"
"""In the place of the layers' paths."""
LIVE_REMEDY = "the server's routers have other weights than those of transformers: collect with expertcast collect"


def save_live_skeleton(view: MoEView, config: Json, folder: Path) -> None:
    """Write the skeleton of a model (drawn in :mod:`expertcast.data.skeleton`) that transformers did not make.

    Args:
        view: the routers and norms are modules with the weights that transformers' have, by the same names.
        config: transformers' configuration of the model.
        folder: made where it is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{name}.{key}": tensor.detach().cpu().contiguous()
        for name, module in kept(view, own_names=True)
        for key, tensor in module.state_dict().items()
    }
    dtype = str(view[0].dtype).removeprefix("torch.")
    files = {CONFIG: (json.dumps({**config, "dtype": dtype}, indent=2) + "\n").encode(), WEIGHTS: save(tensors)}
    for name, content in files.items():
        write_atomically(folder / name, content)
    digests = {name: digest(content) for name, content in files.items()}
    description = {
        "model_id": without_folders(view.model_id),
        "top_k": view.shape.top_k,
        "layers": FOUND,
        "files": digests,
    }
    write_atomically(folder / LAYERS, json.dumps(seal(description), indent=2).encode())


def kept(view: MoEView, own_names: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a skeleton holds, with their paths in the model; by layer with `own_names`."""
    for layer in view:
        if layer.norm_name:
            yield f"{layer.index}.norm" if own_names else layer.norm_name, layer.norm
        yield f"{layer.index}.router" if own_names else layer.router_name, layer.router
