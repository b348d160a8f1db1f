"""Write the commands' options and help to the file that the command line reads before it imports torch.

    python scripts/freeze_command_line.py

Run it after a change of an option, a help text, a predictor, a policy, a preset, a draft or a codec.
"""

from __future__ import annotations

import json
import os
from typing import Any

from expertcast.cli import COMMANDS, FROZEN, build_parser
from expertcast.commands.numbers import TYPES


def frozen() -> str:
    """Return the file's content, with help for a terminal of 80 columns."""
    os.environ["COLUMNS"] = "80"
    commands = next(action for action in build_parser()._actions if action.dest == "command").choices
    assert isinstance(commands, dict)
    lines = []
    for name in COMMANDS:  # one option in a line, so that a change shows as one
        found = described(commands[name])
        options = ",\n".join(map(json.dumps, found["options"]))
        texts = ",\n".join(f'"{key}": {json.dumps(found[key])}' for key in ("help", "values"))
        lines.append(f'"{name}": {{"options": [\n{options}],\n{texts}}}')
    return "{" + ",\n".join(lines) + "}\n"


def described(parser: Any) -> dict[str, Any]:
    """Return a command's options and help in the file's format."""
    options = []
    for action in parser._actions:
        if action.dest == "help":
            continue
        if action.nargs == 0:
            given: dict[str, Any] = {"action": "store_true"}
        else:
            kind = next((name for name, value in TYPES.items() if value is action.type), None)
            given = {"nargs": action.nargs, "metavar": action.metavar, "type": kind,
                     "choices": action.choices and list(action.choices)}  # fmt: skip
        if action.option_strings and action.required:
            given["required"] = True
        names = action.option_strings or [action.dest]
        options.append({"names": names, **{key: value for key, value in given.items() if value is not None}})
    return {"options": options, "help": parser.format_help(), "values": parser.values_help()}


if __name__ == "__main__":
    FROZEN.write_text(frozen())
