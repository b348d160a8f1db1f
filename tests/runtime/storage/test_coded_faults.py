"""Packing coded experts when the disk fills up, a codec refuses in the middle, or others pack into the same folder."""

from __future__ import annotations

import multiprocessing
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast import load_offloaded, offload
from expertcast.predictors import ExpertcastError
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.expert_file import FILE_NAME
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy
from tests.runtime.faults import INPUTS

# 8 experts of two sectors in each of four layers, behind a header of one: full in the first layer, later, in the index
FULL_AT = (20_000, 100_000, 200_000, 262_144 + 4096 + 100)


@pytest.mark.slow
def test_disk_full_while_packing(tmp_path: Path) -> None:
    """Every weight is back in the model, nothing of the file stays, and with room it is packed."""
    (tmp_path / "store").mkdir()
    done = subprocess.run([sys.executable, "-m", __name__, str(tmp_path / "store")], check=False)
    assert done.returncode == 0
    assert [entry.name for entry in (tmp_path / "store").iterdir()] == [FILE_NAME]


def _on_a_full_disk(folder: Path) -> None:
    model = tiny_model("qwen3_moe")
    before, weights = greedy(model, INPUTS), _copies(model)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    options = {"store": "disk", "codec": "bitsplit", "store_folder": folder, "slots": 6}
    for most in FULL_AT:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
        with pytest.raises(ExpertcastError, match=r"cannot write to .* \(File too large\): give another store_folder"):
            offload(model, **options)  # type: ignore[arg-type]
        assert not list(folder.iterdir())
        assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with offload(model, **options) as offloaded:  # type: ignore[arg-type]
        assert_same(greedy(offloaded, INPUTS), before)


def _copies(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.clone() for name, parameter in model.named_parameters()}


@pytest.mark.slow
def test_two_that_pack_at_once(tmp_path: Path) -> None:
    """In processes of their own, both in the middle of packing at the same time; a third then finds the file."""
    path = str(tmp_path / "model")
    tiny_model("qwen3_moe").save_pretrained(path)
    context = multiprocessing.get_context("spawn")
    barrier, found = context.Barrier(2), context.SimpleQueue()
    others = [context.Process(target=_pack_beside, args=(path, tmp_path, barrier, found.put)) for _ in range(2)]
    for other in others:
        other.start()
    for other in others:
        other.join(120)
        assert other.exitcode == 0
    with load_offloaded(path, store="disk", codec="bitsplit", store_folder=tmp_path / "store", slots=6) as offloaded:
        tokens = greedy(offloaded, INPUTS)[0].tolist()
    assert [found.get() for _ in others] == [tokens] * 2
    assert [entry.name for entry in (tmp_path / "store").iterdir()] == [FILE_NAME]


def _pack_beside(path: str, folder: Path, barrier: Barrier, put: Callable[[object], None]) -> None:
    fill = DiskStore.fill

    def wait(store: DiskStore, layer: int, write: Callable[[dict[str, Tensor]], None]) -> None:
        fill(store, layer, write)
        barrier.wait(100)

    DiskStore.fill = wait  # type: ignore[method-assign]
    with load_offloaded(path, store="disk", codec="bitsplit", store_folder=folder / "store", slots=6) as offloaded:
        put(greedy(offloaded, INPUTS)[0].tolist())


if __name__ == "__main__":
    _on_a_full_disk(Path(sys.argv[1]))
