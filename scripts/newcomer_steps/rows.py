"""What is tried, one row each: a tool in a process of its own, with a time limit, or a command of the README."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from expertcast.predictors.messages import Json
from newcomer_steps.readme import ROOT, readme_lines, shortened, words_of, write_texts

LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool and the function that tries it."""

    name: str
    function: str
    """module.function of this package; takes a :class:`newcomer_steps.world.World`, returns what it found."""
    packages: tuple[str, ...] = ()
    """Without which it cannot be tried."""


TOOLS = (
    Tool("`pipeline`", "generation.text_pipeline"),
    Tool("text streamers", "generation.streamers"),
    Tool("beam search", "generation.beams"),
    Tool("sampling", "generation.sampling"),
    Tool("assisted generation", "generation.assisted"),
    Tool("`torch.compile`", "generation.compiled"),
    Tool("PEFT", "packages.peft_lora", ("peft",)),
    Tool("torchao", "packages.torchao_int8", ("torchao",)),
    Tool("lm-eval", "packages.lm_eval_harness", ("lm_eval",)),
    Tool("`Trainer.evaluate`", "packages.trainer_evaluate", ("accelerate",)),
    Tool("`transformers serve`", "packages.server", ("fastapi", "uvicorn", "openai")),
)


@dataclass(slots=True, kw_only=True)
class Row:
    """A row of the table."""

    name: str
    works: bool | None = None
    """None: it was not tried."""
    takes: str = ""
    identical: bool | None = None
    seconds: float = 0.0
    note: str = ""

    @property
    def outcome(self) -> str:
        """In a few words."""
        if self.works is None:
            return f"not tried: {self.note}"
        return f"{'works' if self.works else 'does not work'}, {self.seconds:.0f} s{self.note and ', ' + self.note}"

    def as_dict(self) -> Json:
        """For JSON."""
        return asdict(self)


def chosen(only: Sequence[str]) -> list[Tool]:
    """Tools whose function's name was given; all where none was."""
    return [tool for tool in TOOLS if not only or tool.function.partition(".")[2] in only]


def try_tool(tool: Tool, *, small: bool, limit_s: float = LIMIT_S) -> Row:
    """A tool in a process of its own.

    Args:
        tool: which.
        small: over few tokens.
        limit_s: seconds after which the process is ended.
    """
    missing = [name for name in tool.packages if importlib.util.find_spec(name) is None]
    if missing:
        return Row(name=tool.name, note=f"{', '.join(missing)} not installed")
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "found.json"
        command = ["-m", "newcomer_steps", "--child", tool.function, "--out", str(answer), *["--small"] * small]
        row = _timed(tool.name, [sys.executable, *command], Path.cwd(), limit_s)
        if row.works:
            found = json.loads(answer.read_text())
            row.takes, row.identical, row.note = found["takes"], found["identical"], found["note"]
            row.works = row.identical is not False
    return row


def try_in_this_process(function: str, *, small: bool) -> Json:
    """What a child does: load the bundled model, call the tool's function, and say what it found."""
    from expertcast.data.models import load_model, load_tokenizer
    from newcomer_steps.world import World

    module, _, name = function.partition(".")
    tool = getattr(importlib.import_module(f"newcomer_steps.{module}"), name)
    tokens = 4 if small else 16
    return asdict(tool(World(model=load_model("reference"), tokenizer=load_tokenizer("reference"), new_tokens=tokens)))


def try_commands(folder: Path, *, small: bool, limit_s: float = LIMIT_S) -> Iterator[Row]:
    """The README's commands, one after another in one folder, by the `expertcast` that is installed."""
    write_texts(folder)
    script = Path(sys.executable).with_name("expertcast")
    start = [str(script)] if script.is_file() else [sys.executable, "-m", "expertcast.cli"]
    if not small:
        yield _timed("expertcast demo", [*start, "demo"], folder, limit_s)
    for line in readme_lines():
        yield _timed(f"expertcast {line}", [*start, *shortened(words_of(line))], folder, limit_s)


def _timed(name: str, command: Sequence[str], folder: Path, limit_s: float) -> Row:
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=folder, env=_environment(), capture_output=True, text=True, timeout=limit_s, check=False
        )
        failed, said = done.returncode != 0, (done.stderr.strip().splitlines() or [""])[-1]
    except subprocess.TimeoutExpired:
        failed, said = True, f"not done in {limit_s:g} s"
    return Row(name=name, works=not failed, seconds=time.monotonic() - begin, note=said if failed else "")


def _environment() -> dict[str, str]:
    """A child finds this package."""
    found = [str(ROOT / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(found)}
