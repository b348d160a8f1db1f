"""Kill commands at random moments, fill their disk, take their folder's permissions, start them twice at once.

    python scripts/kill_commands.py --kills 20 --seed 0 --json kills.json
    python scripts/kill_commands.py --signals --json signals.json

Commands run in forks of this process on small artefacts (see `mutate_artefacts.py`). After each fault three things must
hold: what a command prints is one line, or nothing where it was killed; what it leaves behind is refused in one line or
is right; and the same command, given again, ends with the result of an undisturbed one and with no other files.

`--signals` sends SIGTERM and SIGINT instead, at three moments each, to every command that needs no hub, and prints what
came of it.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import fault_trials
from fault_trials import (
    ESTIMATOR,
    OPERATIONS,
    TRACES,
    TRIALS,
    Ended,
    Limits,
    Made,
    Trial,
    comparable,
    difference,
    files_in,
    generate_words,
    in_one_line,
    train_words,
)

START, MIDDLE, WRITING = "start-up", "middle", "writing"
SIGNALS = signal.SIGTERM, signal.SIGINT
_LIMITS = Limits(seconds=900.0)
_SERVING = "serving "
_LONGEST = 200.0
_RESULT = "result.json"
_EVENTS = "events"

Strikes = Callable[[int, str, tuple[Any, ...]], bool]
"""Of an audit event's number, name and values: whether the signal comes then."""


@dataclass(frozen=True, slots=True)
class Case:
    """A command, with what must come of it."""

    words: Callable[[Made, Path], list[str]]
    exact: bool = True
    """Whether it gives the same result every time; what it measures differs."""
    serves: bool = False
    """Whether it ends by a signal alone."""


def _on_a_few(*words: str) -> Callable[[Made, Path], list[str]]:
    """On the small model with few slots and few tokens; `{}` is where to write."""
    return lambda made, out: [words[0], str(made.model), "--slots", "8", *(word.format(out) for word in words[1:])]


CASES = {
    "demo": Case(lambda _, out: ["demo", "--tokens", "6000", "--steps", "6", "--minutes", "0.1", "--out", str(out)],
                 exact=False),
    "collect": Case(TRIALS["collect"].words),
    "train": Case(lambda made, out: train_words(made[TRACES], ESTIMATOR, out)),
    "eval": Case(TRIALS["eval"].words),
    "store": Case(lambda made, out: ["store", str(made.model), "--store-folder", str(out)]),
    "generate": Case(lambda made, out: generate_words(made, "--store-folder", str(out))),
    "serve": Case(_on_a_few("serve", "--port", "0"), exact=False, serves=True),
    "bench": Case(_on_a_few("bench", "--new-tokens", "4", "--repetitions", "1"), exact=False),
    "advise": Case(_on_a_few("advise", "--new-tokens", "4", "--save", "{}"), exact=False),
    "simulate": Case(TRIALS["sweep"].words),
    "inspect": Case(lambda made, _: ["inspect", str(made[TRACES]), "--verify"]),
}  # fmt: skip
"""Of every command of `expertcast` that needs no hub."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """What came of one signal."""

    command: str
    moment: str
    signal: str
    status: int
    said: str
    left: str
    again: str

    @property
    def right(self) -> bool:
        """Whether it ended at once with its status and one line, and the same command ends as if nothing had been."""
        number = getattr(signal, self.signal)
        ended = self.command == "serve" and self.moment == MIDDLE
        wanted = (0, "") if ended else (128 + number, "expertcast: interrupted; run the same command again")
        found = (self.status, self.said.removesuffix(" to go on"))
        return found == wanted and self.again == "as undisturbed"


class Interrupts:
    """Interrupts commands in a folder, which holds the artefacts that they read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made = Made(folder / "made")
        self._notes, self._place = folder / "notes", folder / "place"
        self._notes.mkdir()
        fault_trials.call(lambda: fault_trials.make(self._made, 0), self._notes)

    def of(self, name: str, signals: tuple[signal.Signals, ...] = SIGNALS) -> Iterator[Interrupted]:
        """All moments of one command."""
        case = CASES[name]
        words = case.words(self._made, self._fresh() / name)
        _, right = self._run(words, case)
        files, half = files_in(self._place), int((self._notes / _EVENTS).read_text()) // 2
        strikes = {MIDDLE: None if case.serves else lambda count, *_: count >= half, WRITING: _writing(self._folder)}
        for moment in (START, MIDDLE, WRITING):
            for number in signals:
                self._fresh()
                if moment == START:
                    status, err = self._at_start(words, number)
                else:
                    found, _ = self._run(words, case, number, strikes[moment])
                    status, err = found.status, found.err
                left = _in_short(files_in(self._place))
                again = self._again(words, case, right, files)
                yield Interrupted(name, moment, number.name, status, _last_line(err), left, again)

    def _again(self, words: list[str], case: Case, right: Any, files: list[str]) -> str:
        ended, found = self._run(words, case)
        if ended.status:
            return f"status {ended.status}: {_last_line(ended.err)}"
        if case.exact and found != right:
            return difference(right, found)
        odd = sorted({*files_in(self._place)} ^ {*files})
        return f"other files: {_in_short(odd)}" if odd else "as undisturbed"

    def _at_start(self, words: list[str], number: signal.Signals) -> tuple[int, str]:
        """A process that gets the signal while it imports torch."""
        command = [sys.executable, "-m", "expertcast.cli", *words, "--json", str(self._notes / _RESULT)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        maps = Path(f"/proc/{process.pid}/maps")
        while process.poll() is None and "libtorch" not in maps.read_text():
            time.sleep(0.005)
        process.send_signal(number)
        _, err = process.communicate(timeout=_LONGEST)
        ended = process.returncode  # Python ends itself by SIGINT where one came in code that an extension ran
        return 128 - ended if ended < 0 else ended, err

    def _run(
        self, words: list[str], case: Case, number: int = signal.SIGTERM, strikes: Strikes | None = None
    ) -> tuple[Ended, Any]:
        """A fork that sends itself the signal when it `strikes`; a server without that gets it once it serves."""
        result = self._notes / _RESULT
        result.unlink(missing_ok=True)

        def work() -> int:
            from expertcast.cli import main

            events = _watch(strikes, number)
            status = main([*words, "--json", str(result)])
            (self._notes / _EVENTS).write_text(str(events()))
            return status

        wait, child = fault_trials.start(work, self._notes, _LIMITS)
        if case.serves:
            err = self._notes / "err"
            while not _ended(child) and _SERVING not in (err.read_text() if err.exists() else ""):
                time.sleep(0.02)
            os.kill(child, signal.SIGTERM if strikes else number)
        ended = wait()
        return ended, comparable(json.loads(result.read_text())) if result.is_file() else None

    def _fresh(self) -> Path:
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir()
        return self._place


def _writing(folder: Path) -> Strikes:
    """Strikes at the next event after a file below `folder` was opened to write it."""
    begun: list[bool] = []

    def strikes(_: int, event: str, values: tuple[Any, ...]) -> bool:
        if begun:
            return True
        if event == "open" and isinstance(values[0], str) and values[0].startswith(str(folder)):
            begun.extend([True] if values[2] & (os.O_WRONLY | os.O_RDWR) else [])
        return False

    return strikes


def _watch(strikes: Strikes | None, number: int) -> Callable[[], int]:
    """Send this process a signal at the first audit event that `strikes`; gives what counts the events."""
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
    """Markdown: a row per command and moment, both signals in it where they differ in the status alone."""
    lines = ["| command | moment | SIGTERM | SIGINT | said | left on disk | the same command again |", "|" + "---|" * 7]
    for command, moment in dict.fromkeys((row.command, row.moment) for row in rows):
        own = {row.signal: row for row in rows if (row.command, row.moment) == (command, moment)}
        cells = [str(own[name].status) if name in own else "" for name in ("SIGTERM", "SIGINT")]
        for get in (lambda row: row.said.removeprefix("expertcast: "), lambda row: row.left, lambda row: row.again):
            cells.append(" / ".join(dict.fromkeys(get(row) for row in own.values())))
        lines.append(f"| {command} | {moment} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch


NOBODY = 65534
LONGEST = (20_000, 40_000, 70_000)
"""Bytes of the longest file that can be written; what is printed is one, so that less would cut it off."""
ROOM = (4096, 8192, 16_384, 65_536)
"""Bytes that a disk has left, in whole pages."""
HELD = "as it must be"


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one fault."""

    command: str
    fault: str
    seconds: float
    outcome: str


def main(argv: list[str] | None = None) -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each command (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=sorted({*TRIALS, *CASES}), help="(default: all commands)")
    parser.add_argument("--signals", action="store_true", help="SIGTERM and SIGINT at three moments each")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there as well")
    args = parser.parse_args(argv)
    if args.signals:
        return interrupt(args.only or list(CASES), args.json)
    fault_trials.prepare()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        os.chmod(temporary, 0o755)
        trials = Trials(Path(temporary))
        for name in args.only or list(TRIALS):
            for row in trials.of(name, args.kills, Random(f"{args.seed}:{name}")):
                rows.append(row)
                if row.outcome != HELD:
                    print(f"{name}, {row.fault} after {row.seconds:.3f} s: {row.outcome}", flush=True)
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return int(any(row.outcome != HELD for row in rows))


def interrupt(names: list[str], path: Path | None) -> int:
    """SIGTERM and SIGINT for commands by name; returns the exit status."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and pass that on
    with tempfile.TemporaryDirectory() as temporary:
        fault_trials.prepare()
        interrupts = Interrupts(Path(temporary))
        rows = []
        for name in names:
            for row in interrupts.of(name):
                rows.append(row)
                print(f"{'' if row.right else 'WRONG '}{row}", file=sys.stderr, flush=True)
    print(signal_table(rows))
    if path:
        path.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return int(not all(row.right for row in rows))


class Trials:
    """Faults of commands in a folder, which holds the artefacts that they read."""

    def __init__(self, folder: Path) -> None:
        self.made = Made(folder / "made")
        self.notes, self.place = folder / "notes", folder / "place"
        self.notes.mkdir()
        fault_trials.call(lambda: fault_trials.make(self.made, 0), self.notes)

    def of(self, name: str, kills: int, rng: Random) -> Iterator[Row]:
        """All faults of one command."""
        trial = TRIALS[name]
        out = self._fresh(trial, name)
        right, seconds = self._result(trial, out)
        files = files_in(out.parent)
        limits = fault_trials.Limits(seconds=60.0)

        def row(fault: str, after: float, found: str | None) -> Row:
            return Row(name, fault, after, found or self._again(trial, out, right, files) or HELD)

        for _ in range(kills):
            out, after = self._fresh(trial, name), rng.uniform(0.0, 1.1 * seconds)
            ended = fault_trials.run(self._work(trial, out), self.notes, limits, after)
            yield row("killed", after, None if ended.status in (0, -9) else ended.err)
        for size in LONGEST:
            out = self._fresh(trial, name)
            ended = fault_trials.run(
                self._work(trial, out), self.notes, fault_trials.Limits(seconds=60.0, file_bytes=size)
            )
            yield row(f"no file over {size} bytes", 0.0, in_one_line(ended))
        for size in ROOM:
            with self._small_disk(trial, name, size) as mounted:
                if mounted is None:
                    continue
                ended = fault_trials.run(self._work(trial, mounted), self.notes, limits)
                found = in_one_line(ended) or self._left(trial, mounted)
            yield Row(name, f"{size} bytes left on the disk", 0.0, found or HELD)
        if os.getuid() == 0:
            out = self._fresh(trial, name)
            ended = fault_trials.run(self._work(trial, out), self.notes, fault_trials.Limits(seconds=60.0, user=NOBODY))
            yield row("a folder of another user", 0.0, in_one_line(ended))
        for after in (0.0, 0.3 * seconds):
            out = self._fresh(trial, name)
            yield row("two at once", after, self._two_at_once(trial, out, after))

    def _two_at_once(self, trial: Trial, out: Path, after: float) -> str | None:
        """Both end as if alone, or one refuses in one line."""
        folders = [self.notes / "one", self.notes / "other"]
        waits = []
        for folder in folders:
            folder.mkdir(exist_ok=True)
            waits.append(
                fault_trials.start(self._work(trial, out, folder), folder, fault_trials.Limits(seconds=60.0))[0]
            )
            time.sleep(after)
        ends = [wait() for wait in waits]
        if not any(ended.status == 0 for ended in ends):
            return "neither ended: " + " | ".join(ended.err[-300:] for ended in ends)
        return next((found for ended in ends if (found := in_one_line(ended))), None)

    def _work(self, trial: Trial, out: Path, notes: Path | None = None) -> Callable[[], int]:
        result = (notes or self.notes) / "result.json"

        def work() -> int:
            from expertcast.cli import main as command

            return command([*trial.words(self.made, out), "--json", str(result)])

        return work

    def _result(self, trial: Trial, out: Path) -> tuple[Any, float]:
        """Of the command, and of what opens what it wrote."""
        ended = fault_trials.run(self._work(trial, out), self.notes, fault_trials.Limits(seconds=60.0))
        if ended.status:
            raise RuntimeError(ended.err[-1500:])
        given = comparable(json.loads((self.notes / "result.json").read_text()))
        if trial.opens is None:
            return given, ended.seconds
        artefact, operation = trial.opens
        opened = fault_trials.call(lambda: OPERATIONS[artefact][operation][1](self.made, out, self.notes), self.notes)
        return [given, opened], ended.seconds

    def _again(self, trial: Trial, out: Path, right: Any, files: list[str]) -> str | None:
        """What is wrong with what is there, or with the same command run again."""
        found = self._left(trial, out)
        if found:
            return found
        try:
            again, _ = self._result(trial, out)
        except RuntimeError as error:
            return f"run again: {error}"
        if again != right:
            return f"run again: {difference(right, again)}"
        return None if files_in(out.parent) == files else f"files: {sorted({*files_in(out.parent)} ^ {*files})}"

    def _left(self, trial: Trial, out: Path) -> str | None:
        """What is wrong with what is there: it must be right, or refused in one line."""
        if trial.opens is None or not out.exists():
            return None
        artefact, operation = trial.opens

        def opened() -> int:
            from expertcast.predictors import ExpertcastError

            try:
                OPERATIONS[artefact][operation][1](self.made, out, self.notes)
            except ExpertcastError as error:
                print(f"expertcast: {error}", file=sys.stderr)
                return 2
            return 0

        found = in_one_line(fault_trials.run(opened, self.notes, fault_trials.Limits(seconds=60.0)))
        return f"what was left behind: {found}" if found else None

    def _fresh(self, trial: Trial, name: str) -> Path:
        """Nothing but what is there before."""
        self._clear()
        out = self.place / name
        trial.before(self.made, out)
        return out

    @contextmanager
    def _small_disk(self, trial: Trial, name: str, room: int) -> Iterator[Path | None]:
        """A fresh folder on a file system that has so much room left; None where this process may mount none."""
        page = 4096
        there = sum(-(-path.stat().st_size // page) * page for path in self._fresh(trial, name).rglob("*"))
        self._clear()
        command = ["mount", "-t", "tmpfs", "-o", f"size={room + there}", "none", str(self.place)]
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        try:
            yield self._fresh(trial, name) if mounted else None
        finally:
            if mounted:
                subprocess.run(["umount", str(self.place)], check=True)

    def _clear(self) -> None:
        self.place.mkdir(exist_ok=True)
        for path in self.place.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def table(rows: list[Row]) -> str:
    """Per command and fault, how often all was as it must be."""
    tried = collections.Counter((row.command, row.fault) for row in rows)
    held = collections.Counter((row.command, row.fault) for row in rows if row.outcome == HELD)
    lines = [f"{'command':10}{'fault':34}{'tried':>7}{'held':>7}"]
    lines += [f"{command:10}{fault:34}{count:>7}{held[command, fault]:>7}" for (command, fault), count in tried.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
