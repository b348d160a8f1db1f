"""The command line: `expertcast COMMAND ...`. Each command is a file of :mod:`expertcast.commands`.

Exit status 0, or 2 with one line on standard error: the error and its remedy. SIGINT and SIGTERM end
every command with one line and status 130 and 143; `serve`, once it serves, ends in order and with status 0.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import gc
import importlib
import io
import json
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

import expertcast

COMMANDS = {
    "demo": "run all of the following on the bundled model in three to four minutes",
    "collect": "run a model over text and write traces: router inputs, logits and default vectors",
    "train": "train a predictor on traces, or online on a running model",
    "eval": "score predictors on traces: recall@k per layer and other metrics",
    "store": "pack a model's experts into a folder, compressed without loss, for models larger than memory",
    "generate": "generate text with offloaded experts and forecasts",
    "chat": "chat with a model in the terminal, with offloaded experts and forecasts",
    "serve": "serve a model with offloaded experts and forecasts by the OpenAI API",
    "bench": "measure the time per token of offloaded decoding in every mode",
    "advise": "decode briefly with and without forecasts, and advise which to use",
    "simulate": "simulate cache policies over recorded routing, in virtual time",
    "inspect": "describe a model, traces folder or checkpoint, or verify its files",
}


FROZEN = Path(__file__).parent / "commands" / "frozen.json"
"""Options and help of all commands, so that `--help` and refusals do not import torch. scripts/freeze_command_line.py
writes the file; a test compares it with the options' classes and registries."""
_RESUMED = ("collect", "train")
"""Commands that resume after an interruption. The others start again."""
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
"""Errors of a disk that is full, read-only, another user's or broken."""


_FORMAT = warnings.formatwarning
"""Python's own formatter of warnings."""


class _Parser(argparse.ArgumentParser):
    def __init__(self, **given: Any) -> None:
        super().__init__(allow_abbrev=False, **given)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown options, and name the nearest one."""
        if self._subparsers is None:
            for flag in (word.partition("=")[0] for word in args if word.startswith("--") and len(word) > 2):
                if flag not in self._option_string_actions and " " not in flag:
                    known = list(self._option_string_actions)
                    begun = [each for each in known if each.startswith(flag)]
                    near = (begun or difflib.get_close_matches(flag, known, n=1))[:1]
                    self.error(f"unknown option {flag}" + "".join(f", the nearest one is {each}" for each in near))
        found, others = super().parse_known_args(args, namespace)
        if others:
            self.error(f"unrecognized arguments: {' '.join(others)}")
        return found, others

    def error(self, message: str) -> NoReturn:
        """Print one line instead of argparse's two."""
        self.exit(2, f"expertcast: {message}; see `{self.prog} --help`\n")

    def values_help(self) -> str:
        """Return sections on the values of options, such as predictors and policies."""
        from expertcast.commands.catalogue import catalogue

        return catalogue({flag for action in self._actions for flag in action.option_strings})


class _HelpAll(argparse.Action):
    def __call__(self, parser: Any, *_: object) -> None:
        """Print the help with the values of options."""
        print(parser.format_help() + parser.values_help(), end="")
        parser.exit()


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the command line.

    Args:
        only: the command that gets its options; the modules of the others are not imported. None: all of them.
    """
    parser = _Parser(prog="expertcast", description=str(expertcast.__doc__).partition("\n")[0])
    parser.add_argument("--version", action="version", version=f"expertcast {expertcast.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if only in (None, name):
            _add_options(command, _module(name))
    return parser


def _refuse_early(command: str, words: Sequence[str]) -> None:
    """Show a command's help, or refuse its words, by the frozen options, before torch is imported.

    Once torch is imported, a program may have registered predictors and policies that the file lacks.
    """
    if command not in COMMANDS or words[0] != command or "torch" in sys.modules:
        return
    from expertcast.commands.numbers import TYPES

    parser, known = _Parser(prog=f"expertcast {command}"), json.loads(FROZEN.read_text())[command]
    for option in known["options"]:
        given = {key: TYPES[value] if key == "type" else value for key, value in option.items() if key != "names"}
        parser.add_argument(*option["names"], **given)
    parser.add_argument("--help-all", action=_HelpAll, dest="help", nargs=0)
    parser.format_help = lambda: str(known["help"])  # type: ignore[method-assign]
    parser.values_help = lambda: str(known["values"])  # type: ignore[method-assign]
    parser.parse_args(words[1:])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status.

    Args:
        argv: the words after `expertcast`; None: those of the process.
    """
    if expertcast.UNSUPPORTED:
        print(f"expertcast: {expertcast.UNSUPPORTED}", file=sys.stderr)
        return 2
    words = sys.argv[1:] if argv is None else argv
    received: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    if broken := re.search(r"\S*[\ud800-\udfff]\S*", " ".join(words)):  # bytes of another encoding
        return _failed(f"{broken[0]!r} is not valid Unicode: write it in UTF-8, or rename the file", 2)
    with _on_signals(interrupt), _sent_again(received):
        try:
            status = _status(words)
            if not received:  # else a library caught the interrupt
                return status
        except BaseException as error:
            if not received and not isinstance(error, KeyboardInterrupt):
                raise
    if os.environ.get("RANK", "0") == "0":
        purpose = " to go on" if words and words[0] in _RESUMED else ""
        _failed(f"interrupted; run the same command again{purpose}", 0)
    return 128 + (received or [signal.SIGINT])[0]


@contextmanager
def _on_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle SIGINT and SIGTERM, unless they are ignored or the program has its own handler."""
    default = (signal.SIG_DFL, signal.default_int_handler)
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) in default}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own)


@contextmanager
def _sent_again(received: list[int]) -> Iterator[None]:
    """Send a received signal again if Python drops its exception, as in finalisers, callbacks and around forks."""
    report, timers = sys.unraisablehook, list[threading.Timer]()

    def hook(dropped: sys.UnraisableHookArgs) -> None:
        if not received or dropped.exc_type is not KeyboardInterrupt:
            report(dropped)
            return
        timers.append(threading.Timer(0.01, os.kill, (os.getpid(), received[-1])))  # from here it would be dropped too
        timers[-1].start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = report
        for timer in timers:
            timer.cancel()


def _status(words: Sequence[str]) -> int:
    """Run a command; return its exit status."""
    command = next((word for word in words if not word.startswith("-")), "")
    _set_quiet()
    _refuse_early(command, words)
    try:
        with _imports_kept():
            args = build_parser(command).parse_args(words)
        if text := _run(_module(args.command), args):
            print(text, flush=True)
    except ModuleNotFoundError as error:
        from expertcast.predictors.messages import missing_extra

        return _failed(str(missing_extra(error)), 2)
    except ValueError as error:
        from expertcast.predictors.messages import ExpertcastError

        if not isinstance(error, ExpertcastError):
            raise
        return _failed(str(error), 2)
    except BrokenPipeError:
        # Python flushes standard output at exit, which would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in _DISK:
            raise
        where = "" if error.filename is None else f" {error.filename}"
        remedy = "free some space or choose another folder, and run the same command again"
        return _failed(f"cannot read or write{where}: {error.strerror}; {remedy}", 2)
    return 0


@contextmanager
def _imports_kept() -> Iterator[None]:
    """Keep what the first command imports out of the garbage collection, which takes a fifth of the time of the imports
    and as much of a large checkpoint's opening."""
    first = "torch" not in sys.modules and gc.isenabled()
    if first:
        gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
            gc.enable()


def _failed(text: str, status: int) -> int:
    """Print the error on its own line."""
    if progress := sys.modules.get("expertcast.predictors.messages"):  # without it there is no bar
        progress.end_bars()
    print(f"expertcast: {text}", file=sys.stderr)
    return status


def _module(command: str) -> ModuleType:
    return importlib.import_module(f"expertcast.commands.{command}")


def _add_options(parser: argparse.ArgumentParser, module: ModuleType) -> None:
    from expertcast.commands.numbers import positive
    from expertcast.commands.options import add_options
    from expertcast.commands.output import new_file

    add_options(parser, module.Options)
    if "json" not in {field.name for field in fields(module.Options)}:
        parser.add_argument("--json", type=new_file, metavar="PATH", help="also write the results to this file")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: torch's own)")
    required = [" ".join([*each.option_strings, str(each.metavar)]) for each in parser._actions if each.required]
    parser.usage = " ".join([parser.prog, *required, "[options]"])
    parser.add_argument(
        "--help-all",
        action=_HelpAll,
        dest="help",
        nargs=0,
        help="show this, and the values of options: predictors, policies, ...",
    )


def _run(module: ModuleType, args: argparse.Namespace) -> str:
    """Run a command and write its result; return the text to print, under torchrun only on the first rank."""
    import torch
    from transformers.utils import logging as transformers_logging

    from expertcast.commands.options import read_options
    from expertcast.commands.output import show, write_json
    from expertcast.predictors.messages import ExpertcastError

    transformers_logging.disable_progress_bar()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    result, text = module.run(read_options(module.Options, args))
    if os.environ.get("RANK", "0") != "0":
        return ""
    if (path := getattr(args, "json", None)) is not None:
        try:
            write_json(path, result)
        except ExpertcastError:
            show(str(text))  # minutes of computing may be in it
            raise
    return str(text)


def _one_line(message: Warning | str, category: type[Warning], *where: Any, **line: Any) -> str:
    return f"warning: {message}\n" if category is UserWarning else _FORMAT(message, category, *where, **line)


def _set_quiet() -> None:
    """Keep other libraries' progress and notices out of the output, unless the user switched them on.

    The libraries read these settings when the commands import them. Warnings for the user are one line. Characters
    that the output's encoding lacks are escaped, as on standard error.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    warnings.formatwarning = _one_line
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TQDM_MININTERVAL", "0.5")


if __name__ == "__main__":
    raise SystemExit(main())
