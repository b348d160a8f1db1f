"""Arrow files whose columns are not those that trace.json describes are refused before a buffer is touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from expertcast.data import trace_format as layout
from expertcast.data.traces import TraceDataset
from expertcast.predictors.messages import ExpertcastError


def replaced(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, values)


def narrower(table: pa.Table) -> pa.Table:
    """As many numbers in lists half as long would be twice as many rows."""
    column = table.column(layout.LOGITS).combine_chunks()
    lists = pa.FixedSizeListArray.from_arrays(column.values, column.type.list_size // 2)
    return replaced(table, layout.LOGITS, lists[: len(column)])


def wider(table: pa.Table) -> pa.Table:
    return replaced(table, layout.POSITION, table.column(layout.POSITION).cast(pa.int64()))


def empty_row(table: pa.Table) -> pa.Table:
    documents = [None, *table.column(layout.DOCUMENT).to_pylist()[1:]]
    return replaced(table, layout.DOCUMENT, pa.array(documents, pa.int32()))


def renamed(table: pa.Table) -> pa.Table:
    return table.rename_columns(["hidden", *table.column_names[1:]])


@pytest.mark.parametrize(
    ("change", "rows_at_once", "compression", "told"),
    [
        (narrower, None, None, "column router_logits is fixed_size_list"),
        (wider, None, None, "column position is int64, not int32"),
        (empty_row, None, None, "1 pieces and 1 empty rows, not 1 and none"),
        (renamed, None, None, "has other columns than residual, router_logits"),
        (lambda table: table, 100, None, "pieces and 0 empty rows"),
        (lambda table: table, None, "lz4", "does not lie in the file"),
    ],
)
def test_other_columns_are_refused(
    change: Callable[[pa.Table], pa.Table], rows_at_once: int | None, compression: str | None, told: str, traces: Path
) -> None:
    path = traces / layout.shard_file(0, 0)
    table = change(pa.ipc.open_stream(path.read_bytes()).read_all())
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows_at_once)
    with pytest.raises(ExpertcastError, match=told) as raised:
        TraceDataset.open(traces)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
