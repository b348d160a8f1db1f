"""What commands make of a user's text: one long file, documents that were learned from, tokenizers' limits."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from expertcast.checkpoints.bundled import REFERENCE
from expertcast.checkpoints.checkpoint import save_predictor
from expertcast.cli import build_parser, main
from expertcast.commands import advise
from expertcast.commands.bench_target import Target
from expertcast.commands.options import read_options
from expertcast.data.models import load_tokenizer
from expertcast.data.text import bundled_ids, load_documents
from expertcast.predictors import MoEView, PredictorConfig
from expertcast.predictors.baselines import QuasiHidden
from expertcast.runtime.quality.forecasts import text_windows


def test_one_txt_file_is_several_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line of text, without a blank line: cut by size, and the command says so."""
    text = " ".join(document.text.replace("\n", " ") for document in load_documents(REFERENCE)[:20])[:44_000]
    path, out = tmp_path / "book.txt", tmp_path / "traces"
    path.write_text(text)
    collect = ["collect", REFERENCE, "--data", str(path), "--out", str(out), "--early-rank", "none"]
    assert main([*collect, "--tokens", "600", "--window", "64"]) == 0
    documents = json.loads((out / "trace.json").read_text())["documents"]
    assert {document["split"] for document in documents} == {"train", "validation", "test"}
    said = [line for line in capsys.readouterr().err.splitlines() if "book.txt" in line]
    count = len(load_documents(path))
    assert said == [
        f"{path}: one text, cut into {count} documents of about 4000 characters (at blank lines where it has any)"
    ]
    assert count == 10
    with pytest.raises(SystemExit):
        main(["collect", "--help"])
    assert "documents of about 4000 characters" in " ".join(capsys.readouterr().out.split())


def test_online_training_runs_no_more_text_than_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", REFERENCE, "--data", REFERENCE, "--tokens", "600", "--window", "32", "--early-rank", "none"]
    result = tmp_path / "result.json"
    assert main([*command, "--predictor", "router_input", "--out", str(tmp_path / "made"), "--json", str(result)]) == 0
    splits = json.loads(result.read_text())["data"]["splits"]
    assert sum(splits.values()) == 600
    counts = ", ".join(f"{tokens:,} {split}" for split, tokens in splits.items())
    assert f"reference is run over 600 tokens of text in each pass ({counts})" in capsys.readouterr().err


def test_prompts_are_not_what_the_predictor_learned_from(reference_view: MoEView, tmp_path: Path) -> None:
    """bench and advise run the bundled text, from its first document that the checkpoints do not know."""
    documents, tokenizer = load_documents(REFERENCE), load_tokenizer(REFERENCE)
    for name, known in (("first", documents[:2]), ("others", documents[2:5])):
        predictor = QuasiHidden(PredictorConfig(), reference_view.shape)
        predictor.learned_from = frozenset(document.hash for document in known)
        save_predictor(predictor, tmp_path / name, view=reference_view)
    ids = tokenizer(documents[5].text, verbose=False)["input_ids"][:40]
    words = ["advise", REFERENCE, "--predictor", str(tmp_path / "first")]
    options = read_options(advise.Options, build_parser().parse_args(words))
    found = Target.load(options).prompt(40, str(tmp_path / "others"))
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
