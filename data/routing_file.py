"""Routing that anybody recorded, from a file: .parquet, .csv, .npy or .npz.

A table has a row per routed expert with the columns `token` (or `step`), `layer`, `rank` (0 = heaviest) and `expert`,
and may have `weight`, `prefill` (true: the token belongs to a prompt) and `expert_bytes` (0 where nothing was loaded).
An array is [tokens, layers, K] of expert ids, as vLLM returns routed experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.csv
import pyarrow.parquet

from expertcast.predictors.messages import ExpertcastError

# Recorded routing: T tokens, L MoE layers, K experts per token; the key of an expert is layer * E + expert

Ids = npt.NDArray[np.int64]
ABSENT = -1
"""In place of an expert: the token was given fewer, or the layer did not run for it."""


@dataclass(frozen=True, slots=True)
class Step:
    """One forward: all tokens of a prompt, or one decoded token."""

    fresh: bool
    """A prompt."""
    rows: list[list[list[int]]]
    """[L][tokens][K] experts, heaviest first; tokens for which a layer did not run are left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The routing of one text after another."""

    source: str
    """Where it was read."""
    ids_TLK: Ids
    """Experts, heaviest first; `ABSENT` behind them."""
    prompt_T: npt.NDArray[np.bool_]
    """Tokens of prompts, which one forward runs together; the others are decoded one by one."""
    experts: int
    """E"""
    bytes_LE: Ids | None = None
    """Of each expert, where that is known."""

    @property
    def layers(self) -> int:
        """L"""
        return int(self.ids_TLK.shape[1])

    @property
    def top_k(self) -> int:
        """K"""
        return int(self.ids_TLK.shape[2])

    def steps(self) -> Iterator[Step]:
        """The forwards, in order: prompt tokens that follow one another are one of them."""
        edges = np.flatnonzero(np.diff(self.prompt_T.astype(np.int8))) + 1
        bounds = [0, *edges.tolist(), len(self.prompt_T)]
        for start, end in pairwise(bounds):
            fresh = bool(self.prompt_T[start])
            for first, last in [(start, end)] if fresh else [(row, row + 1) for row in range(start, end)]:
                yield Step(fresh, [_rows(self.ids_TLK[first:last, layer]) for layer in range(self.layers)])

    def sized(self, expert_bytes: int | None) -> Ids:
        """Bytes of each expert [L, E], as recorded or else all the same.

        Raises:
            ExpertcastError: neither is known.
        """
        if self.bytes_LE is not None:
            return self.bytes_LE
        if expert_bytes is None:
            raise ExpertcastError(
                f"{self.source} does not say how large an expert is: give --expert-bytes, such as 3MiB, or record a "
                "column expert_bytes"
            )
        return np.full((self.layers, self.experts), expert_bytes, dtype=np.int64)


def _rows(ids_TK: Ids) -> list[list[int]]:
    return [kept for row in ids_TK.tolist() if (kept := [expert for expert in row if expert != ABSENT])]


def checked(routing: Routing) -> Routing:
    """The same, if it can be replayed.

    Raises:
        ExpertcastError: with the first token and layer that cannot be: nothing decoded, an id out of range, an expert
            twice, or a decoded token that a layer did not run for.
    """
    ids_TLK, source, experts = routing.ids_TLK, routing.source, routing.experts
    if not len(ids_TLK) or routing.prompt_T.all():
        raise ExpertcastError(f"{source} holds no decoded token: nothing would be replayed; record some")
    ordered, empty_TL = np.sort(ids_TLK, axis=2), ids_TLK[:, :, 0] == ABSENT
    _refuse(
        source, (ids_TLK < ABSENT) | (ids_TLK >= experts), ids_TLK,
        f"token {{0}}, layer {{1}} names expert {{value}} of {experts}: ids are 0 to {experts - 1}; correct the file "
        "or give --experts",
    )  # fmt: skip
    _refuse(
        source, (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] != ABSENT), ordered,
        "token {0}, layer {1} names expert {value} twice: leave out rows that were not captured (vLLM fills them with "
        "zeros), and give each expert once",
    )  # fmt: skip
    _refuse(
        source, empty_TL & ~routing.prompt_T[:, None], empty_TL,
        "token {0} has no experts at layer {1}: number the MoE layers 0 to L-1 without gaps and record every decoded "
        "token at all of them",
    )  # fmt: skip
    empty_L = empty_TL.all(axis=0)
    _refuse(source, empty_L, empty_L, "no token runs layer {0}: number the MoE layers 0 to L-1 without gaps")
    return routing


def _refuse(source: object, wrong: npt.NDArray[np.bool_], values: npt.NDArray[np.generic], why: str) -> None:
    """
    Raises:
        ExpertcastError: something is wrong; `why` of the first place, by its indices, and the `value` there.
    """
    for place in np.argwhere(wrong)[:1].tolist():
        raise ExpertcastError(f"{source}: " + why.format(*place, value=values[tuple(place)]))


SUFFIXES = (".parquet", ".csv", ".npy", ".npz")
DECODED, PROMPT = "routed_experts", "prompt_routed_experts"
"""Arrays of an .npz file: decoded tokens, and a prompt's, which may be left out."""
_NEEDED = ("layer", "rank", "expert")
_MOST = 2**31
"""Cells of the array that a table may fill."""

Column = npt.NDArray[np.int64]
T = TypeVar("T")


def is_routing_file(path: Path | str) -> bool:
    """Whether the path names such a file, there or not: it ends in one of `SUFFIXES` and is no folder."""
    return Path(path).suffix.lower() in SUFFIXES and not Path(path).is_dir()


def read_routing(path: Path | str, *, experts: int | None = None) -> Routing:
    """Routing from a file, checked.

    Args:
        path: of the file.
        experts: E; None: the largest id and one.

    Raises:
        ExpertcastError: no such file, one that cannot be read, or what :func:`checked` refuses.
    """
    path = Path(path)
    if not path.is_file():
        raise ExpertcastError(f"{path}: there is no such file; give a routing file ({', '.join(SUFFIXES)})")
    if path.suffix.lower() in (".npy", ".npz"):
        return _from_arrays(path, experts)
    return _from_table(path, experts)


def _arrays(path: Path) -> dict[str, npt.NDArray[np.int64]]:
    """What a file of numpy holds, by name; the one array of an .npy file as `DECODED`."""
    loaded = np.load(path, allow_pickle=False)
    return {DECODED: loaded} if isinstance(loaded, np.ndarray) else {name: loaded[name] for name in loaded.files}


def _table(path: Path) -> pyarrow.Table:
    """A table whose names and values can all be read."""
    read = pyarrow.csv.read_csv if path.suffix.lower() == ".csv" else pyarrow.parquet.read_table
    table = read(path)
    table.validate(full=True)
    assert all(isinstance(name, str) for name in table.column_names)
    return table


def _parsed(path: Path, parse: Callable[[Path], T]) -> T:
    """What a library makes of a file; whatever it fails with is one line."""
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
                f"{path}: an array of {part.dtype} {list(part.shape)}: give whole numbers [tokens, layers, experts per "
                "token], equal layers and experts in all arrays"
            )
    ids_TLK = np.concatenate(parts).astype(np.int64)
    prompt_T = np.arange(len(ids_TLK)) < (len(parts[0]) if len(parts) == 2 else 0)
    count = experts or max(1, int(ids_TLK.max(initial=0)) + 1)
    return checked(Routing(source=str(path), ids_TLK=ids_TLK, prompt_T=prompt_T, experts=count))


def _from_table(path: Path, experts: int | None) -> Routing:
    table = _parsed(path, _table)
    names = table.column_names
    doubled = sorted({name for name in names if names.count(name) > 1})
    token_name = next((name for name in ("token", "step") if name in names), None)
    missing = [name for name in _NEEDED if name not in names] + ([] if token_name else ["token"])
    if missing or doubled:
        what = f"lacks the column {missing[0]}" if missing else f"has the column {doubled[0]} twice"
        raise ExpertcastError(
            f"{path} {what}: a routing table has token (or step), layer, rank, expert, and may have weight, prefill "
            f"and expert_bytes; it has {', '.join(names) or 'none'}"
        )
    if not table.num_rows:
        raise ExpertcastError(f"{path} has no rows: record a row per token, layer and routed expert")
    columns = {name: _whole(path, table, name) for name in (str(token_name), *_NEEDED)}
    token, layer, rank, expert = columns.values()
    _check_weights(path, table)
    prompt = _whole(path, table, "prefill") if "prefill" in names else np.zeros_like(token)
    tokens, row = np.unique(token, return_inverse=True)
    shape = (len(tokens), int(layer.max()) + 1, int(rank.max()) + 1)
    if shape[0] * shape[1] * shape[2] > _MOST:
        raise ExpertcastError(f"{path}: layers up to {layer.max()} and ranks up to {rank.max()}: number both from 0")
    place = (row * shape[1] + layer) * shape[2] + rank
    _check_places(path, place, token, layer, rank)
    ids_TLK = np.full(shape, ABSENT, dtype=np.int64)
    ids_TLK.reshape(-1)[place] = expert
    _check_ranks(path, ids_TLK, tokens)
    prompt_T = np.zeros(len(tokens), dtype=bool)
    np.logical_or.at(prompt_T, row, prompt != 0)
    mixed = prompt_T[row] != (prompt != 0)
    _refuse(path, mixed, token, "token {value} is of a prompt in some rows only: correct prefill")
    count = experts or int(expert.max()) + 1
    sizes = _whole(path, table, "expert_bytes") if "expert_bytes" in names else None
    routing = checked(Routing(source=str(path), ids_TLK=ids_TLK, prompt_T=prompt_T, experts=count))
    return routing if sizes is None else replace(routing, bytes_LE=_sizes(path, layer, expert, sizes, routing))


def _whole(path: Path, table: pyarrow.Table, name: str) -> Column:
    """A column of whole numbers of 0 or more, or of booleans."""
    column = table[name]
    values = column.to_numpy(zero_copy_only=False)
    if not column.null_count and values.dtype.kind in "iub" and values.min() >= 0 and values.max() < 2**62:
        whole: Column = values.astype(np.int64)
        return whole
    if column.null_count:
        what = "is empty in some rows"
    elif values.dtype.kind not in "iub":
        what = f"holds {column.type}"
    else:
        what = f"holds {values.min()}" if values.min() < 0 else f"holds {values.max()}"
    raise ExpertcastError(f"{path}: column {name} {what}: give whole numbers of 0 or more in every row")


def _check_weights(path: Path, table: pyarrow.Table) -> None:
    if "weight" not in table.column_names:
        return
    values = table["weight"].to_numpy(zero_copy_only=False)
    if values.dtype.kind not in "iuf" or not np.isfinite(values).all():
        raise ExpertcastError(f"{path}: column weight is not a finite number in every row: correct it or leave it out")


def _check_places(path: Path, place: Column, token: Column, layer: Column, rank: Column) -> None:
    order = np.argsort(place, kind="stable")
    same = np.flatnonzero(np.diff(place[order]) == 0)
    if len(same):
        first = order[same[0]]
        raise ExpertcastError(
            f"{path}: token {token[first]}, layer {layer[first]} has rank {rank[first]} twice: give each rank once; "
            "texts that were recorded apart need tokens numbered on"
        )


def _check_ranks(path: Path, ids_TLK: Ids, tokens: Column) -> None:
    gaps = (ids_TLK[:, :, :-1] == ABSENT) & (ids_TLK[:, :, 1:] != ABSENT)
    named = np.broadcast_to(tokens[:, None, None], ids_TLK.shape)
    _refuse(path, gaps, named, "token {value}, layer {1} has no rank {2} before the next one: number ranks from 0")


def _sizes(path: Path, layer: Column, expert: Column, sizes: Column, routing: Routing) -> Ids:
    """Bytes [L, E] of what was seen loaded; experts that were not are as large as the largest of their layer."""
    bytes_LE = np.zeros((routing.layers, routing.experts), dtype=np.int64)
    np.maximum.at(bytes_LE, (layer, expert), sizes)
    differs = np.flatnonzero((sizes != 0) & (sizes != bytes_LE[layer, expert]))
    if len(differs):
        at = differs[0]
        raise ExpertcastError(
            f"{path}: expert {expert[at]} of layer {layer[at]} has {sizes[at]} and {bytes_LE[layer[at], expert[at]]} "
            "bytes: give one size per expert (0 where it was not loaded)"
        )
    largest_L = bytes_LE.max(axis=1)
    _refuse(path, largest_L == 0, largest_L, "expert_bytes is 0 throughout layer {0}: give its experts' size")
    return np.where(bytes_LE == 0, largest_L[:, None], bytes_LE)
