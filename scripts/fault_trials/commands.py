"""Commands that write, what opens what they wrote, and what is right of either."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fault_trials import artefacts
from fault_trials.artefacts import ESTIMATOR, FREE, STORE, TRACES, Made
from fault_trials.forked import Ended


def _nothing(_: Made, __: Path) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Trial:
    """A command that writes, and what opens what it wrote."""

    words: Callable[[Made, Path], list[str]]
    opens: tuple[str, str] | None
    """Artefact and operation; None where people read what is written."""
    before: Callable[[Made, Path], None] = _nothing
    """What is there already."""


def _another(made: Made, out: Path) -> None:
    shutil.copytree(made[FREE], out)


def _evaluate(made: Made, out: Path) -> list[str]:
    return ["eval", str(made[TRACES]), "--predictor", "linear", str(made[ESTIMATOR]), "--report", str(out)]


def _sweep(made: Made, out: Path) -> list[str]:
    return ["simulate", str(made[TRACES]), "--sweep", "--processes", "1", "--layer-time", "0.001", "--out", str(out)]


TRIALS = {
    "collect": Trial(artefacts.collect_words, (TRACES, "open")),
    "train": Trial(lambda made, out: artefacts.train_words(made[TRACES], ESTIMATOR, out), (ESTIMATOR, "open")),
    "refit": Trial(
        lambda made, out: artefacts.train_words(made[TRACES], ESTIMATOR, out),
        (ESTIMATOR, "open"),
        _another,
    ),
    "pack": Trial(lambda made, out: artefacts.generate_words(made, "--store-folder", str(out)), (STORE, "open")),
    "eval": Trial(_evaluate, None),
    "sweep": Trial(_sweep, None),
}


def in_one_line(ended: Ended) -> str | None:
    """None for success and for one line; else what was printed."""
    if ended.status == 0:
        return None
    words = ended.err.split("expertcast: ")
    if ended.status == 2 and len(words) > 1 and "\n" not in words[-1].strip() and "Traceback" not in ended.err:
        return None
    return f"status {ended.status}: {' | '.join(ended.err.strip().splitlines()[-3:])}"


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
