"""The commands' options and help as a file, so that `--help` and refusals need not wait for torch.

`python scripts/freeze_command_line.py` writes the file; a test compares it with what the options' classes and the
registries say.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from expertcast.commands import numbers

FILE = Path(__file__).with_name("frozen.json")
TYPES = {"int": int, "float": float, **{name: value for name, value in vars(numbers).items() if callable(value)}}
"""What makes a value of a word, by the name that the file has for it; what else a type is comes later."""


def add_frozen(parser: argparse.ArgumentParser, command: str) -> str | None:
    """Give a parser a command's options from the file, without defaults.

    Returns:
        The command's help; None where the file does not know the command.
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
