"""Step 2: the tests marked `gpu`, a process per file and a time limit per test; in the small form tests of the CPU.

A test that hangs or takes its process down costs itself only: the rest of its file runs in a new process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from gpu_steps.day import ROOT, TESTS_FILE, Day
from gpu_steps.lines_plugin import LIMIT_OPTION, LINES_OPTION

SMALL_TESTS = "tests/runtime/links/test_readback.py"
TEST_S = 45
"""Limit of one test; compiling its kernels is in it."""
RESERVE_S = 5
"""Kept back for the end of the step."""
NOT_BEGUN = (2, 3, 4, 5)
"""Exit statuses of a pytest that ran no test."""
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "gpu_steps.lines_plugin", "--tb=short", "--no-header")


def run(day: Day) -> bool:
    """Run them all, as far as the time goes."""
    selection = [SMALL_TESTS] if day.small else ["-m", "gpu", "tests"]
    tests = collect(day, selection)
    day.save(command=" ".join(["pytest", *selection]), tests=len(tests), outcomes={})
    lines_file = day.out / TESTS_FILE
    lines_file.unlink(missing_ok=True)
    for _, of_file in groupby(tests, key=lambda test: test.partition("::")[0]):
        run_file(day, list(of_file), lines_file)
        lines = outcomes(lines_file)
        day.save(
            outcomes=dict(Counter(line["outcome"] for line in lines)),
            failed=[line for line in lines if line["outcome"] not in ("passed", "skipped")],
        )
    counted = Counter(line["outcome"] for line in outcomes(lines_file))
    return bool(counted["passed"]) and not set(counted) - {"passed", "skipped"} and counted.total() == len(tests)


def collect(day: Day, selection: list[str]) -> list[str]:
    """Ids of the tests.

    Raises:
        RuntimeError: pytest cannot collect them.
    """
    command = [*PYTEST, "--collect-only", "-q", "-q", *selection]
    names_file = day.out / (TESTS_FILE + ".names")
    try:
        found = subprocess.run([*command, f"{LINES_OPTION}={names_file}"], cwd=ROOT, timeout=day.left(), check=False)
        if found.returncode:
            raise RuntimeError(f"pytest collected nothing (status {found.returncode}); the log says why")
        return [line["test"] for line in outcomes(names_file)]
    finally:
        names_file.unlink(missing_ok=True)


def run_file(day: Day, tests: list[str], lines_file: Path) -> None:
    """Run the tests of one file; one whose process ended in it is `killed`, and the next process goes on behind it.

    Args:
        day: whose time counts.
        tests: their ids, in order.
        lines_file: gets a line per test.
    """
    while tests and day.left() > RESERVE_S:
        options = [f"{LINES_OPTION}={lines_file}", f"{LIMIT_OPTION}={TEST_S}"]
        known = len(outcomes(lines_file))
        try:
            status = subprocess.run(
                [*PYTEST, *options, *tests], cwd=ROOT, timeout=day.left() - RESERVE_S, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return
        lines = outcomes(lines_file)
        tests = [test for test in tests if test not in {line["test"] for line in lines}]
        lost = tests if status in NOT_BEGUN and len(lines) == known else tests[:1]
        with lines_file.open("a") as file:
            for test in lost:
                file.write(json.dumps({"test": test, "outcome": "killed", "status": status}) + "\n")
        tests = tests[len(lost) :]


def outcomes(lines_file: Path) -> list[dict[str, Any]]:
    """What was written so far; a line that was cut short is left out."""
    return list(_lines(lines_file))


def _lines(lines_file: Path) -> Iterator[dict[str, Any]]:
    if lines_file.exists():
        for line in lines_file.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                continue
