"""The script for a machine with a GPU: valid commands."""

from __future__ import annotations

import shlex
from pathlib import Path

from expertcast.cli import build_parser

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_day.sh"


def test_commands_are_of_the_command_line(tmp_path: Path) -> None:
    text = SCRIPT.read_text().replace("\\\n", "").replace("$model", "M").replace("$out", str(tmp_path))
    commands = [
        shlex.split(line)[3:]
        for line in text.splitlines()
        if line.strip().startswith("step ") and " expertcast " in line
    ]
    assert len(commands) == 4
    for words in commands:
        assert build_parser(words[0]).parse_args(words).json.name.endswith(".json")
