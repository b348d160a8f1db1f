"""The script for a machine with a GPU: valid commands, time limits, and a refusal without a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from scripts import gpu_day

from expertcast.cli import build_parser


def test_commands_are_of_the_command_line(tmp_path: Path) -> None:
    for name, command in gpu_day.commands(tmp_path).items():
        if name != "tests":
            words = command[len(gpu_day.EXPERTCAST) :]
            assert build_parser(words[0]).parse_args(words).json == tmp_path / f"{name}.json"


def test_step_keeps_status_and_output(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    failed = gpu_day.run([sys.executable, "-c", "print('text'); raise SystemExit(3)"], log, 60)
    assert (failed["status"], log.read_text()) == (3, "text\n")
    assert gpu_day.run([sys.executable, "-c", "import time; time.sleep(60)"], log, 0.2)["status"] is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        gpu_day.main()
    assert capsys.readouterr().err == "gpu_day: torch sees no CUDA device: run it on a machine with a GPU\n"
