"""How experts on a disk are best kept: on findings made by hand, where the right answer is known."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expertcast.predictors import ExpertcastError
from expertcast.predictors.view import ModelShape
from expertcast.runtime.benchmarking import advise_disk as disk_advice
from expertcast.runtime.benchmarking.advise_disk import (
    COMPRESS,
    DiskFindings,
    StoredExperts,
    advise_disk,
    disk_rate,
    routing_of,
    scratch_rate,
    stored_experts,
)
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.expert_file import ExpertFile
from expertcast.runtime.storage.layout import SECTOR
from tests.runtime.storage.test_coded_store import _store

LAYERS, EXPERTS = 2, 8
# three tokens' experts in turn: with four slots of sixteen, least recently used first out, nothing is ever found
NEEDED = [[[8 * layer, 8 * layer + 1] for layer in range(LAYERS)]] + [
    [[8 * layer + 2 * (step % 3), 8 * layer + 2 * (step % 3) + 1] for layer in range(LAYERS)] for step in range(6)
]
SHAPE = ModelShape(layers=LAYERS, experts=EXPERTS, top_k=2, hidden=1)
CODED = StoredExperts(codec="bitsplit", plain=500, coded=200, decode_s=0.7)


def _found(
    rate: float = 1000.0, stored: StoredExperts | None = CODED, needed: Sequence[Any] = NEEDED, slots: int = 4
) -> DiskFindings:
    """Experts of 1000 bytes; a layer takes two seconds beside what it waits for."""
    return DiskFindings(
        routing=routing_of(needed, SHAPE), compute_s=2.0 * LAYERS, slots=slots, block_bytes=1000,
        rate=rate, rate_source="given", stored=stored, refused="" if stored else "codec 'bitsplit' cannot hold these",
    )  # fmt: skip


def test_compression_pays_on_a_slow_disk() -> None:
    """Each token but the fourth finds neither or both of its experts in the first two ranks: a third of all. Raw, a
    missing one takes a second. Coded, it is read in .7 s, and its shards are read and decoded in .2 and .7."""
    advice = advise_disk(_found())
    raw, coded, *_ = advice.options
    assert raw.hit_rate == coded.hit_rate == pytest.approx(1 / 3)
    assert raw.tpot_s == pytest.approx(LAYERS * (2 + 4 / 3), rel=1e-5)
    assert coded.tpot_s == pytest.approx(LAYERS * (2 + 4 / 3 * 0.9), rel=1e-5)
    slow = advise_disk(_found(rate=100.0))
    assert slow.chosen.codec == "bitsplit"
    assert slow.chosen.tpot_s == min(option.tpot_s for option in slow.options)


def test_not_when_decoding_takes_longer_than_reading() -> None:
    advice = advise_disk(_found(rate=2000.0))
    assert advice.chosen is advice.options[0]
    assert advice.text().startswith("advice: codec raw; expect")


def test_not_for_a_gain_that_is_not_relied_on() -> None:
    """Two slots leave no room for pools."""
    advice = advise_disk(_found(stored=replace(CODED, decode_s=0.6), slots=2))
    raw, coded = advice.options
    assert 0 < 1 - coded.tpot_s / raw.tpot_s < COMPRESS
    assert advice.chosen is raw
    assert "10% less time per token" in advice.reasons[-1]


def test_pools_hold_more_experts_in_the_same_memory() -> None:
    """Tokens choose among eight experts: room for five whole ones a layer is room for more planes or shards."""
    choose = random.Random(0)
    tokens = [[sorted(8 * layer + each for each in choose.sample(range(8), 2)) for layer in range(LAYERS)]
              for _ in range(200)]  # fmt: skip
    found = _found(rate=50.0, stored=replace(CODED, decode_s=0.1), needed=tokens, slots=10)
    advice = advise_disk(found)
    raw, coded, pooled = advice.options
    assert advice.chosen is pooled
    assert pooled.tpot_s < coded.tpot_s < raw.tpot_s
    pools = dict(word.split("=") for word in pooled.pools.split(","))
    assert pools.keys() <= {"C", "S", "E"}
    assert 1000 * pooled.slots + sum(map(int, pools.values())) <= 1000 * found.slots


def test_where_all_experts_fit_nothing_is_compressed() -> None:
    advice = advise_disk(_found(rate=1.0, slots=16))
    assert (advice.chosen.codec, advice.chosen.tpot_s) == ("raw", LAYERS * 2)
    assert "each is read once" in advice.reasons[0]


def test_experts_that_the_codec_cannot_hold() -> None:
    advice = advise_disk(_found(rate=1.0, stored=None))
    assert [option.codec for option in advice.options] == ["raw"]
    assert advice.reasons[-1] == "codec 'bitsplit' cannot hold these"
    assert advice.facts["decode_rate"] is None


def test_what_is_advised_can_be_saved(tmp_path: Path) -> None:
    advice = advise_disk(_found(rate=100.0))
    config = advice.chosen.config(OffloadConfig(memory="4000", bandwidth=100.0), tmp_path)
    config.save(tmp_path / "offload.json")
    loaded = OffloadConfig.load(tmp_path / "offload.json")
    assert (loaded.store, loaded.codec, loaded.slots) == ("disk", "bitsplit", advice.chosen.slots)
    assert (loaded.store_folder, loaded.memory, loaded.bandwidth) == (str(tmp_path), None, None)
    assert json.loads(json.dumps(advice.as_dict()))["chosen"]["codec"] == "bitsplit"


def test_routing_is_what_was_needed() -> None:
    """A prompt of many experts is one forward."""
    routing = routing_of(NEEDED, SHAPE)
    steps = list(routing.steps())
    assert [step.fresh for step in steps] == [True] + [False] * 6
    for step, needed in zip(steps, NEEDED, strict=True):
        for layer, rows in enumerate(step.rows):
            assert [8 * layer + expert for row in rows for expert in row] == needed[layer]
    prompt, token = routing_of([[[0, 1, 2, 3, 4], [8, 9]], [[0, 1], [8, 9]]], SHAPE).steps()
    assert prompt.rows == [[[0, 1], [2, 3], [4]], [[0, 1]]]
    assert (prompt.fresh, token.rows) == (True, [[[0, 1]], [[0, 1]]])


def test_a_disk_is_measured(tmp_path: Path) -> None:
    """With experts larger than the file, smaller ones, and ones that do not end with a sector."""
    path = tmp_path / "file"
    path.write_bytes(bytes(200_000))
    for block_bytes in (1_000_000, 40_960, 5_000):
        assert disk_rate(path, block_bytes) > 0
    path.write_bytes(b"short")
    with pytest.raises(ExpertcastError, match="too short"):
        disk_rate(path, 4096)
    assert scratch_rate(tmp_path / "new", 40_960, most=1 << 20) > 0
    assert not list((tmp_path / "new").iterdir())
    with pytest.raises(ExpertcastError, match="give another --store-folder"):
        scratch_rate(path / "inside", 4096)


def test_a_scratch_file_is_as_long_as_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is written in pieces of 16 MB."""
    monkeypatch.setattr(disk_advice, "disk_rate", lambda path, _block, most: path.stat().st_size)
    assert scratch_rate(tmp_path, 4096, most=(16 << 20) + 5 * SECTOR) == (16 << 20) + 5 * SECTOR


def test_sizes_are_those_of_the_file(tmp_path: Path) -> None:
    store, view = _store(tmp_path)
    store.pack(view)
    assert isinstance(store, DiskStore)
    file = ExpertFile(store.path)
    parts = [file.read(key) for key in range(file.header.count)]
    stored = stored_experts(store.codec, parts, decoding_s=0.5, threads=2)
    spans = file.offsets[:, -1] - file.offsets[:, 0] + -(-file.nbytes[:, -1] // SECTOR) * SECTOR
    assert stored.plain + stored.coded == spans.mean()
    assert stored.shards * stored.decode_s == 0.5
    costs = stored.costs(1000.0)
    assert costs.read_s + costs.shards * costs.shard_s == pytest.approx(spans.mean() / 1000)
