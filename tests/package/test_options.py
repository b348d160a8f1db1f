"""Command line options that are made from dataclasses."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest

from expertcast.commands.numbers import bandwidth
from expertcast.commands.options import Count, Fields, Given, Option, add_options, read_options
from expertcast.predictors import ExpertcastError


@dataclass(frozen=True, kw_only=True)
class Inner:
    speed: float = 2.5
    """How fast it goes, at 100%."""
    unseen: int = 7
    """No option sets it."""

    def __post_init__(self) -> None:
        if self.speed < 0:
            raise ExpertcastError(f"speed={self.speed}: give 0 or more")


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


def test_help_is_the_docstring() -> None:
    text = " ".join(parser().format_help().split())
    assert "TARGET what to look at" in text
    assert "--out DIR IDs are written there" in text  # required: no default
    assert "--counts N [N ...] how many (default: 1 2)" in text
    assert "--seed SEED order of tokens (default: none)" in text
    assert "inner: How it is run. --speed S how fast it goes, at 100% (default: 2.5)" in text


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


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys; from expertcast.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as stop: print(stop.code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.splitlines()[-1] == "0 False False"
    assert "simulate" in found
