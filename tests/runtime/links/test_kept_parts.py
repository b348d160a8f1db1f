"""Experts kept compressed beside the slots: the same bits, fewer bytes from the disk, and bounded memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast import OffloadConfig, offload
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError
from expertcast.runtime.config import slots_for
from expertcast.runtime.links.base import InstantLink
from expertcast.runtime.links.disk import DiskLink
from expertcast.runtime.offloading import OffloadedModel
from expertcast.runtime.policies import Policies
from expertcast.runtime.pools.states import State
from expertcast.runtime.storage.coded_reader import EVERYTHING, NOTHING, PACKED, PLAIN
from expertcast.runtime.storage.layout import BlockLayout
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy
from tests.runtime.drafts.loops import prompt, tiny
from tests.runtime.faults import INPUTS
from tests.runtime.storage.codecs.layouts import cut_into


def _model() -> PreTrainedModel:
    return tiny_model("qwen3_moe").to(torch.bfloat16)


@pytest.mark.parametrize(
    "fields",
    [
        {"pools": "C=40KB"},
        {"pools": "C=10KB,S=15KB,E=6KB"},
        {"pools": "S=12KB"},
        {"pools": "E=12KB"},
        {"pools": "C=30KB", "predictor": "next_norm"},
        {"pools": "C=30KB", "slots": 5},
        {"pools": "C=20KB,S=10KB", "slots": 20},
    ],
)
def test_same_bits(fields: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every pool, and over a second text, parts in memory are not read again."""
    cut_into(4 if fields.get("slots") == 20 else 1, monkeypatch)
    model = _model()
    before = greedy(model, INPUTS, 8)
    options = {"store": "disk", "codec": "bitsplit", "slots": 9, "store_folder": tmp_path, **fields}
    read = []
    for own in ({}, {"pools": "", "policies": Policies(eviction="lru")}):  # pools evict by recency, too
        with offload(model, **{**options, **own}) as offloaded:  # type: ignore[arg-type]
            for _ in range(2):
                assert_same(greedy(offloaded, INPUTS, 8), before)
            read.append(offloaded.link.bytes_read)
            if not own:
                _check(offloaded)
    if "predictor" not in fields:  # how much is read ahead of time depends on when threads run
        assert read[0] < read[1]
    assert_same(greedy(model, INPUTS, 8), before)


def _check(offloaded: OffloadedModel) -> None:
    """Memory stays within the pools' sizes, slots included."""
    link, store = offloaded.link, offloaded.store
    assert isinstance(link, DiskLink)
    assert link.pools is not None
    for copy in offloaded.residency.copies.values():
        link.wait(copy)
    link._kept.apply_changes()
    reader, room, kept = link._kept.reader, link.pools.room, 0
    wanted = {State.C: EVERYTHING, State.S: {PLAIN}, State.E: {PACKED}, State.M: NOTHING, State.F: NOTHING}
    for key in range(store.layers * store.experts):
        state, held = link.pools.state(key), reader.held(key)
        assert held <= wanted[state]
        assert state is not State.F or key in offloaded.pool.slots
        kept += len(held)
    assert 0 < kept <= 2 * room[State.C] + room[State.S] + room[State.E]
    assert reader._memory.nbytes <= (room[State.C] + room[State.S] + room[State.E] + 4) * sum(store.part_nbytes)


def _plain_parts(offloaded: OffloadedModel, keys: Iterable[int]) -> int:
    """Count the experts whose signs and mantissas are kept, and compare these with the model's."""
    reader, found = offloaded.link._kept.reader, 0
    for key in keys:
        if PLAIN in reader.held(key):
            found += 1
            low = offloaded.store.block(key).view(-1, 2)[:, 0]
            assert torch.equal(reader._memory._kept[key][PLAIN][: len(low)], low), key
    return found


def test_full_experts_are_taken_apart(tmp_path: Path) -> None:
    """An expert evicted into pool S keeps its signs and mantissas from the slot, without a read."""
    model, taken = _model(), list[int]()
    before = greedy(model, INPUTS, 12)
    with offload(model, store="disk", codec="bitsplit", slots=12, pools="S=20KB", store_folder=tmp_path) as offloaded:
        reader = offloaded.link._kept.reader
        keep_plain = reader.keep_plain

        def note(key: int, block: Tensor) -> None:
            keep_plain(key, block)
            taken.append(_plain_parts(offloaded, [key]))

        reader.keep_plain = note
        assert_same(greedy(offloaded, INPUTS, 12), before)
        assert sum(taken)


@pytest.mark.parametrize(
    ("draft", "pools"), [("cascade", "S=200KB"), ("drop_cascade", "C=50KB,S=100KB,E=50KB"), ("fetch_lowest", "S=200KB")]
)
def test_what_a_draft_holds_in_less_is_not_taken_apart(draft: str, pools: str, tmp_path: Path) -> None:
    """Only full experts leave signs and mantissas, so forward passes after a draft stay exact."""
    model = tiny("qwen3_moe", torch.bfloat16)
    ids_BS = prompt(2)
    with torch.no_grad():
        before = model(ids_BS).logits
    options = {"store": "disk", "codec": "bitsplit", "slots": 9, "pools": pools, "store_folder": tmp_path}
    with offload(model, **options) as offloaded, torch.no_grad():  # type: ignore[arg-type]
        kept, store = 0, offloaded.store
        for length in (1, 2, 4):
            offloaded.generate(ids_BS, max_new_tokens=12, do_sample=False, draft=draft, draft_length=length)
            kept += _plain_parts(offloaded, range(store.layers * store.experts))
            assert torch.equal(offloaded(ids_BS).logits, before), length
        assert kept


def test_few_forecasts_begin_however_much_memory_is_free(reference_model: PreTrainedModel) -> None:
    """Each expert takes a third of a second: two of twenty prefetches have begun, and the others are dropped."""
    options = {"codec": "bitsplit", "slots": 100, "pools": "C=4MB", "bandwidth": 1e5}
    with offload(reference_model, store="disk", **options) as offloaded:  # type: ignore[arg-type]
        residency = offloaded.residency
        residency.prefetch(range(20))
        residency.cancel_prefetches(range(20))
        assert sum(not copy.done for copy in residency.copies.values()) == 2


@pytest.mark.parametrize("shards", [1, 3])
def test_memory_is_for_slots_and_for_decoding(shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads decode one shard each, in buffers of half an expert."""
    cut_into(shards, monkeypatch)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: range(4))
    model = _model()
    block = BlockLayout.of(find_moe_layers(model)).block_bytes
    decoding, memory = 4 * block // 2 // shards, 20 * block
    with offload(model, store="disk", store_folder=tmp_path, codec="bitsplit") as offloaded:
        slots = slots_for(OffloadConfig(memory=memory), offloaded.store)
        assert slots * block == memory - -(-decoding // block) * block
        with pytest.raises(ExpertcastError, match=f"memory={2 * block} holds .* beside .* for decoding"):
            slots_for(OffloadConfig(memory=2 * block), offloaded.store)


def test_a_forward_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    """After an error the pools are empty, and the model is right again."""
    model = _model()
    before = greedy(model, INPUTS)
    options = {"store": "disk", "codec": "bitsplit", "slots": 9, "pools": "C=200KB", "store_folder": tmp_path}
    with offload(model, **options) as offloaded:  # type: ignore[arg-type]
        assert_same(greedy(offloaded, INPUTS), before)
        path = offloaded.store.path  # type: ignore[attr-defined]
        content = path.read_bytes()
        with path.open("r+b") as file:
            file.truncate(len(content) // 2)
        offloaded.link.restart()
        offloaded.residency.reset()
        with pytest.raises(ExpertcastError, match="changed or truncated"):
            greedy(offloaded, INPUTS)
        path.write_bytes(content)
        offloaded.residency.reset()
        assert_same(greedy(offloaded, INPUTS), before)


def test_refusals() -> None:
    model = _model()
    with pytest.raises(ExpertcastError, match=r"pools='X=1GB': give one size"):
        OffloadConfig(store="disk", codec="bitsplit", pools="X=1GB")
    with pytest.raises(ExpertcastError, match=r"pools='C=much': 'much' is no size"):
        OffloadConfig(store="disk", codec="bitsplit", pools="C=much")
    with pytest.raises(ExpertcastError, match="give a codec"):
        OffloadConfig(store="disk", pools="C=1GB")
    with pytest.raises(ExpertcastError, match="leave eviction, scope and lossy misses out"):
        OffloadConfig(store="disk", codec="bitsplit", pools="C=1GB", policies=Policies(eviction="lfu"))
    with pytest.raises(ExpertcastError, match="cache=True"):
        OffloadConfig(store="disk", codec="bitsplit", pools="C=1GB", cache=False)
    with pytest.raises(ExpertcastError, match="'instant' on cpu"):
        offload(model, store="disk", codec="bitsplit", pools="C=1GB", link="instant")
    with pytest.raises(ExpertcastError, match="pool C has 9 bytes, but one expert takes"):
        offload(model, store="disk", codec="bitsplit", pools="C=9")
    with pytest.raises(ExpertcastError, match="1 GB for pools='C=1GB'"):
        offload(model, store="disk", codec="bitsplit", pools="C=1GB", memory="1GB")
    with offload(model, store="disk", codec="bitsplit", link=InstantLink()) as offloaded:
        assert offloaded.link.pools is None
