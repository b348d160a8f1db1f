"""Commands that run a model over text do so with it offloaded, and give what they give with it in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from expertcast.checkpoints.bundled import REFERENCE
from expertcast.checkpoints.checkpoint import WEIGHTS
from expertcast.cli import main
from expertcast.commands import options
from expertcast.data.text import load_documents
from expertcast.data.traces import TraceDataset
from expertcast.predictors.messages import Json
from tests.package.conftest import RUN
from tests.package.test_cli import fails, ran

TEXT = ("--data", REFERENCE)


@pytest.fixture(scope="module")
def store_folder(tiny_folder: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The experts, packed by the command for that."""
    folder = str(tmp_path_factory.mktemp("store"))
    assert main(["store", tiny_folder, "--store-folder", folder, "--codec", "bitsplit"]) == 0
    return folder


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.suffix in (".arrow", ".safetensors")}


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_collect(where: str, tiny_folder: str, store_folder: str, tiny_traces: TraceDataset, tmp_path: Path) -> None:
    """From a packed folder, whose own codec is found, and from memory."""
    packed = sorted(Path(store_folder).iterdir())
    given = ["--store-folder", store_folder, "--slots", "9"] if where == "disk" else ["--slots", "9"]
    out = tmp_path / "traces"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "load_model", None)  # the whole model is never loaded
        assert main(["collect", tiny_folder, *TEXT, "--tokens", "500", "--out", str(out), *RUN, *given]) == 0
    assert files(out) == files(tiny_traces.folder)
    assert TraceDataset.open(out).info["id"] == tiny_traces.info["id"]
    assert sorted(Path(store_folder).iterdir()) == packed


def test_train_online(tiny_folder: str, store_folder: str, tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": each.text[:150]}) + "\n" for each in load_documents(REFERENCE)[:8]))
    command = ["train", tiny_folder, "--data", str(text), "--predictor", "linear", *RUN]
    assert main([*command, "--out", str(tmp_path / "plain")]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "load_model", None)
        given = ["--store-folder", store_folder, "--slots", "10"]
        assert main([*command, *given, "--out", str(tmp_path / "offloaded")]) == 0
    own, other = (load_file(tmp_path / name / WEIGHTS) for name in ("plain", "offloaded"))
    assert own.keys() == other.keys()
    assert all(own[name].equal(tensor) for name, tensor in other.items())


def test_eval(tiny_folder: str, store_folder: str, tiny_traces: TraceDataset, tmp_path: Path) -> None:
    command = ["eval", str(tiny_traces.folder), "--predictor", "next_norm", "early_attention"]
    command += ["--quality-tokens", "64", "--model", tiny_folder, *TEXT]
    plain = ran(tmp_path, "", *command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "load_model", None)
        offloaded = ran(tmp_path, "", *command, "--store-folder", store_folder, "--memory", "20GB")
    assert offloaded["quality"] == plain["quality"]
    assert plain["quality"]["runs"]["speculate early_attention"]["kl"] > 0


def test_simulate(tiny_folder: str, store_folder: str, tiny_traces: TraceDataset, tmp_path: Path) -> None:
    command = ["simulate", str(tiny_traces.folder), "--miss", "drop", "--slots", "4", "--tokens", "60"]
    command += ["--prefill", "8"]
    command += ["--quality-tokens", "96", "--processes", "1", "--model", tiny_folder, *TEXT]

    def quality(result: Json) -> list[Any]:
        return [row[name] for row in result["results"] for name in ("perplexity", "agreement", "kl")]

    plain = quality(ran(tmp_path, "", *command))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "load_model", None)
        offloaded = quality(ran(tmp_path, "", *command, "--store-folder", store_folder))
    assert offloaded == plain
    assert plain[0] > 1


def test_training_on_a_model_leaves_half_of_the_memory(
    tiny_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sums, rows and steps need it: with all of it the model had left nothing, and the system ended the process."""
    monkeypatch.setattr(options, "free_memory", lambda _device: 2_000_000)
    line = ("train", tiny_folder, *TEXT, "--in-place", "--predictor", "linear", "--out", tmp_path / "ck")
    assert "memory=1000000 holds 0 experts" in fails(capsys, *map(str, line))
