"""Kill commands at random moments, fill their disk, take their folder's permissions, start them twice at once.

    python scripts/kill_commands.py --kills 20 --seed 0 --json kills.json
    python scripts/kill_commands.py --signals --json signals.json

Commands run in forks of this process on small artefacts (see `mutate_artefacts.py`). After each fault three things must
hold: what a command prints is one line, or nothing where it was killed; what it leaves behind is refused in one line or
is right; and the same command, given again, ends with the result of an undisturbed one and with no other files.

`--signals` sends SIGTERM and SIGINT to every command instead, at three moments each, and prints what came of it.
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

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

from fault_trials import artefacts, forked
from fault_trials.artefacts import Made
from fault_trials.commands import TRIALS, Trial, files_in, in_one_line
from fault_trials.interrupts import CASES, Interrupts, one_hub, signal_table
from fault_trials.operations import OPERATIONS, comparable, difference

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
    forked.prepare()
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
    with one_hub(), tempfile.TemporaryDirectory() as temporary:
        forked.prepare()
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
        forked.call(lambda: artefacts.make(self.made, 0), self.notes)

    def of(self, name: str, kills: int, rng: Random) -> Iterator[Row]:
        """All faults of one command."""
        trial = TRIALS[name]
        out = self._fresh(trial, name)
        right, seconds = self._result(trial, out)
        files = files_in(out.parent)
        limits = forked.Limits(seconds=60.0)

        def row(fault: str, after: float, found: str | None) -> Row:
            return Row(name, fault, after, found or self._again(trial, out, right, files) or HELD)

        for _ in range(kills):
            out, after = self._fresh(trial, name), rng.uniform(0.0, 1.1 * seconds)
            ended = forked.run(self._work(trial, out), self.notes, limits, after)
            yield row("killed", after, None if ended.status in (0, -9) else ended.err)
        for size in LONGEST:
            out = self._fresh(trial, name)
            ended = forked.run(self._work(trial, out), self.notes, forked.Limits(seconds=60.0, file_bytes=size))
            yield row(f"no file over {size} bytes", 0.0, in_one_line(ended))
        for size in ROOM:
            with self._small_disk(trial, name, size) as mounted:
                if mounted is None:
                    continue
                ended = forked.run(self._work(trial, mounted), self.notes, limits)
                found = in_one_line(ended) or self._left(trial, mounted)
            yield Row(name, f"{size} bytes left on the disk", 0.0, found or HELD)
        if os.getuid() == 0:
            out = self._fresh(trial, name)
            ended = forked.run(self._work(trial, out), self.notes, forked.Limits(seconds=60.0, user=NOBODY))
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
            waits.append(forked.start(self._work(trial, out, folder), folder, forked.Limits(seconds=60.0))[0])
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
        ended = forked.run(self._work(trial, out), self.notes, forked.Limits(seconds=60.0))
        if ended.status:
            raise RuntimeError(ended.err[-1500:])
        given = comparable(json.loads((self.notes / "result.json").read_text()))
        if trial.opens is None:
            return given, ended.seconds
        artefact, operation = trial.opens
        opened = forked.call(lambda: OPERATIONS[artefact][operation][1](self.made, out, self.notes), self.notes)
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

        found = in_one_line(forked.run(opened, self.notes, forked.Limits(seconds=60.0)))
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
