"""A running model as a source of traces: the batches of :class:`TraceDataset`, with nothing stored."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from expertcast.checkpoints.provenance import provenance
from expertcast.data.batch import TraceBatch
from expertcast.data.discovery import find_moe_layers
from expertcast.data.distributed import Share, current_share, documents_of, sum_over_ranks
from expertcast.data.means import MeanOutputs
from expertcast.data.plan import SPLITS, PlannedDocument, Window, make_plan
from expertcast.data.shuffle import rebatched, shuffled
from expertcast.data.stream import ActivationStream
from expertcast.data.text import Document
from expertcast.data.traces import ALL, chosen_documents, own_tokens
from expertcast.predictors.defaults import DefaultVectors
from expertcast.predictors.view import MoEView

BUFFER_TOKENS = 16_384


class OnlineTraces:
    """Runs the model each time batches are asked for. Same documents, splits and values as traces collected with the
    same settings; only the order of shuffled tokens differs, which mix within the buffer and not over the whole split.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        documents: Sequence[Document],
        *,
        tokens: int | None = None,
        window: int = 256,
        batch_size: int = 8,
        buffer_tokens: int = BUFFER_TOKENS,
        seed: int = 0,
    ) -> None:
        """
        Args:
            tokens: how many tokens of text to use; None takes all.
            window: tokens per window.
            batch_size: windows per forward.
            buffer_tokens: tokens held for shuffling (a token takes L x (2 D + 2..4 E) bytes).
            seed: order of the documents.

        Raises:
            ExpertcastError: as :func:`expertcast.data.collector.collect`.
        """
        self.model = model
        self.view: MoEView = find_moe_layers(model)
        self.plan = make_plan(documents, tokenizer, tokens=tokens, window=window, seed=seed)
        self.documents = list(self.plan.documents)
        self._forward_size, self._buffer_tokens = batch_size, buffer_tokens
        fingerprint = self.view.fingerprint()
        self.info: dict[str, Any] = {
            "id": hashlib.sha256(f"{fingerprint} {self.plan.digest}".encode()).hexdigest()[:16],
            "model": self.view.model_id,
            "fingerprint": fingerprint,
            "shape": self.view.shape.as_dict(),
            "tokens": self.plan.token_count(ALL),
            "window": window,
            "seed": seed,
            "splits": {split: self.plan.token_count(split) for split in SPLITS},
            **provenance(),
            "documents": [asdict(document) for document in self.documents],
        }

    @cached_property
    def defaults(self) -> DefaultVectors:
        """Default vectors over the train split: one pass, at the first use.

        With a process group each rank passes over its share, so every rank must ask for them.
        """
        means, share = MeanOutputs(self.view), current_share()
        own = documents_of(chosen_documents(self.documents, "train"), share)
        for _ in self._stream(own, None, means):
            pass
        counted = torch.tensor(means.token_count)
        sum_over_ranks(share, [counted, *means.tensors()])
        means.token_count = int(counted)
        return means.default_vectors(self.view)

    def token_count(self, split: str = ALL) -> int:
        return sum(document.tokens for document in chosen_documents(self.documents, split))

    def domains(self) -> dict[int, str]:
        return {document.index: document.domain for document in self.documents}

    def batches(
        self,
        split: str,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        max_tokens: int | None = None,
        share: Share | None = None,
    ) -> Iterator[TraceBatch]:
        """As :meth:`TraceDataset.batches`, from the running model."""
        own, limit = own_tokens(self.documents, split, batch_size, max_tokens, share)
        stream = with_previous_tokens(self._stream(own, limit))
        if shuffle:
            return shuffled(stream, batch_size, capacity=self._buffer_tokens, seed=seed)
        return rebatched(stream, batch_size)

    def _stream(
        self, documents: Sequence[PlannedDocument], limit: int | None, means: MeanOutputs | None = None
    ) -> ActivationStream:
        indices = {document.index for document in documents}
        windows = [window for split in SPLITS for window in self.plan.windows[split] if window.document in indices]
        return ActivationStream(
            self.model, self.view, first_tokens(windows, limit), batch_size=self._forward_size, means=means
        )


def with_previous_tokens(stream: Iterable[TraceBatch]) -> Iterator[TraceBatch]:
    """A stream in order of documents and positions, `previous_TLE` filled in."""
    before: TraceBatch | None = None
    for batch in stream:
        yield batch.with_previous(before)
        before = batch[-1:]


def first_tokens(windows: Sequence[Window], limit: int | None) -> list[Window]:
    """The windows of the first `limit` tokens; the last one is cut."""
    if limit is None:
        return list(windows)
    kept: list[Window] = []
    for window in windows:
        if limit <= 0:
            break
        kept.append(Window(window.document, window.start, window.token_ids[:limit]))
        limit -= len(window.token_ids)
    return kept
