"""The newcomer's script: every tool whose package is here, on the bundled model; its result and exit status."""

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
from scripts import newcomer
from scripts.newcomer import EITHER, MODEL_ONLY, TOOLS, World, try_tool
from transformers import PreTrainedModel

from expertcast.predictors import ExpertcastError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _reset() -> Iterator[None]:
    yield
    torch.compiler.reset()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("function", "packages"),
    [
        ("text_pipeline", ()),
        ("streamers", ()),
        ("beams", ()),
        ("sampling", ()),
        ("assisted", ()),
        ("peft_lora", ("peft",)),
        ("trainer_evaluate", ("accelerate",)),
        ("torchao_int8", ("torchao",)),
        ("server", ("fastapi", "uvicorn", "openai")),
    ],
)
def test_a_tool_takes_either(
    function: str, packages: tuple[str, ...], reference_model: PreTrainedModel, reference_tokenizer: Any
) -> None:
    for name in packages:
        pytest.importorskip(name)
    side = reference_tokenizer.padding_side
    try:
        found = getattr(newcomer, function)(World(model=reference_model, tokenizer=reference_tokenizer, new_tokens=3))
    finally:
        reference_tokenizer.padding_side = side
    assert found.takes == EITHER
    assert found.identical


def test_what_a_tool_does_wrong_is_seen(reference_model: PreTrainedModel, reference_tokenizer: Any) -> None:
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
    """As it is started: a child per tool, and the file."""
    out = tmp_path / "found.json"
    command = [str(ROOT / "scripts" / "newcomer.sh"), "--skip-install", "--small", "--no-commands"]
    environment = {**os.environ, "PYTHON": sys.executable}
    own = [*command, "--only", "sampling", "--out", str(out)]
    done = subprocess.run(own, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["tools"]
    assert (row["name"], row["works"], row["identical"]) == ("sampling", True, True)


def test_a_tool_out_of_time_is_ended() -> None:
    row = try_tool(TOOLS[0], small=True, limit_s=0.2)
    assert (row.works, row.note) == (False, "not done in 0.2 s")


def test_commands_are_the_readmes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is run, and a failing one is a row with its last line; none that needs a hub is among them."""
    lines = newcomer.readme_lines()
    assert "collect MODEL --data my.parquet --tokens 200000 --out traces" in lines
    assert not any(line.startswith(("push", "pull")) or "user/" in line for line in lines)
    monkeypatch.setattr(newcomer, "readme_lines", lambda: ["nothing here"])
    (failed,) = newcomer.try_commands(tmp_path, small=True)
    assert (failed.name, failed.works) == ("expertcast nothing here", False)
    assert failed.note.startswith("expertcast: ")
    assert "'nothing'" in failed.note
    assert (tmp_path / "my.parquet").is_file()
