"""Experts on a disk: what the simulator counts is what the runtime counts, to the byte."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.data.moe_layers import find_moe_layers
from expertcast.runtime import offload
from expertcast.runtime.advising.disk import stored as stored_by
from expertcast.runtime.advising.disk import stored_in
from expertcast.runtime.advising.survey import Watcher
from expertcast.runtime.config import pool_bytes
from expertcast.runtime.links.virtual import Stored
from expertcast.runtime.policies import Policies
from expertcast.runtime.simulation.machine import Case, Machine, constant_times
from expertcast.runtime.simulation.simulator import simulate
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.expert_file import ExpertFile
from tests.runtime.conftest import greedy

COUNTS = ("requests", "hits", "misses", "collisions", "evicted", "bytes_moved")


@contextmanager
def bytes_of_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What the system was asked for, read by read."""
    counted: list[int] = []
    own = os.preadv

    def counting(file: int, views: Sequence[Any], offset: int) -> int:
        counted.append(sum(len(view) for view in views))
        return own(file, views, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", counting)
        yield counted


@pytest.mark.parametrize(
    ("codec", "pools", "slots"),
    [
        ("raw", "", 48),
        ("bitsplit:shards=3", "", 48),
        ("bitsplit", "C=2MB", 48),
        ("bitsplit", "S=2MB", 192),
        ("bitsplit", "E=1MB", 192),
        ("bitsplit:shards=2", "C=1MB,S=1MB,E=500KB", 48),
        ("bitsplit:shards=2", "C=1MB,S=1MB,E=500KB", 192),
    ],
)
def test_the_simulator_counts_what_the_runtime_reads(
    codec: str, pools: str, slots: int, reference_model: PreTrainedModel, one: dict[str, Tensor], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    view, watched = find_moe_layers(reference_model), Watcher()
    options = {"store": "disk", "store_folder": tmp_path, "codec": codec, "slots": slots, "pools": pools}
    with offload(reference_model, observers=[watched], **options) as offloaded:
        assert offloaded.link.name == "disk"
        block_bytes = offloaded.store.layout.block_bytes
        stored = Stored(plain=block_bytes)
        if isinstance(offloaded.store, DiskStore) and not offloaded.store.addressable:
            file, made = ExpertFile(offloaded.store.path), offloaded.store.codec
            stored = replace(stored_by(made, stored_in(file), decoding_s=0.001, threads=1), pools=pool_bytes(pools))
        with bytes_of_reads(monkeypatch) as read:
            greedy(reference_model, one, 8)
        stats = offloaded.stats
    machine = Machine(
        times=constant_times(len(view), 0.001), block_bytes={"full": block_bytes}, bandwidth=1e9, stored=stored
    )
    trace = watched.trace(view.shape)
    done = simulate(trace, Case(policies=Policies(prefetch="none"), slots=slots, machine=machine))
    both = [done.decode.total, done.prefill.total]
    for name in COUNTS:
        assert sum(getattr(part, name) for part in both) == getattr(stats.total, name), name
    # where a prompt's layers take turns in few slots, a pool may have room a moment sooner or later in the runtime
    exact = {} if pools and slots < 100 else {"rel": 1e-12}
    assert done.bytes_read + done.prefill_bytes_read == pytest.approx(sum(read), **({"rel": 0.01} | exact))
    assert done.bytes_read > 0
    assert (offloaded.link.pools is None) == (not pools)
    if codec != "raw":
        assert sum(read) < 0.95 * stats.total.bytes_moved
