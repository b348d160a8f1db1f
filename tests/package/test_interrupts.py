"""SIGTERM and SIGINT end a command with one line, also while it still imports."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.package.test_layout import ROOT


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_at_start_up(number: signal.Signals, status: int) -> None:
    program = (
        "import sys, threading\n"
        "def import_slowly(): sys.stdout.write('ready\\n'); sys.stdout.flush(); threading.Event().wait(60)\n"
        "sys.meta_path.insert(0, type('Slow', (), {'find_spec': staticmethod(\n"
        "    lambda name, *_: import_slowly() if name == 'torch' else None)}))\n"
        "from expertcast.cli import main; sys.exit(main(['generate', 'reference', '--prompt', 'It was']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert said == "expertcast: interrupted; run the same command again\n"
    assert process.returncode == status
