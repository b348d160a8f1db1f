"""Reading a trace dataset: rows of the Arrow shards as tensors, without a copy.

T tokens, D hidden size, L MoE layers, E routed experts per layer. The folder is drawn in :mod:`expertcast.data.layout`.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path

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
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.plain import Json
from expertcast.predictors.quasi_hidden import DefaultVectors
from expertcast.predictors.view import MoEView


class TraceSource(Documented):
    """What predictors are fitted from: traces on disk, or a running model."""

    view: MoEView
    """The model's norms and routers."""
    defaults: DefaultVectors
    """Default vectors over the documents of the train split."""
    info: Json
    """Where the values come from: model, text, documents, versions."""

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
            shuffle: tokens in an order drawn from `seed`: over the whole split where it lies on disk, within the
                shuffle buffer where a model is run.
            seed: only looked at with `shuffle`.
            max_tokens: only the first so many tokens of the split (whole documents first, then a part of one).
            share: this rank's documents only, cut so that every rank gets equally many full batches.

        Raises:
            ExpertcastError: unknown split, `batch_size` under 1, or a share without one full batch.
        """
        if batch_size < 1:
            raise ExpertcastError(f"batch_size={batch_size}: give at least 1 token")
        own, tokens = self.chosen(split), self.token_count(split)
        if share is not None and share.world > 1:
            tokens = smallest_share(own, share.world)
            tokens = tokens if max_tokens is None else min(tokens, max_tokens // share.world)
            if tokens < batch_size:
                raise ExpertcastError(
                    f"a rank's share of {tokens} tokens of {split} holds no batch of {batch_size}: use more text, a "
                    "smaller batch or fewer ranks"
                )
            own, tokens = documents_of(own, share), tokens - tokens % batch_size
        elif max_tokens is not None:
            tokens = min(tokens, max_tokens)
        return self._batches(own, tokens, batch_size, seed if shuffle else None)

    def _batches(
        self, own: list[PlannedDocument], tokens: int, batch_size: int, seed: int | None
    ) -> Iterator[TraceBatch]:
        """The first `tokens` of neighbouring documents, shuffled where there is a seed."""
        raise NotImplementedError


class TraceDataset(TraceSource):
    """A complete trace dataset. Made by :func:`expertcast.data.collector.collect`, opened by :meth:`open`."""

    def __init__(self, folder: Path, info: Json) -> None:
        self.folder = folder
        self.info = info
        self.documents = [PlannedDocument(**document) for document in info["documents"]]
        names = json.loads((folder / layout.DATASET_STATE_FILE).read_text())["_data_files"]
        shards = [_Shard(folder / entry["filename"], info) for entry in names]
        begins = itertools.accumulate(map(len, shards), initial=0)
        self._shards = list(zip(begins, shards, strict=False))
        """Each with the number of its first row."""

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
    def view(self) -> MoEView:  # type: ignore[override]
        """The model's norms and routers, from the skeleton in the folder."""
        return load_skeleton(self.folder / layout.SKELETON_FOLDER)

    @cached_property
    def defaults(self) -> DefaultVectors:  # type: ignore[override]
        """Default vectors over the documents of the train split."""
        return DefaultVectors.from_tensors(load_file(self.folder / layout.DEFAULTS_FILE))

    def _batches(
        self, own: list[PlannedDocument], tokens: int, batch_size: int, seed: int | None
    ) -> Iterator[TraceBatch]:
        """Tensors are views of the files, private ones: writing to them never reaches the disk."""
        before = itertools.takewhile(lambda document: document is not own[0], self.documents)
        begin = sum(document.tokens for document in before)
        end = begin + tokens
        order = None if seed is None else torch.randperm(tokens, generator=torch.Generator().manual_seed(seed)) + begin
        for first in range(begin, end, batch_size):
            last = min(first + batch_size, end)
            yield self._slice(first, last) if order is None else self._gather(order[first - begin : last - begin])

    def _slice(self, first: int, last: int) -> TraceBatch:
        before = self._rows(first - 1, first) if first else None
        return self._rows(first, last).with_previous(before)

    def _rows(self, first: int, last: int) -> TraceBatch:
        parts = [
            shard.rows(slice(max(first - begin, 0), last - begin))
            for begin, shard in self._shards
            if begin < last and begin + len(shard) > first
        ]
        return parts[0] if len(parts) == 1 else TraceBatch.cat(parts)

    def _gather(self, rows_T: Tensor) -> TraceBatch:
        sorted_T = rows_T.sort().values  # neighbours on disk are read together; the batch is a random set all the same
        batch = TraceBatch.cat([shard.rows(own_T) for shard, own_T in self._by_shard(sorted_T)])
        before = TraceBatch.cat([shard.routing(own_T) for shard, own_T in self._by_shard((sorted_T - 1).clamp(min=0))])
        return batch.with_previous_rows(before)

    def _by_shard(self, sorted_T: Tensor) -> Iterator[tuple[_Shard, Tensor]]:
        """The shards that hold some of the rows, and the rows' numbers in them."""
        for begin, shard in self._shards:
            own_T = sorted_T[(sorted_T >= begin) & (sorted_T < begin + len(shard))]
            if len(own_T):
                yield shard, own_T - begin


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

        residual, logits = info["columns"][layout.RESIDUAL], info["columns"][layout.LOGITS]
        self._residual_TLD = tensor(layout.RESIDUAL, torch.bfloat16, residual["shape"])
        self._logits_TLE = tensor(layout.LOGITS, getattr(torch, logits["dtype"]), logits["shape"])
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
