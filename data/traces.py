"""Reading a trace dataset: rows of the Arrow shards as tensors, without a copy.

T tokens, D hidden size, L MoE layers, E routed experts per layer. The folder is drawn in :mod:`expertcast.data.layout`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import torch
from safetensors.torch import load_file
from torch import Tensor

from expertcast.data import layout
from expertcast.data.batch import TraceBatch
from expertcast.data.distributed import Share, documents_of, smallest_share
from expertcast.data.layout import TRACE_FILE as TRACE_FILE
from expertcast.data.models import load_skeleton
from expertcast.data.plan import ALL as ALL
from expertcast.data.plan import Documented, PlannedDocument
from expertcast.predictors.defaults import DefaultVectors
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.plain import Json
from expertcast.predictors.view import MoEView


class TraceSource(Protocol):
    """What predictors are fitted from: traces on disk, or a running model."""

    @property
    def view(self) -> MoEView:
        """The model's norms and routers."""

    @property
    def defaults(self) -> DefaultVectors:
        """Default vectors over the documents of the train split."""

    @property
    def info(self) -> Json:
        """Where the values come from: model, text, documents, versions."""

    def token_count(self, split: str) -> int:
        """Tokens of `train`, `validation`, `test` or `all`."""

    def batches(
        self,
        split: str,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        max_tokens: int | None = None,
        share: Share | None = None,
    ) -> Iterator[TraceBatch]:
        """Batches of `batch_size` tokens of a split.

        Without `shuffle` rows are in order of documents and positions, and the last batch may be smaller; a document
        may be cut between batches.

        Args:
            split: train, validation, test or all.
            batch_size: tokens per batch.
            shuffle: tokens in an order drawn from `seed`.
            seed: only looked at with `shuffle`.
            max_tokens: only the first so many tokens of the split (whole documents first, then a part of one).
            share: this rank's documents only, cut so that every rank gets equally many full batches.

        Raises:
            ExpertcastError: unknown split, `batch_size` under 1, or a share without one full batch.
        """


class TraceDataset(Documented):
    """A complete trace dataset. Made by :func:`expertcast.data.collector.collect`, opened by :meth:`open`."""

    def __init__(self, folder: Path, info: Json) -> None:
        self.folder = folder
        self.info = info
        self.documents = [PlannedDocument(**document) for document in info["documents"]]
        names = json.loads((folder / layout.DATASET_STATE_FILE).read_text())["_data_files"]
        self._shards = [_Shard(folder / entry["filename"], info) for entry in names]
        self._ends = np.cumsum([len(shard) for shard in self._shards])

    @classmethod
    def open(cls, folder: Path | str) -> TraceDataset:
        """The traces in a folder.

        Raises:
            ExpertcastError: no traces there, or their collection was not finished.
        """
        folder = Path(folder)
        info = read_info(folder)
        if info is None:
            raise ExpertcastError(f"{folder} holds no traces ({TRACE_FILE} missing): make them with expertcast collect")
        if not info["complete"]:
            raise ExpertcastError(f"the collection in {folder} is not finished: run the same collect command again")
        return cls(folder, info)

    @cached_property
    def view(self) -> MoEView:
        """The model's norms and routers, from the skeleton in the folder."""
        return load_skeleton(self.folder / layout.SKELETON_FOLDER)

    @cached_property
    def defaults(self) -> DefaultVectors:
        """Default vectors over the documents of the train split."""
        return DefaultVectors.from_tensors(load_file(self.folder / layout.DEFAULTS_FILE))

    def batches(
        self,
        split: str,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        max_tokens: int | None = None,
        share: Share | None = None,
    ) -> Iterator[TraceBatch]:
        """As :meth:`TraceSource.batches`, shuffled over the whole split. Tensors are views of the files, private ones:
        writing to them never reaches the disk."""
        begin, end = self._rows_of(split, max_tokens, share, batch_size)
        order = begin + torch.randperm(end - begin, generator=torch.Generator().manual_seed(seed)) if shuffle else None
        for first in range(begin, end, batch_size):
            last = min(first + batch_size, end)
            yield self._slice(first, last) if order is None else self._gather(order[first - begin : last - begin])

    def _rows_of(self, split: str, max_tokens: int | None, share: Share | None, batch_size: int) -> tuple[int, int]:
        """First row and end: a split, and a rank's share of it, are runs of neighbouring rows."""
        own, limit = own_tokens(self, split, batch_size, max_tokens, share)
        begin = 0
        for document in self.documents:
            if own and document is own[0]:
                break
            begin += document.tokens
        return begin, begin + limit

    def _slice(self, first: int, last: int) -> TraceBatch:
        before = self._rows(first - 1, first) if first else None
        return self._rows(first, last).with_previous(before)

    def _rows(self, first: int, last: int) -> TraceBatch:
        parts = []
        while first < last:
            number = int(np.searchsorted(self._ends, first, side="right"))
            start = int(self._ends[number]) - len(self._shards[number])
            end = min(last, int(self._ends[number]))
            parts.append(self._shards[number].rows(slice(first - start, end - start)))
            first = end
        return parts[0] if len(parts) == 1 else TraceBatch.cat(parts)

    def _gather(self, rows_T: Tensor) -> TraceBatch:
        sorted_T = rows_T.sort().values  # neighbours on disk are read together; the batch is a random set all the same
        batch = TraceBatch.cat([shard.rows(own_T) for shard, own_T in self._by_shard(sorted_T)])
        before = TraceBatch.cat([shard.routing(own_T) for shard, own_T in self._by_shard((sorted_T - 1).clamp(min=0))])
        return batch.with_previous_rows(before)

    def _by_shard(self, sorted_T: Tensor) -> Iterator[tuple[_Shard, Tensor]]:
        """The shards that hold some of the rows, and the rows' numbers in them."""
        first = 0
        for shard, end in zip(self._shards, self._ends, strict=True):
            own_T = sorted_T[(sorted_T >= first) & (sorted_T < int(end))]
            if len(own_T):
                yield shard, own_T - first
            first = int(end)


def own_tokens(
    source: Documented, split: str, batch_size: int, max_tokens: int | None, share: Share | None
) -> tuple[list[PlannedDocument], int]:
    """A rank's documents of a split, and how many of their tokens it takes: equally many full batches on every rank.

    Args:
        source: what has the documents.
        split: train, validation, test or all.
        batch_size: tokens per batch.
        max_tokens: of the whole split, over all ranks; None takes all.
        share: the rank; none is the only one.

    Raises:
        ExpertcastError: unknown split, `batch_size` under 1, or several ranks and a share without one full batch.
    """
    if batch_size < 1:
        raise ExpertcastError(f"batch_size={batch_size}: give at least 1 token")
    chosen, total = source.chosen(split), source.token_count(split)
    if share is None or share.world == 1:
        return chosen, total if max_tokens is None else min(total, max_tokens)
    tokens = smallest_share(chosen, share.world)
    tokens = tokens if max_tokens is None else min(tokens, max_tokens // share.world)
    count = tokens // batch_size
    if count == 0:
        raise ExpertcastError(
            f"a rank's share of {tokens} tokens of {split} holds no batch of {batch_size}: use more text, a smaller "
            "batch or fewer ranks"
        )
    return documents_of(chosen, share), count * batch_size


def read_info(folder: Path) -> Json | None:
    """trace.json of a folder; None where there is none of ours."""
    try:
        info = json.loads((folder / TRACE_FILE).read_text())
    except (OSError, json.JSONDecodeError):
        return None
    return info if isinstance(info, dict) and info.get("format") == layout.FORMAT else None


class _Shard:
    """One Arrow file: its columns as tensors over a private memory map.

    `datasets.load_from_disk` reads the same files, but makes arrays of its own for every batch: batches of 1024 tokens
    came at 140,000 tokens/s instead of 370,000 in order, and at 22,000 instead of 98,000 shuffled (its Arrow format,
    of CPU time; its numpy format gives half of that, and its torch format turns the 16 bits of bf16 into 64).
    """

    def __init__(self, path: Path, info: Json) -> None:
        try:
            # copy-on-write: a stray in-place operation on a batch neither crashes nor reaches the file
            content = np.memmap(path, dtype=np.uint8, mode="c")
            table = pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(content))).read_all()
        except (OSError, ValueError, pa.ArrowException) as error:
            raise ExpertcastError(f"cannot read {path}: {error}; collect the traces again") from error

        def tensor(column: str, dtype: torch.dtype, shape: list[int]) -> Tensor:
            """The column (one chunk, as written) as [T, *shape]."""
            array = table.column(column).chunk(0)
            buffer = (array.values if shape else array).buffers()[1]
            begin = buffer.address - content.ctypes.data  # through numpy: torch refuses Arrow's read-only buffers
            nbytes = len(array) * math.prod(shape) * dtype.itemsize
            return torch.from_numpy(content[begin : begin + nbytes]).view(dtype).reshape(-1, *shape)

        columns = info["columns"]
        self._residual_TLD = tensor(layout.RESIDUAL, torch.bfloat16, columns[layout.RESIDUAL]["shape"])
        self._logits_TLE = tensor(layout.LOGITS, layout.logits_dtype_of(info), columns[layout.LOGITS]["shape"])
        self._document_T = tensor(layout.DOCUMENT, torch.int32, [])
        self._position_T = tensor(layout.POSITION, torch.int32, [])

    def __len__(self) -> int:
        return len(self._document_T)

    def rows(self, index: slice | Tensor) -> TraceBatch:
        return replace(self.routing(index), residual_TLD=self._residual_TLD[index])

    def routing(self, index: slice | Tensor) -> TraceBatch:
        """The rows without their residuals."""
        return TraceBatch(
            residual_TLD=self._residual_TLD[:, :0][index],
            logits_TLE=self._logits_TLE[index],
            document_T=self._document_T[index].long(),
            position_T=self._position_T[index].long(),
        )
