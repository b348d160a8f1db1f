"""trace.json, which says what a trace dataset is, and state.json, which names its shards: schema, reader and writer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NotRequired

from pydantic import Field, JsonValue, with_config
from typing_extensions import TypedDict

from expertcast.checkpoints.repositories import Kind
from expertcast.data import layout
from expertcast.data.plan import SPLITS, PlannedDocument
from expertcast.data.shard_file import write_atomically
from expertcast.predictors.artefacts import CLOSED, SEAL, read_json, seal, warn_unsealed
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.plain import Json
from expertcast.predictors.view import ModelShape

REMEDY = "collect the traces again into a new folder"

TRACES = Kind(
    what="trace dataset",
    repo_type="dataset",
    files=("*.json", "*.safetensors", "*.arrow", "README.md"),
    marks=(layout.TRACE_FILE,),
    holds=lambda folder: (folder / layout.TRACE_FILE).is_file(),
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
    filename: Annotated[str, Field(pattern=layout.SHARD_PATTERN)]


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
    path = folder / layout.TRACE_FILE
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
    write_atomically(folder / layout.TRACE_FILE, (json.dumps(sealed, indent=1) + "\n").encode())


def documents_in(info: TraceInfo) -> list[PlannedDocument]:
    """The documents, in the order of their rows."""
    return [PlannedDocument(**document) for document in info["documents"]]


def shape_in(info: TraceInfo) -> ModelShape:
    """L, E, K and D of the model that was run."""
    shape = info["shape"]
    return ModelShape(layers=shape["L"], experts=shape["E"], top_k=shape["K"], hidden=shape["D"])


def is_live(info: Mapping[str, object]) -> bool:
    """Whether the traces are of a server's traffic."""
    return info.get("format") == layout.LIVE_FORMAT


def shard_names(folder: Path, info: TraceInfo) -> list[str]:
    """The shards of a complete collection, in order: from state.json, or from trace.json where it is written last.

    Raises:
        ExpertcastError: state.json is not right.
    """
    if is_live(info):
        return [name for name in info.get("files", {}) if re.match(layout.SHARD_PATTERN, name)]
    path = folder / layout.DATASET_STATE_FILE
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
