"""One process at a time writes a folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from expertcast.data.processes import exclusive, join_ranks
from expertcast.predictors import ExpertcastError

CODE = """
import sys, time
from pathlib import Path
from expertcast.data.processes import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(100)
"""


def test_held_by_another_process_until_it_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    other = subprocess.Popen([sys.executable, "-c", CODE, str(folder)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    with pytest.raises(ExpertcastError, match=r"another process is writing .*new: wait for it"), exclusive(folder):
        pass
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    other.stdout.close()
    with exclusive(folder):
        (folder / "file").touch()
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_a_folder_that_was_not_written_is_not_left(tmp_path: Path) -> None:
    with exclusive(tmp_path / "above" / "new"):
        assert (tmp_path / "above" / "new").is_dir()
    assert list(tmp_path.iterdir()) == []
    with exclusive(tmp_path / "above" / "new"):
        (tmp_path / "above" / "file").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["above", "file"]
    (tmp_path / "above" / "file").unlink()
    (tmp_path / "above").rmdir()
    (tmp_path / "old").mkdir()
    with exclusive(tmp_path / "old"), exclusive(tmp_path / "other"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize(("gpus", "backend"), [(0, "gloo"), (1, "gloo"), (2, "cpu:gloo,cuda:nccl")])
def test_each_rank_has_a_gpu_of_its_own(gpus: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with a GPU each; calls that need the GPUs themselves are recorded, not run."""
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "there"}.items():
        monkeypatch.setenv(name, value)
    called: list[object] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", called.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda backend, **_: called.append(backend))
    join_ranks()
    assert called == ([1, backend] if gpus == 2 else [backend])
