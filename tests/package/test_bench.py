"""`expertcast bench` and `advise`: of a model, and of experts on a disk."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from expertcast.cli import build_parser, main
from expertcast.commands import advise
from expertcast.commands.bench import speed_lines
from expertcast.commands.options import read_options
from expertcast.runtime.config import OffloadConfig
from tests.package.test_cli import ran


def test_names_of_links_are_bandwidths() -> None:
    for name, value in (("pcie3", 12e9), ("pcie4", 25e9), ("pcie5", 50e9), ("1.5e9", 1.5e9)):
        assert build_parser().parse_args(["bench", "reference", "--bandwidth", name]).bandwidth == value


def test_bench_in_every_mode(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = "--slots 96 --prompt-tokens 6 12 --new-tokens 4 --repetitions 1 --bandwidth pcie3"
    got = ran(tmp_path, f"bench reference {options} --forecasts always")
    modes = ["on_demand", "exact", "speculate", "hybrid"]
    assert list(got["runs"]) == [*modes, *(f"{mode}_cache" for mode in modes)]
    wanted = {
        "tpot_s", "ttft_s", "compute_s", "copy_s", "idle_s", "bytes_per_token", "hit_rate", "overlap_efficiency",
        "link_utilisation", "tpot_over_bound", "identical",
    }  # fmt: skip
    assert all(wanted <= set(run) for run in got["runs"].values())
    assert all(got["runs"][name]["identical"] for name in ("on_demand", "exact", "on_demand_cache", "exact_cache"))
    per_layer = got["runs"]["exact"]["stats"]["per_layer"]
    assert all(layer["hits"] > 0 for layer in per_layer[1:])  # layer 0 has no forecast
    assert list(got["prompts"]) == ["6", "12"]
    assert got["hardware"]["machine"]
    assert got["versions"]["torch"]
    assert {"command", "date", "git_revision"} <= set(got)
    printed = capsys.readouterr().out
    assert "identical means as resident" in printed
    # each prompt ends with one line with a cache and one without
    assert len(re.findall(r"^\w+ is \d\.\d\d times as fast as on_demand", printed, re.M)) == 4
    assert len(re.findall(r"^\w+_cache is \d\.\d\d times as fast as on_demand_cache", printed, re.M)) == 2


def test_speed_lines_compare_the_fastest_mode_of_each_cache_setting() -> None:
    seconds = {"on_demand": 0.03, "exact": 0.02, "speculate": 0.025, "on_demand_cache": 0.012, "exact_cache": 0.015}
    runs = {name: {"tpot_s": tpot_s, "identical": True} for name, tpot_s in seconds.items()}
    first = "exact is 1.50 times as fast as on_demand; identical: yes"
    assert speed_lines(runs) == [first, "exact_cache is 0.80 times as fast as on_demand_cache; identical: yes"]
    assert speed_lines({name: run for name, run in runs.items() if name != "on_demand_cache"}) == [first]
    assert speed_lines({name: runs[name] for name in ("on_demand", "on_demand_cache")}) == []
    runs["exact"]["identical"] = False
    assert speed_lines(runs)[0] == first.replace("yes", "no")


@pytest.mark.parametrize(
    ("command", "memory"),
    [("advise reference --experts int4", 47e6), ("advise reference", 30e6), ("bench reference", 30e6)],
)
def test_a_model_larger_than_memory_is_refused(
    command: str, memory: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before its experts are read: they run with all of them in memory."""
    monkeypatch.setattr("expertcast.data.machine.available_memory", lambda: int(memory))
    assert main([*command.split(), "--prompt-tokens", "8", "--new-tokens", "3"]) == 2
    *_, line = capsys.readouterr().err.strip().splitlines()
    assert " MB" in line
    assert "--memory" not in line


def test_routing_of_another_model_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("expertcast.runtime.benchmarking.advise_disk.decode_greedily", None)
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(f'{{"token": {token}, "layer": 3, "experts": [5, 9]}}' for token in range(2)))
    command = f"advise reference --store-folder {tmp_path / 'new'} --replay {path} --prompt-tokens 4 --slots 96"
    assert main(command.split()) == 2
    wanted = "it has 1 MoE layers and 2 of 10 experts per token, this model 12 and 4 of 64; give routing of this model"
    assert wanted in capsys.readouterr().err


@pytest.mark.slow
def test_bench_and_advise_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = "--prompt-tokens 8 --slots 96"
    ways = "--mode on_demand exact --cache with --repetitions 1 --bandwidth pcie3"
    got = ran(tmp_path, f"bench reference {options} --new-tokens 3 {ways}")
    assert list(got["runs"]) == ["on_demand_cache", "exact_cache"]
    assert all(run["identical"] for run in got["runs"].values())
    assert got["bandwidth"] == 12e9
    advice = ran(tmp_path, f"advise reference {options} --new-tokens 6 --bandwidth pcie3")
    assert advice["slots"] == 96
    assert list(advice["runs"]) == ["on demand", "next_norm, 1 ahead"]
    said = capsys.readouterr().out
    assert "advice: " in said
    assert "forecasts of exact_cache: " in said


@pytest.mark.slow
def test_a_disk_before_and_after_packing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On a disk this slow compressing pays whatever else this machine is doing; what is saved runs."""
    saved, folder = tmp_path / "offload.json", str(tmp_path / "packed")
    advise = f"advise reference --store-folder {folder} --prompt-tokens 4 --new-tokens 3 --memory 4MB"
    before = ran(tmp_path, f"{advise} --bandwidth 1e6 --save {saved}")
    assert before["packed"] is None
    assert before["disk_source"] == "given"
    pack = f"expertcast store reference --store-folder {folder} --codec bitsplit"
    assert f"pack with: {pack}" in capsys.readouterr().out
    config = OffloadConfig.load(saved)
    assert (config.store, config.store_folder, config.codec) == ("disk", folder, "bitsplit")
    assert main(pack.split()[1:]) == 0
    after = ran(tmp_path, advise)
    assert after["packed"] == "bitsplit"
    assert after["disk_source"] == "direct reads of the store"
    assert after["tokens"] == 2
    assert after["stored_share"] == pytest.approx(before["stored_share"], abs=0.02)
    assert [option["codec"] for option in after["options"][:2]] == ["raw", "bitsplit"]
    assert "an expert is 36,864 bytes" in capsys.readouterr().out
    assert main(f"generate reference --prompt It --new-tokens 1 --config {saved}".split()) == 0


@pytest.mark.parametrize("words", ["", "--bandwidth 1e9", "--latency 1e-4", "--copy-over-compute 2", "--link emulated"])
def test_advise_emulates_a_link_that_is_named_or_has_a_speed(words: str) -> None:
    command = ["advise", "reference", "--device", "cpu", *words.split()]
    assert read_options(advise.Options, build_parser().parse_args(command)).emulated == bool(words)


@pytest.mark.parametrize("command", ["advise", "bench"])
def test_a_busy_machine_is_warned_of(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: range(2))
    for load in (7.0, 2.0):
        line = f"warning: the machine is busy (load {load}, 2 processors for this program): times will be too long"
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert main([command, "no_such_model"]) == 2
        assert (line in capsys.readouterr().err.splitlines()) == (load == 7.0)
