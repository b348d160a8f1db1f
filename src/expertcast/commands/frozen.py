"""Options and help of all commands in a file, so that `--help` and refusals do not import torch.

`python scripts/freeze_command_line.py` writes the file; a test compares it with the options' classes and registries.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from expertcast.commands import numbers

FILE = Path(__file__).with_name("frozen.json")
TYPES = {"int": int, "float": float, **{name: value for name, value in vars(numbers).items() if callable(value)}}
"""Parsers of values by their names in the file; the command itself checks other types."""


def add_frozen(parser: argparse.ArgumentParser, command: str) -> str | None:
    """Add the options of a command from the file to a parser, without defaults.

    Returns:
        The help of the command; None if the file does not have it.
    """
    known = json.loads(FILE.read_text()).get(command)
    if known is None:
        return None
    for option in known["options"]:
        given = {key: value for key, value in option.items() if key != "names"}
        if "type" in given:
            given["type"] = TYPES[given["type"]]
        parser.add_argument(*option["names"], **given)
    return str(known["help"])
