"""The README's commands run as they are written, on the bundled model and little text."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from expertcast.cli import main

ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT / "checkpoints" / "reference" / "text" / "test.parquet"
ROUTING_FILE = ROOT / "benchmarks" / "routing" / "gpt-oss-120b-k2.parquet"
STAND_INS = {
    "Qwen/Qwen3-30B-A3B": "reference",
    "MODEL": "reference",
    "200000": "6000",
    "1024": "256",
    "qwen3-30b-a3b": "reference",
    "8": "2",
    "ROUTING.parquet": str(ROUTING_FILE),
}
ROUTING = str(ROUTING_FILE)
FEW_TOKENS = ["--prompt-tokens", "8", "--new-tokens", "4", "--repetitions", "1", "--slots", "96"]
SHORT = ["--set", "steps=8", "step_tokens=128"]
"""Fewer steps than a user would take; the rest of each command is the README's."""
SMALLER = {"estimator": ["parameters=80000"], "next_token": ["width=32"]}


def readme_commands() -> list[list[str]]:
    lines = re.findall(r"^    expertcast (.*)$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    return [[STAND_INS.get(word, word) for word in shlex.split(line)] for line in lines]


def test_readme_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = pq.read_table(TEXT)
    for first, name in enumerate(("my.parquet", "other.parquet")):
        few = rows.take(list(range(first, len(rows), len(rows) // 10)))  # several domains, small enough to run online
        pq.write_table(few, tmp_path / name)
    commands = readme_commands()
    assert {command[0] for command in commands} == {
        "inspect", "collect", "train", "eval", "store", "generate", "advise", "bench", "simulate"
    }  # fmt: skip
    for command in commands:
        short = command + {"bench": FEW_TOKENS, "advise": FEW_TOKENS[:4]}.get(command[0], [])
        if "--gpu" in command or ROUTING in command:
            short = command
        if command[0] == "train":
            short += [*SHORT, *SMALLER[command[command.index("--predictor") + 1]]]
        if command[0] == "simulate" and ROUTING not in command:
            short += ["--tokens", "300", "--quality-tokens", "40"]
        assert main(short) == 0, command
    assert (tmp_path / "report" / "index.html").is_file()
    assert (tmp_path / "steps.trace.json").is_file()
    assert (tmp_path / "sweep" / "hit_rate.png").is_file()
    assert list((tmp_path / "runs").rglob("events.out.tfevents*"))


def test_readme_names_make_targets_that_exist() -> None:
    targets = re.findall(r"^    make (\w+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    assert {"demo", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
