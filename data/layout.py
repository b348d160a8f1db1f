"""Names, columns and Arrow form of a trace dataset on disk.

    TRACES/
        trace.json                    what it is: model, fingerprint, documents with their split and domain, versions,
                                      and the digests of all other files
        data-00000-00000.arrow ...    one row per token; rank and number of the shard
        dataset_info.json state.json  what `datasets.load_from_disk` reads
        default_vectors.safetensors   means over the documents of the train split
        skeleton/                     norms and routers of the model
        progress/                     while collecting only: per rank, sums and shards that are done

Columns: `residual` (L x D, bf16 stored as its 16 bits, Arrow has no bf16), `router_logits` (L x E), `document`,
`position` (in the document) and `token` (id).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from expertcast.predictors.plain import Json
from expertcast.predictors.view import ModelShape

if TYPE_CHECKING:
    from datasets import Features

TRACE_FILE = "trace.json"
DEFAULTS_FILE = "default_vectors.safetensors"
SKELETON_FOLDER = "skeleton"
PROGRESS_FOLDER = "progress"
DATASET_STATE_FILE = "state.json"
DATASET_INFO_FILE = "dataset_info.json"
PARTIAL = ".partial"
FORMAT = "expertcast-traces-1"

SHARD_PATTERN = r"^data-[0-9]{5,}-[0-9]{5,}\.arrow$"
"""Of the names that :func:`shard_file` gives."""

RESIDUAL, LOGITS, DOCUMENT, POSITION, TOKEN = "residual", "router_logits", "document", "position", "token"


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


def row_bytes(shape: ModelShape, logits: torch.dtype) -> int:
    """Bytes of one token on disk."""
    return shape.layers * (shape.hidden * 2 + shape.experts * logits.itemsize) + 3 * 4


def features(shape: ModelShape, logits: torch.dtype) -> Features:
    """The `datasets.Features` of a trace dataset."""
    from datasets import Features, List, Value  # slow to import, and only writing needs it

    return Features(
        {
            RESIDUAL: List(Value("uint16"), length=shape.layers * shape.hidden),
            LOGITS: List(Value(str(logits).removeprefix("torch.")), length=shape.layers * shape.experts),
            DOCUMENT: Value("int32"),
            POSITION: Value("int32"),
            TOKEN: Value("int32"),
        }
    )


def columns_note(shape: ModelShape, logits: torch.dtype) -> Json:
    """How to read the columns, for trace.json."""
    return {
        RESIDUAL: {"dtype": "bfloat16", "stored_as": "uint16 holding the bits", "shape": [shape.layers, shape.hidden]},
        LOGITS: {"dtype": str(logits).removeprefix("torch."), "shape": [shape.layers, shape.experts]},
        POSITION: "of the token in its document",
    }


def write_dataset_files(folder: Path, shape: ModelShape, logits: torch.dtype, shards: list[str], mark: str) -> None:
    """dataset_info.json and state.json, with which `datasets.load_from_disk` reads the files `shards` in this order.

    The `shape` of the model and the dtype of the `logits` make the columns; `mark`, hexadecimal digits, tells the
    dataset in `folder` from others.
    """
    from datasets import DatasetInfo

    DatasetInfo(features=features(shape, logits)).write_to_directory(str(folder))
    state: Json = {
        "_data_files": [{"filename": name} for name in shards],
        "_fingerprint": mark[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / DATASET_STATE_FILE).write_text(json.dumps(state, indent=2))
