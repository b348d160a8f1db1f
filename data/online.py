"""A running model as a source of traces: the batches of :class:`TraceDataset`, with nothing stored."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from expertcast.data.batch import TraceBatch
from expertcast.data.discovery import find_moe_layers
from expertcast.data.distributed import current_share, documents_of, sum_over_ranks
from expertcast.data.means import MeanOutputs
from expertcast.data.plan import PlannedDocument, TextOptions, Window, make_plan
from expertcast.data.shuffle import rebatched, shuffled
from expertcast.data.stream import ActivationStream
from expertcast.data.text import Document
from expertcast.data.traces import TraceSource
from expertcast.predictors.defaults import DefaultVectors

BUFFER_TOKENS = 16_384


class OnlineTraces(TraceSource):
    """Runs the model each time batches are asked for. Same documents, splits and values as traces collected with the
    same settings; only the order of shuffled tokens differs, which mix within the buffer and not over the whole split.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        documents: Sequence[Document],
        options: TextOptions | None = None,
        *,
        buffer_tokens: int = BUFFER_TOKENS,
        **fields: object,
    ) -> None:
        """
        Args:
            model: is run; it stays as it is.
            tokenizer: the model's.
            documents: the text.
            options: how much of it, and in which portions; none are the default :class:`TextOptions`.
            buffer_tokens: tokens held for shuffling (a token takes L x (2 D + 2..4 E) bytes).
            fields: fields of :class:`TextOptions` that are other than in `options`.

        Raises:
            ExpertcastError: as :func:`expertcast.data.collector.collect`.
        """
        self.options = TextOptions.of(options, fields)
        self.model = model
        self.view = find_moe_layers(model)
        tokens, window, seed = self.options.tokens, self.options.window, self.options.seed
        self.plan = make_plan(documents, tokenizer, tokens=tokens, window=window, seed=seed)
        self.documents = self.plan.documents
        self._buffer_tokens = buffer_tokens
        account = self.plan.account(self.view, seed)
        identity = hashlib.sha256(f"{account['fingerprint']} {self.plan.digest}".encode())
        self.info = {"id": identity.hexdigest()[:16], **account}

    @cached_property
    def defaults(self) -> DefaultVectors:  # type: ignore[override]
        """Default vectors over the train split: one pass, at the first use.

        With a process group each rank passes over its share, so every rank must ask for them.
        """
        means, share = MeanOutputs(self.view), current_share()
        own = documents_of(self.chosen("train"), share)
        for _ in self._stream(own, None, means):
            pass
        counted = torch.tensor(means.token_count)
        sum_over_ranks(share, [counted, *means.tensors()])
        means.token_count = int(counted)
        return means.default_vectors(self.view)

    def _batches(
        self, own: list[PlannedDocument], tokens: int, batch_size: int, seed: int | None
    ) -> Iterator[TraceBatch]:
        stream = with_previous_tokens(self._stream(own, tokens))
        if seed is None:
            return rebatched(stream, batch_size)
        return shuffled(stream, batch_size, capacity=self._buffer_tokens, seed=seed)

    def _stream(
        self, documents: Sequence[PlannedDocument], limit: int | None, means: MeanOutputs | None = None
    ) -> ActivationStream:
        windows = first_tokens(self.plan.windows_of(documents), limit)
        return ActivationStream(self.model, self.view, windows, batch_size=self.options.batch_size, means=means)


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
