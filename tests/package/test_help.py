"""Options that are made from dataclasses, and `--help`: every name and every key that an option takes."""

from __future__ import annotations

import argparse
import json
import re
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest

from expertcast.cli import COMMANDS, FROZEN, main
from expertcast.commands.numbers import bandwidth
from expertcast.commands.options import Count, Fields, Given, Option, add_options, read_options
from expertcast.predictors import ExpertcastError, Predictor
from expertcast.predictors.base import PREDICTORS


def help_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    assert stop.value.code == 0
    return capsys.readouterr().out


def entry(said: str, name: str) -> str:
    """What follows a name at the start of a line, up to the next name."""
    found = re.search(rf"^  {re.escape(name)}(?=\s)(.*?)(?=^  \w|^\w|\Z)", said, flags=re.MULTILINE | re.DOTALL)
    assert found, name
    return found[1]


def test_what_is_registered_later_is_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class SameLogits(Predictor):
        """Takes this layer's logits for those of a later one. The rest is not shown."""

        name = "same_logits"

    monkeypatch.setitem(PREDICTORS._classes, SameLogits.name, SameLogits)
    assert "same_logits" not in help_of(capsys, monkeypatch, "eval", "--help")
    said = help_of(capsys, monkeypatch, "eval", "--help-all")
    assert " ".join(entry(said, "same_logits").split()) == "takes this layer's logits for those of a later one"


def test_the_frozen_command_line_is_that_of_the_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    made = runpy.run_path(str(FROZEN.resolve().parents[3] / "scripts" / "freeze_command_line.py"))["frozen"]()
    assert made == FROZEN.read_text(), "run python scripts/freeze_command_line.py"


def test_an_option_shows_the_same_choices_in_every_command() -> None:
    shown: dict[str, set[tuple[str, ...]]] = {}
    for command in json.loads(FROZEN.read_text()).values():
        for option in command["options"]:
            shown.setdefault(option["names"][-1], set()).add(tuple(option.get("choices", ())))
    del shown["--mode"]  # bench runs on demand too
    assert [name for name, choices in shown.items() if len(choices) > 1] == []


def test_help_and_refusals_do_not_wait_for_torch() -> None:
    refused = ["generate reference --promt x", "bench reference --bandwidth pcie9", "train traces"]
    code = (
        "import sys; from expertcast.cli import main\n"
        "for line in sys.argv[1:]:\n"
        "    try: main(line.split())\n"
        "    except SystemExit as stop: print('status', stop.code, *({'torch', 'transformers'} & set(sys.modules)))"
    )
    lines = ["--help", *(f"{name} --help" for name in COMMANDS), "generate --help-all", *refused]
    found = subprocess.run([sys.executable, "-c", code, *lines], capture_output=True, text=True, check=True)
    said = [line for line in found.stdout.splitlines() if line.startswith("status")]
    assert said == ["status 0"] * (2 + len(COMMANDS)) + ["status 2"] * len(refused)
    short, _, rest = found.stdout.partition("usage: expertcast generate")[2].partition("status 0")
    assert short.count("\n") < 100, "two screens"
    assert "half_life=" not in short
    assert "half_life=" in rest
    assert all(f"expertcast {name}" in found.stdout for name in COMMANDS)
    assert [line.split("see `")[1] for line in found.stderr.splitlines()] == [
        f"expertcast {name} --help`" for name in ("generate", "bench", "train")
    ]


@dataclass(frozen=True, kw_only=True)
class Inner:
    speed: float = 2.5
    """How fast it goes, at 100%."""
    unseen: int = 7
    """No option sets it."""

    def __post_init__(self) -> None:
        if self.speed < 0:
            raise ExpertcastError(f"speed={self.speed}: must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class Base:
    seed: int = 0
    """Order of tokens (default: none)."""


@dataclass(frozen=True, kw_only=True)
class Outer(Base):
    target: Annotated[str, Option(positional=True, metavar="TARGET")]
    """What to look at."""
    out: Annotated[Path, Option(metavar="DIR")]
    """IDs are written there."""
    counts: tuple[Count, ...] = (1, 2)
    """How many."""
    most: Count | None = None
    """At most so many."""
    words: Annotated[tuple[str, ...], Option(flag="--say", choices=("a", "b"))] = ()
    """What is said."""
    quick: bool = False
    """Leave things out."""
    link: Annotated[float | None, Option(read=bandwidth)] = None
    """Bytes per second."""
    inner: Annotated[Inner, Fields(speed=Option(metavar="S"))]
    """How it is run."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="it", exit_on_error=False)
    add_options(made, Outer)
    return made


def parse(*words: str) -> Outer:
    return read_options(Outer, parser().parse_args(words))


def test_defaults_and_values() -> None:
    assert parse("here", "--out", "x") == Outer(target="here", out=Path("x"), inner=Inner())
    given = ("--counts", "3", "4", "--most", "9", "--say", "b", "a", "--quick", "--link", "pcie3", "--seed", "-1")
    assert parse("here", "--out", "x", *given, "--speed", "0.5") == Outer(
        target="here",
        out=Path("x"),
        counts=(3, 4),
        most=9,
        words=("b", "a"),
        quick=True,
        link=12e9,
        seed=-1,
        inner=Inner(speed=0.5),
    )


def test_what_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--counts", "0"], ["--most", "x"], ["--say", "c"], ["--link", "0"], ["--speed", "fast"]):
        with pytest.raises(argparse.ArgumentError, match=words[0]):
            parse("here", "--out", "x", *words)
    with pytest.raises(SystemExit):
        parse("here")
    assert "required: --out" in capsys.readouterr().err
    with pytest.raises(ExpertcastError, match="speed=-1"):
        parse("here", "--out", "x", "--speed", "-1")
    assert "unseen" not in parser().format_help()


@dataclass(frozen=True, kw_only=True)
class Beside:
    inner: Annotated[Given[Inner], Fields(speed=Option(metavar="S"))]
    """What wins over the rest."""


def test_what_is_given_of_a_configuration() -> None:
    made = argparse.ArgumentParser(prog="it")
    add_options(made, Beside)
    assert "at 100% (default: 2.5)" in " ".join(made.format_help().split())
    assert read_options(Beside, made.parse_args([])).inner == {}
    assert read_options(Beside, made.parse_args(["--speed", "2.5"])).inner == {"speed": 2.5}
