"""A running model as a source of traces: the batches of :class:`TraceDataset` without files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from expertcast.data.batch import TraceBatch
from expertcast.data.capture import ActivationStream, EarlyRun, try_early
from expertcast.data.early import EarlyAttention
from expertcast.data.experts import Offload, experts_of, model_of
from expertcast.data.means import MeanOutputs
from expertcast.data.models import check_token_ids
from expertcast.data.plan import PlannedDocument, TextOptions, Window, first_tokens, make_plan
from expertcast.data.processes import documents_of, join_ranks, sum_over_ranks
from expertcast.data.stand_in import fit_stand_in, stand_in_nbytes, with_rank
from expertcast.data.text import Document
from expertcast.data.traces import TraceSource
from expertcast.predictors.baselines import DefaultVectors
from expertcast.predictors.early_attention import StandIn
from expertcast.predictors.messages import with_token_progress

BUFFER_TOKENS = 16_384
KEPT_BYTES = 1 << 30
"""Most bytes of the rows that stay for later passes, and of those in a shuffle buffer."""


class OnlineTraces(TraceSource):
    """Runs the model when batches are read first, and again in later passes where the rows exceed `KEPT_BYTES`.

    Documents, splits and values equal those of collected traces with the same settings. Only shuffling differs: tokens
    are mixed within a buffer instead of the whole split.

    Args:
        model, tokenizer, documents, options, fields: as for :func:`expertcast.data.collect.collect`.
        buffer_tokens: most tokens in the shuffle buffer.
    """

    def __init__(
        self,
        model: PreTrainedModel | Offload,
        tokenizer: PreTrainedTokenizerBase,
        documents: Sequence[Document],
        options: TextOptions | None = None,
        *,
        buffer_tokens: int = BUFFER_TOKENS,
        **fields: object,
    ) -> None:

        self.model = model_of(model)
        experts = experts_of(self.model)
        self.view = experts.view
        self.plan = with_rank(make_plan(documents, tokenizer, options, **fields), self.view)
        check_token_ids(self.plan.token_ids, self.model.config, tokenizer)
        self.documents = self.plan.documents
        beside = stand_in_nbytes(self.view, self.plan.early_rank)
        self._windows = self.plan.options.batch_size or experts.windows(self.plan.options.window, beside)
        """Windows per forward."""
        shape = self.view.shape
        self._row_bytes = shape.layers * (4 * shape.hidden + 4 * shape.experts)
        self._buffer_tokens, self._room = min(buffer_tokens, KEPT_BYTES // self._row_bytes), KEPT_BYTES
        self._kept: dict[tuple[object, ...], list[TraceBatch]] = {}
        """Rows of earlier passes, by documents and number of tokens."""
        account = self.plan.account(self.view)
        identity = hashlib.sha256(f"{account['fingerprint']} {self.plan.digest}".encode())
        self.info = {"id": identity.hexdigest()[:16], **account}

    @cached_property
    def defaults(self) -> DefaultVectors:  # type: ignore[override]
        """Default vectors of the train split, computed in one pass on first use.

        In a process group each rank processes its share, so every rank must read this attribute.
        """
        means, share = MeanOutputs(self.view), join_ranks()
        own = documents_of(self.chosen("train"), share)
        total = sum(document.tokens for document in own)
        for _ in with_token_progress(self._stream(own, None, means), "default vectors", total):
            pass
        counted = torch.tensor(means.token_count)
        sum_over_ranks(share, [counted, *means.tensors()])
        means.token_count = int(counted)
        return means.default_vectors(experts_of(self.model, self.view))

    @cached_property
    def stand_in(self) -> StandIn | None:  # type: ignore[override]
        """Stand-in of early attention, fitted on a part of the train split on first use, equally on every rank.

        None if early attention is disabled or no layer supports it.
        """
        if self._early is None:
            return None
        rank = self.plan.early_rank or 0
        return fit_stand_in(self.model, self.view, self.plan.windows["train"], rank=rank, batch_size=self._windows)

    @cached_property
    def _early(self) -> EarlyAttention | None:
        return try_early(self.model, self.view, self.plan)[0]

    def _batches(
        self, own: list[PlannedDocument], tokens: int, batch_size: int, seed: int | None
    ) -> Iterator[TraceBatch]:
        key = (*(document.index for document in own), tokens)
        rows: Iterable[TraceBatch] = self._kept.get(key) or self._stream(own, tokens)
        if key not in self._kept and self._room >= tokens * self._row_bytes:
            self._kept[key] = rows = list(with_token_progress(rows, "running the model", tokens))
            self._room -= tokens * self._row_bytes
        return rebatched(_with_previous_tokens(rows), batch_size, capacity=self._buffer_tokens, seed=seed)

    def _stream(
        self, documents: Sequence[PlannedDocument], limit: int | None, means: MeanOutputs | None = None
    ) -> ActivationStream:
        whole = ((window, window.token_ids) for window in self.plan.windows_of(documents))
        windows = [Window(window.document, window.start, ids) for window, ids in first_tokens(whole, limit)]
        early = None
        if means is None and self._early is not None and self.stand_in is not None:
            early = EarlyRun(self._early, self.stand_in.to(self.model.device), dict(self._early.refused))
        return ActivationStream(self.model, self.view, windows, batch_size=self._windows, means=means, early=early)


def _with_previous_tokens(stream: Iterable[TraceBatch]) -> Iterator[TraceBatch]:
    """Fill in `previous_TLE` of a stream in order of documents and positions."""
    before: TraceBatch | None = None
    for batch in stream:
        yield batch.with_previous(before)
        before = batch[-1:]


def rebatched(
    stream: Iterable[TraceBatch], batch_size: int, *, capacity: int = 0, seed: int | None = None
) -> Iterator[TraceBatch]:
    """Yield every token once in batches of `batch_size`; the last batch may be smaller.

    With a `seed`, tokens are shuffled within a buffer of about `capacity` tokens (at least two batches): the buffer is
    filled and shuffled, and half of it is yielded before the next fill. Without a seed the order is unchanged.
    """
    parts = 1 if seed is None else 2
    generator = torch.Generator().manual_seed(seed or 0)
    held: list[TraceBatch] = []

    def buffer() -> TraceBatch:
        rows = TraceBatch.cat(held)
        return rows if seed is None else rows[torch.randperm(len(rows), generator=generator)]

    for batch in stream:
        held.append(batch)
        if sum(map(len, held)) >= max(0 if seed is None else capacity, parts * batch_size):
            rows = buffer()
            out = len(rows) // parts // batch_size * batch_size
            yield from _cut(rows[:out], batch_size)
            held = [rows[out:]] if out < len(rows) else []
    if held:
        yield from _cut(buffer(), batch_size)


def _cut(rows: TraceBatch, batch_size: int) -> Iterator[TraceBatch]:
    for begin in range(0, len(rows), batch_size):
        yield rows[begin : begin + batch_size]
