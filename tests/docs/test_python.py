"""docs/python.md: its blocks run one after another, and the command line takes the predictor that it writes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import expertcast
from expertcast.cli import main
from expertcast.predictors.base import PREDICTORS
from tests.pages import ROOT, commands_of

BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "python.md").read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def _no_registration_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(PREDICTORS, "_classes", dict(PREDICTORS._classes))
    yield
    sys.modules.pop("my_module", None)


@pytest.mark.usefixtures("_no_registration_stays")
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in BLOCKS:
        exec(block.replace("20_000", "3_000"), names)
    assert names["scores"].recall("linear") > names["scores"].recall("same_logits") > 0
    own = BLOCKS[-1].partition("\n\n\nsame =")[0]
    (tmp_path / "my_module.py").write_text(f"import expertcast\n{own}\n")
    PREDICTORS._classes.pop("same_logits")
    (command,) = commands_of("docs/python.md")
    capsys.readouterr()
    assert main(command.split()) == 0
    assert re.search(r"^same_logits +0\.\d+", capsys.readouterr().out, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("no_such:Predictor", "cannot import predictor 'no_such:Predictor': No module named 'no_such'"),
        ("json:JSONDecoder", "'json:JSONDecoder' is no subclass of expertcast.Predictor"),
    ],
)
def test_what_is_no_predictor(word: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "nowhere", "--predictor", word, "--out", "checkpoint"]) == 2
    assert message in capsys.readouterr().err


def test_names_for_a_session() -> None:
    """Tab completion shows what matters, and each of it says what it is."""
    assert len(expertcast.__all__) <= 16
    for name in set(expertcast.__all__) - {"__version__"}:
        assert getattr(expertcast, name).__doc__, name
