"""Forecasts are not decoded beside the model: they wait until somebody waits."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from expertcast.data.discovery import find_moe_layers
from expertcast.runtime.storage.coded_reader import CodedReader
from expertcast.runtime.storage.coded_store import CodedStore
from tests.families.models import tiny_model


@pytest.fixture
def store(tmp_path: Path) -> CodedStore:
    view = find_moe_layers(tiny_model("qwen3_moe").to(torch.bfloat16))
    made = CodedStore(view, tmp_path, codec="bitsplit", fingerprint="one")
    made.pack(view)
    return made


@pytest.fixture
def reader(store: CodedStore) -> Iterator[CodedReader]:
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    made = store.reader(2, None)
    made.jobs.held_back = True
    yield made
    made.close()
    torch.set_num_threads(threads)


def test_a_forecast_is_read_and_waits(store: CodedStore, reader: CodedReader) -> None:
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


def test_one_that_becomes_urgent(store: CodedStore, reader: CodedReader) -> None:
    block = torch.zeros(store.layout.block_bytes, dtype=torch.uint8)
    read = store.read(2, block, None, False)
    reader.submit(read)
    while read.reading:
        time.sleep(1e-3)
    assert read.undone
    reader.promote(read)
    read.wait()
    assert torch.equal(block, store.block(2))


def test_processors_that_torch_leaves_free(store: CodedStore, reader: CodedReader) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))
    if (os.cpu_count() or 1) == 1:
        pytest.skip("one processor: torch leaves none free")
    block = torch.zeros(store.layout.block_bytes, dtype=torch.uint8)
    read = store.read(3, block, None, False)
    reader.submit(read)
    read.wait()
    assert torch.equal(block, store.block(3))
