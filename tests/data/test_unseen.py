"""Documents that a predictor learned from: left out of traces and of texts, counted, and named with who learned."""

from __future__ import annotations

import pytest

from expertcast.data.text import Document
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, Predictor, PredictorConfig
from expertcast.predictors.baselines import QuasiHidden
from expertcast.training.scoring import Fitted
from expertcast.training.unseen import ExcludedDocuments, unseen_documents, unseen_traces

ELSEWHERE = "0" * 16


def predictor(traces: TraceDataset, *hashes: str) -> Predictor:
    made = QuasiHidden(PredictorConfig(), traces.view.shape)
    made.learned_from = frozenset(hashes) if hashes else None
    return made


@pytest.mark.parametrize("split", ["train", "validation", "test", "all"])
def test_traces_without_what_any_predictor_learned_from(split: str, dataset: TraceDataset) -> None:
    first, second, *_, last = [each.hash for each in dataset.documents]
    known = {"one": (first, ELSEWHERE), "two": (first, second), "three": (ELSEWHERE,), "four": ()}
    fitted = {name: Fitted(predictor=predictor(dataset, *hashes)) for name, hashes in known.items()}
    rest, left_out = unseen_traces(dataset, fitted, split)
    gone = {first, second}
    assert rest.documents == [each for each in dataset.documents if each.hash not in gone]
    counted = [each for each in dataset.chosen(split) if each.hash in gone]
    tokens = sum(each.tokens for each in counted)
    assert left_out.as_dict() == {"documents": len(counted), "tokens": tokens}
    assert left_out.by == (["one", "two"] if counted else [])
    assert str(left_out) == (
        f"{len(counted)} document(s) of {tokens:,} tokens left out: one, two learned from them" if counted else ""
    )
    every = {"five": Fitted(predictor=predictor(dataset, *(each.hash for each in dataset.chosen(split)))), **fitted}
    with pytest.raises(ExpertcastError, match=f"five.* learned from every document of split '{split}'"):
        unseen_traces(dataset, every, split)
    assert last not in gone


def test_texts_without_what_any_predictor_learned_from(dataset: TraceDataset, text: list[Document]) -> None:
    """Nor what chose the layers of hybrid execution, which is named for what no predictor learned from."""
    hashes = [each.hash for each in text[:5]]
    predictors = {"one": predictor(dataset, hashes[0]), "two": predictor(dataset)}
    for chosen_by, kept, by in (
        (frozenset[str](), text[1:5], ["one"]),
        (frozenset(hashes[:1]), text[1:5], ["one"]),
        (frozenset(hashes[:3]), text[3:5], ["one", "hybrid execution"]),
    ):
        found, left_out = unseen_documents(text[:5], predictors, chosen_by)
        assert found == kept
        assert left_out.by == by
        assert left_out.as_dict() == {"documents": 5 - len(kept)}, "not cut into tokens yet"
        assert str(left_out) == f"{5 - len(kept)} document(s) left out: {', '.join(by)} learned from them"
    with pytest.raises(ExpertcastError, match="one learned from every document of the text: use other --data"):
        unseen_documents(text[:1], predictors)
    assert unseen_documents([], predictors) == ([], ExcludedDocuments())
