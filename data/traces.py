"""Reading a trace dataset: rows of the Arrow shards as tensors, without a copy.

T tokens, D hidden size, L MoE layers, E routed experts per layer. The folder is drawn in
:mod:`expertcast.data.trace_format`.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from expertcast.checkpoints.hub import blamed, located
from expertcast.data import trace_format as layout
from expertcast.data.batch import TraceBatch
from expertcast.data.plan import SPLITS, Documented, PlannedDocument
from expertcast.data.processes import Share, documents_of, smallest_share
from expertcast.data.skeleton import CONFIG, WEIGHTS, load_skeleton
from expertcast.data.trace_format import (
    REMEDY,
    TRACE_FILE,
    TRACES,
    Column,
    Columns,
    TraceInfo,
    columns_in,
    documents_in,
    is_live,
    read_info,
    read_tensors,
    shape_in,
    shard_names,
)
from expertcast.data.trace_writer import read_stand_in
from expertcast.predictors.artefacts import SEAL, check_file, digest, open_file
from expertcast.predictors.baselines import DefaultVectors
from expertcast.predictors.early_attention import StandIn
from expertcast.predictors.messages import ExpertcastError, Json, first_line
from expertcast.predictors.view import MoEView


class TraceSource(Documented):
    """What predictors are fitted from: traces on disk, or a running model."""

    view: MoEView
    """The model's norms and routers."""
    defaults: DefaultVectors
    """Default vectors over the documents of the train split, or from elsewhere
    (:func:`expertcast.data.live.with_default_vectors`)."""
    defaults_learned_from: frozenset[str] = frozenset()
    """Hashes of the documents elsewhere that they come from."""
    info: Json
    """Where the values come from: model, text, documents, versions."""

    @property
    def stand_in(self) -> StandIn | None:
        """What early attention ran on; None where it did not run."""
        raise NotImplementedError

    def learned_from(self) -> frozenset[str]:
        """As of anything that is made from documents, with those elsewhere that the default vectors come from."""
        return super().learned_from() | self.defaults_learned_from

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


class Shard:
    """One Arrow file: its columns as tensors over a private memory map.

    `datasets.load_from_disk` reads the same files, but makes arrays of its own for every batch: batches of 1024 tokens
    came at 140,000 tokens/s instead of 370,000 in order, and at 22,000 instead of 98,000 shuffled (its Arrow format,
    of CPU time; its numpy format gives half of that, and its torch format turns the 16 bits of bf16 into 64).

    Its bytes are checked once, before the first rows are given out.
    """

    def __init__(self, path: Path, digest: str, columns: Columns) -> None:
        """Opens a file.

        Args:
            path: of the file.
            digest: taken when it was written.
            columns: what it holds of a token.

        Raises:
            ExpertcastError: it is no such file.
        """
        self._path, self._digest, self._checked = path, digest, False
        try:
            # copy-on-write: a stray in-place operation on a batch neither crashes nor reaches the file
            with open_file(path) as file:
                self._content: npt.NDArray[np.uint8] = np.memmap(file, dtype=np.uint8, mode="c")
            table = pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(self._content))).read_all()
            if table.column_names != list(columns):
                raise ExpertcastError(f"{path} has other columns than {', '.join(columns)}; {REMEDY}")
            self._columns = {each.field: self._column(table, name, each) for name, each in columns.items()}
        except ExpertcastError:
            raise
        except (OSError, ValueError, pa.ArrowException) as error:
            raise ExpertcastError(f"cannot read {path}: {first_line(error)}; {REMEDY}") from error

    def _column(self, table: pa.Table, name: str, wanted: Column) -> Tensor:
        """A column as [T, *shape]: a view of the file."""
        column = table.column(name)
        if not _same_type(column.type, wanted.type):
            raise ExpertcastError(f"{self._path}: column {name} is {column.type}, not {wanted.type}; {REMEDY}")
        if column.num_chunks != 1 or column.null_count:
            raise ExpertcastError(
                f"{self._path}: column {name} has {column.num_chunks} pieces and {column.null_count} empty rows, not 1 "
                f"and none; {REMEDY}"
            )
        array = column.chunk(0)
        buffer = (array.values if wanted.shape else array).buffers()[1]
        nbytes = len(array) * wanted.width * wanted.dtype.itemsize
        # through numpy: torch refuses Arrow's read-only buffers
        begin = 0 if buffer is None else buffer.address - self._content.ctypes.data
        held = 0 if buffer is None else min(buffer.size, self._content.size - begin)
        if begin < 0 or begin % wanted.dtype.itemsize or held < nbytes or array.offset:
            raise ExpertcastError(f"{self._path}: column {name} does not lie in the file as it says; {REMEDY}")
        return torch.from_numpy(self._content[begin : begin + nbytes]).view(wanted.dtype).reshape(-1, *wanted.shape)

    def __len__(self) -> int:
        return len(self._columns["document_T"])

    def check(self) -> None:
        """See, once, that the bytes are those that were written.

        Raises:
            ExpertcastError: they are not.
        """
        if not self._checked and digest(self._content.data) != self._digest:
            raise ExpertcastError(f"{self._path} was changed after it was written; {REMEDY}")
        self._checked = True

    def rows(self, index: slice | Tensor, *, residuals: bool = True) -> TraceBatch:
        """Rows by their numbers in the file, with their residuals or without.

        Raises:
            ExpertcastError: the file was changed after it was written.
        """
        self.check()
        columns = dict(self._columns)
        if not residuals:
            columns = {**columns, "residual_TLD": columns["residual_TLD"][:, :0]}
            columns.pop("early_TLD", None)
        taken = {field: tensor[index] for field, tensor in columns.items()}
        return TraceBatch(**{name: each if each.is_floating_point() else each.long() for name, each in taken.items()})


class Rows:
    """The rows of all shards of a dataset, counted from the first one's first on."""

    def __init__(self, shards: Sequence[tuple[int, Shard]]) -> None:
        """Takes the shards in order, each with the number of its first row."""
        self._shards = shards

    def check(self) -> None:
        """:meth:`Shard.check` of all.

        Raises:
            ExpertcastError: as there.
        """
        for _, shard in self._shards:
            shard.check()

    def in_order(self, spans: Sequence[range], batch_size: int) -> Iterator[TraceBatch]:
        """The rows of some spans, so many at a time, the last batch may be smaller; `previous_TLE` is filled in."""
        held, count = list[TraceBatch](), 0
        for span in spans:
            first = span.start
            while first < span.stop:
                last = min(first + batch_size - count, span.stop)
                before = self._between(first - 1, first) if first else None
                held.append(self._between(first, last).with_previous(before))
                count, first = count + last - first, last
                if count == batch_size:
                    yield held[0] if len(held) == 1 else TraceBatch.cat(held)
                    held, count = [], 0
        if held:
            yield held[0] if len(held) == 1 else TraceBatch.cat(held)

    def gathered(self, rows_T: Tensor) -> TraceBatch:
        """These rows, in their order in the files, with `previous_TLE`."""
        sorted_T = rows_T.sort().values  # neighbours on disk are read together; the batch is a random set all the same
        batch = TraceBatch.cat([shard.rows(own_T) for shard, own_T in self._by_shard(sorted_T)])
        before = TraceBatch.cat(
            [shard.rows(own_T, residuals=False) for shard, own_T in self._by_shard((sorted_T - 1).clamp(min=0))]
        )
        return batch.with_previous_rows(before)

    def _between(self, first: int, last: int) -> TraceBatch:
        parts = [
            shard.rows(slice(max(first - begin, 0), last - begin))
            for begin, shard in self._shards
            if begin < last and begin + len(shard) > first
        ]
        return parts[0] if len(parts) == 1 else TraceBatch.cat(parts)

    def _by_shard(self, sorted_T: Tensor) -> Iterator[tuple[Shard, Tensor]]:
        """The shards that hold some of the rows, and the rows' numbers in them."""
        for begin, shard in self._shards:
            own_T = sorted_T[(sorted_T >= begin) & (sorted_T < begin + len(shard))]
            if len(own_T):
                yield shard, own_T - begin


def _same_type(found: pa.DataType, wanted: pa.DataType) -> bool:
    """The same whatever the members of lists are called."""
    if not pa.types.is_fixed_size_list(wanted):
        return bool(found == wanted)
    same_size = pa.types.is_fixed_size_list(found) and found.list_size == wanted.list_size
    return bool(same_size and found.value_type == wanted.value_type)


class TraceDataset(TraceSource):
    """A complete trace dataset. Made by :func:`expertcast.data.collect.collect`, opened by :meth:`open`.

    The other files of the folder are compared with the digests in trace.json: small ones when they are read, a shard
    before its first rows are given out.
    """

    def __init__(self, folder: Path, info: TraceInfo) -> None:
        self.folder = folder
        self.info = {name: value for name, value in info.items() if name != SEAL}
        rows_of = documents_in(info)
        self.documents = sorted(rows_of, key=lambda document: SPLITS.index(document.split))
        self._shape = shape_in(info)
        self._files = info["files"]
        shards, begin, columns = [], 0, columns_in(info)
        for name in shard_names(info):
            shards.append((begin, Shard(folder / name, self._files[name], columns)))
            begin += len(shards[-1][1])
        self._shards = Rows(shards)
        self._first, rows = dict[int, int](), 0
        """By `PlannedDocument.index`, the number of a document's first row."""
        for document in rows_of:
            self._first[document.index] = rows
            rows += document.tokens
        if begin != info["tokens"]:
            raise ExpertcastError(
                f"{folder}: {begin} rows in {len(shards)} shards, {TRACE_FILE} has {info['tokens']} tokens; {REMEDY}"
            )

    @classmethod
    def open(cls, folder: Path | str, *, revision: str | None = None) -> TraceDataset:
        """The traces in a folder; where there is none, those of `user/repo` or `user/repo@revision` of the hub.

        Raises:
            ExpertcastError: no traces there, a file that is not right, or their collection was not finished.
        """
        found, name = located(folder, TRACES, revision)
        with blamed(name, found, TRACES):
            info = read_info(found)
            if info is None:
                missing = f"{TRACE_FILE} missing" if found.is_dir() else "no such folder"
                raise ExpertcastError(f"{found} holds no traces ({missing}): make them with expertcast collect")
            if not info["complete"]:
                raise ExpertcastError(f"the collection in {found} is not finished: run the same collect command again")
            return cls(found, info)

    def without(self, documents: Collection[int]) -> TraceDataset:
        """The same traces as if there were not the rows of some documents (by `PlannedDocument.index`); what is of them
        all (`defaults`, `stand_in`, `info`) is as it was."""
        rest = copy.copy(self)
        rest.documents = [document for document in self.documents if document.index not in documents]
        return rest

    def verify(self) -> None:
        """Check every file that was not read since the traces were opened.

        Raises:
            ExpertcastError: one is missing, was changed, or holds what cannot be.
        """
        for name in self._files:
            if not name.endswith(".arrow"):
                self._check(name)
        self._shards.check()
        _ = self.view, self.stand_in
        if layout.DEFAULTS_FILE in self._files:
            _ = self.defaults

    @cached_property
    def view(self) -> MoEView:  # type: ignore[override]
        """The model's norms and routers, from the skeleton in the folder.

        Raises:
            ExpertcastError: a file of it is not right, or it is of another model than the traces.
        """
        folder = self.folder / layout.SKELETON_FOLDER
        for name in (CONFIG, WEIGHTS):
            self._check(f"{layout.SKELETON_FOLDER}/{name}")
        view = load_skeleton(folder, self.info["model"])
        if view.shape != self._shape or self.info["fingerprint"] != view.fingerprint():
            raise ExpertcastError(f"{folder} is not of the model that {TRACE_FILE} was collected from; {REMEDY}")
        return replace(view, experts_known=self.info.get("experts_fingerprint"))

    @cached_property
    def defaults(self) -> DefaultVectors:  # type: ignore[override]
        """Default vectors over the documents of the train split.

        Raises:
            ExpertcastError: their file is not right, or there is none.
        """
        if layout.DEFAULTS_FILE not in self._files and is_live(self.info):
            raise ExpertcastError(
                f"{self.folder} is of a server's traffic and holds no default vectors: take those of other traces or "
                "a checkpoint of the same model (expertcast train --default-vectors), or train linear "
                "with --set reads=router_input, or a predictor that needs none (router_input, next_norm, frequency, "
                "previous_token)"
            )
        path = self.folder / layout.DEFAULTS_FILE
        self._check(layout.DEFAULTS_FILE)
        tensors, _ = read_tensors(path, DefaultVectors.of_shape(self._shape).as_tensors(), REMEDY)
        defaults = DefaultVectors.from_tensors(tensors)
        count_LE, tokens = defaults.count_LE, self.info["splits"]["train"]
        if defaults.token_count != tokens or int(count_LE.min()) < 0 or int(count_LE.max()) > tokens:
            raise ExpertcastError(f"{path} is not of the {tokens} tokens of the train split; {REMEDY}")
        return defaults

    @cached_property
    def stand_in(self) -> StandIn | None:  # type: ignore[override]
        """What early attention ran on; None where it did not run.

        Raises:
            ExpertcastError: its file is not right.
        """
        rank = self.info["settings"]["early_rank"]
        if rank is None:
            return None
        self._check(layout.STAND_IN_FILE)
        return read_stand_in(self.folder, self._shape, rank)

    def _check(self, name: str) -> None:
        """Compare a file with its digest."""
        if name not in self._files:
            raise ExpertcastError(f"{self.folder / TRACE_FILE}: files lacks {name}; {REMEDY}")
        check_file(self.folder / name, self._files[name], REMEDY)

    def _batches(
        self, own: list[PlannedDocument], tokens: int, batch_size: int, seed: int | None
    ) -> Iterator[TraceBatch]:
        """In order, tensors are views of the files where a batch lies in one of them, private ones: writing to them
        never reaches the disk."""
        spans, left = list[range](), tokens
        for document in own:
            first = self._first[document.index]
            begin = spans.pop().start if spans and spans[-1].stop == first else first
            spans.append(range(begin, first + min(document.tokens, left)))
            left -= min(document.tokens, left)
            if not left:
                break
        if seed is None:
            yield from self._shards.in_order(spans, batch_size)
            return
        rows_T = torch.cat([torch.arange(span.start, span.stop) for span in spans])
        order_T = rows_T[torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))]
        for batch_T in torch.split(order_T, batch_size):
            yield self._shards.gathered(batch_T)
