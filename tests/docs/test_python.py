"""docs/python.md, the tutorials and the docstrings' examples run as written; wrong predictor names give one line."""

from __future__ import annotations

import doctest
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks.life_size_files import qwen3, write

import expertcast
from expertcast.cli import main
from expertcast.predictors.base import PREDICTORS
from expertcast.training.fit import fit
from tests.pages import ROOT, TUTORIALS, run_tutorial, tutorials

BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "python.md").read_text(), flags=re.MULTILINE | re.DOTALL)


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in BLOCKS:
        exec(block.replace("20_000", "3_000"), names)
    assert names["scores"].recall("linear") > 0.5


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_code_runs_on_a_gguf_file(page: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "Q4_0", qwen3(2, small=True))
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(block.replace("MODEL", str(path)).replace('"checkpoint"', '"next_norm"'), names)
    assert names["offloaded"].stats.as_dict()["requests"] > 0


VARYING = ("advice", "- ", "TPOT ms: ", "forecasts of ", "use ", "git_revision", '{"status"', "It is a truth")
"""Beginnings of lines whose words follow timings, the processor's arithmetic, the checkout or random names."""


def words_of(output: str) -> set[str]:
    """Return the words of a tutorial's output, without numbers and what is cut off at the line's end."""
    lines = [line for line in output.splitlines() if not line.startswith(VARYING)]
    return set(re.findall(r"(?<![\w.])[A-Za-z_]{3,}(?!\w|\.\.\.)", "\n".join(lines)))


@pytest.mark.slow
@pytest.mark.parametrize("name", tutorials())
def test_tutorials_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PREDICTORS, "_classes", dict(PREDICTORS._classes))
    page = run_tutorial(name, tmp_path)
    recorded = (TUTORIALS / f"{name}.md").read_text()
    shown, printed = (re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL) for text in (recorded, page))
    assert len(shown) == len(printed) > 0
    for old, new in zip(shown, printed, strict=True):
        assert words_of(old) <= words_of(new)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "no_such:Predictor",
            "cannot import predictor no_such:Predictor (ModuleNotFoundError: No module named 'no_such')",
        ),
        ("json:JSONDecoder", "json:JSONDecoder is no subclass of expertcast.Predictor"),
    ],
)
def test_what_is_no_predictor(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", "nowhere", "--predictor", word, "--out", "checkpoint"])
    assert message in capsys.readouterr().err


def test_a_module_that_changes_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Paths of the command line stay those of the folder in which it runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moves.py").write_text("import os\nos.chdir('/')\nPredictor = None\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit, match="2"):
        main(["train", "nowhere", "--predictor", "moves:Predictor", "--out", "checkpoint"])
    assert "moves:Predictor is no subclass" in capsys.readouterr().err
    assert Path.cwd() == tmp_path


def test_names_for_a_session() -> None:
    """Tab completion shows what matters, and each of it says what it is."""
    assert len(expertcast.__all__) <= 17
    for name in set(expertcast.__all__) - {"__version__"}:
        assert getattr(expertcast, name).__doc__, name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the `traces` and the `checkpoint` that examples open; `collect` then finds its traces complete."""
    from expertcast.data.models import load_model, load_tokenizer

    folder = tmp_path_factory.mktemp("examples")
    model, tokenizer = load_model("reference"), load_tokenizer("reference")
    documents = expertcast.load_documents("reference")
    traces = expertcast.collect(model, tokenizer, documents, folder / "traces", tokens=600, early_rank=None)
    expertcast.save_predictor(fit("quasi_hidden", traces).predictor, folder / "checkpoint", view=traces.view)
    return folder


@pytest.mark.parametrize("name", [name for name in expertcast.__all__ if not name.startswith("_")])
def test_example(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(PREDICTORS, "_classes", dict(PREDICTORS._classes))
    text = inspect.getdoc(getattr(expertcast, name)) or ""
    assert ">>> import expertcast" in text
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False).run(test, out=report.append)
    assert not report, "".join(report)
