"""`expertcast advise --gpu`: what it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expertcast.cli import main
from expertcast.runtime import OffloadConfig
from expertcast.runtime.timed.costs import LINKS
from tests.package.test_cli import fails

GPU = ("advise", "olmoe-1b-7b", "--layers", "2", "--gpu", "pcie4")


def test_advice_for_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved, result = tmp_path / "offload.json", tmp_path / "result.json"
    assert main([*GPU, "--capacity", "0.25", "--accuracy", "1", "--save", str(saved), "--json", str(result)]) == 0
    got = json.loads(result.read_text())
    assert (got["bandwidth"], got["slots"], got["experts"]) == (LINKS["pcie4"], 32, 128)
    assert {(way["link"], way["prefetch"]) for way in got["ways"]} == {
        (link, prefetch) for link in ("cuda", "kernel") for prefetch in (False, True)
    }
    assert {"command", "date", "git_revision"} <= set(got)
    config = OffloadConfig.load(saved)
    assert (config.link, config.slots, config.predictor) == (got["chosen"]["link"], 32, None)
    printed = capsys.readouterr().out
    assert "advice: " in printed
    assert "which a GPU may refute" in printed


def test_a_routing_without_reuse_misses_more(tmp_path: Path) -> None:
    result, misses = tmp_path / "result.json", []
    for persistence in ("1", "0"):
        assert main([*GPU, "--slots", "32", "--persistence", persistence, "--json", str(result)]) == 0
        misses.append(json.loads(result.read_text())["ways"][0]["misses"])
    assert misses[0] == 0 < misses[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--link", "cuda"], "--link: of a run on this machine"),
        (["--bandwidth", "1e9", "--latency", "1"], "--bandwidth, --latency: of a run on this machine"),
        (["--new-tokens", "3"], "--new-tokens: of a run"),
        (["--dtype", "fp32"], "--dtype: of a run"),
        (["--replay", "traces"], "--replay: of a run"),
        (["--capacity", "2"], "--capacity 2.0: give the share"),
        (["--capacity", "0.1", "--slots", "9"], "give one of them"),
        (["--slots", "2"], "slots=2 is fewer than the 8 experts"),
        (["--accuracy", "3"], "--accuracy 3.0: give a probability"),
        (["--accuracy", "0.9", "--predictor", "checkpoint"], "leave --accuracy out"),
        (["--predictor", "next_norm"], "no predictor checkpoint at next_norm"),
        (["--host", "slow"], "choose from 'fast', 'a100'"),
        (["--gpu", "inf"], "--gpu inf"),
        (["--gpu", "pcie9"], "pcie3, pcie4, pcie5, grace"),
        (["--layers", "99"], "--layers 99: olmoe-1b-7b has 1 to 16"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert message in fails(capsys, *GPU, *options)


def test_other_commands_options_stay_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert "is for a GPU that is not there" in fails(capsys, "advise", "reference", "--capacity", "0.5")
    assert "--host is for a GPU" in fails(capsys, "advise", "reference", "--host", "fast")
    assert "glm4_moe_lite" in fails(capsys, "advise", "glm-4.7-flash", "--gpu", "pcie4")
