"""Tries everything, prints the table, and writes it as JSON; `scripts/newcomer.sh` calls it."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import expertcast
from expertcast.commands.output import say, write_json
from expertcast.predictors.messages import Json
from newcomer_steps import report
from newcomer_steps.rows import LIMIT_S, TOOLS, Row, chosen, try_commands, try_in_this_process, try_tool

VERSIONS = ("expertcast", "torch", "transformers", "accelerate", "peft", "torchao", "lm_eval")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 1 when something that should work does not."""
    args = _parser().parse_args(arguments)
    if args.child is not None:
        write_json(args.out, try_in_this_process(args.child, small=args.small))
        return 0
    say(f"expertcast is {Path(expertcast.__file__).parent}")
    result: Json = {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: _version(name) for name in VERSIONS if _version(name)},
        "tools": [],
        "commands": [],
    }
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        for kind, rows in _tried(args, Path(folder)):
            for row in rows:
                say(f"{row.name}: {row.outcome}")
                result[kind].append(row.as_dict())
                if args.out is not None:  # whoever stops it here has what was tried
                    write_json(args.out, result)
    print(report.everything(result))
    if args.report is not None:
        report.write(result, args.report)
    tried = [*result["tools"], *result["commands"]]
    untried = [row for row in result["tools"] if row["works"] is None and not args.allow_missing]
    return int(bool(untried) or any(row["works"] is False for row in tried))


def _tried(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, Iterable[Row]]]:
    """Rows as they come, tools first."""
    yield "tools", (try_tool(tool, small=args.small, limit_s=args.limit) for tool in chosen(args.only))
    if args.commands:
        yield "commands", try_commands(folder, small=args.small, limit_s=args.limit)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _parser() -> argparse.ArgumentParser:
    names = [tool.function.partition(".")[2] for tool in TOOLS]
    parser = argparse.ArgumentParser(prog="newcomer_steps", description=__doc__)
    parser.add_argument("--small", action="store_true", help="few tokens, and no demo")
    parser.add_argument("--only", nargs="+", default=[], choices=names, metavar="TOOL", help=", ".join(names))
    parser.add_argument("--no-commands", dest="commands", action="store_false", help="leave the README's commands out")
    parser.add_argument("--allow-missing", action="store_true", help="tools whose packages are missing are no failure")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds for each (%(default)g)")
    parser.add_argument("--out", type=Path, metavar="JSON", help="write the result there")
    parser.add_argument("--report", type=Path, metavar="PAGE", help="put the tools' table between the page's marks")
    parser.add_argument("--child", metavar="FUNCTION", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
