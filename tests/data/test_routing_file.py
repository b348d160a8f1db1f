"""Routing files: what is read of good ones, and the one line that says what is wrong with a damaged one."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest

from expertcast.data.routing_file import is_routing_file, read_routing
from expertcast.predictors import ExpertcastError

Columns = dict[str, list[Any]]


def good() -> Columns:
    """3 tokens, the first of a prompt, 2 layers, 2 of 4 experts."""
    columns: Columns = {name: [] for name in ("token", "layer", "rank", "expert", "weight", "prefill", "expert_bytes")}
    for token in range(3):
        for layer in range(2):
            for rank in range(2):
                values = (token + 5, layer, rank, (token + layer + rank) % 4, 0.5, token == 0, 100 + layer)
                for name, value in zip(columns, values, strict=True):
                    columns[name].append(value)
    return columns


def write(path: Path, columns: Columns) -> Path:
    table = pyarrow.table(columns)
    (pyarrow.csv.write_csv if path.suffix == ".csv" else pyarrow.parquet.write_table)(table, path)
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_a_table(tmp_path: Path, suffix: str) -> None:
    columns = good()
    columns["expert_bytes"][0] = 0
    order = random.Random(0).sample(range(12), 12)
    routing = read_routing(write(tmp_path / f"a{suffix}", {name: [v[i] for i in order] for name, v in columns.items()}))
    assert routing.ids_TLK.tolist() == [[[t, t + 1], [(t + 1) % 4, (t + 2) % 4]] for t in range(3)]
    assert routing.prompt_T.tolist() == [True, False, False]
    assert routing.experts == 4
    assert routing.bytes_LE is not None
    assert routing.bytes_LE.tolist() == [[100] * 4, [101] * 4], "of experts that were not loaded, the layer's"
    steps = list(routing.steps())
    assert [(step.fresh, step.rows[1]) for step in steps] == [(True, [[1, 2]]), (False, [[2, 3]]), (False, [[3, 0]])]


def test_only_what_is_needed(tmp_path: Path) -> None:
    columns = {name: values for name, values in good().items() if name in ("token", "layer", "rank", "expert")}
    columns["step"] = columns.pop("token")
    routing = read_routing(write(tmp_path / "a.parquet", columns), experts=8)
    assert not routing.prompt_T.any()
    assert routing.experts == 8
    assert routing.sized(7).tolist() == [[7] * 8] * 2
    with pytest.raises(ExpertcastError, match="has no sizes of experts: set --expert-bytes"):
        routing.sized(None)


def test_arrays_as_vllm_returns_them(tmp_path: Path) -> None:
    ids_TLK = np.array([[[0, 1], [2, 3]], [[1, 2], [3, 0]], [[2, 3], [0, 1]]], dtype=np.int16)
    np.save(tmp_path / "a.npy", ids_TLK)
    assert read_routing(tmp_path / "a.npy").ids_TLK.tolist() == ids_TLK.tolist()
    np.savez(tmp_path / "a.npz", prompt_routed_experts=ids_TLK[:2], routed_experts=ids_TLK[2:])
    routing = read_routing(tmp_path / "a.npz")
    assert routing.ids_TLK.tolist() == ids_TLK.tolist()
    assert routing.prompt_T.tolist() == [True, True, False]


ROWS = [[[0, 1], [2, 3]], [[1, 2], [3, 0]], [[2, 3], [0, 1]]]
"""Experts of 3 tokens at 2 layers; the first 2 tokens are a prompt."""


def _lines(make: Callable[[int, int, list[int]], object]) -> str:
    return "".join(
        f"{made if isinstance(made, str) else json.dumps(made)}\n"
        for token, layers in enumerate(ROWS) for layer, experts in enumerate(layers)
        for made in [make(token, layer, experts)]
    )  # fmt: skip


def _megatron(token: int, layer: int, experts: list[int]) -> object:
    record = {"step": 5, "stage": "pre_dispatch", "block": "decoder", "layer": layer + 3, "rank": 0, "num_tokens": 2,
              "topk": 2, "top_indices": [ROWS[0][layer], ROWS[1][layer]]}  # fmt: skip
    return (
        record
        if token == 0
        else {**record, "step": 6, "top_indices": [experts]}
        if token == 2
        else {"block": "mtp", "top_indices": 0}
    )


OTHERS: dict[str, tuple[str, str]] = {
    "llama.cpp, ranks": (
        ".csv",
        "phase,token,layer,rank,expert\n"
        + _lines(lambda t, layer, ids: "\n".join(f"{'prefill' if t < 2 else 'decode'},{t},{layer},{k},{e}"
                                                  for k, e in enumerate(ids))),
    ),
    "llama.cpp, wide": (".csv", _lines(lambda t, layer, ids: f"{t - 2},{layer + 1},{ids[0]},{ids[1]}")),
    "BigMoeOnEdge": (
        ".csv",
        "# route_trace v1\n# model=m n_layer=2\nturn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n"
        + _lines(lambda t, layer, ids: "\n".join(f"0,{'prefill' if t < 2 else 'decode'},{t},{layer},{k},{e},0.5,hit,9"
                                                  for k, e in enumerate(ids))),
    ),
    "JSONL": (
        ".jsonl", _lines(lambda t, layer, ids: {"t": t, "layer": layer + 1, "experts": ids, "prefill": t < 2})
    ),
    "JSONL of other names": (
        ".jsonl",
        _lines(lambda t, layer, ids: {"token_idx": t, "layer_idx": layer, "selected_ids": ids, "prefill": t < 2}),
    ),
    "Megatron": (".jsonl", _lines(_megatron)),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_files_of_other_engines(tmp_path: Path, name: str) -> None:
    suffix, text = OTHERS[name]
    path = tmp_path / f"a{suffix}"
    path.write_text(text)
    routing = read_routing(path)
    assert routing.ids_TLK.tolist() == ROWS
    assert routing.prompt_T.tolist() == [True, True, False]
    assert (routing.bytes_LE is not None) == (name == "BigMoeOnEdge")


def test_arrays_by_layer(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{f"layer_{layer}": np.zeros((3, 1), dtype=np.int8) + layer for layer in (10, 2)})
    assert read_routing(tmp_path / "a.npz").ids_TLK.tolist() == [[[2], [10]]] * 3


def _records(*places: tuple[int, int], experts: Sequence[int] = (1, 2)) -> str:
    """A line for each token and layer."""
    return "\n".join(json.dumps({"token": t, "layer": layer, "experts": list(experts)}) for t, layer in places)


@pytest.mark.parametrize(
    ("suffix", "text", "message"),
    [
        (".csv", "# a\ntoken,layer,rank,expert\n0,0,0,1\n1,0,0,x\n", "line 4, column expert is 'x'"),
        (".csv", "# a\n0,0,1\n1,0,x\n", "line 3, column 3: 'x' is no integer"),
        (".csv", "0,0\n", "line 1: 2 columns; use position, layer and experts"),
        (".jsonl", '{"token": 0, "layer": 0, "experts": [1]}\n{"token": 1', "line 2 is no JSON"),
        (".jsonl", '{"token": 0, "experts": [1]}', "line 1, field layer: 'None'; use a whole number"),
        (".jsonl", '\n{"token": 0, "layer": 0, "experts": [1, "a"]}', "line 2, field experts: "),
        (".jsonl", '{"step": 0, "layer": 0, "top_indices": [1]}', "line 1, field top_indices: '[1]'; use lists of"),
        (".jsonl", "[1]", "line 1 is no object"),
        (".jsonl", _records((7, 3), (7, 5), (9, 3)), "token 9 has no experts at layer 5: record every decoded token"),
        (".jsonl", _records((7, 3), (7, 5), experts=[1, 1]), "token 7, layer 3 has expert 1 twice"),
        (".jsonl", _records((7, 3), (7, 5), (7, 5)), "token 7, layer 5 has rank 0 twice"),
        (".csv", "0,3,1,2\n0,5,1,2\n1,3,1,2\n", "token 1 has no experts at layer 5"),
        (".jsonl", "", "has no rows"),
    ],
)
def test_wrong_text_is_named_by_line(tmp_path: Path, suffix: str, text: str, message: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_text(text)
    assert message in (refusal(path) or "")


def test_what_is_a_routing_file(tmp_path: Path) -> None:
    assert is_routing_file("no/such.parquet")
    assert not is_routing_file("traces")
    (tmp_path / "folder.csv").mkdir()
    assert not is_routing_file(tmp_path / "folder.csv")


def _set(name: str, row: int, value: Any) -> Callable[[Columns], None]:
    def change(columns: Columns) -> None:
        columns[name][row] = value

    return change


def _each(name: str, change: Callable[[Any], Any]) -> Callable[[Columns], None]:
    def apply(columns: Columns) -> None:
        columns[name] = [change(value) for value in columns[name]]

    return apply


def _drop(keep: Callable[[Columns, int], bool]) -> Callable[[Columns], None]:
    def apply(columns: Columns) -> None:
        rows = [row for row in range(len(columns["token"])) if keep(columns, row)]
        for name in columns:
            columns[name] = [columns[name][row] for row in rows]

    return apply


def _without(name: str) -> Callable[[Columns], None]:
    def apply(columns: Columns) -> None:
        del columns[name]

    return apply


def _set_text(name: str, row: int, value: str) -> Callable[[Columns], None]:
    def change(columns: Columns) -> None:
        columns[name] = list(map(str, columns[name]))
        columns[name][row] = value

    return change


DAMAGE: dict[str, tuple[Callable[[Columns], None], str]] = {
    "no token": (_without("token"), "lacks the column token: a routing table has token"),
    "no layer": (_without("layer"), "lacks the column layer"),
    "no rank": (_without("rank"), "lacks the column rank"),
    "no expert": (_without("expert"), "lacks the column expert"),
    "no rows": (_drop(lambda columns, row: False), "has no rows"),
    "empty cell": (_set("expert", 3, None), "row 3, column expert is empty: use a non-negative integer"),
    "text": (_set_text("layer", 5, "x"), "row 5, column layer is 'x': use a non-negative integer"),
    "fraction": (_each("expert", lambda value: value + 0.5), "row 0, column expert is 0.5: use a non-negative integer"),
    "nan": (_each("rank", lambda value: float("nan")), "row 0, column rank is nan"),
    "negative": (_set("expert", 4, -2), "row 4, column expert is -2: use a non-negative integer"),
    "expert out of range": (_set("expert", 5, 9), "token 6, layer 0 has expert 9 of 4: ids range from 0 to 3"),
    "gap in layers": (_each("layer", lambda value: 2 * value), "token 6 has no experts at layer 1: record every"),
    "from layer 1": (_each("layer", lambda value: value + 1), "token 6 has no experts at layer 0: record every"),
    "layer missing once": (
        _drop(lambda columns, row: (columns["token"][row], columns["layer"][row]) != (6, 1)),
        "token 6 has no experts at layer 1",
    ),
    "rank twice": (_set("rank", 1, 0), "token 5, layer 0 has rank 0 twice"),
    "rank from 1": (_each("rank", lambda value: value + 1), "token 5, layer 0 lacks rank 0"),
    "expert twice": (_set("expert", 1, 0), "token 5, layer 0 has expert 0 twice"),
    "huge layer": (_set("layer", 2, 2**40), "number both from 0"),
    "sparse layers": (_set("layer", 2, 10**6), "in 12 rows: number both from 0 without gaps"),
    "half a prompt": (_set("prefill", 0, False), "token 5 belongs to a prompt in only some"),
    "nothing decoded": (_each("prefill", lambda value: True), "has no decoded tokens"),
    "two sizes": (_set("expert_bytes", 1, 7), "bytes: record one size per expert"),
    "no size": (_each("expert_bytes", lambda value: 0), "expert_bytes is 0 throughout layer 0"),
    "negative size": (_set("expert_bytes", 2, -5), "row 2, column expert_bytes is -5"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_line_with_a_remedy(tmp_path: Path, name: str) -> None:
    change, message = DAMAGE[name]
    columns = good()
    change(columns)
    path = write(tmp_path / "a.parquet", columns)
    with pytest.raises(ExpertcastError, match=re.escape(message)) as caught:
        read_routing(path, experts=4)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


ARRAYS: dict[str, tuple[Any, str]] = {
    "flat": (np.zeros((4, 2), dtype=np.int16), "invalid array of int16 [4, 2]: use integers [tokens, layers"),
    "floats": (np.zeros((4, 2, 1)), "invalid array of float64"),
    "zeros": (np.zeros((4, 2, 2), dtype=np.int16), "has expert 0 twice: remove rows that were not captured"),
    "no layers": (np.zeros((4, 0, 2), dtype=np.int16), "invalid array of int16 [4, 0, 2]"),
    "no tokens": (np.zeros((0, 2, 2), dtype=np.int16), "has no decoded tokens"),
    "too small": (np.full((1, 1, 1), -3), "expert -3 of 1"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_damaged_arrays(tmp_path: Path, name: str) -> None:
    array, message = ARRAYS[name]
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ExpertcastError, match=re.escape(message)):
        read_routing(tmp_path / "a.npy")


def test_a_huge_id_takes_no_memory(tmp_path: Path) -> None:
    columns = good()
    columns["expert"][0] = 10**9
    with pytest.raises(ExpertcastError, match="1000000001 experts in each of 2 layers: number them from 0"):
        read_routing(write(tmp_path / "a.csv", columns))


def test_archives_without_the_array(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", other=np.zeros(3))
    with pytest.raises(ExpertcastError, match="has no array 'routed_experts'"):
        read_routing(tmp_path / "a.npz")
    ids = np.zeros((2, 2, 1), dtype=np.int16)
    np.savez(tmp_path / "a.npz", routed_experts=ids, prompt_routed_experts=ids[:, :1])
    with pytest.raises(ExpertcastError, match="equal layers and experts in all arrays"):
        read_routing(tmp_path / "a.npz")


def refusal(path: Path) -> str | None:
    try:
        read_routing(path)
    except ExpertcastError as error:
        return str(error)
    return None


def test_damaged_bytes(tmp_path: Path) -> None:
    """Cut short, changed at any place, or something else altogether: read, or refused in one line."""
    choose = random.Random(0)
    columns, ids = good(), np.array([[[0, 1], [2, 3]]] * 3, dtype=np.int16)
    write(tmp_path / "a.parquet", columns)
    write(tmp_path / "a.csv", columns)
    np.save(tmp_path / "a.npy", ids)
    np.savez(tmp_path / "a.npz", routed_experts=ids)
    (tmp_path / "a.jsonl").write_text(OTHERS["Megatron"][1])
    refused = 0
    for suffix in (".parquet", ".csv", ".jsonl", ".npy", ".npz"):
        whole = (tmp_path / f"a{suffix}").read_bytes()
        path = tmp_path / f"b{suffix}"
        for _ in range(40):
            data = bytearray(whole[: choose.randint(0, len(whole))] if choose.random() < 0.5 else whole)
            for _ in range(choose.randint(0, 4) if data else 0):
                data[choose.randrange(len(data))] = choose.randrange(256)
            path.write_bytes(data)
            line = refusal(path)
            assert line is None or "\n" not in line
            refused += line is not None
    assert refused > 80
    with pytest.raises(ExpertcastError, match=r"none.csv: no such file; give a routing file"):
        read_routing(tmp_path / "none.csv")
