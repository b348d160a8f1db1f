"""The README's commands, as they are written, on the bundled model and little text."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT / "checkpoints" / "reference" / "text" / "test.parquet"
ROUTING = str(ROOT / "benchmarks" / "routing" / "gpt-oss-120b-k2.parquet")
STAND_INS = {
    "Qwen/Qwen3-30B-A3B": "reference",
    "MODEL": "reference",
    "200000": "6000",
    "1024": "256",
    "qwen3-30b-a3b": "reference",
    "8": "2",
    "ROUTING.parquet": ROUTING,
}
FEW_TOKENS = ["--prompt-tokens", "8", "--new-tokens", "4", "--repetitions", "1", "--slots", "96"]
SHORT = ["--set", "steps=8", "step_tokens=128"]
"""Fewer steps than a user would take; the rest of each command is the README's."""
SMALLER = {"estimator": ["parameters=80000"], "next_token": ["width=32"]}
HUB = " user/"
"""In commands that need a hub."""
SERVE = "serve "
"""A command that does not end by itself; the tests of serving run it."""


def readme_lines() -> list[str]:
    """What stands behind `expertcast` in the README, but for what needs a hub or serves: `tests/hub`
    and `tests/runtime/serving` run these."""
    lines = re.findall(r"^    expertcast (.*)$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    return [line for line in lines if HUB not in line and not line.startswith(SERVE)]


def words_of(line: str) -> list[str]:
    """A command with what this machine has in place of names."""
    return [STAND_INS.get(word, word) for word in shlex.split(line)]


def shortened(command: list[str]) -> list[str]:
    """The same command over fewer tokens and steps."""
    if ROUTING in command:
        return command
    short = command + {"bench": FEW_TOKENS, "advise": FEW_TOKENS[:4]}.get(command[0], [])
    if command[0] == "train":
        short += [*SHORT, *SMALLER[command[command.index("--predictor") + 1]]]
    if command[0] == "simulate":
        short += ["--tokens", "300", "--quality-tokens", "40"]
    return short


def write_texts(folder: Path) -> None:
    """The files that the commands read: several domains, small enough to run online."""
    rows = pq.read_table(TEXT)
    for first, name in enumerate(("my.parquet", "other.parquet")):
        pq.write_table(rows.take(list(range(first, len(rows), len(rows) // 10))), folder / name)
