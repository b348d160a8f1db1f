"""Stages that take long say how far they are: through the real commands, as if three seconds were none."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import PreTrainedModel

from expertcast.cli import main
from expertcast.commands import inspect
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError
from expertcast.predictors import messages as progress
from expertcast.predictors.messages import Progress, with_token_progress
from expertcast.runtime.benchmarking.bench import decode_greedily
from tests.package.conftest import RUN

TEXT = Path(__file__).resolve().parents[2] / "checkpoints" / "reference" / "text" / "test.parquet"
TINY = ["--set", "steps=6", "step_tokens=64", "width=8", "patience=6"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The beginnings of some bundled documents."""
    rows = pq.read_table(TEXT, columns=["text"])["text"].to_pylist()
    path = tmp_path_factory.mktemp("text") / "my.jsonl"
    path.write_text("".join(json.dumps({"text": row[:200]}) + "\n" for row in rows[:20]))
    return str(path)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "DELAY_S", 0.0)
    monkeypatch.setattr(progress, "LOG_S", 0.0)


def stages(printed: str) -> dict[str, str]:
    """What each stage's bar showed last, by its name."""
    bars = re.split(r"[\r\n]+", printed)
    return {bar.rpartition(": ")[0]: bar for bar in bars if "|" in bar}


def test_training_online(capsys: pytest.CaptureFixture[str], text: str, tiny_folder: str, tmp_path: Path) -> None:
    command = ["train", tiny_folder, "--data", text, *RUN, "--predictor", "estimator", *TINY]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().err
    cost, begun = (printed.index(what) for what in ("estimator: at most about 1 minute", "estimator: sums of"))
    assert cost < begun
    assert re.search(r" minute .*, [\d.]+ .B of memory .*, and [\d.]+ .B of checkpoint", printed)
    found = stages(printed)
    for stage in (
        "default vectors", "stand-in for early attention: maps",
        "estimator: sums of 3 layer pairs", "estimator: solving 3 layer pairs",
        "estimator: choosing strengths, 1 ahead", "calibrating",
        "scoring on split 'validation'", "scoring on split 'test'",
    ):  # fmt: skip
        assert "100%" in found[stage], stage
    assert re.search(r"100%.* 6/6 .*recall 0\.\d{4}", found["training ahead1"])
    assert not any("Epoch" in stage for stage in found)


def test_evaluation_and_simulation(
    capsys: pytest.CaptureFixture[str], text: str, tiny_folder: str, tmp_path: Path
) -> None:
    traces = str(tmp_path / "traces")
    collect = ["collect", tiny_folder, "--data", text, *RUN, "--tokens", "600", "--early-rank", "none", "--out", traces]
    assert main(collect) == 0
    assert "100%" in stages(capsys.readouterr().err)["collecting"]
    quality = ["--model", tiny_folder, "--data", "reference", "--quality-tokens", "64"]
    assert main(["eval", traces, "--predictor", "frequency", *quality]) == 0
    found = stages(capsys.readouterr().err)
    tokens = TraceDataset.open(Path(traces)).token_count("test")
    assert f"{tokens}/{tokens}" in found["scoring on split 'test'"].replace(".0", "")
    assert "frequency: counting" in found
    assert "100%" in found["executing forecasts"]
    options = ["--tokens", "60", "--processes", "1", "--miss", "fetch", "drop", *quality]
    assert main(["simulate", traces, *options]) == 0
    found = stages(capsys.readouterr().err)
    assert "2/2" in found["simulating"]
    assert "100%" in found["reading the routing"]
    assert "100%" in found["decoding with policies"]


def test_decoding(capsys: pytest.CaptureFixture[str], reference_model: PreTrainedModel) -> None:
    """As every run of bench and advise decodes."""
    decode_greedily(reference_model, torch.ones(1, 4).long(), 3)
    assert "3.00/3.00" in stages(capsys.readouterr().err)["decoding"]


def test_packing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["store", "reference", "--store-folder", str(tmp_path / "store")]) == 0
    found = stages(capsys.readouterr().err)
    assert "12/12" in found["loading experts"]
    assert "packing experts" not in found  # once is enough


def test_an_error_within_a_stage_has_its_own_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_options: object) -> None:
        batches = with_token_progress([[0], [0]], "stage", 2)  # the traceback holds it, and its bar
        for _batch in batches:
            raise ExpertcastError("broken")

    monkeypatch.setattr(inspect, "run", fail)
    assert main(["inspect", "reference"]) == 2
    assert re.split(r"[\r\n]+", capsys.readouterr().err)[-2:] == ["expertcast: broken", ""]


def test_short_stages_and_other_ranks_show_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(**options: bool) -> str:
        assert list(with_token_progress([[0] * 3, [0] * 2], "reading", 5, **options)) == [[0] * 3, [0] * 2]
        return capsys.readouterr().err

    assert "5.00/5.00" in run()
    assert run(shown=False) == ""
    monkeypatch.setenv("RANK", "1")
    assert run() == ""
    monkeypatch.delenv("RANK")
    monkeypatch.setattr(progress, "DELAY_S", 60.0)
    assert run() == ""


def test_a_stage_ends_with_a_line_where_nothing_was_shown_before(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a log: no update came in the minute between two lines, and the stage took long."""
    monkeypatch.setattr(progress, "DELAY_S", 3.0)
    monkeypatch.setattr(progress, "LOG_S", 60.0)
    with Progress("stage", total=2, unit="run") as bar:
        bar.update(2)
        bar.start_t -= 4
    said = capsys.readouterr().err
    assert said.count("stage") == 1
    assert said.endswith("\n")


def test_a_stage_is_shown_before_its_first_step_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A forward of a model larger than memory takes minutes."""
    monkeypatch.setattr(progress, "DELAY_S", 0.01)
    said = ""
    with Progress("stage", total=2, unit="run"):
        for _ in range(1000):
            if said := said + capsys.readouterr().err:
                break
            time.sleep(0.01)
    assert "stage:   0%" in said
    assert "0/2" in said


def test_an_interrupted_constructor_leaves_a_bar_that_closes() -> None:
    """The collector closes what `__new__` has made, and would print the error of a missing attribute."""
    Progress.__new__(Progress).close()
