"""Stores without a folder: their file has no name, so that nothing stays of a process that is killed."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from expertcast.data.moe_layers import find_moe_layers
from expertcast.runtime import offload
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.store import ExpertStore
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy

INPUTS = {"input_ids": torch.arange(1, 9)[None]}
CODECS = ["raw", "bitsplit"]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("when", ["packing", "running"])
def test_a_killed_process_leaves_nothing(when: str, codec: str, tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", __name__, when, codec]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        held = [os.readlink(handle) for handle in Path(f"/proc/{process.pid}/fd").iterdir()]
        assert [place for place in held if place.startswith(str(tmp_path))], "the experts are there"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert list(tmp_path.iterdir()) == []


def _wait_to_be_killed(when: str, codec: str) -> None:
    if when == "packing":
        DiskStore.finish = _stop  # type: ignore[method-assign]
    with offload(tiny_model("qwen3_moe"), store="disk", codec=codec, slots=6) as offloaded:
        greedy(offloaded, INPUTS)
        _stop(offloaded.store)


def _stop(_store: ExpertStore) -> None:
    print("now", flush=True)
    time.sleep(600)


@pytest.mark.parametrize("link", ["instant", "disk"])
@pytest.mark.parametrize("codec", CODECS)
def test_it_is_read_like_any_other(codec: str, link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = tiny_model("qwen3_moe")
    before = greedy(model, INPUTS)
    with offload(model, store="disk", codec=codec, link=link, slots=6) as offloaded:
        assert_same(greedy(offloaded, INPUTS), before)
        path = offloaded.store.path  # type: ignore[attr-defined]
        assert path.stat().st_size > 0
        assert list(tmp_path.iterdir()) == []
        file = os.stat(path)
    del offloaded
    gc.collect()
    assert (file.st_dev, file.st_ino) not in _open_files()
    assert_same(greedy(model, INPUTS), before)


def test_it_is_filled_again_beside_what_is_in_use() -> None:
    one, two = (find_moe_layers(tiny_model("qwen3_moe", seed=seed)) for seed in (0, 1))
    store = DiskStore(one)
    store.pack(one)
    first = store.block(0)
    before = first.clone()
    store.pack(two)
    assert torch.equal(first, before)
    assert not torch.equal(store.block(0), before)
    store.close()


def _open_files() -> set[tuple[int, int]]:
    """Device and number of each file that this process has open."""
    found = set()
    for handle in Path("/proc/self/fd").iterdir():
        try:
            status = handle.stat()
        except OSError:  # the listing's own
            continue
        found.add((status.st_dev, status.st_ino))
    return found


if __name__ == "__main__":
    _wait_to_be_killed(*sys.argv[1:])
