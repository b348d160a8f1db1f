"""The plan: every token once, documents whole in one split, the same on every machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertcast.data.plan import SPLITS, PlannedDocument, assign_splits, make_plan
from expertcast.data.processes import Share, documents_of, smallest_share
from expertcast.data.text import Document, load_documents
from expertcast.predictors.messages import ExpertcastError

DOCUMENTS = [Document(i, f"Document {i}. " + "All happy families are alike. " * (5 + i), "prose") for i in range(40)]


def test_windows_hold_every_token_of_every_document_once(reference_tokenizer: Any) -> None:
    plan = make_plan(DOCUMENTS, reference_tokenizer, tokens=None, window=32)
    by_index = {document.index: document for document in DOCUMENTS}
    for planned in plan.documents:
        windows = [w for w in plan.windows[planned.split] if w.document == planned.index]
        assert [w.start for w in windows] == list(range(0, planned.tokens, 32))
        ids = np.concatenate([w.token_ids for w in windows]).tolist()
        assert ids == reference_tokenizer(by_index[planned.index].text)["input_ids"]
        assert not any(w.document == planned.index for s in SPLITS if s != planned.split for w in plan.windows[s])
    assert sorted(planned.index for planned in plan.documents) == list(range(40))


@pytest.mark.parametrize("tokens", [400, 1000, 2500])
def test_exactly_the_tokens_asked_for(reference_tokenizer: Any, tokens: int) -> None:
    plan = make_plan(DOCUMENTS, reference_tokenizer, tokens=tokens, window=32)
    assert plan.token_count("all") == tokens == sum(len(w.token_ids) for s in SPLITS for w in plan.windows[s])
    assert len(plan.documents) >= 10
    for split in ("validation", "test"):
        assert 0.05 * tokens <= plan.token_count(split) <= 0.11 * tokens


def test_plan_depends_on_its_settings_only(reference_tokenizer: Any) -> None:
    def digest(**changed: Any) -> str:
        settings = {"tokens": 900, "window": 32, "seed": 0, **changed}
        return make_plan(DOCUMENTS, reference_tokenizer, **settings).digest

    assert digest() == digest()
    assert len({digest(), digest(tokens=901), digest(window=33), digest(seed=1)}) == 4


def test_prefix_of_the_bundled_text_mixes_domains(reference_tokenizer: Any) -> None:
    plan = make_plan(load_documents("reference"), reference_tokenizer, tokens=12_000, window=256)
    assert len({document.domain for document in plan.documents if document.split == "train"}) >= 3


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"documents": DOCUMENTS[:2]}, "only 2 "),
        ({"tokens": 20}, "only 1 "),
        ({"tokens": 0}, "tokens=0"),
        ({"window": 1}, "window=1: must be greater than or equal to 2"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"seed": 10**20}, "seed=10{20}"),
    ],
)
def test_bad_settings_are_one_clear_line(reference_tokenizer: Any, changed: dict[str, Any], expected: str) -> None:
    settings = {"documents": DOCUMENTS, "tokens": 900, "window": 32, **changed}
    with pytest.raises(ExpertcastError, match=expected):
        make_plan(settings.pop("documents"), reference_tokenizer, **settings)


lengths = st.lists(st.integers(1, 500), min_size=3, max_size=60)
hashed = st.dictionaries(st.text("0123456789abcdef", min_size=16, max_size=16), st.integers(1, 500), min_size=3)


@given(hashed)
def test_splits_are_never_empty_and_held_out_ones_stay_small(lengths: dict[str, int]) -> None:
    splits = assign_splits(lengths)
    assert splits.keys() == lengths.keys()
    for split in ("validation", "test"):
        own = [length for name, length in lengths.items() if splits[name] == split]
        assert own
        assert sum(own) <= sum(lengths.values()) / 10 or len(own) == 1
    assert "train" in splits.values()


def test_test_has_the_lowest_hashes_and_validation_the_highest() -> None:
    """As in every other collection: a document changes sides only where the shares are cut."""
    hashes = [f"{number:016x}" for number in range(20)]
    splits = assign_splits(dict.fromkeys(hashes, 10))
    assert [splits[own] for own in hashes] == 2 * ["test"] + 16 * ["train"] + 2 * ["validation"]


def test_a_document_keeps_its_split(reference_tokenizer: Any) -> None:
    """Whatever else is collected, from whatever file, in whatever order; few change sides where shares are cut."""
    text = load_documents("reference")
    part = make_plan(text, reference_tokenizer, tokens=60_000, window=256)
    shifted = [Document(7 * i, f"\n {text[i].text}\t", "other") for i in range(len(text) - 1, 40, -1)]
    whole = make_plan(shifted, reference_tokenizer, tokens=300_000, window=256, seed=3)
    split_of = {document.hash: document.split for document in whole.documents}
    both = [document for document in part.documents if document.hash in split_of]
    moved = [document for document in both if split_of[document.hash] != document.split]
    assert len(both) > 20
    assert len(moved) <= len(both) / 10
    assert {split_of[document.hash] for document in both if document not in moved} == set(SPLITS)


def test_equal_texts_are_one_document(reference_tokenizer: Any) -> None:
    """They lie in one split, and do not count as several where there must be three."""
    copies = [Document(100 + i, f" {each.text}\n") for i, each in enumerate(DOCUMENTS)]
    plan = make_plan([*DOCUMENTS, *copies], reference_tokenizer, window=32)
    split_of = {document.index: document.split for document in plan.documents}
    assert all(split_of[i] == split_of[100 + i] for i in range(len(DOCUMENTS)))
    assert plan.learned_from() == {d.hash for d in DOCUMENTS if split_of[d.index] != "test"}
    with pytest.raises(ExpertcastError, match="only 2 "):
        make_plan([*DOCUMENTS[:2], *copies[:2]], reference_tokenizer, window=32)


@given(lengths, st.integers(1, 4))
def test_shares_cut_the_documents_into_runs(lengths: list[int], world: int) -> None:
    documents = [PlannedDocument(index=i, domain="", tokens=n, split="train", hash="") for i, n in enumerate(lengths)]
    shares = [documents_of(documents, Share(rank, world)) for rank in range(world)]
    assert [document for share in shares for document in share] == documents
    assert smallest_share(documents, world) == min(sum(d.tokens for d in share) for share in shares)
