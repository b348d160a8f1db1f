"""The README's commands run as they are written, on the bundled model and little text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from scripts.newcomer import readme_lines, shortened, words_of, write_texts

from expertcast.cli import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_readme_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)
    commands = [words_of(line) for line in readme_lines()]
    assert {command[0] for command in commands} == {
        "inspect", "collect", "train", "eval", "store", "generate", "advise", "bench", "simulate"
    }  # fmt: skip
    for command in commands:
        assert main(shortened(command)) == 0, command
    assert (tmp_path / "report" / "index.html").is_file()
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert set(report["provenance"]["predictors"]) == set(report["evaluation"]["recall_at_k"])
    assert report["provenance"]["predictors"]["estimator"]["training"]["checkpoint"] == "checkpoint"
    assert all(len(each["text"]) == len(each["token_ids"]) for each in report["examples"]["passages"])
    assert (tmp_path / "steps.trace.json").is_file()
    assert (tmp_path / "sweep" / "hit_rate.png").is_file()
    assert list((tmp_path / "runs" / "evaluation" / "estimator_0").glob("events.out.tfevents*"))


def test_readme_names_make_targets_that_exist() -> None:
    targets = re.findall(r"^    make (\w+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert {"demo", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
