"""Documents that score: none that a predictor learned or was chosen from.

Documents are known by the hashes of their texts (:attr:`expertcast.data.text.Document.hash`), so that they are known
again in other traces and other files.
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
class LeftOut:
    """What does not score, and why."""

    documents: int = 0
    tokens: int | None = None
    """None of documents that are not cut into tokens yet."""
    by: list[str] = field(default_factory=list)
    """Predictors that learned from them."""

    def as_dict(self) -> Json:
        """For JSON."""
        counted = {} if self.tokens is None else {"tokens": self.tokens}
        return {"documents": self.documents, **counted}

    def __str__(self) -> str:
        """What is left out, as the end of a sentence; empty where nothing is."""
        if not self.documents:
            return ""
        tokens = "" if self.tokens is None else f" of {self.tokens:,} tokens"
        return f"{self.documents} document(s){tokens} left out: {', '.join(self.by)} learned from them"


def unseen_traces(traces: TraceDataset, fitted: Mapping[str, Fitted], split: str) -> tuple[TraceDataset, LeftOut]:
    """The traces without the documents that any of some predictors learned from.

    Args:
        traces: what is to score.
        fitted: the predictors by name, with the reports of their fits.
        split: of the traces, in which what is left out is counted.

    Raises:
        ExpertcastError: nothing of the split is left.
    """
    chosen = traces.chosen(split)
    known = {name: made.predictor.learned_from or frozenset() for name, made in fitted.items()}
    what = f"split {split!r}: score another split, or collect other text"
    left_out = _left_out([document.hash for document in chosen], known, what)
    learned = frozenset[str]().union(*known.values())
    left_out.tokens = sum(document.tokens for document in chosen if document.hash in learned)
    return traces.without({document.index for document in traces.documents if document.hash in learned}), left_out


def unseen_documents(
    documents: Sequence[Document], predictors: Mapping[str, Predictor], chosen_by: frozenset[str] = frozenset()
) -> tuple[list[Document], LeftOut]:
    """The documents that none of some predictors learned from.

    Args:
        documents: of a text.
        predictors: by name.
        chosen_by: hashes of the documents that chose the layers of hybrid execution; they are left out too.

    Raises:
        ExpertcastError: none is left.
    """
    known = {name: each.learned_from or frozenset() for name, each in predictors.items()}
    known["hybrid execution"] = chosen_by.difference(*known.values())
    left_out = _left_out([document.hash for document in documents], known, "the text: give other --data")
    learned = frozenset[str]().union(*known.values())
    return [document for document in documents if document.hash not in learned], left_out


def _left_out(hashes: Sequence[str], known: Mapping[str, frozenset[str]], what: str) -> LeftOut:
    """What of some documents was learned from, and by whom; `what` they are and what helps, for the message."""
    learned = frozenset[str]().union(*known.values())
    left_out = LeftOut(
        documents=sum(each in learned for each in hashes),
        by=[name for name, own in known.items() if not own.isdisjoint(hashes)],
    )
    if hashes and left_out.documents == len(hashes):
        raise ExpertcastError(f"{', '.join(left_out.by)} learned from every document of {what}")
    return left_out
