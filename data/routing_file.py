"""Read recorded routing from a .parquet, .csv, .jsonl, .npy or .npz file of any origin.

.parquet  one row per routed expert with the columns `token` (or `step`), `layer`, `rank` (or `slot`; 0 = largest
          weight) and `expert`, and optionally `weight`, `prefill` (true for tokens of a prompt; or `phase`: `prefill`)
          and `expert_bytes` (0 if the expert was not loaded)
.csv      the same, after comments that begin with # (BigMoeOnEdge); or, without a header, the rows of llama.cpp's
          moe-trace: position (negative for a prompt), layer, experts
.jsonl    one object per token and layer: `token` (`t`, `step`), `layer`, `experts` (a list), optionally `prefill`; or
          one per step and layer with `top_indices` (a list per token): Megatron's RouterTracer
.npy      expert ids [tokens, layers, K], vLLM's routed experts
.npz      the same as `routed_experts`, with `prompt_routed_experts`; or an array [tokens, K] per layer, in the order of
          the numbers in their names
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.csv
import pyarrow.parquet

from expertcast.predictors.messages import ExpertcastError

# Recorded routing: T tokens, L MoE layers, K experts per token; the key of an expert is layer * E + expert

Ids = npt.NDArray[np.int64]
ABSENT = -1
"""Fills places without an expert: the token has fewer experts, or the layer did not run for it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One pass through the model: all tokens of a prompt, or one decoded token."""

    fresh: bool
    """Whether this is a prompt."""
    rows: list[list[list[int]]]
    """[L][tokens][K] experts, largest weight first; tokens without experts at a layer are omitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Routing of consecutive sequences."""

    source: str
    """Name of the file."""
    ids_TLK: Ids
    """Experts, largest weight first, padded with `ABSENT`."""
    prompt_T: npt.NDArray[np.bool_]
    """Whether a token belongs to a prompt; one step runs a whole prompt, but decodes one token."""
    experts: int
    """E"""
    bytes_LE: Ids | None = None
    """Size of each expert; None if unknown."""

    @property
    def layers(self) -> int:
        """L"""
        return int(self.ids_TLK.shape[1])

    @property
    def top_k(self) -> int:
        """K"""
        return int(self.ids_TLK.shape[2])

    def steps(self) -> Iterator[Step]:
        """Yield the steps in order; consecutive prompt tokens form one step."""
        edges = np.flatnonzero(np.diff(self.prompt_T.astype(np.int8))) + 1
        bounds = [0, *edges.tolist(), len(self.prompt_T)]
        for start, end in pairwise(bounds):
            fresh = bool(self.prompt_T[start])
            for first, last in [(start, end)] if fresh else [(row, row + 1) for row in range(start, end)]:
                yield Step(fresh, [_rows(self.ids_TLK[first:last, layer]) for layer in range(self.layers)])

    def sized(self, expert_bytes: int | None) -> Ids:
        """Return the bytes of each expert [L, E]: recorded sizes, or else `expert_bytes` for all.

        Raises:
            ExpertcastError: neither is known.
        """
        if self.bytes_LE is not None:
            return self.bytes_LE
        if expert_bytes is None:
            raise ExpertcastError(
                f"{self.source} has no sizes of experts: set --expert-bytes, such as 3MiB, or record a "
                "column expert_bytes"
            )
        return np.full((self.layers, self.experts), expert_bytes, dtype=np.int64)


def _rows(ids_TK: Ids) -> list[list[int]]:
    return [kept for row in ids_TK.tolist() if (kept := [expert for expert in row if expert != ABSENT])]


def checked(routing: Routing, tokens: Sequence[int] | Ids, layers: Sequence[int] | Ids) -> Routing:
    """Check that a routing can be replayed, and return it.

    Args:
        routing: the routing.
        tokens: [T] numbers of the tokens in the file.
        layers: [L] numbers of the layers in the file.

    Raises:
        ExpertcastError: there is no decoded token, an id is out of range, a token has an expert twice, or a decoded
            token has no experts at a layer. The message names the first such token and layer.
    """
    ids_TLK, source, experts = routing.ids_TLK, routing.source, routing.experts
    if not len(ids_TLK) or routing.prompt_T.all():
        raise ExpertcastError(f"{source} has no decoded tokens to replay: record some")
    if experts * routing.layers > _MOST_EXPERTS:
        raise ExpertcastError(f"{source}: {experts} experts in each of {routing.layers} layers: number them from 0")
    ordered, empty_TL = np.sort(ids_TLK, axis=2), ids_TLK[:, :, 0] == ABSENT
    _refuse(
        source, (ids_TLK < ABSENT) | (ids_TLK >= experts), ids_TLK, (tokens, layers),
        f"token {{0}}, layer {{1}} has expert {{value}} of {experts}: ids range from 0 to {experts - 1}; correct the "
        "file or set --experts-per-layer",
    )  # fmt: skip
    _refuse(
        source, (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] != ABSENT), ordered, (tokens, layers),
        "token {0}, layer {1} has expert {value} twice: remove rows that were not captured (vLLM fills them with "
        "zeros), and list each expert once",
    )  # fmt: skip
    _refuse(
        source, empty_TL & ~routing.prompt_T[:, None], empty_TL, (tokens, layers),
        "token {0} has no experts at layer {1}: record every decoded token at every MoE layer, and number the layers "
        "of a table 0 to L-1 without gaps",
    )  # fmt: skip
    empty_L = empty_TL.all(axis=0)
    why = "no token has experts at layer {0}: number the MoE layers 0 to L-1 without gaps"
    _refuse(source, empty_L, empty_L, (layers,), why)
    return routing


def _refuse(
    source: object, wrong: npt.NDArray[np.bool_], values: npt.NDArray[np.generic],
    names: Sequence[Sequence[int] | Ids], why: str,
) -> None:  # fmt: skip
    """Raise an error for the first place where `wrong` is true; `why` is formatted with its `names` and `value`."""
    for place in np.argwhere(wrong)[:1].tolist():
        named = [name[index] for name, index in zip(names, place, strict=False)]
        raise ExpertcastError(f"{source}: " + why.format(*named, value=values[tuple(place)]))


SUFFIXES = (".parquet", ".csv", ".jsonl", ".npy", ".npz")
DECODED, PROMPT = "routed_experts", "prompt_routed_experts"
"""Arrays of an .npz file: routing of decoded tokens, and optionally of a prompt."""
_NEEDED = ("layer", "rank", "expert")
_SPARSE = 100
"""Most cells [tokens, layers, ranks] per row of a table, so that memory is in proportion to the file."""
_MOST_EXPERTS = 10**7
"""Most experts of all layers together."""

Column = npt.NDArray[np.int64]
T = TypeVar("T")


def is_routing_file(path: Path | str) -> bool:
    """Return whether a path has one of `SUFFIXES` and is not a folder; the file need not exist."""
    return Path(path).suffix.lower() in SUFFIXES and not Path(path).is_dir()


def read_routing(path: Path | str, *, experts: int | None = None) -> Routing:
    """Read and check routing from a file.

    Args:
        path: the file.
        experts: E; default: the largest id plus one.

    Raises:
        ExpertcastError: the file is missing, unreadable, or fails :func:`checked`.
    """
    path = Path(path)
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "no such file"
        raise ExpertcastError(f"{path}: {found}; give a routing file ({', '.join(SUFFIXES)})")
    if path.suffix.lower() in (".npy", ".npz"):
        return _from_arrays(path, experts)
    return _from_table(path, experts)


def _arrays(path: Path) -> dict[str, npt.NDArray[np.int64]]:
    """Read the arrays of a numpy file by name; arrays of single layers, and that of an .npy file, become `DECODED`."""
    loaded = np.load(path, allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return {DECODED: loaded}
    arrays = {name: loaded[name] for name in loaded.files}
    if DECODED in arrays or not all(re.search(r"\d", name) and array.ndim == 2 for name, array in arrays.items()):
        return arrays
    ordered = sorted(arrays, key=lambda name: int(re.findall(r"\d+", name)[-1]))
    odd = next((name for name in ordered if arrays[name].shape != arrays[ordered[0]].shape), None)
    if odd is not None:
        raise ValueError(f"array {odd} is {list(arrays[odd].shape)}, {ordered[0]} is {list(arrays[ordered[0]].shape)}")
    return {DECODED: np.stack([arrays[name] for name in ordered], axis=1)}


_NAMES = {"slot": "rank", "phase": "prefill", "t": "token", "token_idx": "token", "layer_idx": "layer",
          "selected_ids": "experts"}  # fmt: skip
"""Names of columns and fields in files of other projects, and ours."""
_FIRST_LINE, _RECORDS = b"first_line", b"records"
"""Metadata of a table read from text: line of its first row; and whether numbers of layers may have gaps."""


def _table(path: Path) -> pyarrow.Table:
    """Read a table and validate its names and values."""
    read = {".csv": _csv, ".jsonl": _jsonl}.get(path.suffix.lower(), pyarrow.parquet.read_table)
    table = read(path)
    table.validate(full=True)
    assert all(isinstance(name, str) for name in table.column_names)
    given, metadata = table.column_names, table.schema.metadata
    table = table.rename_columns([name if _NAMES.get(name) in given else _NAMES.get(name, name) for name in given])
    if "prefill" in table.column_names and pyarrow.types.is_string(table["prefill"].type):
        place = table.column_names.index("prefill")
        words = [word in ("prefill", "prompt") for word in table["prefill"].to_pylist()]
        table = table.set_column(place, "prefill", pyarrow.array(words))
    return table.replace_schema_metadata(metadata)


def _csv(path: Path) -> pyarrow.Table:
    data, line = path.read_bytes(), 1
    while data.startswith(b"#"):
        data, line = data.partition(b"\n")[2], line + 1
    if not re.search(rb"[a-zA-Z]", data.partition(b"\n")[0]):
        return _of_records(_moe_trace(data.decode(), line))
    table = pyarrow.csv.read_csv(io.BytesIO(data))
    return table.replace_schema_metadata({_FIRST_LINE: str(line + 1)})


_Record = tuple[int, int, list[int], bool]
"""Token, layer, experts, and whether the token belongs to a prompt."""


def _moe_trace(text: str, line: int) -> Iterator[_Record]:
    """Yield the records of rows `position,layer,expert,expert,...`; rows of a prompt have a position below 0."""
    prompt: Counter[int] = Counter()
    rows = []
    for number, row in enumerate(text.splitlines(), line):
        cells = row.split(",") if row.strip() else []
        wrong = next((place for place, cell in enumerate(cells, 1) if not re.fullmatch(r"\s*-?\d+\s*", cell)), None)
        if wrong is not None:
            raise ValueError(f"line {number}, column {wrong}: {cells[wrong - 1]!r} is no integer")
        if cells and len(cells) < 3:
            raise ValueError(f"line {number}: {len(cells)} columns; use position, layer and experts")
        if cells:
            rows.append(list(map(int, cells)))
    for position, layer, *_ in rows:
        prompt[layer] += position < 0
    length = max(prompt.values(), default=0)
    seen: Counter[int] = Counter()
    for position, layer, *experts in rows:
        seen[layer] += position < 0
        yield length + position if position >= 0 else seen[layer] - 1, layer, experts, position < 0


def _jsonl(path: Path) -> pyarrow.Table:
    return _of_records(_json_records(path.read_text().splitlines()))


def _json_records(lines: Iterable[str]) -> Iterator[_Record]:
    """Yield the records of all lines; a step of several tokens is a prompt if other steps have one token."""
    steps: dict[int, list[tuple[int, list[list[int]]]]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} is no JSON: {error}") from None
        if not isinstance(found, dict):
            raise ValueError(f"line {number} is no object")
        found = {_NAMES.get(name, name): value for name, value in found.items()}
        if "top_indices" not in found:
            token = _field(found, number, "step" if "token" not in found and "step" in found else "token", 0)
            prompt = found.get("prefill") in (True, "prefill", "prompt")
            yield token, _field(found, number, "layer", 0), _field(found, number, "experts", 1), prompt
        elif found.get("block", "decoder") == "decoder":
            layer, rows = _field(found, number, "layer", 0), _field(found, number, "top_indices", 2)
            steps.setdefault(_field(found, number, "step", 0), []).append((layer, rows))
    single = any(len(rows) == 1 for step in steps.values() for _, rows in step)
    first = 0
    for _, step in sorted(steps.items()):
        length = max(len(rows) for _, rows in step)
        for layer, rows in step:
            for place, row in enumerate(rows, first):
                yield place, layer, row, single and length > 1
        first += length


def _field(record: dict[str, Any], line: int, name: str, depth: int) -> Any:
    """Return a whole number, or lists of them, of a record."""
    values = [record.get(name)]
    for _ in range(depth):
        values = [each for value in values for each in (value if isinstance(value, list) else [None])]
    wrong = [value for value in values if isinstance(value, bool) or not isinstance(value, int) or value < 0]
    if wrong or not values:
        kind = ("a whole number", "a list of whole numbers", "lists of whole numbers, one per token")[depth]
        raise ValueError(f"line {line}, field {name}: {str(record.get(name))[:40]!r}; use {kind} from 0 on")
    return record[name]


def _of_records(records: Iterable[_Record]) -> pyarrow.Table:
    """Return a table with one row per expert; numbers of layers may have gaps, since some may be dense."""
    rows = [
        (token, layer, rank, expert, prompt)
        for token, layer, experts, prompt in records for rank, expert in enumerate(experts)
    ]  # fmt: skip
    names, columns = ("token", "layer", "rank", "expert", "prefill"), zip(*rows, strict=True) if rows else ((),) * 5
    return pyarrow.table(dict(zip(names, columns, strict=True)), metadata={_RECORDS: ""})


def _parsed(path: Path, parse: Callable[[Path], T]) -> T:
    """Apply a library's parser; any failure becomes an error of one line."""
    try:
        return parse(path)
    except Exception as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise ExpertcastError(f"{path} cannot be read as {path.suffix[1:]}: {first}; write it again") from None


def _from_arrays(path: Path, experts: int | None) -> Routing:
    arrays = _parsed(path, _arrays)
    if DECODED not in arrays:
        raise ExpertcastError(f"{path} has no array {DECODED!r}: save it with np.savez(path, {DECODED}=...)")
    parts = [arrays[name] for name in (PROMPT, DECODED) if name in arrays]
    for part in parts:
        if part.ndim != 3 or part.dtype.kind not in "iu" or part.shape[1:] != parts[0].shape[1:] or 0 in part.shape[1:]:
            raise ExpertcastError(
                f"{path}: invalid array of {part.dtype} {list(part.shape)}: use integers [tokens, layers, experts per "
                "token], with equal layers and experts in all arrays"
            )
    ids_TLK = np.concatenate(parts).astype(np.int64)
    prompt_T = np.arange(len(ids_TLK)) < (len(parts[0]) if len(parts) == 2 else 0)
    count = experts or max(1, int(ids_TLK.max(initial=0)) + 1)
    routing = Routing(source=str(path), ids_TLK=ids_TLK, prompt_T=prompt_T, experts=count)
    return checked(routing, range(len(ids_TLK)), range(routing.layers))


def _from_table(path: Path, experts: int | None) -> Routing:
    table = _parsed(path, _table)
    names = table.column_names
    doubled = sorted({name for name in names if names.count(name) > 1})
    token_name = next((name for name in ("token", "step") if name in names), None)
    missing = [name for name in _NEEDED if name not in names] + ([] if token_name else ["token"])
    if missing or doubled:
        what = f"lacks the column {missing[0]}" if missing else f"has the column {doubled[0]} twice"
        raise ExpertcastError(
            f"{path} {what}: a routing table has token (or step), layer, rank, expert, and optionally weight, prefill "
            f"and expert_bytes; found {', '.join(names) or 'no columns'}"
        )
    if not table.num_rows:
        raise ExpertcastError(f"{path} has no rows: record a row per token, layer and routed expert")
    columns = {name: _whole(path, table, name) for name in (str(token_name), *_NEEDED)}
    token, layer, rank, expert = columns.values()
    prompt = _whole(path, table, "prefill") if "prefill" in names else np.zeros_like(token)
    tokens, row = np.unique(token, return_inverse=True)
    layers: Sequence[int] | Ids = range(int(layer.max()) + 1)
    column = layer
    if _RECORDS in (table.schema.metadata or {}):
        layers, column = np.unique(layer, return_inverse=True)
    shape = (len(tokens), len(layers), int(rank.max()) + 1)
    if shape[0] * shape[1] * shape[2] > _SPARSE * table.num_rows:
        raise ExpertcastError(
            f"{path}: layers up to {layers[-1]} and ranks up to {rank.max()} in {table.num_rows} rows: number both "
            "from 0 without gaps"
        )
    place = (row * shape[1] + column) * shape[2] + rank
    _check_places(path, place, token, layer, rank)
    ids_TLK = np.full(shape, ABSENT, dtype=np.int64)
    ids_TLK.reshape(-1)[place] = expert
    _check_ranks(path, ids_TLK, (tokens, layers, range(shape[2])))
    prompt_T = np.zeros(len(tokens), dtype=bool)
    np.logical_or.at(prompt_T, row, prompt != 0)
    mixed = prompt_T[row] != (prompt != 0)
    _refuse(path, mixed, token, (), "token {value} belongs to a prompt in only some of its rows: correct prefill")
    count = experts or int(expert.max()) + 1
    sizes = _whole(path, table, "expert_bytes") if "expert_bytes" in names else None
    routing = checked(Routing(source=str(path), ids_TLK=ids_TLK, prompt_T=prompt_T, experts=count), tokens, layers)
    return routing if sizes is None else replace(routing, bytes_LE=_sizes(path, layer, expert, sizes, routing))


def _whole(path: Path, table: pyarrow.Table, name: str) -> Column:
    """Return a column of non-negative integers or booleans."""
    column = table[name]
    values = column.to_numpy(zero_copy_only=False)
    if not column.null_count and values.dtype.kind in "iub" and values.min() >= 0 and values.max() < 2**62:
        whole: Column = values.astype(np.int64)
        return whole
    cells = column.to_pylist()
    good = (isinstance(cell, bool) or (str(cell).isdigit() and int(cell) < 2**62) for cell in cells)
    row = next((row for row, each in enumerate(good) if not each), 0)
    first = (table.schema.metadata or {}).get(_FIRST_LINE)
    place = f"row {row}" if first is None else f"line {int(first) + row}"
    cell = "empty" if cells[row] is None else repr(cells[row])
    raise ExpertcastError(f"{path}: {place}, column {name} is {cell}: use a non-negative integer in every row")


def _check_places(path: Path, place: Column, token: Column, layer: Column, rank: Column) -> None:
    order = np.argsort(place, kind="stable")
    same = np.flatnonzero(np.diff(place[order]) == 0)
    if len(same):
        first = order[same[0]]
        raise ExpertcastError(
            f"{path}: token {token[first]}, layer {layer[first]} has rank {rank[first]} twice: list each rank once; "
            "number the tokens of separate recordings consecutively"
        )


def _check_ranks(path: Path, ids_TLK: Ids, names: Sequence[Sequence[int] | Ids]) -> None:
    gaps = (ids_TLK[:, :, :-1] == ABSENT) & (ids_TLK[:, :, 1:] != ABSENT)
    _refuse(path, gaps, gaps, names, "token {0}, layer {1} lacks rank {2} but has the next one: number ranks from 0")


def _sizes(path: Path, layer: Column, expert: Column, sizes: Column, routing: Routing) -> Ids:
    """Return the bytes [L, E] of each expert; experts that were never loaded get the largest size of their layer."""
    bytes_LE = np.zeros((routing.layers, routing.experts), dtype=np.int64)
    np.maximum.at(bytes_LE, (layer, expert), sizes)
    differs = np.flatnonzero((sizes != 0) & (sizes != bytes_LE[layer, expert]))
    if len(differs):
        at = differs[0]
        raise ExpertcastError(
            f"{path}: expert {expert[at]} of layer {layer[at]} has {sizes[at]} and {bytes_LE[layer[at], expert[at]]} "
            "bytes: record one size per expert (0 if it was not loaded)"
        )
    largest_L = bytes_LE.max(axis=1)
    why = "expert_bytes is 0 throughout layer {0}: record the size of its experts"
    _refuse(path, largest_L == 0, largest_L, (range(routing.layers),), why)
    return np.where(bytes_LE == 0, largest_L[:, None], bytes_LE)
