"""Default vectors from elsewhere: training gives the same result as with own ones, and errors name the remedy."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from expertcast.checkpoints.checkpoint import PredictorCheckpoint, load_predictor
from expertcast.cli import main
from expertcast.data import trace_format as layout
from expertcast.data.collect import collect
from expertcast.data.online import OnlineTraces
from expertcast.data.text import load_documents
from expertcast.data.traces import DEFAULTS_NOTE, TraceDataset, with_default_vectors
from expertcast.predictors import ExpertcastError, Predictor, PredictorConfig
from expertcast.predictors.artefacts import file_digest
from expertcast.predictors.estimator import EstimatorConfig
from expertcast.predictors.linear import LinearConfig
from expertcast.training.evaluation import evaluate
from expertcast.training.fit import fit
from expertcast.training.scoring import FitOptions
from tests.data.traffic import as_traffic
from tests.package.test_cli import fails
from tests.sealed import edit_json

SMALL = EstimatorConfig(width=8, steps=6, step_tokens=128)
FEW: dict[str, Any] = {"tokens": 900, "window": 128, "early_rank": None}
OTHER = {**FEW, "seed": 1}
QUICK = FitOptions(tokens=1000, validation_tokens=250)
CONFIGS: dict[str, PredictorConfig | None] = {"quasi_hidden": None, "linear": None, "estimator": SMALL}


@pytest.fixture(scope="module")
def live(traces: TraceDataset, model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> TraceDataset:
    return as_traffic(traces, model, tmp_path_factory.mktemp("live") / "traces", known=False)


@pytest.fixture(scope="module")
def live_with_own(live: TraceDataset, traces: TraceDataset, tmp_path_factory: pytest.TempPathFactory) -> TraceDataset:
    """The same traffic as if its server had collected default vectors, with the values of the collected traces."""
    folder = shutil.copytree(live.folder, tmp_path_factory.mktemp("own") / "traces")
    defaults, tokens = traces.defaults, live.info["splits"]["train"]
    tensors = replace(defaults, count_LE=torch.zeros_like(defaults.count_LE), token_count=tokens).as_tensors()
    save_file(tensors, folder / layout.DEFAULTS_FILE)

    def add(info: dict[str, Any]) -> None:
        info["files"][layout.DEFAULTS_FILE] = file_digest(folder / layout.DEFAULTS_FILE)

    edit_json(folder / layout.TRACE_FILE, add)
    return TraceDataset.open(folder)


@pytest.fixture(scope="module")
def few(model: PreTrainedModel, reference_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> TraceDataset:
    """Other traces of the same model; the text is another part of the same."""
    folder = tmp_path_factory.mktemp("few") / "traces"
    return collect(model, reference_tokenizer, load_documents("reference"), folder, **OTHER)


def same(first: Predictor, second: Predictor) -> bool:
    """Bit for bit."""
    ours, theirs = first.state_dict(), second.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("name", CONFIGS)
def test_training_on_traffic_is_as_with_default_vectors_of_its_own(
    name: str, live: TraceDataset, live_with_own: TraceDataset, traces: TraceDataset
) -> None:
    source = with_default_vectors(live, traces.folder)
    made = fit(name, source, config=CONFIGS[name], options=QUICK)
    assert same(made.predictor, fit(name, live_with_own, config=CONFIGS[name], options=QUICK).predictor)
    assert made.report[DEFAULTS_NOTE]["traces"] == traces.info["id"]
    taught = {document.hash for document in traces.chosen("train")}
    assert made.predictor.learned_from == live.learned_from() | taught  # type: ignore[operator]
    scored = {name: made.predictor, "frequency": fit("frequency", live).predictor}
    recall = evaluate(scored, source.batches("test", 1000), source.view).as_dict()["recall_at_k"]
    assert recall[name]["mean"] > recall["frequency"]["mean"] + 0.2


def test_they_win_over_those_of_ordinary_traces(
    few: TraceDataset, traces: TraceDataset, model: PreTrainedModel, reference_tokenizer: Any
) -> None:
    other = with_default_vectors(traces, few.folder)
    assert torch.equal(fit("quasi_hidden", other).predictor.get_buffer("expert_LED"), few.defaults.expert_LED)
    assert not torch.equal(few.defaults.expert_LED, traces.defaults.expert_LED)
    online = OnlineTraces(model, reference_tokenizer, load_documents("reference"), **OTHER)
    ridge = LinearConfig(steps=0)  # steps of distillation would draw the two in different orders
    taken, again = (
        fit("linear", with_default_vectors(source, traces.folder), config=ridge, options=QUICK).predictor
        for source in (online, few)
    )
    assert same(taken, again)
    assert "defaults" not in vars(online), "no pass over the text is made for them"


def test_a_training_that_was_kept_is_not_gone_on_with_under_others(
    live: TraceDataset, few: TraceDataset, traces: TraceDataset, tmp_path: Path
) -> None:
    options = replace(QUICK, resume_folder=tmp_path / "kept")
    fit("estimator", with_default_vectors(live, few.folder), config=SMALL, options=options)
    source = with_default_vectors(live, traces.folder)
    after = fit("estimator", source, config=SMALL, options=options).predictor
    assert same(after, fit("estimator", source, config=SMALL, options=QUICK).predictor)


def test_of_a_test_split_that_they_all_come_from_nothing_is_scored(
    traces: TraceDataset, model: PreTrainedModel, reference_tokenizer: Any, tmp_path: Path
) -> None:
    """So few documents are not all split by their hashes: one of them is the other traces' test split."""
    documents, folder = load_documents("reference"), tmp_path / "traces"
    other = collect(model, reference_tokenizer, documents, folder, **FEW)
    assert {each.hash for each in traces.chosen("test")} < {each.hash for each in other.chosen("train")}
    with pytest.raises(ExpertcastError, match="come from every document of the test split, so none is left to score"):
        with_default_vectors(traces, folder)


def test_the_command_notes_where_they_come_from(
    live: TraceDataset, traces: TraceDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, given, out = str(live.folder), str(traces.folder), tmp_path / "checkpoint"
    train = ["train", folder, "--default-vectors", given, "--out", str(out), "--predictor"]
    assert main([*train, "linear"]) == 0
    note = PredictorCheckpoint.open(out).config["training"][DEFAULTS_NOTE]
    assert (note["given"], note["traces"]) == (traces.folder.name, traces.info["id"])
    assert note["digest"] in (out / "README.md").read_text()
    direct = fit("linear", with_default_vectors(live, given)).predictor
    assert same(load_predictor(out), direct)
    scored = tmp_path / "scored.json"
    assert main(["eval", folder, "--predictor", str(out), "--split", "test", "--json", str(scored)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("split by conversation") == 2
    metrics = json.loads((out / "metrics.json").read_text())
    assert json.loads(scored.read_text())["recall_at_k"] == metrics["recall_at_k"]
    capsys.readouterr()
    assert main([*train, "frequency"]) == 0
    assert "frequency with these settings reads no default vectors" in capsys.readouterr().err
    assert DEFAULTS_NOTE not in PredictorCheckpoint.open(out).config["training"]


@pytest.mark.parametrize("part", ["router", "experts"])
def test_those_of_another_model_are_refused(
    part: str, live: TraceDataset, model: PreTrainedModel, reference_tokenizer: Any, tmp_path: Path
) -> None:
    model = copy.deepcopy(model)
    block = model.model.layers[3].mlp
    with torch.no_grad():
        if part == "router":
            block.gate.weight += 1
        else:
            block.experts.down_proj += 1
    documents = load_documents("reference")
    other = collect(model, reference_tokenizer, documents, tmp_path / "other", **{**FEW, "tokens": 600})
    reason = "different router or norm weights" if part == "router" else "different expert weights"
    with pytest.raises(ExpertcastError, match=f"{other.folder} belongs to .* has {reason}, so its default"):
        with_default_vectors(live, other.folder)


def _cut(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def test_what_cannot_be_is_one_line(
    live: TraceDataset, traces: TraceDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    cases: dict[str, tuple[Path, str]] = {
        "traffic": (live.folder, "has a server's traffic without default vectors: add those of other traces"),
        "empty": (tmp_path / "empty", "no traces in"),
        "hub": (Path("nobody/nothing"), "neither a local folder nor in the hub's cache"),
    }
    damages: dict[str, Callable[[Path], object]] = {
        layout.DEFAULTS_FILE: _cut, layout.TRACE_FILE: lambda path: path.write_text('{"form')
    }  # fmt: skip
    for name, damage in damages.items():
        folder = shutil.copytree(traces.folder, tmp_path / f"damaged {name}")
        damage(folder / name)
        cases[name] = (folder, str(folder / name))
    out = str(tmp_path / "out")
    for given, said in cases.values():
        train = ("train", str(live.folder), "--predictor", "linear", "--out", out, "--default-vectors", str(given))
        assert said in fails(capsys, *train)
    assert not Path(out).exists()


def test_traffic_without_them_says_what_helps(
    live: TraceDataset, traces: TraceDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = ("train", str(live.folder), "--out", str(tmp_path / "out"), "--predictor")
    for name in ("quasi_hidden", "linear", "estimator"):
        assert "(expertcast train --default-vectors), or train linear with --set" in fails(capsys, *train, name)
    given = ("--default-vectors", str(traces.folder))
    early = ("estimator", *given, "--set", "inputs=quasi_hidden/early")
    for words in (("early_attention", *given), early):
        assert "no early attention, as all traces of a server's traffic: leave it out of" in fails(
            capsys, *train, *words
        )
