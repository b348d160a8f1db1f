"""One Arrow file of a trace dataset, as tensors.

T tokens, D hidden size, L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from expertcast.data import layout
from expertcast.data.batch import TraceBatch
from expertcast.data.plan import PlannedDocument
from expertcast.data.tensor_files import is_finite
from expertcast.data.trace_file import REMEDY, TraceInfo
from expertcast.predictors.artefacts import digest, open_file
from expertcast.predictors.errors import ExpertcastError, first_line

_ARROW = {
    torch.bfloat16: pa.uint16(),
    torch.float16: pa.float16(),
    torch.float32: pa.float32(),
    torch.int32: pa.int32(),
}
"""What Arrow calls the columns' types; bf16 are its bits."""


class Shard:
    """One Arrow file: its columns as tensors over a private memory map.

    `datasets.load_from_disk` reads the same files, but makes arrays of its own for every batch: batches of 1024 tokens
    came at 140,000 tokens/s instead of 370,000 in order, and at 22,000 instead of 98,000 shuffled (its Arrow format,
    of CPU time; its numpy format gives half of that, and its torch format turns the 16 bits of bf16 into 64).

    Its bytes are checked once, before the first rows are given out.
    """

    def __init__(self, path: Path, info: TraceInfo, places: Callable[[int], tuple[Tensor, Tensor]]) -> None:
        """Opens a file of the traces that `info` describes.

        Args:
            path: of the file.
            info: trace.json.
            places: gives document and position of the rows, as many as it is asked for; it is only asked where `info`
                has no digest of the file.

        Raises:
            ExpertcastError: it is no such file.
        """
        self._path, self._places = path, places
        self._digest = info.get("files", {}).get(path.name)
        self._checked = False
        try:
            # copy-on-write: a stray in-place operation on a batch neither crashes nor reaches the file
            with open_file(path) as file:
                self._content: npt.NDArray[np.uint8] = np.memmap(file, dtype=np.uint8, mode="c")
            self._take_columns(pa.ipc.open_stream(pa.BufferReader(pa.py_buffer(self._content))).read_all(), info)
        except ExpertcastError:
            raise
        except (OSError, ValueError, pa.ArrowException) as error:
            raise ExpertcastError(f"cannot read {path}: {first_line(error)}; {REMEDY}") from error

    def _take_columns(self, table: pa.Table, info: TraceInfo) -> None:
        residual, logits = info["columns"]["residual"], info["columns"]["router_logits"]
        early = info["columns"].get("early")
        names = [layout.RESIDUAL, layout.LOGITS, layout.DOCUMENT, layout.POSITION, layout.TOKEN]
        names += [] if early is None else [layout.EARLY]
        if table.column_names != names:
            raise ExpertcastError(f"{self._path} has other columns than {', '.join(names)}; {REMEDY}")
        self._residual_TLD = self._column(table, layout.RESIDUAL, torch.bfloat16, residual["shape"])
        self._logits_TLE = self._column(table, layout.LOGITS, getattr(torch, logits["dtype"]), logits["shape"])
        self._early_TLD = None
        if early is not None:
            self._early_TLD = self._column(table, layout.EARLY, torch.bfloat16, early["shape"])
        self._document_T = self._column(table, layout.DOCUMENT, torch.int32, [])
        self._position_T = self._column(table, layout.POSITION, torch.int32, [])
        self._token_T = self._column(table, layout.TOKEN, torch.int32, [])

    def _column(self, table: pa.Table, name: str, dtype: torch.dtype, shape: list[int]) -> Tensor:
        """A column as [T, *shape]: a view of the file."""
        column, width = table.column(name), math.prod(shape)
        wanted = pa.list_(_ARROW[dtype], width) if shape else _ARROW[dtype]
        if not _same_type(column.type, wanted):
            raise ExpertcastError(f"{self._path}: column {name} is {column.type}, not {wanted}; {REMEDY}")
        if column.num_chunks != 1 or column.null_count:
            raise ExpertcastError(
                f"{self._path}: column {name} has {column.num_chunks} pieces and {column.null_count} empty rows, not 1 "
                f"and none; {REMEDY}"
            )
        array = column.chunk(0)
        buffer = (array.values if shape else array).buffers()[1]
        nbytes = len(array) * width * dtype.itemsize
        # through numpy: torch refuses Arrow's read-only buffers
        begin = 0 if buffer is None else buffer.address - self._content.ctypes.data
        held = 0 if buffer is None else min(buffer.size, self._content.size - begin)
        if begin < 0 or begin % dtype.itemsize or held < nbytes or array.offset:
            raise ExpertcastError(f"{self._path}: column {name} does not lie in the file as it says; {REMEDY}")
        return torch.from_numpy(self._content[begin : begin + nbytes]).view(dtype).reshape(-1, *shape)

    def __len__(self) -> int:
        return len(self._document_T)

    def check(self) -> None:
        """See, once, that the bytes are those that were written; where that was not noted, that they can be right.

        Raises:
            ExpertcastError: they are not.
        """
        if self._checked:
            return
        if self._digest is None:
            self._check_values()
        elif digest(self._content.data) != self._digest:
            raise ExpertcastError(f"{self._path} was changed after it was written; {REMEDY}")
        self._checked = True

    def _check_values(self) -> None:
        early = [] if self._early_TLD is None else [(layout.EARLY, self._early_TLD)]
        for name, tensor in ((layout.RESIDUAL, self._residual_TLD), (layout.LOGITS, self._logits_TLE), *early):
            if not is_finite(tensor):
                raise ExpertcastError(f"{self._path}: column {name} holds NaN or infinity; {REMEDY}")
        document_T, position_T = self._places(len(self))
        if not torch.equal(self._document_T, document_T) or not torch.equal(self._position_T, position_T):
            raise ExpertcastError(f"{self._path} does not hold the documents that {layout.TRACE_FILE} says; {REMEDY}")

    def rows(self, index: slice | Tensor) -> TraceBatch:
        """Rows by their numbers in the file.

        Raises:
            ExpertcastError: the file was changed after it was written.
        """
        early_TLD = None if self._early_TLD is None else self._early_TLD[index]
        return replace(self.routing(index), residual_TLD=self._residual_TLD[index], early_TLD=early_TLD)

    def routing(self, index: slice | Tensor) -> TraceBatch:
        """The rows without their residuals.

        Raises:
            ExpertcastError: as for :meth:`rows`.
        """
        self.check()
        return TraceBatch(
            residual_TLD=self._residual_TLD[:, :0][index],
            logits_TLE=self._logits_TLE[index],
            document_T=self._document_T[index].long(),
            position_T=self._position_T[index].long(),
            token_T=self._token_T[index].long(),
        )


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
        """The rows of rising spans, so many at a time, the last batch may be smaller; `previous_TLE` is filled in."""
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
        before = TraceBatch.cat([shard.routing(own_T) for shard, own_T in self._by_shard((sorted_T - 1).clamp(min=0))])
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


def places(documents: Sequence[PlannedDocument], begin: int, rows: int) -> tuple[Tensor, Tensor]:
    """Document and position, as int32, that `rows` rows from number `begin` on have if they hold these documents."""
    index_N, tokens_N = (
        torch.tensor([getattr(document, name) for document in documents]) for name in ("index", "tokens")
    )
    ends_N = tokens_N.cumsum(0)
    rows_T = torch.arange(begin, begin + rows)
    place_T = torch.searchsorted(ends_N, rows_T, right=True)
    return index_N[place_T].int(), (rows_T - (ends_N - tokens_N)[place_T]).int()
