"""SIGTERM and SIGINT for every command: while it starts, in its middle, and when it has begun to write a file.

At start-up the command is a process of its own, which is importing torch; at the other two moments it is a fork. The
middle is half of the audit events of an undisturbed run (torch calls `id` all the time), or that a server serves; time
would strike commands that have ended, on a busy machine. `push` and `pull` know one hub, on the loopback.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_trials import artefacts, forked
from fault_trials.artefacts import ESTIMATOR, FREE, TRACES, Made, generate_words, train_words
from fault_trials.commands import TRIALS, files_in
from fault_trials.forked import Ended, Limits
from fault_trials.operations import comparable, difference

START, MIDDLE, WRITING = "start-up", "middle", "writing"
SIGNALS = signal.SIGTERM, signal.SIGINT
PULLED, PUSHED = "me/there", "me/new"
_LIMITS = Limits(seconds=900.0)
_SERVING = "serving "
_LONGEST = 200.0
_RESULT = "result.json"
_EVENTS = "events"
_TOKEN = "hf_writer"
"""Of the one who writes to the tests' hub."""

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
    "push": Case(lambda made, _: ["push", str(made[FREE]), PUSHED], exact=False),
    "pull": Case(lambda _, out: ["pull", PULLED, "--out", str(out)]),
    "inspect": Case(lambda made, _: ["inspect", str(made[TRACES]), "--verify"]),
}  # fmt: skip
"""Of every command of `expertcast`."""


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
        forked.call(lambda: artefacts.make(self._made, 0), self._notes)
        self._run(["push", str(self._made[FREE]), PULLED], None)

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
        self, words: list[str], case: Case | None, number: int = signal.SIGTERM, strikes: Strikes | None = None
    ) -> tuple[Ended, Any]:
        """A fork that sends itself the signal when it `strikes`; a server without that gets it once it serves."""
        result = self._notes / _RESULT
        result.unlink(missing_ok=True)
        serves = case is not None and case.serves

        def work() -> int:
            from expertcast.cli import main

            os.environ["HF_TOKEN"] = _TOKEN
            events = _watch(strikes, number)
            status = main([*words, "--json", str(result)])
            (self._notes / _EVENTS).write_text(str(events()))
            return status

        wait, child = forked.start(work, self._notes, _LIMITS)
        if serves:
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


@contextlib.contextmanager
def one_hub() -> Iterator[None]:
    """The tests' hub, which huggingface_hub knows alone. To be entered before anything imports it."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.hub.fake_hub import served

    with served() as hub, tempfile.TemporaryDirectory() as home:
        os.environ |= {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": home,
                       "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}  # fmt: skip
        yield
