"""Damage the files of small artefacts, open them with the commands, and count what comes of it.

    python scripts/mutate_artefacts.py --count 2000 --seed 0 --json faults.json

An artefact (traces, checkpoints, an expert store, a file of options, texts) is copied, one of its files is changed, and
up to two operations open it, each in a fork of this process with a limit of time and memory. What may come out:

    right       the same result as of the undamaged files, compared exactly
    edited      another result of a file that people edit, or whose digest was made anew on purpose
    refused     exit status 2 and one line that names the file or its folder
    unnamed     the same with a line that does not
    traceback   an exception, a signal, or more than one line
    changed     another result, without a word
    hung        no end in 20 seconds

The first three are right; the exit status is 1 if there was any other. `--only N` makes case N of a seed alone, and
says what happened; its files stay in `--out`.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a fork has one thread

from fault_trials import artefacts, forked
from fault_trials.mutations import mutate
from fault_trials.operations import BAD, CLASSES, OPERATIONS, comparable, outcome, perform

WEIGHTS = {artefacts.TRACES: 8, artefacts.ESTIMATOR: 4, artefacts.FREE: 3, artefacts.NEXT_TOKEN: 1,
           artefacts.STORE: 3, artefacts.CONFIG: 2, artefacts.DATA: 2}  # fmt: skip
EDITABLE = (artefacts.CONFIG, artefacts.DATA)


@dataclass(frozen=True, slots=True)
class Row:
    """One operation on one damaged artefact."""

    case: int
    file: str
    change: str
    operation: str
    outcome: str
    line: str


def main(argv: list[str] | None = None) -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="damaged files (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument("--only", type=int, metavar="N", help="case N alone")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="keep the artefacts there (default: a temporary folder)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the results there as well")
    args = parser.parse_args(argv)
    forked.prepare()
    with tempfile.TemporaryDirectory() as temporary:
        driver = Driver(args.out or Path(temporary), args.seed)
        rows: list[Row] = []
        for case in range(args.count) if args.only is None else [args.only]:
            for row in driver.case(case):
                rows.append(row)
                if row.outcome in BAD or args.only is not None:
                    what = f"{row.file}: {row.change}; {row.operation}: {row.outcome}, {row.line!a}"
                    print(f"--seed {args.seed} --only {case}: {what}", flush=True)
    by_file = counts(rows)
    print(table(by_file))
    if args.json:
        failures = [asdict(row) for row in rows if row.outcome in BAD]
        result = {"seed": args.seed, "count": args.count, "operations": len(rows), "by_file": by_file}
        args.json.write_text(json.dumps({**result, "failures": failures}, indent=2) + "\n")
    return int(any(row.outcome in BAD for row in rows))


class Driver:
    """The artefacts, and what their operations give when nothing is damaged.

    Args:
        folder: holds them; made if need be.
        seed: what is damaged, and how.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.seed = seed
        self.made, self.other = artefacts.Made(folder / "made"), artefacts.Made(folder / "other")
        self.work = folder / "work"

        for number, made in enumerate((self.made, self.other)):
            shutil.rmtree(made.root, ignore_errors=True)
            forked.call(lambda made=made, number=number: artefacts.make(made, number), self._renew(self.work / "out"))
        self.right = {name: {operation: self._right(name, operation) for operation in OPERATIONS[name]}
                      for name in artefacts.ARTEFACTS}  # fmt: skip

    def case(self, number: int) -> list[Row]:
        """Damage one file, and open it by at most two operations."""
        rng = Random(f"{self.seed}:{number}")
        name = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        file = rng.choice(damageable(self.made[name]))
        operations = OPERATIONS[name]
        weights = [weight for weight, _ in operations.values()]
        chosen = dict.fromkeys(rng.choices(list(operations), weights, k=2))
        others = [path for each in artefacts.ARTEFACTS for path in damageable(self.made[each])]
        twin = self.other[name] / file.relative_to(self.made[name])
        rows = []
        for operation in chosen:
            target = self._copy(name)
            damaged = target / file.relative_to(self.made[name])
            change = mutate(damaged, [twin] * len(others) + others, Random(f"{self.seed}:{number}:change"))
            edited = name in EDITABLE or "sealed again" in change
            ended, given = perform(name, operation, self.made, target, self._renew(self.work / "out"))
            kind, line = outcome(ended, given, self.right[name][operation], target, edited)
            rows.append(Row(number, f"{name}/{file.relative_to(self.made[name])}", change, operation, kind, line))
        return rows

    def _right(self, name: str, operation: str) -> Any:
        given = []
        for _ in range(2):
            ended, result = perform(name, operation, self.made, self._copy(name), self._renew(self.work / "out"))
            assert ended.status == 0, f"{operation} of undamaged {name}: {ended.err}"
            given.append(comparable(result))
        assert given[0] == given[1], f"{operation} of {name} gives another result every time"
        return given[0]

    def _copy(self, name: str) -> Path:
        """Always at the same place, for results that say where."""
        target = self.work / name
        if target.exists():
            shutil.rmtree(target)
        shutil.copytree(self.made[name], target)
        return target

    @staticmethod
    def _renew(folder: Path) -> Path:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        return folder


def damageable(folder: Path) -> list[Path]:
    """The files of an artefact that are read."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".md")


def counts(rows: list[Row]) -> dict[str, dict[str, int]]:
    """Operations by file and class."""
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in rows:
        found[row.file][row.outcome] += 1
    return {file: {name: count[name] for name in CLASSES} for file, count in sorted(found.items())}


def table(by_file: dict[str, dict[str, int]]) -> str:
    """A row per file, and their sum."""
    total = {name: sum(row[name] for row in by_file.values()) for name in CLASSES}
    lines = [f"{'file':40}" + "".join(f"{name:>11}" for name in CLASSES)]
    lines += [f"{file:40}" + "".join(f"{row[name]:>11}" for name in CLASSES) for file, row in by_file.items()]
    return "\n".join([*lines, f"{'all':40}" + "".join(f"{total[name]:>11}" for name in CLASSES)])


if __name__ == "__main__":
    sys.exit(main())
