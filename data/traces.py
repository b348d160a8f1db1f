"""Read trace datasets: rows of the Arrow shards as tensors.

T tokens, D hidden size, L MoE layers, E routed experts per layer. :mod:`expertcast.data.trace_format` describes the
folder.
"""

from __future__ import annotations

import copy
import mmap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from expertcast.checkpoints.hub import located, repository_in_errors
from expertcast.checkpoints.provenance import different_part, without_folders
from expertcast.data import trace_format as layout
from expertcast.data.batch import TraceBatch
from expertcast.data.plan import SPLITS, Documented, PlannedDocument
from expertcast.data.processes import Share, documents_of, smallest_share
from expertcast.data.skeleton import CONFIG, WEIGHTS, load_skeleton
from expertcast.data.trace_format import (
    REMEDY,
    SCALE,
    TRACE_FILE,
    TRACES,
    Column,
    Columns,
    TraceInfo,
    columns_in,
    decoded,
    documents_in,
    is_live,
    read_info,
    shard_names,
    tensors_digest,
)
from expertcast.data.trace_writer import read_stand_in
from expertcast.predictors.artefacts import SEAL, check_file, digest, open_file, read_tensors
from expertcast.predictors.baselines import DefaultVectors
from expertcast.predictors.early_attention import StandIn
from expertcast.predictors.messages import ExpertcastError, Json, first_line
from expertcast.predictors.view import ModelShape, MoEView


class TraceSource(Documented):
    """Base of the sources that predictors are fitted from: traces on disk, or a running model."""

    view: MoEView
    """The model's norms and routers."""
    defaults: DefaultVectors
    """Default vectors of the train split, or from elsewhere (:func:`with_default_vectors`)."""
    defaults_learned_from: frozenset[str] = frozenset()
    """Hashes of other documents that contributed to the default vectors."""
    info: Json
    """Provenance: model, text, documents, versions."""

    @property
    def stand_in(self) -> StandIn | None:
        """Stand-in of early attention; None without early attention."""
        raise NotImplementedError

    def learned_from(self) -> frozenset[str]:
        """Return the hashes of train and validation documents, and of others behind the default vectors."""
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
        """Yield batches of a split.

        Without `shuffle`, rows are in order of documents and positions, a document may span two batches, and the last
        batch may be smaller.

        Args:
            split: train, validation, test or all.
            batch_size: tokens per batch.
            shuffle: whether to shuffle tokens: over the whole split on disk, within a buffer for a running model.
            seed: seed of the shuffle.
            max_tokens: maximum number of tokens, from the beginning of the split.
            share: only this rank's documents, limited so that every rank gets equally many full batches.

        Raises:
            ExpertcastError: the split is unknown, `batch_size` is below 1, or a share has no full batch.
        """
        if batch_size < 1:
            raise ExpertcastError(f"batch_size={batch_size}: must be at least 1 token")
        own, tokens = self.chosen(split), self.token_count(split)
        if share is not None and share.world > 1:
            tokens = smallest_share(own, share.world)
            tokens = tokens if max_tokens is None else min(tokens, max_tokens // share.world)
            if tokens < batch_size:
                raise ExpertcastError(
                    f"a rank's share of {tokens} tokens of {split} is smaller than a batch of {batch_size}: use more "
                    "text, a smaller batch or fewer ranks"
                )
            own, tokens = documents_of(own, share), tokens - tokens % batch_size
        elif max_tokens is not None:
            tokens = min(tokens, max_tokens)
        return self._batches(own, tokens, batch_size, seed if shuffle else None)

    def _batches(
        self, own: list[PlannedDocument], tokens: int, batch_size: int, seed: int | None
    ) -> Iterator[TraceBatch]:
        """Yield batches of the first `tokens` of consecutive documents, shuffled if there is a seed."""
        raise NotImplementedError


class Shard:
    """One Arrow file: its columns as tensors over a private memory map. Its digest is checked before the first read.

    `datasets.load_from_disk` reads the same files, but copies each batch. Batches of 1024 tokens in order: 140,000
    tokens/s instead of 370,000; shuffled: 22,000 instead of 98,000 (with its Arrow format; its numpy format is half as
    fast, and its torch format widens the 16 bits of bf16 to 64).

    Args:
        path: the file.
        digest: recorded digest.
        columns: expected columns.

    Raises:
        ExpertcastError: the file is not such a shard.
    """

    def __init__(self, path: Path, digest: str, columns: Columns) -> None:

        self._path, self._digest, self._checked = path, digest, False
        try:
            # copy-on-write: torch rejects read-only buffers
            with open_file(path) as file:
                self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._content: npt.NDArray[np.uint8] = np.frombuffer(self._mapped, dtype=np.uint8)
            table = pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(self._content))).read_all()
            if table.column_names != list(columns):
                raise ExpertcastError(f"{path} has other columns than {', '.join(columns)}; {REMEDY}")
            self._columns = {each.field: self._column(table, name, each) for name, each in columns.items()}
        except ExpertcastError:
            raise
        except (OSError, ValueError, pa.ArrowException) as error:
            raise ExpertcastError(f"cannot read {path}: {first_line(error)}; {REMEDY}") from error

    def _column(self, table: pa.Table, name: str, wanted: Column) -> Tensor:
        """Map a column as [T, *shape]."""
        column = table.column(name)
        if not _same_type(column.type, wanted.type):
            raise ExpertcastError(f"{self._path}: column {name} is {column.type}, not {wanted.type}; {REMEDY}")
        if column.num_chunks != 1 or column.null_count:
            raise ExpertcastError(
                f"{self._path}: column {name} has {column.num_chunks} chunks and {column.null_count} nulls instead of "
                f"1 and 0; {REMEDY}"
            )
        array = column.chunk(0)
        buffer = (array.values if wanted.shape else array).buffers()[1]
        nbytes = len(array) * wanted.width * wanted.dtype.itemsize
        # through numpy: Arrow's buffers are read-only
        begin = 0 if buffer is None else buffer.address - self._content.ctypes.data
        held = 0 if buffer is None else min(buffer.size, self._content.size - begin)
        if begin < 0 or begin % wanted.dtype.itemsize or held < nbytes or array.offset:
            raise ExpertcastError(f"{self._path}: column {name} points outside the file; {REMEDY}")
        return torch.from_numpy(self._content[begin : begin + nbytes]).view(wanted.dtype).reshape(-1, *wanted.shape)

    def __len__(self) -> int:
        return len(self._columns["document_T"])

    def check(self) -> None:
        """Compare the file with its digest, once.

        Raises:
            ExpertcastError: the file has changed.
        """
        if not self._checked and digest(self._content.data) != self._digest:
            raise ExpertcastError(f"{self._path} was changed after it was written; {REMEDY}")
        self._checked = True

    def rows(self, index: slice | Tensor, *, residuals: bool = True) -> TraceBatch:
        """Return copies of rows by number, optionally without residuals; the first call checks the digest.

        The process keeps no page of the file: a pass over the traces would leave all of them in its memory.
        """
        self.check()
        found = {}
        for field, column in self._columns.items():
            scale = self._columns.get(field + SCALE)
            if scale is not None:
                if residuals:
                    found[field] = decoded(column[index], scale[index])
            elif not field.endswith(SCALE):
                taken = column[index]
                found[field] = taken.clone() if taken.is_floating_point() else taken.long()
        if not residuals:
            found["residual_TLD"] = torch.empty(len(found["document_T"]), 0, 0, dtype=torch.bfloat16)
        if hasattr(mmap, "MADV_DONTNEED"):
            self._mapped.madvise(mmap.MADV_DONTNEED)
        return TraceBatch(**found)


class Rows:
    """Rows of all shards of a dataset, numbered consecutively; takes each shard with the number of its first row."""

    def __init__(self, shards: Sequence[tuple[int, Shard]]) -> None:

        self._shards = [shard for _, shard in shards]
        self._begin_S = torch.tensor([begin for begin, _ in shards])

    def check(self) -> None:
        """Check the digests of all shards (:meth:`Shard.check`)."""
        for shard in self._shards:
            shard.check()

    def in_order(self, spans: Sequence[range], batch_size: int) -> Iterator[TraceBatch]:
        """Yield the rows of some spans in order with `previous_TLE`; the last batch may be smaller."""
        held, count = list[TraceBatch](), 0
        for span in spans:
            first = span.start
            while first < span.stop:
                last = min(first + batch_size - count, span.stop)
                before = self._between(first - 1, first) if first else None
                held.append(self._between(first, last).with_previous(before))
                count, first = count + last - first, last
                if count == batch_size:
                    yield TraceBatch.cat(held)
                    held, count = [], 0
        if held:
            yield TraceBatch.cat(held)

    def gathered(self, rows_T: Tensor) -> TraceBatch:
        """Return a set of rows in the order of the files, with `previous_TLE`."""
        sorted_T = rows_T.sort().values  # sequential reads; the order within a random batch does not matter
        batch = TraceBatch.cat([shard.rows(own_T) for shard, own_T in self._by_shard(sorted_T)])
        before = TraceBatch.cat(
            [shard.rows(own_T, residuals=False) for shard, own_T in self._by_shard((sorted_T - 1).clamp(min=0))]
        )
        return batch.with_previous_rows(before)

    def _between(self, first: int, last: int) -> TraceBatch:
        numbers = torch.searchsorted(self._begin_S, torch.tensor([first, last - 1]), right=True) - 1
        parts = []
        for number in range(int(numbers[0]), int(numbers[1]) + 1):
            begin = int(self._begin_S[number])
            parts.append(self._shards[number].rows(slice(max(first - begin, 0), last - begin)))
        return TraceBatch.cat(parts)

    def _by_shard(self, sorted_T: Tensor) -> Iterator[tuple[Shard, Tensor]]:
        """Yield the shards with some of the rows, and the row numbers within each."""
        shard_T = torch.searchsorted(self._begin_S, sorted_T, right=True) - 1
        numbers, counts = shard_T.unique_consecutive(return_counts=True)  # type: ignore[no-untyped-call]
        for number, own_T in zip(numbers.tolist(), torch.split(sorted_T, counts.tolist()), strict=True):
            yield self._shards[number], own_T - self._begin_S[number]


def _same_type(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Compare types, ignoring the names of list elements."""
    if not pa.types.is_fixed_size_list(wanted):
        return bool(found == wanted)
    same_size = pa.types.is_fixed_size_list(found) and found.list_size == wanted.list_size
    return bool(same_size and found.value_type == wanted.value_type)


class TraceDataset(TraceSource):
    """A complete trace dataset, created by :func:`collect` and opened by :meth:`open`.

    Files are checked against the digests in trace.json: small ones when they are read, a shard before its first rows
    are read.

    Example:
        >>> import expertcast
        >>> traces = expertcast.TraceDataset.open("traces")
        >>> traces
        TraceDataset('reference', train=..., validation=..., test=..., layers=12, experts=64, top_k=4, hidden=192)
        >>> batch = next(traces.batches("train", 64))
        >>> batch.residual_TLD.shape, batch.logits_TLE.shape
        (torch.Size([64, 12, 192]), torch.Size([64, 12, 64]))
    """

    def __init__(self, folder: Path, info: TraceInfo, device: torch.device | str = "cpu") -> None:
        self.folder, self._device = folder, device
        self.info = {name: value for name, value in info.items() if name != SEAL}
        rows_of = documents_in(info)
        self.documents = sorted(rows_of, key=lambda document: SPLITS.index(document.split))
        self._shape = ModelShape.from_dict(info["shape"])
        self._files = info["files"]
        shards, begin, columns = [], 0, columns_in(info)
        for name in shard_names(info):
            shards.append((begin, Shard(folder / name, self._files[name], columns)))
            begin += len(shards[-1][1])
        self._shards = Rows(shards)
        self._first, rows = dict[int, int](), 0
        """First row of each document, by `PlannedDocument.index`."""
        for document in rows_of:
            self._first[document.index] = rows
            rows += document.tokens
        if begin != info["tokens"]:
            raise ExpertcastError(
                f"{folder}: {begin} rows in {len(shards)} shards, {TRACE_FILE} has {info['tokens']} tokens; {REMEDY}"
            )

    def __repr__(self) -> str:
        splits = ", ".join(f"{split}={self.token_count(split)}" for split in SPLITS)
        shape = self._shape
        return (
            f"TraceDataset({self.info['model']!r}, {splits}, layers={shape.layers}, experts={shape.experts}, "
            f"top_k={shape.top_k}, hidden={shape.hidden})"
        )

    @classmethod
    def open(
        cls, folder: Path | str, *, revision: str | None = None, device: torch.device | str = "cpu"
    ) -> TraceDataset:
        """Open a folder of traces, or download `user/repo` or `user/repo@revision` from the hub.

        Args:
            folder: folder or hub repository.
            revision: branch, tag or commit of the repository.
            device: device of the norms and routers, on which predictors are fitted and scored.

        Raises:
            ExpertcastError: there are no traces, a file is invalid, or the collection is incomplete.
        """
        found, name = located(folder, TRACES, revision)
        with repository_in_errors(name, found, TRACES):
            info = read_info(found)
            if info is None:
                missing = f"{TRACE_FILE} missing" if found.is_dir() else "no such folder"
                raise ExpertcastError(f"no traces in {found} ({missing}): create them with expertcast collect")
            if not info["complete"]:
                raise ExpertcastError(f"the collection in {found} is incomplete: run the same collect command again")
            return cls(found, info, device)

    def without(self, documents: Collection[int]) -> TraceDataset:
        """Return the traces without some documents (by `PlannedDocument.index`).

        `defaults`, `stand_in` and `info` stay the same.
        """
        rest = copy.copy(self)
        rest.documents = [document for document in self.documents if document.index not in documents]
        return rest

    def verify(self) -> None:
        """Check every file that was not read yet.

        Raises:
            ExpertcastError: a file is missing, changed or invalid.
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
        """The model's norms and routers, loaded from the skeleton.

        Raises:
            ExpertcastError: the skeleton is invalid or belongs to another model.
        """
        folder = self.folder / layout.SKELETON_FOLDER
        for name in (CONFIG, WEIGHTS):
            self._check(f"{layout.SKELETON_FOLDER}/{name}")
        view = load_skeleton(folder, self.info["model"], self._device)
        if view.shape != self._shape or self.info["fingerprint"] != view.fingerprint():
            raise ExpertcastError(f"{folder} belongs to another model than {TRACE_FILE}; {REMEDY}")
        return replace(view, experts_known=self.info.get("experts_fingerprint"))

    @cached_property
    def defaults(self) -> DefaultVectors:  # type: ignore[override]
        """Default vectors of the train split.

        Raises:
            ExpertcastError: they are missing or invalid.
        """
        if layout.DEFAULTS_FILE not in self._files and is_live(self.info):
            raise ExpertcastError(
                f"{self.folder} has a server's traffic without default vectors: add those of other traces of the "
                "same model (expertcast train --default-vectors), or train linear "
                "with --set inputs=router_input, or a predictor without them (router_input, next_norm, frequency, "
                "previous_token)"
            )
        path = self.folder / layout.DEFAULTS_FILE
        self._check(layout.DEFAULTS_FILE)
        tensors, _ = read_tensors(path, DefaultVectors.of_shape(self._shape).as_tensors(), REMEDY)
        defaults = DefaultVectors(**{**tensors, "token_count": int(tensors["token_count"])})  # type: ignore[arg-type]
        count_LE, tokens = defaults.count_LE, self.info["splits"]["train"]
        if defaults.token_count != tokens or int(count_LE.min()) < 0 or int(count_LE.max()) > tokens:
            raise ExpertcastError(f"{path} does not match the {tokens} tokens of the train split; {REMEDY}")
        return defaults

    @cached_property
    def stand_in(self) -> StandIn | None:  # type: ignore[override]
        """Stand-in of early attention; None without early attention.

        Raises:
            ExpertcastError: its file is invalid.
        """
        rank = self.info["settings"]["early_rank"]
        if rank is None:
            return None
        self._check(layout.STAND_IN_FILE)
        return read_stand_in(self.folder, self._shape, rank)

    def _check(self, name: str) -> None:
        if name not in self._files:
            raise ExpertcastError(f"{self.folder / TRACE_FILE}: files lack {name}; {REMEDY}")
        check_file(self.folder / name, self._files[name], REMEDY)

    def _batches(
        self, own: list[PlannedDocument], tokens: int, batch_size: int, seed: int | None
    ) -> Iterator[TraceBatch]:
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


# Default vectors from other traces of the model, for traces without

DEFAULTS_NOTE = "default_vectors_from"
"""Key in `TraceSource.info` and in a fit's report: the origin of the default vectors."""
Source = TypeVar("Source", bound=TraceSource)


def with_default_vectors(source: Source, given: str | Path) -> Source:
    """Return the source with default vectors from elsewhere.

    Test documents that contributed to these vectors leave the test split, as they are no longer held out.

    Args:
        source: traces, or a running model.
        given: traces of the same model: a folder, or the hub repository `user/repo` or `user/repo@revision`.

    Raises:
        ExpertcastError: `given` does not exist, is invalid, has no default vectors or those of another model, or no
            test document would be left.
    """
    found = TraceDataset.open(given)
    different = different_part({**found.info, "model_id": found.info["model"]}, source.view)
    if different:
        raise ExpertcastError(
            f"{given} belongs to {found.info['model']!r}; {source.view.model_id!r} has different {different}, so its "
            "default vectors do not fit: use traces of this model by expertcast collect"
        )
    defaults, learned = found.defaults, frozenset(document.hash for document in found.chosen("train"))
    result = copy.copy(source)
    result.defaults, result.defaults_learned_from = defaults, learned
    rest = [document for document in source.documents if document.split != "test" or document.hash not in learned]
    if not any(document.split == "test" for document in rest) and source.chosen("test"):
        raise ExpertcastError(
            f"the default vectors of {given} come from every document of the test split, so none is left to score: use "
            "default vectors from other text"
        )
    result.documents = rest
    result.info = {
        **source.info,
        DEFAULTS_NOTE: {
            "given": without_folders(str(given)),
            "traces": found.info["id"],
            "digest": tensors_digest({"expert_LED": defaults.expert_LED, "shared_LD": defaults.shared_LD}),
        },
    }
    return result
