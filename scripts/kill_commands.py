"""Kill and interrupt commands at random moments, fill their disk, deny access, and run them twice at once.

    python scripts/kill_commands.py --kills 20 --seed 0 --json kills.json

Commands run in forks of this process on small artefacts (see `mutate_artefacts.py`). Three conditions are checked after
each fault: the command prints one line, or nothing if it was killed; its leftover files are correct or refused in one
line; and the same command, run again, ends with the result of an undisturbed run and with no other files. One of
two at once is killed as well: the other ends with the right result, or is refused in one line. A command that gets
SIGTERM or SIGINT before its end has the exit status 143 or 130.
"""

from __future__ import annotations

import itertools
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
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import fault_trials
from fault_trials import (
    ESTIMATOR,
    FREE,
    MODEL,
    RIGHT,
    STORE,
    TRACES,
    Ended,
    Limits,
    Row,
    collect_words,
    comparable,
    conclude,
    difference,
    generate_words,
    open_artefact,
    parser_of,
    refusal,
    train_words,
)

WRONG = "wrong"
NOBODY = 65534
LONGEST = (20_000, 40_000, 70_000)
"""Limits of file size in bytes. Printed output is a file too, so smaller limits would cut it off."""
ROOM = (4096, 8192, 16_384, 65_536)
"""Free bytes on the disk, in whole pages."""
LIMITS = Limits(seconds=900.0)
_RESULT = "result.json"
_INTERRUPTED = "interrupted; run the same command again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command and its expected behaviour."""

    words: Callable[[Path, Path], list[str]]
    opens: str | None = None
    """Artefact that it writes; None if its output is for people, or it writes nothing."""
    over: str | None = None
    """Artefact that exists before it runs."""


def _evaluate(made: Path, out: Path) -> list[str]:
    return ["eval", str(made / TRACES), "--predictor", "linear", str(made / ESTIMATOR), "--report", str(out)]


def _sweep(made: Path, out: Path) -> list[str]:
    return ["simulate", str(made / TRACES), "--sweep", "--processes", "1", "--layer-time", "0.001", "--out", str(out)]


_TRAIN = Command(words=lambda made, out: train_words(made / TRACES, ESTIMATOR, out), opens=ESTIMATOR)
COMMANDS = {
    "collect": Command(words=collect_words, opens=TRACES),
    "train": _TRAIN,
    "refit": replace(_TRAIN, over=FREE),
    "eval": Command(words=_evaluate),
    "store": Command(words=lambda made, out: ["store", str(made / MODEL), "--store-folder", str(out)]),
    "generate": Command(words=lambda made, out: generate_words(made, "--store-folder", str(out)), opens=STORE),
    "simulate": Command(words=_sweep),
    "inspect": Command(words=lambda made, _: ["inspect", str(made / TRACES), "--verify"]),
}
"""Commands whose results are reproducible; `refit` trains over an older checkpoint."""


Undisturbed = tuple[Any, list[str]]
"""Result and files of an undisturbed command."""


class Trials:
    """Runs commands with faults in a folder that has their input artefacts."""

    def __init__(self, folder: Path) -> None:
        self.made = folder / "made"
        self.folder, self.notes, self.place = folder, folder / "notes", folder / "place"
        self.notes.mkdir()
        fault_trials.call(lambda: fault_trials.make(self.made, 0), self.notes)

    def faults(self, name: str, kills: int, rng: Random) -> Iterator[Row]:
        """Yield the outcomes of all faults of one command."""
        self._fresh(name)
        command, (result, seconds) = COMMANDS[name], self._result(name)
        right = result, files_in(self.place)

        def row(fault: str, after: float, found: str | None, again: bool = True) -> Row:
            found = found or (self._again(name, right) if again else self._left(name))
            return Row(
                again=f"--only {name}", group=f"{name}: {fault}", what=f"after {after:.3f} s",
                outcome=WRONG if found else RIGHT, line=found or "",
            )  # fmt: skip

        def one_line(ended: Ended) -> str | None:
            return None if ended.status == 0 or refusal(ended) else f"status {ended.status}: {ended.err[-1500:]}"

        for _, number in itertools.product(range(kills), (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)):
            work, after = self._work(command, self._fresh(name)), rng.uniform(0.1, 1.1) * seconds
            ended = fault_trials.run(work, self.notes, LIMITS, after, number)
            expected = (-9, "") if number == signal.SIGKILL else (128 + number, _INTERRUPTED)
            found = ended.status, refusal(ended, 128 + number).removesuffix(" to go on")
            yield row(number.name, after, None if ended.status == 0 or found == expected else ended.err)
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
                yield row(f"{size} bytes left on the disk", 0.0, one_line(ended), again=False)
        pairs: list[tuple[float, float | None]] = [(0.0, None), (0.3 * seconds, None)]
        pairs += [(rng.uniform(0.0, seconds), rng.uniform(0.1, 1.1) * seconds) for _ in range(kills)]
        for after, killed in pairs:
            ends = self._two_at_once(command, self._fresh(name), after, killed, rng.randrange(2))
            found = next(filter(None, map(one_line, ends)), None)
            if all(ended.status for ended in ends):  # a second collection or training is refused, a second store never
                refused = "none ended: " + " | ".join(ended.err[-300:] for ended in ends)
                found = refused if killed is None or command.opens == STORE else found
            elif self._given() != (right[0][0] if command.opens else right[0]):
                found = "another result of the one that ended"
            yield row("two at once" if killed is None else "two at once, one killed", after, found)

    def _two_at_once(self, command: Command, out: Path, after: float, killed: float | None, which: int) -> list[Ended]:
        """Run a command twice, the second `after` seconds later; kill one of them `killed` seconds after that.

        Returns:
            How those that were not killed ended.
        """
        forks = []
        for name, pause in (("one", after), ("other", killed or 0.0)):
            folder = self.notes / name
            folder.mkdir(exist_ok=True)
            forks.append(fault_trials.start(self._work(command, out), folder, LIMITS))
            time.sleep(pause)
        if killed is not None:
            wait, child = forks.pop(which)
            os.kill(child, signal.SIGKILL)
            wait()
        return [wait() for wait, _ in forks]

    def _work(self, command: Command, out: Path) -> Callable[[], int]:
        """Return the function of a fork, which runs the command and writes its result."""

        def work() -> int:
            from expertcast.cli import main

            return main([*command.words(self.made, out), "--json", str(self.place / _RESULT)])

        return work

    def _given(self) -> Any:
        """Return the result that a command wrote, None if it writes none."""
        found = self.place / _RESULT
        return comparable(json.loads(found.read_text())) if found.is_file() else None

    def _result(self, name: str) -> tuple[Any, float]:
        """Run a command and open its artefact; return both results and the seconds."""
        command, out = COMMANDS[name], self.place / name
        ended = fault_trials.run(self._work(command, out), self.notes, LIMITS)
        if ended.status:
            raise RuntimeError(f"status {ended.status}: {ended.err[-1500:]}")
        given = self._given()
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
        if again != right[0]:
            return f"run again: {difference(right[0], again)}"
        odd = sorted({*files_in(self.place)} ^ {*right[1]})
        return f"other files: {', '.join(odd[:3])}{', ...' if len(odd) > 3 else ''}" if odd else None

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


def main(argv: list[str] | None = None) -> int:
    """Run the trials; return the exit status."""
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=20, help="of each signal, per command (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=list(COMMANDS), help="(default: all commands)")
    args = parser.parse_args(argv)
    fault_trials.prepare()
    with tempfile.TemporaryDirectory() as temporary:
        os.chmod(temporary, 0o755)
        trials = Trials(Path(temporary))
        names = args.only or list(COMMANDS)
        rows = (row for name in names for row in trials.faults(name, args.kills, Random(f"{args.seed}:{name}")))
        return conclude(rows, (RIGHT, WRONG), args.json)


if __name__ == "__main__":
    sys.exit(main())
