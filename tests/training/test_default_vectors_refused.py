"""Default vectors that cannot be taken, and trainings that lack them: one line each, before anything is run."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from expertcast.checkpoints.checkpoint import save_predictor
from expertcast.data import trace_format as layout
from expertcast.data.collect import collect
from expertcast.data.live import with_default_vectors
from expertcast.data.text import load_documents
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, Predictor
from expertcast.predictors.linear import LinearConfig
from expertcast.training.fit import fit
from tests.data.traffic import as_traffic
from tests.package.test_cli import fails


@pytest.fixture(scope="module")
def live(
    reference_traces: TraceDataset, reference_model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory
) -> TraceDataset:
    return as_traffic(reference_traces, reference_model, tmp_path_factory.mktemp("live") / "traces", known=False)


def saved(predictor: Predictor, traces: TraceDataset, folder: Path) -> Path:
    save_predictor(predictor, folder, view=traces.view)
    return folder


@pytest.mark.parametrize("part", ["router", "experts"])
def test_those_of_another_model_are_refused(
    part: str, live: TraceDataset, reference_model: PreTrainedModel, reference_tokenizer: Any, tmp_path: Path
) -> None:
    model = copy.deepcopy(reference_model)
    block = model.model.layers[3].mlp
    with torch.no_grad():
        if part == "router":
            block.gate.weight += 1
        else:
            block.experts.down_proj += 1
    documents = load_documents("reference")
    other = collect(model, reference_tokenizer, documents, tmp_path / "other", tokens=600, early_rank=None)
    checkpoint = saved(fit("quasi_hidden", other).predictor, other, tmp_path / "checkpoint")
    said = "its routers' or norms' weights are not those of" if part == "router" else "its experts' weights are not"
    for given in (other.folder, checkpoint):
        with pytest.raises(ExpertcastError, match=f"{given} is of .* and {said} .*, so neither are its default"):
            with_default_vectors(live, given)


def _cut(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def test_what_cannot_be_is_one_line(
    live: TraceDataset, reference_traces: TraceDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = fit("linear", reference_traces, config=LinearConfig(reads="router_input")).predictor
    (tmp_path / "empty").mkdir()
    counts = saved(fit("frequency", live).predictor, live, tmp_path / "counts")
    no_vectors = "holds no default vectors: give traces of this model by expertcast collect"
    cases: dict[str, tuple[Path, str]] = {
        "traffic": (live.folder, "is of a server's traffic and holds no default vectors: take those of other traces"),
        "counts": (counts, f"is of frequency and {no_vectors}"),
        "plain": (saved(plain, reference_traces, tmp_path / "plain"), f"is of linear and {no_vectors}"),
        "empty": (tmp_path / "empty", "holds neither traces (trace.json) nor a predictor checkpoint: give traces"),
        "nowhere": (tmp_path / "no" / "where", "holds neither traces (trace.json) nor a predictor checkpoint"),
        "hub": (Path("nobody/nothing"), "neither a folder here nor in the hub's cache"),
    }
    damages: dict[str, Callable[[Path], object]] = {
        layout.DEFAULTS_FILE: _cut, layout.TRACE_FILE: lambda path: path.write_text('{"form')
    }  # fmt: skip
    for name, damage in damages.items():
        folder = shutil.copytree(reference_traces.folder, tmp_path / f"damaged {name}")
        damage(folder / name)
        cases[name] = (folder, str(folder / name))
    weights = (
        saved(fit("quasi_hidden", reference_traces).predictor, reference_traces, tmp_path / "weights")
        / "model.safetensors"
    )
    _cut(weights)
    cases["weights"] = (weights.parent, f"{weights} was changed")
    out = str(tmp_path / "out")
    for given, said in cases.values():
        train = ("train", str(live.folder), "--predictor", "linear", "--out", out, "--default-vectors", str(given))
        assert said in fails(capsys, *train)
    assert not Path(out).exists()


def test_traffic_without_them_says_what_helps(
    live: TraceDataset, reference_traces: TraceDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = ("train", str(live.folder), "--out", str(tmp_path / "out"), "--predictor")
    for name in ("quasi_hidden", "linear", "estimator"):
        assert "(expertcast train --default-vectors), or train linear with --set" in fails(capsys, *train, name)
    given = ("--default-vectors", str(reference_traces.folder))
    remedy = "train the estimator with --set inputs=quasi_hidden/router_input/routing/previous, or another predictor"
    early = ("estimator", *given, "--set", "inputs=quasi_hidden/early")
    for words in (("early_attention", *given), early):
        assert f"traces of a server's traffic hold no early attention: {remedy}" in fails(capsys, *train, *words)
