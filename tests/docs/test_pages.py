"""Every command of a page is accepted by its parser; every block of Python runs here or in the test that is named."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import prometheus_client
import pytest
from benchmarks.life_size_files import qwen3, write
from transformers import PreTrainedModel

import expertcast
from expertcast import cli
from expertcast.data.traces import TraceDataset
from tests.pages import ROOT, blocks_of, commands_of

PAGES = [
    name
    for name in subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    if not name.startswith((".github/", "checkpoints/"))
]


class AcceptedError(Exception):
    """The words were parsed."""


@pytest.fixture
def parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsers end a program once they have accepted its words."""
    parse = argparse.ArgumentParser.parse_args

    def parse_args(self: argparse.ArgumentParser, *given: Any) -> NoReturn:
        parse(self, *given)
        raise AcceptedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    monkeypatch.setattr(sys, "argv", ["program"])
    monkeypatch.syspath_prepend(ROOT / "scripts")


@pytest.mark.usefixtures("parsing")
@pytest.mark.parametrize("page", PAGES)
def test_commands_are_accepted(page: str) -> None:
    for line in commands_of(page):
        words = shlex.split(re.sub(r"my_module:\w+", "next_norm", line.partition(" > ")[0]))
        with pytest.raises(AcceptedError):
            cli.build_parser(words[0]).parse_args(words)
    for line in commands_of(page, "python -m benchmarks"):
        name, *words = shlex.split(line)
        module = importlib.import_module("benchmarks.timed.__main__" if name == "timed" else f"benchmarks.{name}")
        with pytest.raises(AcceptedError):
            module.main(words)
    for name in ("fault_trials", "mutate_artefacts", "kill_commands", "soak"):
        for line in commands_of(page, f"python scripts/{name}.py"):
            with pytest.raises(AcceptedError):
                importlib.import_module(name).main(shlex.split(line))
    makefile = (ROOT / "Makefile").read_text()
    for line in commands_of(page, "make"):
        for target in line.split():
            assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


ELSEWHERE = {
    "README.md": "docs/test_python.py", "docs/quickstart.md": "docs/test_python.py",
    "docs/python.md": "docs/test_python.py", "docs/add-a-policy.md": "runtime/policies/test_recipe.py",
    "docs/add-a-predictor.md": "predictors/test_recipe.py", "docs/extending.md": "docs/test_architecture.py",
    "docs/serving.md": "runtime/serving/test_process.py",
}  # fmt: skip
"""Tests that run the Python of other pages, the tutorials aside."""
HERE = [
    f"docs/{name}.md"
    for name in ("drafts", "metrics", "offloading", "policies", "report", "routing-traces", "storage", "timed-device",
                 "tools")
]  # fmt: skip
STAND_INS = {
    '"MODEL"': '"reference"', '"Qwen/Qwen3-30B-A3B"': '"reference"', "Qwen3-30B-A3B-Q4_K_M.gguf": "model.gguf",
    "Qwen3-30B-A3B-Q4_0.gguf": "model.gguf", '"cuda"': '"cpu"', '"checkpoint"': '"next_norm"', "9400": "0",
    "slots=1024": "slots=384", "layers=12, warm_up=8, steps=6": "layers=2, warm_up=1, steps=2",
}  # fmt: skip
"""Stand-ins for names and numbers of the pages."""


def test_all_python_of_pages_is_run() -> None:
    found = {page for page in PAGES if blocks_of(page, "python") and not page.startswith("docs/tutorials/")}
    assert found == {*ELSEWHERE, *HERE}
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / "tests" / test).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("page", HERE)
def test_python_of_a_page_runs(
    page: str, reference_model: PreTrainedModel, reference_tokenizer: Any, reference_traces: TraceDataset,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prometheus_client, "REGISTRY", prometheus_client.CollectorRegistry())
    if page == "docs/tools.md":
        lm_eval = pytest.importorskip("lm_eval", reason="pip install '.[eval]'")
        monkeypatch.setattr(lm_eval, "simple_evaluate", lambda **given: given)
    write(tmp_path / "model.gguf", "Q4_0", qwen3(2, small=True))
    (tmp_path / "traces").symlink_to(reference_traces.folder)
    code = "\n".join(blocks_of(page, "python"))
    for name, stand_in in STAND_INS.items():
        code = code.replace(name, stand_in)
    names: dict[str, Any] = {
        "expertcast": expertcast, "model": reference_model, "tokenizer": reference_tokenizer,
        "traces": reference_traces, "fitted": expertcast.fit("linear", reference_traces) if "fitted" in code else None,
        "routed": np.zeros((5, 2, 4), np.int16),
        "prompt_ids": [1, 2], "inputs": reference_tokenizer("It is a truth", return_tensors="pt"),
    }  # fmt: skip
    with expertcast.load_offloaded("reference", slots=192) as names["offloaded"]:
        exec(code, names)
