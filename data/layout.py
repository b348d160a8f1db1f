"""Names, columns and Arrow form of a trace dataset on disk.

    TRACES/
        trace.json                    what it is: model, fingerprint, documents with their split and domain, versions,
                                      and the digests of all other files
        data-00000-00000.arrow ...    one row per token; rank and number of the shard
        dataset_info.json state.json  what `datasets.load_from_disk` reads
        default_vectors.safetensors   means over the documents of the train split
        stand_in.safetensors          what early attention ran on, where it did
        skeleton/                     norms and routers of the model
        progress/                     while collecting only: per rank, sums and shards that are done

Traces of a server's traffic (:mod:`expertcast.data.live`) may be read while they grow: trace.json names their shards
and is written last. They hold no default vectors, and their skeleton leaves it to its reader where in the model its
layers are.

Columns: `residual` (L x D, bf16 stored as its 16 bits, Arrow has no bf16), `router_logits` (L x E), `document`,
`position` (in the document; it begins above 0 where the beginning of a request was in a prefix cache), `token` (id),
and with early attention `early` (L - 1 x D, stored as `residual` is).
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from expertcast.predictors.plain import Json
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

    from expertcast.data.shard_file import write_atomically

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
