"""Writing files of a trace dataset: each is the old one or the new one, never a part. Shards hold rows of tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from expertcast.data import layout
from expertcast.data.batch import TraceBatch
from expertcast.data.tensor_files import is_finite
from expertcast.predictors.artefacts import DigestingFile
from expertcast.predictors.errors import ExpertcastError

_ODD_REMEDY = "load it in another dtype (--dtype), or collect other text"


def write_shard(path: Path, columns: layout.Columns, parts: Sequence[tuple[TraceBatch, Tensor]]) -> tuple[str, int]:
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


def _table(columns: layout.Columns, parts: Sequence[tuple[TraceBatch, Tensor]], schema: pa.Schema) -> pa.Table:
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
    partial = path.with_name(path.name + layout.PARTIAL)
    with partial.open("wb") as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    os.replace(partial, path)
