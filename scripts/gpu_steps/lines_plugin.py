"""A pytest plugin: one line of JSON per test when it ends, and the end of the process when a test takes too long.

The limit is kept by a thread of C, which also ends a process whose call into CUDA never returns.
"""

from __future__ import annotations

import faulthandler
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

LINES_OPTION = "--lines"
LIMIT_OPTION = "--test-seconds"
_ERROR_LINES = 12
_STDERR = os.dup(2)
"""Descriptor; pytest puts its own file in the place of 2 before anything runs."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Where the lines go, and how long a test may take."""
    parser.addoption(LINES_OPTION, type=Path, required=True, help="file that gets a line per test")
    parser.addoption(LIMIT_OPTION, type=float, default=60.0, help="seconds of one test")


def pytest_configure(config: pytest.Config) -> None:
    """Lines are written as tests end."""
    config.pluginmanager.register(_Lines(config), "gpu-day-lines")


class _Lines:
    def __init__(self, config: pytest.Config) -> None:
        self._file: Path = config.getoption(LINES_OPTION)
        self._limit: float = config.getoption(LIMIT_OPTION)
        self._collect_only: bool = config.option.collectonly
        self._found: dict[str, Any] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if self._collect_only:
            for item in session.items:
                self._write({"test": item.nodeid})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        faulthandler.dump_traceback_later(self._limit, exit=True, file=_STDERR)
        self._found = {"test": item.nodeid, "outcome": "passed", "seconds": 0.0}
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._write({**self._found, "seconds": round(self._found["seconds"], 3)})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._found["seconds"] += report.duration
        if not report.passed:
            self._found["outcome"] = report.outcome
            self._found["why"] = str(report.longrepr).splitlines()[-_ERROR_LINES:]

    def _write(self, line: dict[str, Any]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")
