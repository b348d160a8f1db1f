"""The benchmark of drafts: the whole command in small form, and what it counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks import drafts
from benchmarks.draft_runs import Watch

from expertcast.data.batch import RouterCall

SMALL = ["--small", "--prompts", "1", "--rounds", "1", "--other-prompts", "1"]


@pytest.mark.slow
def test_the_whole_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads, out = torch.get_num_threads(), tmp_path / "drafts.json"
    command = [*SMALL, "--keep", str(tmp_path / "kept"), "--out", str(out)]
    try:
        assert drafts.main([*command, "--only", "int4", "auto"]) == 0, capsys.readouterr().err
        capsys.readouterr()
        assert drafts.main([*command, "--only", "int4", "auto"]) == 0
        assert "ms per token" not in capsys.readouterr().err, "nothing is measured twice"
        assert drafts.main([*command, "--only", "resident", "--budget", "0"]) == 0
    finally:
        torch.set_num_threads(threads)
    result = json.loads(out.read_text())
    rows = {(row["model"], row["side"]): row for row in result["results"]}
    assert all(row["identical"] for row in rows.values())
    assert any("resident" in line for line in result["left_out"])
    assert result["models"]["reference"]["ids"][0][:7] == result["models"]["widened"]["ids"][0], "the same function"
    assert result["models"]["widened"]["expert_bytes"] > 3 * result["models"]["reference"]["expert_bytes"]
    plain, drafted = rows["reference", "none"], rows["reference", "int4, 4"]
    assert (plain["length"], plain["memory_bytes"], plain["tokens_per_cycle"]) == (None, 0, 1.0)
    assert drafted["length"] == 4
    assert 1 <= drafted["tokens_per_cycle"] <= 5
    assert sum(drafted["exact_set"].values()) == pytest.approx(1)
    assert drafted["exact_set"]["hard"] > 0.3, "int4 copies route mostly as the model does"
    assert 0.25 < drafted["coverage"] <= 1
    more = drafted["memory_bytes"] // result["models"]["reference"]["expert_bytes"]
    assert rows["reference", "none, same memory"]["slots"] == plain["slots"] + more
    assert set(rows["reference", "auto, governed"]["governor"]["lengths"]) >= {"none 0"}


def call(ids: list[list[int]], layer: int = 0) -> RouterCall:
    rows = torch.tensor(ids)
    nothing = torch.zeros(len(ids), 1)
    return RouterCall(
        layer=layer, sequences=1, tokens=len(ids), residual_TD=nothing, router_input_TD=nothing, logits_TE=nothing,
        weights_TK=torch.ones(rows.shape), ids_TK=rows,
    )  # fmt: skip


def test_routing_is_compared_by_column() -> None:
    watch = Watch()
    # the first pass feeds two columns, of which the second is position 0; three positions are drafted
    for position, ids in enumerate(([[9, 9], [0, 1]], [[2, 3]], [[4, 5]])):
        watch.routed(position, call(ids))
    # the exact pass feeds the column before, positions 0 to 2, and the last drafted token, which no draft pass saw
    watch.routed(None, call([[9, 9], [0, 1], [3, 2], [4, 6], [7, 7]]))
    assert (watch.hard, watch.soft, watch.mismatch) == (1, 1, 1)
    watch.routed(None, call([[0, 1], [2, 3]]))
    assert watch.hard == 1, "no draft was written before this pass"
    watch.reached(0, [1, 2, 3], {1, 2})
    watch.reached(0, [2], {2})
    watch.reached(1, [7], ())
    assert watch.as_dict()["needed"] == [2, 4]
