"""Scores by the commands: only documents that no predictor learned from, at every distance; a user's own text."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from expertcast.checkpoints import checkpoint as files
from expertcast.checkpoints.bundled import REFERENCE
from expertcast.checkpoints.checkpoint import load_predictor, save_predictor
from expertcast.cli import build_parser, main
from expertcast.commands import advise
from expertcast.commands.bench_target import Target
from expertcast.commands.options import read_options
from expertcast.commands.predictors import QualityOptions, best_on_validation, forecast_quality, quality_windows
from expertcast.data.models import load_tokenizer
from expertcast.data.text import bundled_ids, load_documents
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, MoEView, Predictor, PredictorConfig
from expertcast.predictors.baselines import QuasiHidden
from expertcast.predictors.hybrid import HybridConfig
from expertcast.runtime.quality import text_windows
from expertcast.training.evaluation import evaluate
from expertcast.training.fit import FITTERS, select_hybrid
from expertcast.training.scoring import FitOptions
from tests.package.conftest import RUN
from tests.package.test_cli import fails, ran

TOKENS = 2000


class Made(NamedTuple):
    """Traces of a part of the bundled text, and what was trained on them."""

    traces: Path
    checkpoint: Path
    learned: set[str]
    """Texts of its train and validation splits."""
    metrics: dict[str, Any]


@pytest.fixture(scope="module")
def made(tiny_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The bundled text in another file: other indices, other domains, blanks around the documents."""
    folder = tmp_path_factory.mktemp("unseen")
    texts = [document.text for document in load_documents("reference")]
    pq.write_table(pa.table({"text": ["", *(f"\n{text}  " for text in texts)]}), folder / "text.parquet")
    traces, checkpoint = folder / "traces", folder / "checkpoint"
    collect = ["collect", tiny_folder, "--data", str(folder / "text.parquet"), "--early-rank", "none", *RUN]
    assert main([*collect, "--tokens", str(TOKENS), "--out", str(traces)]) == 0
    assert main(["train", str(traces), "--predictor", "linear", "--ahead", "2", "1", "--out", str(checkpoint)]) == 0
    info = json.loads((traces / "trace.json").read_text())
    learned = {texts[each["index"] - 1].strip() for each in info["documents"] if each["split"] != "test"}
    return Made(traces, checkpoint, learned, json.loads((checkpoint / files.METRICS).read_text()))


@pytest.fixture(scope="module")
def more(tiny_folder: str, tmp_path_factory: pytest.TempPathFactory) -> TraceDataset:
    """Traces of more of the same text."""
    folder = tmp_path_factory.mktemp("more") / "traces"
    collect = ["collect", tiny_folder, "--data", REFERENCE, "--early-rank", "none", *RUN]
    assert main([*collect, "--tokens", str(2 * TOKENS), "--out", str(folder)]) == 0
    return TraceDataset.open(folder)


def test_more_of_the_same_text_scores_unseen_documents_only(
    made: Made, more: TraceDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces, texts = more, {each.index: each.text.strip() for each in load_documents("reference")}
    seen = {each.index for each in traces.documents if texts[each.index] in made.learned}
    batches = list(traces.batches("all", 512))
    unseen = [batch[[int(index) not in seen for index in batch.document_T]] for batch in batches]
    predictor = load_predictor(made.checkpoint, traces.view)
    honest = evaluate({"linear": predictor}, [batch for batch in unseen if len(batch)], traces.view).as_dict()
    leaking = evaluate({"linear": predictor}, batches, traces.view).as_dict()
    command = ["eval", str(traces.folder), "--predictor", str(made.checkpoint)]
    found = ran(tmp_path, "", *command)
    tokens = sum(each.tokens for each in traces.documents if each.index in seen)
    assert found["left_out"] == {"documents": len(seen), "tokens": tokens}
    assert found["tokens"] == honest["tokens"] == traces.token_count() - tokens
    assert tokens > 0
    recall = found["recall_at_k"]["linear"]
    assert recall["per_layer"] == pytest.approx(honest["recall_at_k"]["linear"]["per_layer"])
    assert recall["mean"] != leaking["recall_at_k"]["linear"]["mean"]
    printed = capsys.readouterr().out
    assert f"scored on split 'all', {found['tokens']} tokens; {len(seen)} document(s) of {tokens:,} tokens" in printed


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_scores_are_printed_and_saved_before_what_may_fail(
    made: Made,
    more: TraceDataset,
    tiny_folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And a text without a window is refused before anything is scored."""
    command = ["eval", str(more.folder), "--predictor", "next_norm"]
    model = ["--model", tiny_folder, "--data", REFERENCE]
    with monkeypatch.context() as patched:
        patched.setattr("expertcast.commands.eval.scores_ahead", None)
        assert main([*command, *model, "--window", "9999"]) == 2
    assert "no text has 9999 tokens" in capsys.readouterr().err
    found = tmp_path / "found.json"
    with monkeypatch.context() as patched:
        patched.setattr("expertcast.commands.eval.forecast_quality", _interrupted)
        assert main([*command, *model, "--window", "32", "--json", str(found)]) == 130
    assert json.loads(found.read_text())["recall_at_k"].keys() == {"next_norm"}
    assert "scored on split" in capsys.readouterr().out


def test_a_checkpoint_of_other_traces_is_not_replaced(
    made: Made, more: TraceDataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "checkpoint"
    shutil.copytree(made.checkpoint, out)
    train = ["--predictor", "next_norm", "--out", str(out)]
    assert f"{out} is a checkpoint of other traces" in fails(capsys, "train", str(more.folder), *train)
    assert main(["train", str(made.traces), *train]) == 0
    (out / files.METRICS).write_text("{")
    assert main(["train", str(more.folder), *train]) == 0, "a damaged checkpoint may be replaced"


def test_a_folder_with_a_predictors_name_is_not_the_predictor(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made.checkpoint, tmp_path / "next_norm")
    (tmp_path / "router_input").mkdir()  # no checkpoint, so that the name is the predictor's
    traces, refused = (str(made.traces), "'next_norm' is a predictor and also a checkpoint folder: use ./next_norm")
    generate = ["generate", "reference", "--prompt", "It is", "--new-tokens", "1", "--predictor"]
    assert refused in fails(capsys, "eval", traces, "--predictor", "next_norm")
    assert refused in fails(capsys, *generate, "next_norm")
    assert refused in fails(capsys, "simulate", traces, "--predictor", "next_norm")
    assert refused in fails(capsys, "bench", "reference", "--predictor", "next_norm")
    evaluate = ["eval", traces, "--ahead", "2", "--predictor", "./next_norm", "router_input"]
    assert set(ran(tmp_path, "", *evaluate)["recall_at_k"]) == {"linear", "router_input"}
    assert main([*generate, "router_input"]) == 0


def test_every_distance_is_scored(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own traces leave a checkpoint their test split: eval gives the numbers of training."""
    for scores in (made.metrics, made.metrics["validation"]):
        assert scores["ahead"] == 1
        assert list(scores["further"]) == ["2"]
        assert scores["further"]["2"]["targets"] == scores["targets"][1:]
        further, near = (each["recall_at_k"]["linear"]["mean"] for each in (scores["further"]["2"], scores))
        assert 0.1 < further < near
    command = ["eval", str(made.traces), "--predictor", str(made.checkpoint)]
    found = ran(tmp_path, "", *command, "--ahead", "2", "1")
    printed = capsys.readouterr().out
    assert printed.index("1 layer ahead\n") < printed.index("2 layers ahead\n")
    for distance, trained in ((found, made.metrics), (found["further"]["2"], made.metrics["further"]["2"])):
        assert distance["recall_at_k"] == trained["recall_at_k"]
        assert distance["tokens"] == trained["tokens"]
    assert "forecasts [1, 2] layers ahead, not 3" in fails(capsys, *command, "--ahead", "1", "3")


def test_nothing_left_is_refused(
    made: Made, tiny_folder: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    traces, checkpoint = str(made.traces), str(made.checkpoint)
    line = "linear learned from every document of split 'train': score another split"
    assert line in fails(capsys, "eval", traces, "--predictor", checkpoint, "--split", "train")
    simulate = ["simulate", traces, "--predictor", checkpoint, "--split", "train", "--processes", "1"]
    assert "learned from every document of split 'train'" in fails(capsys, *simulate)
    pq.write_table(pa.table({"text": sorted(made.learned)}), tmp_path / "seen.parquet")
    quality = ["--model", tiny_folder, "--data", str(tmp_path / "seen.parquet")]
    assert main(["eval", traces, "--predictor", checkpoint, *quality]) == 2
    assert "linear learned from every document of the text" in capsys.readouterr().err


def test_text_that_was_learned_from_measures_no_quality(made: Made, tiny_folder: str, tmp_path: Path) -> None:
    """Executed forecasts are measured on a text as on its unseen documents alone."""
    unseen = [each.text for each in load_documents("reference") if each.text.strip() not in made.learned][:3]
    pq.write_table(pa.table({"text": unseen}), tmp_path / "unseen.parquet")
    pq.write_table(pa.table({"text": [*made.learned, *unseen]}), tmp_path / "both.parquet")
    command = ["eval", str(made.traces), "--predictor", str(made.checkpoint), "--model", tiny_folder]
    runs = []
    for name in ("unseen", "both"):
        text = ["--data", str(tmp_path / f"{name}.parquet"), "--quality-tokens", "128"]
        runs.append(ran(tmp_path, "", *command, *text)["quality"]["runs"])
    assert runs[0] == runs[1]
    simulate = ["simulate", str(made.traces), "--predictor", str(made.checkpoint), "--split", "all", "--tokens", "120"]
    lossy = ["--miss", "drop", "--model", tiny_folder, "--quality-tokens", "64", "--processes", "1"]
    rows = []
    for name in ("unseen", "both"):
        found = ran(tmp_path, "", *simulate, *lossy, "--data", tmp_path / f"{name}.parquet")
        rows.append([{key: row[key] for key in ("perplexity", "agreement", "kl")} for row in found["results"]])
        assert found["left_out"]["documents"] > 0
    assert rows[0] == rows[1]


@pytest.fixture(scope="module")
def fitted(more: TraceDataset) -> dict[str, Predictor]:
    """Two predictors, one fitted on the documents of the validation split, the other on those of the test split."""
    fitted = {}
    for split in ("validation", "test"):
        source = copy.copy(more)
        own = {each.index for each in more.documents if each.split == split}
        source.documents = [replace(each, split="train") for each in more.documents if each.index in own]
        fitted[split] = FITTERS["frequency"](source, PredictorConfig(), FitOptions()).predictor.bind(source.view)
    return fitted


def test_validation_chooses_what_hybrid_execution_is_measured_with(
    fitted: dict[str, Predictor], tiny_folder: str, more: TraceDataset
) -> None:
    recall = evaluate(fitted, more.batches("test", 4096), more.view).as_dict()["recall_at_k"]
    assert recall["test"]["mean"] > recall["validation"]["mean"]
    chosen = best_on_validation(fitted, more, 1)
    options = QualityOptions(quality_tokens=128, window=32)
    windows = quality_windows(options, tiny_folder, fitted, more)
    assert {each.shape[1] for each in windows.values()} == {32}
    found = forecast_quality(options, tiny_folder, fitted, 1, more, chosen, windows)
    assert [name for name in found["runs"] if "hybrid" in name] == ["hybrid execution of validation"]


def test_a_report_marks_what_validation_chose(fitted: dict[str, Predictor], more: TraceDataset, tmp_path: Path) -> None:
    """Not what is best on the test split, of which the report is."""
    view, config = more.view, HybridConfig(candidates=["frequency"])
    hybrid = select_hybrid({"frequency": fitted["validation"]}, more, config, FitOptions()).predictor
    save_predictor(hybrid, tmp_path / "validation", view=view)
    save_predictor(fitted["test"], tmp_path / "test", view=view)
    command = ["eval", str(more.folder), "--split", "test", "--report", str(tmp_path / "report")]
    assert main([*command, "--predictor", str(tmp_path / "test"), str(tmp_path / "validation")]) == 0
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    recall = report["evaluation"]["recall_at_k"]
    assert recall["frequency"]["mean"] > recall["hybrid"]["mean"]
    assert report["chosen"] == "hybrid"


def test_several_predictors_and_nothing_to_choose_by(fitted: dict[str, Predictor], made: Made) -> None:
    traces = TraceDataset.open(made.traces)
    traces.documents = [each for each in traces.documents if each.split != "validation"]
    assert best_on_validation({"one": fitted["test"]}, traces, 1) == ("one", [])
    with pytest.raises(ExpertcastError, match="the validation split is empty"):
        best_on_validation(fitted, traces, 1)


def test_online_training_runs_no_more_text_than_asked(
    tiny_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", tiny_folder, "--data", REFERENCE, "--tokens", "600", "--early-rank", "none", *RUN]
    result = tmp_path / "result.json"
    assert main([*command, "--predictor", "router_input", "--out", str(tmp_path / "made"), "--json", str(result)]) == 0
    splits = json.loads(result.read_text())["data"]["splits"]
    assert sum(splits.values()) == 600
    counts = ", ".join(f"{tokens:,} {split}" for split, tokens in splits.items())
    assert f" runs over 600 tokens of text ({counts})" in capsys.readouterr().err


def test_prompts_are_not_what_the_predictor_learned_from(reference_view: MoEView, tmp_path: Path) -> None:
    """bench and advise run the bundled text, from its first document that the checkpoints do not know."""
    documents, tokenizer = load_documents(REFERENCE), load_tokenizer(REFERENCE)
    predictor = QuasiHidden(PredictorConfig(), reference_view.shape)
    predictor.learned_from = frozenset(document.hash for document in documents[:2])
    save_predictor(predictor, tmp_path / "first", view=reference_view)
    ids = tokenizer(documents[2].text, verbose=False)["input_ids"][:40]
    words = ["advise", REFERENCE, "--predictor", str(tmp_path / "first")]
    options = read_options(advise.Options, build_parser().parse_args(words))
    found = Target.load(options).prompt(40)
    assert found.tolist() == [ids]


def test_text_that_is_cut_anyway_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """The bundled documents are longer than the tokenizer's `model_max_length`."""
    logger = logging.getLogger("transformers")
    texts = [document.text for document in load_documents(REFERENCE)[1:4]]

    def fresh() -> Any:  # a tokenizer warns once
        return load_tokenizer(REFERENCE)

    level = logger.level
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.WARNING)
    try:
        fresh()(texts[0])
        assert "longer than the specified maximum" in caplog.text
        caplog.clear()
        bundled_ids(fresh(), 3000)
        text_windows(fresh(), texts, length=64, count=8)
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(level)
    assert "longer than" not in caplog.text
