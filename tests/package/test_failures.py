"""Full disks, cut files, models that are not those of the traces, SIGTERM and SIGINT: one line each."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from expertcast.checkpoints.bundled import REFERENCE
from expertcast.cli import main
from expertcast.commands import inspect
from expertcast.data.models import load_config, load_tokenizer
from expertcast.data.source import ModelSource
from expertcast.data.traces import TraceDataset
from tests.families.models import tiny_model
from tests.package.conftest import RUN
from tests.package.test_cli import fails
from tests.package.test_layout import ROOT
from tests.sealed import edit_json


def kept(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def model(tiny_folder: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors"])
def test_a_cut_model(file: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = (model / file).read_bytes()
    (model / file).write_bytes(content[: len(content) // 2])
    before, out = kept(model), tmp_path / "out"
    for command in (
        ["generate", str(model), "--prompt", "It", "--new-tokens", "1", "--slots", "16"],
        ["collect", str(model), "--data", REFERENCE, "--tokens", "900", *RUN, "--out", str(out)],
    ):
        assert main(command) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("expertcast: ")]
        assert len(lines) == 1
        assert str(model) in lines[0]
        if file.startswith("tokenizer"):
            assert "a file is not valid JSON" in lines[0]
            assert lines[0].endswith("download it again")
    assert kept(model) == before
    assert not out.exists()


def test_a_token_beyond_the_embedding(
    model: Path, reference_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before weights are read."""
    tokenizer, known = load_tokenizer(model), load_config(ModelSource.of(model)).vocab_size
    tokenizer.add_tokens([f"<|{number}|>" for number in range(known - len(tokenizer) + 1)])
    tokenizer.save_pretrained(model)
    last = tokenizer.convert_ids_to_tokens(known)
    text, out = tmp_path / "text.jsonl", tmp_path / "out"
    text.write_text("".join(f'{{"text": "Document {number} has {last}."}}\n' for number in range(20)))
    line = f"the tokenizer has {known + 1} tokens, the model {known}: token {known} ({last}) has no embedding"
    command = ["collect", str(model), "--data", str(text), "--tokens", "100", "--window", "16", "--out", str(out)]
    assert line in fails(capsys, *command)
    (model / "model.safetensors").unlink()
    assert line in fails(capsys, "generate", str(model), "--prompt", last)
    assert not out.exists()


def test_a_full_disk_before_weights_are_read(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "model.safetensors").unlink()
    usage = shutil.disk_usage(tmp_path)._replace(free=10**6)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    out = tmp_path / "new" / "out"
    line = fails(capsys, "collect", str(model), "--data", REFERENCE, "--tokens", "9000", "--out", str(out))
    assert "1 MB are free: collect fewer tokens" in line
    assert not out.parent.exists()


def test_a_model_without_a_tokenizer(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in model.glob("*token*"):
        path.unlink()
    for command in (["generate", str(model), "--prompt", "It"], ["serve", str(model)]):
        line = fails(capsys, *command)
        assert "transformers finds no tokenizer files: put the model's tokenizer.json and" in line


def test_a_configuration_of_another_size(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_json(model / "config.json", lambda config: config.update(moe_intermediate_size=64))
    command = ["eval", "no/traces", "--predictor", "next_norm"]
    assert main(["collect", str(model), "--data", REFERENCE, "--tokens", "900", *RUN, "--out", str(model / "out")]) == 2
    error = capsys.readouterr().err
    assert "the sizes in config.json and in the weights differ" in error
    assert not (model / "out").exists()
    assert "no/traces" in fails(capsys, *command)


def test_what_lacks_its_description(
    tiny_traces: TraceDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = shutil.copytree(tiny_traces.folder, tmp_path / "traces")
    checkpoint = tmp_path / "checkpoint"
    assert main(["train", str(traces), "--predictor", "frequency", "--out", str(checkpoint)]) == 0
    capsys.readouterr()
    (traces / "trace.json").unlink()
    (checkpoint / "config.json").unlink()
    assert "neither config.json" in fails(capsys, "inspect", str(traces))
    whole = str(tiny_traces.folder)
    for command in (
        ["inspect", str(checkpoint)], ["eval", whole, "--predictor", str(checkpoint)],
    ):  # fmt: skip
        line = fails(capsys, *command)
        assert f"{checkpoint} is an incomplete checkpoint without config.json" in line


def test_two_predictors_of_one_name(
    tiny_traces: TraceDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before one of them is fitted."""
    traces, checkpoint = str(tiny_traces.folder), str(tmp_path / "checkpoint")
    assert main(["train", traces, "--predictor", "frequency", "--out", checkpoint]) == 0
    capsys.readouterr()
    monkeypatch.setattr("expertcast.commands.predictors.fit_many", None)
    line = fails(capsys, "eval", traces, "--predictor", checkpoint, "frequency")
    assert f"two predictors named 'frequency': rename one, as in --predictor other={checkpoint}" in line


def test_a_model_that_is_not_the_traces(
    tiny_traces: TraceDataset, model: Path, tmp_path: Path, reference_tokenizer: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """One of another shape is refused before anything is scored, one with other weights when it is loaded."""
    other, traces = tmp_path / "other", str(tiny_traces.folder)
    tiny_model("deepseek_v2").save_pretrained(other)
    reference_tokenizer.save_pretrained(other)
    quality = ["--data", REFERENCE, "--quality-tokens", "64"]
    simulate = ["simulate", traces, "--miss", "drop", "--tokens", "40"]
    for command in (["eval", traces, "--predictor", "next_norm"], simulate):
        line = fails(capsys, *command, "--model", str(other), *quality)
        assert f"'{other}' is not the model of these traces, " in line
        assert line.endswith("give the model that they were collected from")
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if name.endswith("mlp.gate.weight"))
    save_file({**weights, name: -weights[name]}, model / "model.safetensors", metadata={"format": "pt"})
    assert main(["eval", traces, "--predictor", "next_norm", "--model", str(model), *quality]) == 2
    assert f"whose routers or norms are not those of '{model}'" in capsys.readouterr().err


@pytest.mark.parametrize("name", [None, "traces/trace.json.partial"])
def test_a_full_disk_is_one_line(
    name: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

    monkeypatch.setattr(inspect, "run", full)
    assert main(["inspect", "traces"]) == 2
    where = "" if name is None else f" {name}"
    assert capsys.readouterr().err == (
        f"expertcast: cannot read or write{where}: No space left on device; free some space or choose another folder, "
        "and run the same command again\n"
    )


def test_a_result_that_cannot_be_written_is_printed(
    tiny_traces: TraceDataset, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(tiny_traces.folder), "--predictor", "next_norm", "--json", "/dev/full"]) == 2
    printed = capsys.readouterr()
    assert "recall" in printed.out
    assert printed.err.startswith("expertcast: cannot write /dev/full: No space left on device; free some space")


def test_what_is_no_disks_answer_comes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(_: object) -> None:
        raise ConnectionError(errno.ECONNRESET, "reset")

    monkeypatch.setattr(inspect, "run", lost)
    with pytest.raises(ConnectionError):
        main(["inspect", "traces"])


PROGRAM = """
import os, sys, threading
from expertcast.cli import main

def wait():
    print("ready", flush=True)
    threading.Event().wait(60)

def stop_here():
    {place}

class Finder:
    def find_spec(name, *_):
        if name == "expertcast.commands.numbers" and Finder in sys.meta_path:
            sys.meta_path.remove(Finder)
            stop_here()

sys.meta_path.insert(0, Finder)
sys.exit(main(["inspect", "--help"]))
"""


@pytest.mark.parametrize(
    ("place", "number", "status"),
    [
        pytest.param("wait()", signal.SIGINT, 130, id="plain code"),
        pytest.param("type('Dying', (), {'__del__': lambda _: wait()})()", signal.SIGTERM, 143, id="a finaliser"),
        pytest.param(
            "os.register_at_fork(after_in_parent=wait)\n    os.fork() or os._exit(0)", signal.SIGINT, 130, id="a fork"
        ),
        pytest.param("try: wait()\n    except BaseException: pass", signal.SIGTERM, 143, id="code that catches all"),
    ],
)
def test_a_signal_at_start_up(place: str, number: signal.Signals, status: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(place=place)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert said == "expertcast: interrupted; run the same command again\n"
    assert process.returncode == status
