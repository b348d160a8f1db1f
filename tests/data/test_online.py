"""Online: the same tokens and values as traces on disk, mixed by a shuffle buffer that loses none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from expertcast.data import online as module
from expertcast.data.batch import TraceBatch
from expertcast.data.capture import ActivationStream
from expertcast.data.online import OnlineTraces, rebatched
from expertcast.data.text import Document
from expertcast.data.traces import TraceDataset, TraceSource
from tests.data.small_traces import MANY


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
    batches = list(rebatched(numbered(sizes), batch_size, capacity=capacity, seed=seed))
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
    rows = TraceBatch.cat(list(rebatched(numbered([10] * 100), 10, capacity=200, seed=0))).document_T
    moved = (rows - torch.arange(1000)).abs()
    assert 20 < float(moved.float().mean()) < 200
    assert int((rows[1:] == rows[:-1] + 1).sum()) < 50


@pytest.fixture(scope="module")
def online(small_model: PreTrainedModel, reference_tokenizer: Any, text: list[Document]) -> OnlineTraces:
    """The running model with the settings of the traces."""
    return OnlineTraces(small_model, reference_tokenizer, text, buffer_tokens=700, **MANY)


def test_what_it_gives_is_the_traces_own(online: OnlineTraces, dataset: TraceDataset) -> None:
    assert online.info["splits"] == dataset.info["splits"]
    assert online.learned_from() == dataset.learned_from() != frozenset()
    assert online.view.fingerprint() == dataset.view.fingerprint()
    for split in ("validation", "test"):
        ours, theirs = (list(source.batches(split, 300)) for source in (online, dataset))
        assert [len(batch) for batch in ours] == [len(batch) for batch in theirs]
        for first, second in zip(ours, theirs, strict=True):
            for name in ("residual_TLD", "early_TLD", "document_T", "position_T", "token_T"):
                assert torch.equal(getattr(first, name), getattr(second, name)), name
            assert torch.equal(first.logits_TLE.float(), second.logits_TLE)
            assert torch.equal(first.previous_TLE.float().nan_to_num(-1e4), second.previous_TLE.nan_to_num(-1e4))
    for name in ("count_LE", "expert_LED", "shared_LD"):
        assert torch.equal(getattr(online.defaults, name), getattr(dataset.defaults, name)), name


def test_both_sources_train_on_the_same_tokens(online: OnlineTraces, dataset: TraceDataset) -> None:
    def order(source: TraceSource, seed: int) -> list[tuple[int, int]]:
        batches = source.batches("train", 256, shuffle=True, seed=seed, max_tokens=1500)
        rows = TraceBatch.cat(list(batches))
        return list(zip(rows.document_T.tolist(), rows.position_T.tolist(), strict=True))

    orders = [order(online, 0), order(dataset, 0), order(dataset, 1)]
    assert all(len(set(each)) == 1500 for each in orders)
    assert set(orders[0]) == set(orders[1])
    assert orders[1] != orders[2], "every epoch is shuffled anew"


@pytest.mark.parametrize("fits", [True, False])
def test_later_passes_run_the_model_only_where_the_rows_do_not_fit(
    small_model: PreTrainedModel,
    reference_tokenizer: Any,
    text: list[Document],
    monkeypatch: pytest.MonkeyPatch,
    fits: bool,
) -> None:
    if not fits:
        monkeypatch.setattr(module, "KEPT_BYTES", 1 << 20)
    source = OnlineTraces(small_model, reference_tokenizer, text, early_rank=None, **MANY)
    ran, run = [0], ActivationStream.run

    def counted(stream: ActivationStream, batch: Any, *more: Any) -> TraceBatch:
        found = run(stream, batch, *more)
        ran[0] += len(found)
        return found

    monkeypatch.setattr(ActivationStream, "run", counted)
    first, again = (TraceBatch.cat(list(source.batches("train", 300))) for _ in range(2))
    for name in ("residual_TLD", "logits_TLE", "previous_TLE", "document_T", "position_T"):
        assert torch.equal(getattr(first, name).nan_to_num(-1), getattr(again, name).nan_to_num(-1)), name
    for seed in range(3):
        assert sum(map(len, source.batches("train", 256, shuffle=True, seed=seed))) == len(first)
    next(source.batches("validation", 50))
    assert sum(map(len, source.batches("validation", 50))) == source.token_count("validation")
    once = len(first) + source.token_count("validation")
    assert once <= ran[0] < 1.5 * once if fits else ran[0] >= 5 * len(first)
