"""The newcomer's script: every tool whose package is here, on the bundled model; its table, page and exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    yield
    torch.compiler.reset()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("function", "packages"),
    [
        ("generation.text_pipeline", ()),
        ("generation.streamers", ()),
        ("generation.beams", ()),
        ("generation.sampling", ()),
        ("generation.assisted", ()),
        ("packages.peft_lora", ("peft",)),
        ("packages.trainer_evaluate", ("accelerate",)),
        ("packages.torchao_int8", ("torchao",)),
        ("packages.server", ("fastapi", "uvicorn", "openai")),
    ],
)
def test_a_tool_takes_either(
    function: str, packages: tuple[str, ...], reference_model: PreTrainedModel, reference_tokenizer: Any
) -> None:
    for name in packages:
        pytest.importorskip(name)
    import importlib

    from newcomer_steps.world import EITHER, World

    module, _, name = function.partition(".")
    tool = getattr(importlib.import_module(f"newcomer_steps.{module}"), name)
    side = reference_tokenizer.padding_side
    try:
        found = tool(World(model=reference_model, tokenizer=reference_tokenizer, new_tokens=3))
    finally:
        reference_tokenizer.padding_side = side
    assert found.takes == EITHER
    assert found.identical


def test_what_a_tool_does_wrong_is_seen(reference_model: PreTrainedModel, reference_tokenizer: Any) -> None:
    from newcomer_steps.world import EITHER, MODEL_ONLY, World

    from expertcast.predictors import ExpertcastError

    world, ids = World(model=reference_model, tokenizer=reference_tokenizer), torch.tensor([[5, 6]])
    calls = iter(range(9))
    other = world.compare(lambda model: (model(ids).logits, next(calls)))
    assert (other.takes, other.identical) == (EITHER, False)

    def only_the_model(model: Any) -> torch.Tensor:
        if type(model) is not type(reference_model):
            raise TypeError("no model\nof mine")
        return model(ids).logits

    found = world.compare(only_the_model)
    assert (found.takes, found.identical) == (MODEL_ONLY, True)
    assert found.note == "on `offloaded`: TypeError: no model"
    with pytest.raises(ExpertcastError, match="never ran an offloaded layer"):
        world.compare(lambda _model: 1)


@pytest.mark.slow
def test_the_script(tmp_path: Path) -> None:
    """As it is started: a child per tool, the table, the file and the page."""
    page, out = tmp_path / "page.md", tmp_path / "found.json"
    page.write_text("# Page\n\n<!-- tools -->\n<!-- end of tools -->\n\nThe end.\n")
    command = [str(ROOT / "scripts" / "newcomer.sh"), "--skip-install", "--small", "--no-commands"]
    environment = {**os.environ, "PYTHON": sys.executable}
    own = [*command, "--only", "sampling", "--out", str(out), "--report", str(page)]
    done = subprocess.run(own, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["tools"]
    assert (row["name"], row["works"], row["identical"]) == ("sampling", True, True)
    assert "| sampling | yes, on `offloaded` or `offloaded.model` | yes |" in done.stdout
    assert page.read_text().startswith("# Page\n\n<!-- tools -->\n\n| tool | takes | same as resident | note |\n")
    assert page.read_text().endswith("<!-- end of tools -->\n\nThe end.\n")


def test_a_tool_out_of_time_is_ended() -> None:
    from newcomer_steps.rows import TOOLS, try_tool

    row = try_tool(TOOLS[0], small=True, limit_s=0.2)
    assert (row.works, row.note) == (False, "not done in 0.2 s")


def test_commands_are_the_readmes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is run, and a failing one is a row with its last line; none that needs a hub is among them."""
    from newcomer_steps import readme, rows

    lines = readme.readme_lines()
    assert "collect MODEL --data my.parquet --tokens 200000 --out traces" in lines
    assert not any(line.startswith(("push", "pull")) or "user/" in line for line in lines)
    monkeypatch.setattr(rows, "readme_lines", lambda: ["nothing here"])
    (failed,) = rows.try_commands(tmp_path, small=True)
    assert (failed.name, failed.works) == ("expertcast nothing here", False)
    assert failed.note.startswith("expertcast: ")
    assert "'nothing'" in failed.note
    assert (tmp_path / "my.parquet").is_file()


def test_the_page_says_what_was_tried(tmp_path: Path) -> None:
    from newcomer_steps import report
    from newcomer_steps.rows import Row

    works = Row(name="one", works=True, takes="either", identical=True, seconds=2.0, note="a | b")
    rows = [works, Row(name="two", works=False, identical=False), Row(name="three", note="x not installed")]
    commands = [Row(name="four", works=True), Row(name="five", works=False), Row(name="six", note="needs a hub")]
    result = {
        "date": "2026-01-02", "versions": {"torch": "2"},
        "tools": [row.as_dict() for row in rows], "commands": [row.as_dict() for row in commands],
    }  # fmt: skip
    said = report.ecosystem(result).splitlines()
    assert said[2:] == [
        "| one | either | yes | a \\| b |", "", "1 of 2 commands of this page ran from the wheel; torch 2 (2026-01-02)."
    ]  # fmt: skip
    whole = report.everything(result)
    assert "| two | **no** | **no** | 0 |  |" in whole
    assert "| three | not tried |  | 0 | x not installed |" in whole
    assert "of this page" not in report.ecosystem({**result, "commands": []})


def test_a_page_without_marks_is_refused(tmp_path: Path) -> None:
    from newcomer_steps import report

    from expertcast.predictors import ExpertcastError

    with pytest.raises(ExpertcastError, match="no line <!-- tools --> with a line"):
        report.write({"tools": [], "commands": [], "versions": {}, "date": ""}, tmp_path / "page.md")
