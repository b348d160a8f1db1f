"""Kill commands at random moments, fill their disk, deny access to their folder, and run them twice at once.

    python scripts/kill_commands.py --kills 20 --seed 0 --json kills.json
    python scripts/kill_commands.py --signals --json signals.json

Commands run in forks of this process on small artefacts (see `mutate_artefacts.py`). Three conditions are checked after
each fault: the command prints one line, or nothing if it was killed; its leftover files are correct or refused in one
line; and the same command, run again, ends with the result of an undisturbed run and with no other files.

`--signals` instead sends SIGTERM and SIGINT at three moments each to every command that needs no hub, and prints the
outcomes.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import fault_trials
from fault_trials import (
    ESTIMATOR,
    FREE,
    MODEL,
    STORE,
    TRACES,
    Ended,
    Limits,
    collect_words,
    comparable,
    difference,
    generate_words,
    open_artefact,
    refusal,
    train_words,
)

START, MIDDLE, WRITING = "start-up", "middle", "writing"
SIGNALS = signal.SIGTERM, signal.SIGINT
HELD = "as it must be"
NOBODY = 65534
LONGEST = (20_000, 40_000, 70_000)
"""Limits of file size in bytes. Printed output is a file too, so smaller limits would cut it off."""
ROOM = (4096, 8192, 16_384, 65_536)
"""Free bytes on the disk, in whole pages."""
LIMITS = Limits(seconds=900.0)
_SERVING = "serving "
_RESULT, _EVENTS = "result.json", "events"

Strikes = Callable[[int, str, tuple[Any, ...]], bool]
"""Function of an audit event's number, name and values: whether to send the signal then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command and its expected behaviour."""

    words: Callable[[Path, Path], list[str]]
    opens: str | None = None
    """Artefact that it writes; None if its output is for people, or it writes nothing."""
    over: str | None = None
    """Artefact that exists before it runs."""
    exact: bool = True
    """Whether its result is reproducible; measured times are not."""
    serves: bool = False
    """Whether it runs until a signal."""


def _on_a_few(*words: str) -> Callable[[Path, Path], list[str]]:
    """Return the words of a command on the small model with few slots; `{}` is replaced by the output path."""
    return lambda made, out: [words[0], str(made / MODEL), "--slots", "8", *(word.format(out) for word in words[1:])]


def _train(made: Path, out: Path) -> list[str]:
    return train_words(made / TRACES, ESTIMATOR, out)


def _evaluate(made: Path, out: Path) -> list[str]:
    return ["eval", str(made / TRACES), "--predictor", "linear", str(made / ESTIMATOR), "--report", str(out)]


def _sweep(made: Path, out: Path) -> list[str]:
    return ["simulate", str(made / TRACES), "--sweep", "--processes", "1", "--layer-time", "0.001", "--out", str(out)]


COMMANDS = {
    "demo": Command(
        words=lambda _, out: ["demo", "--tokens", "6000", "--steps", "6", "--out", str(out)],
        exact=False,
    ),
    "collect": Command(words=collect_words, opens=TRACES),
    "train": Command(words=_train, opens=ESTIMATOR),
    "refit": Command(words=_train, opens=ESTIMATOR, over=FREE),
    "eval": Command(words=_evaluate),
    "store": Command(words=lambda made, out: ["store", str(made / MODEL), "--store-folder", str(out)]),
    "generate": Command(words=lambda made, out: generate_words(made, "--store-folder", str(out)), opens=STORE),
    "serve": Command(words=_on_a_few("serve", "--port", "0"), exact=False, serves=True),
    "bench": Command(words=_on_a_few("bench", "--new-tokens", "4", "--repetitions", "1"), exact=False),
    "advise": Command(words=_on_a_few("advise", "--new-tokens", "4", "--save", "{}"), exact=False),
    "simulate": Command(words=_sweep),
    "inspect": Command(words=lambda made, _: ["inspect", str(made / TRACES), "--verify"]),
}
"""Every command of `expertcast` that needs no hub; `refit` trains over an older checkpoint."""
STRUCK = ("collect", "train", "refit", "generate", "eval", "simulate")
"""Commands that get all faults; all but `refit` get signals."""


@dataclass(frozen=True, slots=True)
class Row:
    """Outcome of one fault."""

    command: str
    fault: str
    seconds: float
    outcome: str

    @property
    def right(self) -> bool:
        return self.outcome == HELD


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Outcome of one signal."""

    command: str
    moment: str
    signal: str
    status: int
    said: str
    left: str
    again: str

    @property
    def right(self) -> bool:
        """Whether it ended at once with the right status and line, and the same command then runs as if undisturbed."""
        number = getattr(signal, self.signal)
        ended = self.command == "serve" and self.moment == MIDDLE
        wanted = (0, "") if ended else (128 + number, "expertcast: interrupted; run the same command again")
        found = (self.status, self.said.removesuffix(" to go on"))
        return found == wanted and self.again == "as undisturbed"


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """Result and files of an undisturbed command."""

    result: Any
    files: list[str]
    seconds: float
    events: int


class Trials:
    """Runs commands with faults in a folder that has their input artefacts."""

    def __init__(self, folder: Path) -> None:
        self.made = folder / "made"
        self.folder, self.notes, self.place = folder, folder / "notes", folder / "place"
        self.notes.mkdir()
        fault_trials.call(lambda: fault_trials.make(self.made, 0), self.notes)

    def faults(self, name: str, kills: int, rng: Random) -> Iterator[Row]:
        """Yield the outcomes of all faults of one command."""
        command, right = COMMANDS[name], self._undisturbed(name)

        def row(fault: str, after: float, found: str | None) -> Row:
            return Row(name, fault, after, found or self._again(name, right) or HELD)

        def one_line(ended: Ended) -> str | None:
            return None if ended.status == 0 or refusal(ended) else f"status {ended.status}: {ended.err[-1500:]}"

        for _ in range(kills):
            work, after = self._work(command, self._fresh(name)), rng.uniform(0.0, 1.1 * right.seconds)
            ended = fault_trials.run(work, self.notes, LIMITS, after)
            yield row("killed", after, None if ended.status in (0, -9) else ended.err)
        limits = {f"no file over {size} bytes": replace(LIMITS, file_bytes=size) for size in LONGEST}
        if os.getuid() == 0:
            limits["a folder of another user"] = replace(LIMITS, user=NOBODY)
        for fault, each in limits.items():
            ended = fault_trials.run(self._work(command, self._fresh(name)), self.notes, each)
            yield row(fault, 0.0, one_line(ended))
        for size in ROOM:
            with self._small_disk(name, size) as mounted:
                if mounted is None:
                    continue
                ended = fault_trials.run(self._work(command, mounted), self.notes, LIMITS)
                yield Row(name, f"{size} bytes left on the disk", 0.0, one_line(ended) or self._left(name) or HELD)
        for after in (0.0, 0.3 * right.seconds):
            ends = self._two_at_once(command, self._fresh(name), after)
            found = next(filter(None, map(one_line, ends)), None)
            if all(ended.status for ended in ends):
                found = "neither ended: " + " | ".join(ended.err[-300:] for ended in ends)
            yield row("two at once", after, found)

    def signals(self, name: str) -> Iterator[Interrupted]:
        """Yield the outcomes of both signals at three moments of one command."""
        command, right = COMMANDS[name], self._undisturbed(name)
        middle = None if command.serves else lambda count, *_: count >= right.events // 2
        strikes = {MIDDLE: middle, WRITING: _writing(self.folder)}
        for moment in (START, MIDDLE, WRITING):
            for number in SIGNALS:
                out = self._fresh(name)
                if moment == START:
                    status, err = self._at_start(command.words(self.made, out), number)
                else:
                    ended = self._run(command, out, strikes[moment], number)
                    status, err = ended.status, ended.err
                left = _in_short(files_in(self.place))
                again = self._again(name, right) or "as undisturbed"
                yield Interrupted(name, moment, number.name, status, _last_line(err), left, again)

    def _at_start(self, words: list[str], number: signal.Signals) -> tuple[int, str]:
        """Start a process and send the signal while it imports torch."""
        command = [sys.executable, "-m", "expertcast.cli", *words, "--json", str(self.notes / _RESULT)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        maps = Path(f"/proc/{process.pid}/maps")
        while process.poll() is None and "libtorch" not in maps.read_text():
            time.sleep(0.005)
        process.send_signal(number)
        _, err = process.communicate(timeout=LIMITS.seconds)
        ended = process.returncode  # Python kills itself with SIGINT if it arrived inside an extension
        return 128 - ended if ended < 0 else ended, err

    def _two_at_once(self, command: Command, out: Path, after: float) -> list[Ended]:
        waits = []
        for name in ("one", "other"):
            folder = self.notes / name
            folder.mkdir(exist_ok=True)
            waits.append(fault_trials.start(self._work(command, out, notes=folder), folder, LIMITS)[0])
            time.sleep(after)
        return [wait() for wait in waits]

    def _work(
        self,
        command: Command,
        out: Path,
        strikes: Strikes | None = None,
        number: int = signal.SIGTERM,
        notes: Path | None = None,
    ) -> Callable[[], int]:
        """Return the function of a fork: it runs the command, sends itself a signal when `strikes` is true, and writes
        result and event count.
        """
        notes = notes or self.notes
        (notes / _RESULT).unlink(missing_ok=True)

        def work() -> int:
            from expertcast.cli import main

            events = _watch(strikes, number)
            status = main([*command.words(self.made, out), "--json", str(notes / _RESULT)])
            if not status:
                (notes / _EVENTS).write_text(str(events()))
            return status

        return work

    def _run(self, command: Command, out: Path, strikes: Strikes | None = None, number: int = signal.SIGTERM) -> Ended:
        """Run a command. A server without `strikes` gets the signal once it serves."""
        wait, child = fault_trials.start(self._work(command, out, strikes, number), self.notes, LIMITS)
        if command.serves:
            err = self.notes / "err"
            while not _ended(child) and _SERVING not in (err.read_text() if err.exists() else ""):
                time.sleep(0.02)
            os.kill(child, signal.SIGTERM if strikes else number)
        return wait()

    def _undisturbed(self, name: str) -> Undisturbed:
        self._fresh(name)
        result, seconds = self._result(name)
        return Undisturbed(result, files_in(self.place), seconds, int((self.notes / _EVENTS).read_text()))

    def _result(self, name: str) -> tuple[Any, float]:
        """Run a command and open its artefact; return both results and the seconds."""
        command, out = COMMANDS[name], self.place / name
        ended = self._run(command, out)
        if ended.status:
            raise RuntimeError(f"status {ended.status}: {_last_line(ended.err) or ended.err[-1500:]}")
        found = self.notes / _RESULT
        given = comparable(json.loads(found.read_text())) if command.exact and found.is_file() else None
        if command.opens is None:
            return given, ended.seconds
        artefact = command.opens
        return [given, fault_trials.call(lambda: open_artefact(artefact, out), self.notes)], ended.seconds

    def _again(self, name: str, right: Undisturbed) -> str | None:
        """Check leftover files and run the command again; return what is wrong, or None."""
        if found := self._left(name):
            return found
        try:
            again, _ = self._result(name)
        except RuntimeError as error:
            return f"run again: {error}"
        if again != right.result:
            return f"run again: {difference(right.result, again)}"
        odd = sorted({*files_in(self.place)} ^ {*right.files})
        return f"other files: {_in_short(odd)}" if odd else None

    def _left(self, name: str) -> str | None:
        """Check that leftover files are correct or refused in one line; return what is wrong, or None."""
        artefact, out = COMMANDS[name].opens, self.place / name
        if artefact is None or not out.exists():
            return None
        ended = fault_trials.run(fault_trials.refusing(lambda: open_artefact(artefact, out)), self.notes, LIMITS)
        return f"what was left behind: {ended.err[-1500:]}" if ended.status and not refusal(ended) else None

    def _fresh(self, name: str) -> Path:
        """Clear the output folder and restore the artefact that exists before the command runs."""
        self._clear()
        out, over = self.place / name, COMMANDS[name].over
        if over is not None:
            shutil.copytree(self.made / over, out)
        return out

    @contextmanager
    def _small_disk(self, name: str, room: int) -> Iterator[Path | None]:
        """Mount a file system with `room` bytes free; yield a fresh folder on it, or None without permission."""
        page = 4096
        there = sum(-(-path.stat().st_size // page) * page for path in self._fresh(name).rglob("*"))
        self._clear()
        command = ["mount", "-t", "tmpfs", "-o", f"size={room + there}", "none", str(self.place)]
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        try:
            yield self._fresh(name) if mounted else None
        finally:
            if mounted:
                subprocess.run(["umount", str(self.place)], check=True)

    def _clear(self) -> None:
        self.place.mkdir(exist_ok=True)
        for path in self.place.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def _writing(folder: Path) -> Strikes:
    """Return a function that strikes at the next event after a file below `folder` is opened for writing."""
    begun: list[bool] = []

    def strikes(_: int, event: str, values: tuple[Any, ...]) -> bool:
        if begun:
            return True
        if event == "open" and isinstance(values[0], str) and values[0].startswith(str(folder)):
            begun.extend([True] if values[2] & (os.O_WRONLY | os.O_RDWR) else [])
        return False

    return strikes


def _watch(strikes: Strikes | None, number: int) -> Callable[[], int]:
    """Send this process a signal at the first audit event that strikes; return a function that counts the events."""
    count, sent = 0, False

    def hook(event: str, values: tuple[Any, ...]) -> None:
        nonlocal count, sent
        count += 1
        if strikes is not None and not sent and strikes(count, event, values):
            sent = True
            os.kill(os.getpid(), number)

    sys.addaudithook(hook)
    return lambda: count


def _ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _last_line(err: str) -> str:
    if "Traceback (most recent call last)" in err:
        return "a traceback: " + err.strip().splitlines()[-1]
    own = [line for line in err.strip().splitlines() if line.startswith("expertcast: ")]
    return own[-1] if own else ""


def _in_short(files: list[str]) -> str:
    return f"{len(files)}: {', '.join(files[:3])}{', ...' if len(files) > 3 else ''}" if files else "nothing"


def signal_table(rows: list[Interrupted]) -> str:
    """Return a Markdown table with a row per command and moment; equal cells of both signals are merged."""
    lines = ["| command | moment | SIGTERM | SIGINT | said | left on disk | the same command again |", "|" + "---|" * 7]
    for command, moment in dict.fromkeys((row.command, row.moment) for row in rows):
        own = {row.signal: row for row in rows if (row.command, row.moment) == (command, moment)}
        cells = [str(own[name].status) if name in own else "" for name in ("SIGTERM", "SIGINT")]
        for get in (lambda row: row.said.removeprefix("expertcast: "), lambda row: row.left, lambda row: row.again):
            cells.append(" / ".join(dict.fromkeys(get(row) for row in own.values())))
        lines.append(f"| {command} | {moment} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table(rows: list[Row]) -> str:
    """Return a table of trials and correct outcomes by command and fault."""
    tried = collections.Counter((row.command, row.fault) for row in rows)
    held = collections.Counter((row.command, row.fault) for row in rows if row.right)
    lines = [f"{'command':10}{'fault':34}{'tried':>7}{'held':>7}"]
    lines += [f"{command:10}{fault:34}{count:>7}{held[command, fault]:>7}" for (command, fault), count in tried.items()]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the trials; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="kills per command (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=list(COMMANDS), help="(default: all commands)")
    parser.add_argument("--signals", action="store_true", help="SIGTERM and SIGINT at three moments each")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there as well")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell inherit an ignored SIGINT
    fault_trials.prepare()
    names = args.only or ([name for name in COMMANDS if name != "refit"] if args.signals else STRUCK)
    rows: list[Any] = []
    with tempfile.TemporaryDirectory() as temporary:
        os.chmod(temporary, 0o755)
        trials = Trials(Path(temporary))
        for name in names:
            found = (
                trials.signals(name) if args.signals else trials.faults(name, args.kills, Random(f"{args.seed}:{name}"))
            )
            for row in found:
                rows.append(row)
                if not row.right:
                    print(f"WRONG {row}", file=sys.stderr, flush=True)
    print(signal_table(rows) if args.signals else table(rows))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return int(not all(row.right for row in rows))


if __name__ == "__main__":
    sys.exit(main())
