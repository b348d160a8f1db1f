"""The benchmark of drafts: the whole script in small form, what it counts, its hindsight and its page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
import torch

from expertcast.data.batch import RouterCall
from expertcast.predictors.messages import Json
from expertcast.runtime.drafts.costs import Choice, Cycle

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--small", "--prompts", "1", "--rounds", "1", "--other-prompts", "1"]


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


@pytest.mark.slow
def test_the_whole_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import bench_drafts

    threads, out, page = torch.get_num_threads(), tmp_path / "drafts.json", tmp_path / "drafts.md"
    page.write_text("# Drafts\n\n<!-- tables -->\n<!-- end of tables -->\n\nThe end.\n")
    command = [*SMALL, "--keep", str(tmp_path / "kept"), "--out", str(out), "--report", str(page)]
    try:
        assert bench_drafts.main([*command, "--only", "int4", "auto"]) == 0, capsys.readouterr().err
        capsys.readouterr()
        assert bench_drafts.main([*command, "--only", "int4", "auto"]) == 0
        assert "ms per token" not in capsys.readouterr().err, "nothing is measured twice"
        assert bench_drafts.main([*command, "--only", "resident", "--budget", "0"]) == 0
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
    assert result["exact_sets"]["int8"]["exact"] > result["exact_sets"]["int4"]["exact"] > 0.7
    said = page.read_text()
    assert said.startswith("# Drafts\n\n<!-- tables -->\n\n## Targets")
    assert said.endswith("<!-- end of tables -->\n\nThe end.\n")
    assert "| int4, governed, no reordering |" in said


def call(ids: list[list[int]], layer: int = 0) -> RouterCall:
    rows = torch.tensor(ids)
    nothing = torch.zeros(len(ids), 1)
    return RouterCall(
        layer=layer, sequences=1, tokens=len(ids), residual_TD=nothing, router_input_TD=nothing, logits_TE=nothing,
        weights_TK=torch.ones(rows.shape), ids_TK=rows,
    )  # fmt: skip


def test_routing_is_compared_by_column() -> None:
    from draft_sides.watching import Watch

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


def cycle(drafted: int, accepted: int, total_s: float, growth: tuple[int, ...]) -> Cycle:
    return Cycle(
        draft="int4", drafted=drafted, accepted=(accepted,), passes_s=(1.0,) * drafted, verify_s=total_s - drafted,
        waited_s=0.0, growth=growth, emitted=accepted + 1,
    )  # fmt: skip


def test_hindsight_by_hand() -> None:
    from draft_sides.replay import Hindsight

    # Two lengths, drafts of 1 s a token, verifications of 4 s whatever they verify, copies that take no time. Position
    # 0 is accepted always, position 1 in two of four: E[N] is 1, 2, 2.5 and, with position 2 and 3 never, 2.5, 2.5.
    fixed = [cycle(4, kept, 8.0, (0, 0, 0, 0)) for kept in (1, 2, 1, 2)] + [cycle(1, 1, 5.0, (0,))]
    found = Hindsight(fixed, plain_s=4.0, copy_s=0.0, layers=2)
    assert found.tokens == pytest.approx([1, 2, 2.5, 2.5, 2.5])
    assert found.rate == pytest.approx(0.4), "1 ahead gives 2 tokens in 5 s, 4 ahead 2.5 in 8, plain steps 1 in 4"
    assert found.seconds(fixed[0]) == pytest.approx([4, 5, 6, 7, 8])
    # Worth at 0.4 a second: 1 - 1.6, 2 - 2, 2.5 - 2.4, ...: 2 ahead. Of 1 ahead 0.4 a second are 96% of its 0.417.
    choice = Choice(draft="int4", length=2, longest=16)
    run = [cycle(2, 1, 6.0, (0, 0)), cycle(2, 1, 6.0, (0, 0)), cycle(1, 1, 5.0, (0,)), cycle(4, 2, 8.0, (0,) * 4)]
    trial = Choice(draft="int4", length=1, longest=1, trial=True)
    judged = found.judge([*run, run[2]], [choice] * 4 + [trial])
    assert (judged["cycles"], judged["agree"], judged["as_good"]) == (4, 0.5, 0.5)
    assert judged["rate_share"] == pytest.approx((2.5 + 2.5 + 2 + 2.5) / 25 / (2.5 / 6))


def test_targets_are_read_off_the_rows() -> None:
    from draft_sides.report import targets

    def row(side: str, tpot_s: float, **more: object) -> Json:
        base: Json = {"setting": "s", "side": side, "draft": side.split(",")[0], "tpot_s": tpot_s, "ablation": None,
                      "same_memory": False, "forecasts": None, "length": 4, "slots": 8}  # fmt: skip
        return cast("Json", {**base, **more})

    rows = [row("none", 4.0), row("none, same memory", 3.0, same_memory=True), row("int4, 4", 1.5), row("auto", 1.6)]
    rows += [row("int4, no prefetch", 1.0, ablation="prefetch"), row("none, f", 1.0, forecasts="f")]
    assert targets(rows) == [
        "- s: int4, 4, is 2.00 times the best exact side in the same memory (on demand, 8 slots)",
        "- s: auto takes 1.067 of the time of the best side without forecasts (int4, 4): **no**; 0.400 of that of none",
    ]
