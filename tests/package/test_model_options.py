"""Options of `from_pretrained` on the command line: every command that loads a model passes them on, or refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from expertcast.cli import main
from expertcast.commands.options import ModelOptions, OffloadedOptions
from expertcast.data.traces import TraceDataset
from tests.families.models import tiny_model
from tests.package.test_cli import fails
from tests.runtime.test_sources import OWN_CODE


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory, reference_tokenizer: Any) -> str:
    """A model that brings code of its own."""
    folder = tmp_path_factory.mktemp("own") / "model"
    tiny_model("qwen3_moe").save_pretrained(folder, save_original_format=False)
    reference_tokenizer.save_pretrained(folder)
    (folder / "own.py").write_text(OWN_CODE)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own_moe", "auto_map": names}))
    return str(folder)


def commands(model: str, traces: str, tmp_path: Path) -> dict[str, list[str]]:
    """Each command that loads a model, in little."""
    text = ["--data", "reference", "--window", "32", "--batch-size", "4"]
    quality = ["--model", model, "--data", "reference", "--quality-tokens", "64"]
    short = ["--prompt-tokens", "8", "--new-tokens", "4"]
    store = str(tmp_path / "store")
    return {
        "inspect": ["inspect", model],
        "collect": ["collect", model, *text, "--tokens", "200", "--out", str(tmp_path / "collected")],
        "train": ["train", model, *text, "--tokens", "200", "--predictor", "next_norm", "--out", str(tmp_path / "c")],
        "eval": ["eval", traces, "--predictor", "next_norm", *quality],
        "generate": ["generate", model, "--prompt", "It is", "--slots", "6", "--new-tokens", "2"],
        "store": ["store", model, "--store-folder", store],
        "bench": ["bench", model, *short, "--repetitions", "1"],
        "advise": ["advise", model, *short],
        "advise on disk": ["advise", model, *short, "--store-folder", store],
        "simulate": ["simulate", traces, "--miss", "drop", "--capacity", "0.25", "--tokens", "50", *quality],
    }


NAMES = ("inspect", "collect", "train", "eval", "generate", "store", "bench", "advise", "advise on disk", "simulate")
TRACED = ("eval", "simulate")
"""These take traces of the model beside it."""


@pytest.mark.parametrize("name", [name for name in NAMES if name not in TRACED])
def test_code_of_a_models_own(name: str, trusted: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run when it is trusted, and only then; traces do not keep it."""
    status = main([*commands(trusted, "", tmp_path)[name], "--trust-remote-code"])
    error = capsys.readouterr().err
    if name == "collect":
        assert status == 2
        assert "OwnForCausalLM is custom code of the model, which traces cannot store: train online" in error
        assert not (tmp_path / "collected").exists()
    else:
        assert status == 0, error
    status = main(commands(trusted, "", tmp_path / "again")[name])
    error = capsys.readouterr().err
    assert status == 2
    assert "it contains custom code: set trust_remote_code=True (--trust-remote-code) if you trust it" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_has_no_revision(
    name: str, trusted: str, reference_traces: TraceDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = commands(trusted, str(reference_traces.folder), tmp_path)[name]
    status = main([*command, "--revision", "v2"])
    error = capsys.readouterr().err
    assert status == 2
    assert f"--revision v2 applies only to hub models; {trusted}" in error


def test_attention(trusted: str, tmp_path: Path) -> None:
    for attention in ("eager", "sdpa"):
        given: dict[str, Any] = {"attn_implementation": attention, "trust_remote_code": True, "device": "cpu"}
        made = (
            ModelOptions(**given), OffloadedOptions(slots=6, **given),
            OffloadedOptions(slots=9, store_folder=str(tmp_path), **given),
        )  # fmt: skip
        for options in made:
            model, _ = options.load(trusted)
            assert model.config._attn_implementation == attention
            assert type(model).__name__ == "OwnForCausalLM"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("./nothing", "cannot load model './nothing': no such folder; use the folder of a model, or its hub id"),
        ("/no/such/model", "cannot load model '/no/such/model': no such folder; use"),
        ("no/model", "cannot load model 'no/model': no such folder, and the hub reports: "),
    ],
)
def test_a_folder_that_is_not_there(model: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in fails(capsys, "inspect", model)
    assert said.replace("cannot load model", "no tokenizer for") in fails(capsys, "generate", model, "--prompt", "x")


def test_a_folder_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such as a store's."""
    said = fails(capsys, "generate", str(tmp_path), "--prompt", "x")
    assert f"no tokenizer for '{tmp_path}': the folder has no config.json; use the folder of a model" in said


def test_inspect_refuses_a_dense_model_and_cuts_no_text(
    tmp_path: Path, reference_traces: TraceDataset, capsys: pytest.CaptureFixture[str]
) -> None:
    LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64).save_pretrained(tmp_path)
    said = fails(capsys, "inspect", str(tmp_path))
    assert "(LlamaForCausalLM) is not supported: LlamaForCausalLM records no router_logits" in said
    assert said.endswith("does not support")
    assert main(["inspect", str(reference_traces.folder)]) == 0
    shown = capsys.readouterr().out
    assert '"residual": [12, 192]' in shown
    assert str(reference_traces.info["command"]) in shown


def test_a_folder_named_reference_is_not_the_bundled_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reference").mkdir()
    assert main(["inspect", "reference"]) == 0
    (tmp_path / "reference" / "config.json").write_text("{}")
    assert "'reference' is the bundled model" in fails(capsys, "inspect", "reference")
    assert "cannot load model './reference'" in fails(capsys, "inspect", "./reference")
