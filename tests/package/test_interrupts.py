"""SIGTERM and SIGINT end a command with one line, also while it still imports, and where Python drops exceptions."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.package.test_layout import ROOT

PROGRAM = """
import os, sys, threading
from expertcast.cli import main

def wait():
    print("ready", flush=True)
    threading.Event().wait(60)

def stop_here():
    {place}

class Finder:
    def find_spec(name, *_):
        if name == "torch" and Finder in sys.meta_path:
            sys.meta_path.remove(Finder)
            stop_here()

sys.meta_path.insert(0, Finder)
sys.exit(main(["inspect", "reference"]))
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize(
    "place",
    [
        pytest.param("wait()", id="plain code"),
        pytest.param("type('Dying', (), {'__del__': lambda _: wait()})()", id="a finaliser"),
        pytest.param("os.register_at_fork(after_in_parent=wait)\n    os.fork() or os._exit(0)", id="a fork"),
        pytest.param("try: wait()\n    except BaseException: pass", id="code that catches everything"),
    ],
)
def test_at_start_up(place: str, number: signal.Signals, status: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(place=place)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert said == "expertcast: interrupted; run the same command again\n"
    assert process.returncode == status
