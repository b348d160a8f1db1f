"""Forecasts are not decoded beside the model: they wait until somebody waits."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from expertcast.data.machine import usable_processors
from expertcast.data.moe_layers import find_moe_layers
from expertcast.runtime.storage.coded_reader import CodedReader
from expertcast.runtime.storage.disk_store import DiskStore
from tests.families.models import tiny_model


@pytest.fixture
def store(tmp_path: Path) -> DiskStore:
    view = find_moe_layers(tiny_model("qwen3_moe").to(torch.bfloat16))
    made = DiskStore(view, tmp_path, codec="bitsplit", fingerprint="one")
    made.pack(view)
    return made


@pytest.fixture
def reader(store: DiskStore) -> Iterator[CodedReader]:
    threads = torch.get_num_threads()
    torch.set_num_threads(usable_processors())
    made = store.reader(2, None)
    made.jobs.held_back = True
    yield made
    made.close()
    torch.set_num_threads(threads)


def test_a_forecast_is_read_and_waits(store: DiskStore, reader: CodedReader) -> None:
    blocks = torch.zeros(2, store.layout.block_bytes, dtype=torch.uint8)
    early, urgent = (store.read(key, block, None, not key) for key, block in zip((1, 0), blocks, strict=True))
    reader.submit(early)
    while early.reading:
        time.sleep(1e-3)
    reader.submit(urgent)
    urgent.wait()
    assert torch.equal(blocks[1], store.block(0))
    assert early.undone == len(reader._plan.jobs)
    assert not blocks[0].any()
    reader.wait(early)
    assert torch.equal(blocks[0], store.block(1))


def test_one_that_becomes_urgent(store: DiskStore, reader: CodedReader) -> None:
    block = torch.zeros(store.layout.block_bytes, dtype=torch.uint8)
    read = store.read(2, block, None, False)
    reader.submit(read)
    while read.reading:
        time.sleep(1e-3)
    assert read.undone
    reader.promote(read)
    read.wait()
    assert torch.equal(block, store.block(2))


def test_threads_are_no_more_than_can_be_busy(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the machine's 64 processors are this process's; with all of them, two jobs of each of four experts."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    for affinity, threads in ((2, 2), (64, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _process, count=affinity: range(count))
        made = store.reader(2, None)
        assert made.rates().threads == threads
        made.close()


def test_processors_that_torch_leaves_free(store: DiskStore, reader: CodedReader) -> None:
    torch.set_num_threads(max(1, usable_processors() - 1))
    if usable_processors() == 1:
        pytest.skip("one processor: torch leaves none free")
    block = torch.zeros(store.layout.block_bytes, dtype=torch.uint8)
    read = store.read(3, block, None, False)
    reader.submit(read)
    read.wait()
    assert torch.equal(block, store.block(3))
