"""Exclude documents from an evaluation that predictors were trained or selected on.

Documents are identified by the hash of their text (:attr:`expertcast.data.text.Document.hash`), also across files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from expertcast.data.text import Document
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, Predictor
from expertcast.predictors.messages import Json
from expertcast.training.scoring import Fitted


@dataclass(kw_only=True)
class ExcludedDocuments:
    """Number of excluded documents, and the predictors that learned from them."""

    documents: int = 0
    tokens: int | None = None
    """None for documents without token ids."""
    by: list[str] = field(default_factory=list)
    """Names of these predictors."""

    def as_dict(self) -> Json:
        """Return the counts as JSON values."""
        counted = {} if self.tokens is None else {"tokens": self.tokens}
        return {"documents": self.documents, **counted}

    def __str__(self) -> str:
        """Describe the excluded documents; empty if there are none."""
        if not self.documents:
            return ""
        tokens = "" if self.tokens is None else f" of {self.tokens:,} tokens"
        return f"{self.documents} document(s){tokens} left out: {', '.join(self.by)} learned from them"


def unseen_traces(
    traces: TraceDataset, fitted: Mapping[str, Fitted], split: str
) -> tuple[TraceDataset, ExcludedDocuments]:
    """Remove the documents that any of the predictors learned from.

    Args:
        traces: traces to score.
        fitted: predictors by name, with the reports of their fits.
        split: split in which removed documents are counted.

    Raises:
        ExpertcastError: no document of the split is left.
    """
    chosen = traces.chosen(split)
    known = {name: each.predictor.learned_from or frozenset() for name, each in fitted.items()}
    what = f"split {split!r}: score another split, or collect other text"
    left_out, learned = _left_out([document.hash for document in chosen], known, what)
    left_out.tokens = sum(document.tokens for document in chosen if document.hash in learned)
    return traces.without({document.index for document in traces.documents if document.hash in learned}), left_out


def unseen_documents(
    documents: Sequence[Document], predictors: Mapping[str, Predictor], chosen_by: frozenset[str] = frozenset()
) -> tuple[list[Document], ExcludedDocuments]:
    """Return the documents that no predictor learned from, and a summary of the others.

    Args:
        documents: documents of a text.
        predictors: predictors by name.
        chosen_by: hashes of documents that chose the layers of hybrid execution; these are removed too.

    Raises:
        ExpertcastError: no document is left.
    """
    known = {name: each.learned_from or frozenset() for name, each in predictors.items()}
    known["hybrid execution"] = chosen_by.difference(*known.values())
    left_out, learned = _left_out([document.hash for document in documents], known, "the text: use other --data")
    return [document for document in documents if document.hash not in learned], left_out


def _left_out(
    hashes: Sequence[str], known: Mapping[str, frozenset[str]], what: str
) -> tuple[ExcludedDocuments, frozenset[str]]:
    """Summarise the documents that were learned from, whose hashes come second; raise an error about `what` if no other
    is left."""
    learned = frozenset[str]().union(*known.values())
    left_out = ExcludedDocuments(
        documents=sum(each in learned for each in hashes),
        by=[name for name, own in known.items() if not own.isdisjoint(hashes)],
    )
    if hashes and left_out.documents == len(hashes):
        raise ExpertcastError(f"{', '.join(left_out.by)} learned from every document of {what}")
    return left_out, learned
