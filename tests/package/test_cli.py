"""The command line: its shape is frozen, its errors are one line, and every command works on real folders."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from expertcast import OffloadConfig, offload
from expertcast.checkpoints.checkpoint import save_predictor
from expertcast.cli import main
from expertcast.commands.output import table
from expertcast.data.traces import TraceDataset
from expertcast.predictors import MoEView, PredictorConfig
from expertcast.predictors.baselines import Frequency
from expertcast.runtime.storage.expert_file import FILE_NAME


def fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command that must fail with status 2 and one line; return the line."""
    try:
        status = main(argv)
    except SystemExit as stop:
        status = stop.code
    captured = capsys.readouterr()
    assert status == 2
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("expertcast: ")
    return lines[0]


def ran(tmp_path: Path, line: str, *words: str | Path) -> dict[str, Any]:
    """Run a command that must succeed; return its result.

    Args:
        tmp_path: folder for the result's file.
        line: the command and its words.
        words: further ones, which may hold blanks.
    """
    path = tmp_path / "result.json"
    assert main([*line.split(), *map(str, words), "--json", str(path)]) == 0
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_store_and_generate_from_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Two commands for a model larger than memory: the second finds what the first packed."""
    store = tmp_path / "store"
    packed = f"--store-folder {store} --codec bitsplit"
    said = ran(tmp_path, f"store reference {packed}")
    assert 0.5 < said["ratio"] < 0.8
    printed = capsys.readouterr().out
    assert "768 experts" in printed
    changed = (store / FILE_NAME).stat().st_mtime_ns
    there = f"--store-folder {store}"
    tokens = [
        ran(tmp_path, f"generate reference --prompt It --new-tokens 4 {options}")["tokens"]
        for options in ("", f"{packed} --memory 20GB", there, f"{there} --slots 50 --pools C=2MB")
    ]
    assert all(each == tokens[0] for each in tokens)
    assert (store / FILE_NAME).stat().st_mtime_ns == changed
    assert len(list(store.iterdir())) == 1, "no second store"


def test_sizes_have_units_and_missing_values_no_row(capsys: pytest.CaptureFixture[str]) -> None:
    """As after an installation without git."""
    assert table({"expert_bytes_int8": 19_000, "git_revision": None, "layers": 2}).split() == [
        "expert_bytes_int8", "19", "kB", "layers", "2",
    ]  # fmt: skip
    assert main(["inspect", "reference"]) == 0
    assert re.search(r"^ *all_experts_bytes +28\.3 MB$", capsys.readouterr().out, flags=re.MULTILINE)


def test_inspect_verify(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    reference_model: PreTrainedModel,
    reference_view: MoEView,
    reference_traces: TraceDataset,
) -> None:
    """A changed file is one line by its name, and what was read is told; folders of others have nothing to verify."""
    checkpoint = tmp_path / "checkpoint"
    frequency = Frequency(PredictorConfig(), reference_view.shape)
    frequency.learned_from = reference_traces.learned_from()
    save_predictor(frequency, checkpoint, view=reference_view, metrics={"ahead": 1})
    traces = tmp_path / "traces"
    shutil.copytree(reference_traces.folder, traces)
    store = tmp_path / "store"
    offload(reference_model, store="disk", store_folder=store).close()
    for target, kinds in ((checkpoint, 4), (traces, 5), (store, 1)):
        assert main(["inspect", str(target), "--verify"]) == 0
        assert capsys.readouterr().out.count(": right\n") == kinds
        for path in sorted(target.rglob("*")):
            if path.is_file() and path.name != "README.md":
                content = path.read_bytes()
                path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
                assert path.name in fails(capsys, "inspect", str(target), "--verify")
                path.write_bytes(content)
    assert "no folder of traces" in fails(capsys, "inspect", str(tmp_path), "--verify")
    assert "no folder of traces" in fails(capsys, "inspect", "reference", "--verify")


@pytest.fixture
def decoded(tiny_folder: str, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Generates on the tiny model in 8 slots; takes further words of the command."""
    return partial(ran, tmp_path, f"generate {tiny_folder} --slots 8 --new-tokens 4 --prompt", "It is a truth")


def test_collect_train_eval_generate_inspect(
    capsys: pytest.CaptureFixture[str], tiny_folder: str, decoded: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    plain = decoded()
    traces, checkpoint, report = (tmp_path / name for name in ("traces", "ckpt", "report"))
    assert main(f"collect {tiny_folder} --data reference --tokens 1500 --window 64 --out {traces}".split()) == 0
    capsys.readouterr()
    assert main(f"train {traces} --predictor linear --out {checkpoint} --ahead 1 2".split()) == 0
    trained = capsys.readouterr().out
    assert trained.count("ECE: calibration error") == 2  # a legend per distance
    assert re.search(r"^scored on split 'test', \d+ tokens$", trained, flags=re.MULTILINE)
    assert re.search(rf"^use ({checkpoint}|on demand|\w+): ", trained, flags=re.MULTILINE)
    link = "--bandwidth 4e9 --layer-time 1e-4 --expert-bytes 200000"
    scored = ran(tmp_path, f"eval {traces} --predictor quasi_hidden {checkpoint} --report {report} {link}")
    assert scored["split"] == "test"
    assert set(scored["recall_at_k"]) == set(scored["ledger"]) == {"quasi_hidden", "linear"}
    for name, costs in scored["ledger"].items():
        assert min(scored["calibration"][name]["ece"], scored["calibration"][name]["before"]["ece"]) > 0, name
        assert min(costs["training_s"], costs["collection_s"], costs["forecast_ms"]) > 0, name
    printed = capsys.readouterr().out
    assert "collection s" in printed
    assert "collection s" in (report / "index.html").read_text()
    metrics = json.loads((checkpoint / "metrics.json").read_text())
    assert metrics["ledger"]["linear"]["training_s"] == scored["ledger"]["linear"]["training_s"]
    assert set(metrics) >= {"recall_at_k", "calibration"}
    forecast = ("--predictor", checkpoint)
    for words in (
        [], ["--policies", "eviction=importance:gamma=0.8", "prefetch=percentile"],
        ["--store-folder", tmp_path / "packed"],
    ):  # fmt: skip
        assert decoded(*forecast, *words)["tokens"] == plain["tokens"]
    both = tmp_path / "both"
    assert main(f"train {traces} --predictor next_norm linear --out {both} --set strengths=1e-3".split()) == 0
    assert decoded("--predictor", both)["tokens"] == plain["tokens"]
    scored = ran(tmp_path, f"eval {traces} --predictor next_norm {both} again={both}")
    times = scored["waiting"]
    assert {"on demand", "next_norm", "hybrid", "hybrid/next_norm", "again"} <= set(times)
    for one, other in (("next_norm", "hybrid/next_norm"), ("hybrid", "again")):
        assert times[one]["recall_at_k"] == times[other]["recall_at_k"]
    for name, costs in scored["ledger"].items():
        assert costs["forecast_ms"] == times[name]["forecast_ms"] > 0
    assert list(times) == sorted(times, key=lambda name: times[name]["token_ms"])
    capsys.readouterr()
    assert f"as in --predictor other={both}" in fails(capsys, "eval", str(traces), "--predictor", str(both), str(both))
    lossy = decoded(*forecast, "--policies", "routing=budget")
    assert lossy["stats"]["skipped"] > 0  # its routing is lossy
    for target in (tiny_folder, traces, checkpoint, both):
        capsys.readouterr()
        assert main(["inspect", str(target)]) == 0
        assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_what_is_advised_is_saved_and_deployed(
    capsys: pytest.CaptureFixture[str], tiny_folder: str, decoded: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    saved = tmp_path / "offload.json"
    advise = f"advise {tiny_folder} --prompt-tokens 8 --new-tokens 3 --memory 30kB --save {saved}"
    for speed in ("--bandwidth 1e8", "--copy-over-compute 2"):
        advice = ran(tmp_path, f"{advise} {speed}")
        assert f"wrote {saved}" in capsys.readouterr().out
        config = OffloadConfig.load(saved)
        assert (config.predictor, config.ahead) == (advice["predictor"], advice["ahead"] or 1)
        assert (config.link, config.bandwidth) == ("emulated", advice["bandwidth"])
    assert decoded("--config", saved)["tokens"] == decoded()["tokens"]


def test_advice_without_a_speed_is_for_the_link_of_this_machine(
    capsys: pytest.CaptureFixture[str], tiny_folder: str, decoded: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    saved = tmp_path / "offload.json"
    advice = ran(tmp_path, f"advise {tiny_folder} --prompt-tokens 8 --new-tokens 3 --memory 30kB --save {saved}")
    said = capsys.readouterr().out
    assert (advice["link"], advice["predictor"]) == ("instant", None)
    assert {"bandwidth", "copy_over_compute"}.isdisjoint(advice)
    assert "link 'instant' of this machine" in said
    assert "--bandwidth" in said
    config = OffloadConfig.load(saved)
    assert (config.link, config.bandwidth, config.predictor) == ("auto", None, None)
    decoded("--config", saved, "--bandwidth", "1e9")


def test_options_win_over_the_file(decoded: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    saved, plain = tmp_path / "offload.json", decoded()
    OffloadConfig(predictor="next_norm", mode="speculate", slots=8, policies="routing=budget", forecasts="always").save(
        saved
    )
    file = ["--config", saved]
    assert decoded(*file)["stats"]["skipped"] > 0  # the file's policies are lossy
    exact = ["--mode", "exact", "--policies", "eviction=lru"]
    found = decoded(*file, *exact, "--slots", "8")
    assert found["tokens"] == plain["tokens"]
    assert found["stats"]["hits"] > plain["stats"]["hits"]  # of the file's predictor
    on_disk = ["--slots", "8", "--store-folder", tmp_path / "packed"]
    assert decoded(*file, *exact, *on_disk)["tokens"] == plain["tokens"]
    assert any((tmp_path / "packed").iterdir())


def test_bad_configurations_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    saved = tmp_path / "offload.json"
    generate = ["generate", "reference", "--prompt", "It is", "--new-tokens", "1", "--config", str(saved)]
    assert "cannot read" in fails(capsys, *generate)
    saved.write_text('{"predictor": "nobody"}')
    assert "unknown predictor 'nobody'" in fails(capsys, *generate)
    OffloadConfig(store="disk", codec="bitsplit").save(saved)
    line = fails(capsys, *generate, "--experts", "int8")
    assert "codec" in line
    assert str(saved) in line
    assert "give slots or memory, not both" in fails(capsys, *generate, "--slots", "9", "--memory", "4MB")


@pytest.mark.slow
def test_a_reader_that_closes_the_pipe_is_no_error() -> None:
    """As in `expertcast inspect reference | head -1`, with a reader that is gone before the first line."""
    reader, writer = os.pipe()
    os.close(reader)
    run = subprocess.run(
        [sys.executable, "-m", "expertcast.cli", "inspect", "reference"],
        stdout=writer, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(writer)
    assert (run.returncode, run.stderr) == (128 + signal.SIGPIPE, "")


def test_output_while_the_model_runs(tiny_folder: str) -> None:
    """The reader leaves after the first word; and an encoding lacks some characters."""
    command = [sys.executable, "-m", "expertcast.cli", "generate", tiny_folder, "--new-tokens", "300", "--prompt"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    run = subprocess.Popen(
        [*command, "Gr\u00fc\u00dfe "], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    assert run.stdout is not None
    assert run.stdout.read(4) == b"Gr\\x"
    run.stdout.close()
    assert run.stderr is not None
    assert run.stderr.read().count(b"\n") == 1  # the plan
    assert run.wait() == 128 + signal.SIGPIPE


def test_another_system_is_refused_in_one_line() -> None:
    code = (
        "import sys; sys.platform = 'win32'; from expertcast.cli import main; import expertcast\n"
        "assert main(['inspect', 'reference']) == 2\n"
        "expertcast.offload"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr.splitlines()
    line = "expertcast runs on Linux and macOS, not on win32: on Windows, install it in WSL"
    assert (said[0], said[-1]) == (f"expertcast: {line}", f"ImportError: {line}")
