"""The README's commands run as they are written, on the bundled model and little text."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from expertcast.cli import main

ROOT = Path(__file__).resolve().parents[2]
ROUTING = str(ROOT / "benchmarks" / "routing" / "gpt-oss-120b-k2.parquet")
STAND_INS = {
    "Qwen/Qwen3-30B-A3B": "reference", "MODEL": "reference", "200000": "6000", "1024": "256",
    "qwen3-30b-a3b": "reference", "8": "2", "ROUTING.parquet": ROUTING,
}  # fmt: skip
FEW_TOKENS = ["--prompt-tokens", "8", "--new-tokens", "4", "--repetitions", "1", "--slots", "96"]
SMALLER = {"estimator": ["parameters=80000"], "next_token": ["width=32"]}


def readme_lines() -> list[str]:
    """What stands behind `expertcast` in the README, but for what needs a hub or serves: `tests/hub` and
    `tests/runtime/serving` run these."""
    lines = re.findall(r"^    expertcast (.*)$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    return [line for line in lines if " user/" not in line and not line.startswith("serve ")]


def shortened(line: str) -> list[str]:
    """A command with what this machine has in place of names, over fewer tokens and steps."""
    command = [STAND_INS.get(word, word) for word in shlex.split(line)]
    if ROUTING in command:
        return command
    short = command + {"bench": FEW_TOKENS, "advise": FEW_TOKENS[:4]}.get(command[0], [])
    if command[0] == "train":
        predictor = command[command.index("--predictor") + 1]
        short += ["--set", "steps=8", "step_tokens=128", *SMALLER[predictor]]
    if command[0] == "simulate":
        short += ["--tokens", "300", "--quality-tokens", "40"]
    return short


def write_texts(folder: Path) -> None:
    """The files that the commands read: several domains, small enough to run online."""
    rows = pq.read_table(ROOT / "checkpoints" / "reference" / "text" / "test.parquet")
    for first, name in enumerate(("my.parquet", "other.parquet")):
        pq.write_table(rows.take(list(range(first, len(rows), len(rows) // 10))), folder / name)


@pytest.mark.slow
def test_readme_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)
    lines = readme_lines()
    assert "collect MODEL --data my.parquet --tokens 200000 --out traces" in lines
    commands = [shortened(line) for line in lines]
    assert {command[0] for command in commands} == {
        "inspect", "collect", "train", "eval", "store", "generate", "advise", "bench", "simulate"
    }  # fmt: skip
    for command in commands:
        assert main(command) == 0, command
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
