"""Online: the same tokens and values as traces on disk, mixed by a shuffle buffer that loses none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from expertcast.data.batch import TraceBatch
from expertcast.data.online import OnlineTraces, rebatched, shuffled
from expertcast.data.text import load_documents
from expertcast.data.traces import TraceDataset


def numbered(sizes: list[int]) -> list[TraceBatch]:
    """Batches of the given sizes whose every tensor says which row it is."""
    batches, start = [], 0
    for size in sizes:
        rows = torch.arange(start, start + size)
        values = rows.float()[:, None, None]
        batches.append(TraceBatch(residual_TLD=values, logits_TLE=values, document_T=rows, position_T=rows))
        start += size
    return batches


sizes = st.lists(st.integers(1, 40), min_size=1, max_size=20)


@given(sizes, st.integers(1, 30), st.integers(1, 100), st.integers(0, 3))
def test_shuffle_buffer_gives_every_row_once(sizes: list[int], batch_size: int, capacity: int, seed: int) -> None:
    batches = list(shuffled(numbered(sizes), batch_size, capacity=capacity, seed=seed))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    rows = TraceBatch.cat(batches)
    assert sorted(rows.document_T.tolist()) == list(range(sum(sizes)))
    assert torch.equal(rows.residual_TLD[:, 0, 0].long(), rows.document_T)


@given(sizes, st.integers(1, 30))
def test_rebatching_keeps_the_order(sizes: list[int], batch_size: int) -> None:
    batches = list(rebatched(numbered(sizes), batch_size))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert TraceBatch.cat(batches).document_T.tolist() == list(range(sum(sizes)))


def test_shuffle_buffer_mixes_within_its_capacity() -> None:
    rows = TraceBatch.cat(list(shuffled(numbered([10] * 100), 10, capacity=200, seed=0))).document_T
    moved = (rows - torch.arange(1000)).abs()
    assert 20 < float(moved.float().mean()) < 200
    assert int((rows[1:] == rows[:-1] + 1).sum()) < 50


@pytest.fixture(scope="module")
def online(reference_model: PreTrainedModel, reference_tokenizer: Any) -> OnlineTraces:
    """The running model with the settings of the session's traces."""
    return OnlineTraces(
        reference_model, reference_tokenizer, load_documents("reference"), tokens=12_000, buffer_tokens=700
    )


def test_unshuffled_batches_are_the_traces_own(online: OnlineTraces, reference_traces: TraceDataset) -> None:
    assert online.info["splits"] == reference_traces.info["splits"]
    assert online.learned_from() == reference_traces.learned_from() != frozenset()
    for split in ("validation", "test"):
        ours = list(online.batches(split, 500))
        theirs = list(reference_traces.batches(split, 500))
        assert [len(batch) for batch in ours] == [len(batch) for batch in theirs]
        for first, second in zip(ours, theirs, strict=True):
            assert torch.equal(first.residual_TLD, second.residual_TLD)
            assert torch.equal(first.logits_TLE.float(), second.logits_TLE)
            assert torch.equal(first.document_T, second.document_T)
            assert torch.equal(first.position_T, second.position_T)
            assert first.token_T is not None
            assert second.token_T is not None
            assert torch.equal(first.token_T, second.token_T)


def test_online_default_vectors_are_the_traces_own(
    reference_model: PreTrainedModel, reference_tokenizer: Any, online: OnlineTraces, reference_traces: TraceDataset
) -> None:
    assert torch.equal(online.defaults.count_LE, reference_traces.defaults.count_LE)
    assert torch.equal(online.defaults.expert_LED, reference_traces.defaults.expert_LED)
    assert online.view.fingerprint() == reference_traces.view.fingerprint()


def test_both_sources_train_on_the_same_tokens(online: OnlineTraces, reference_traces: TraceDataset) -> None:
    orders = []
    for source, seeds in ((online, [0]), (reference_traces, [0, 1])):
        epochs = [
            TraceBatch.cat(list(source.batches("train", 256, shuffle=True, seed=seed, max_tokens=1500)))
            for seed in seeds
        ]
        tokens = [list(zip(e.document_T.tolist(), e.position_T.tolist(), strict=True)) for e in epochs]
        assert all(len(set(order)) == 1500 for order in tokens)
        orders += tokens
    assert set(orders[0]) == set(orders[1])
    assert orders[1] != orders[2], "every epoch is shuffled anew"
    assert sum(len(batch) for batch in online.batches("validation", 256)) == reference_traces.token_count("validation")
