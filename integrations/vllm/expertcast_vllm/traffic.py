"""Traces of a server's traffic.

A document is a request. Rows are buffered until they fill a shard.

T tokens, D hidden size, L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from expertcast.data import plan
from expertcast.data.batch import TraceBatch
from expertcast.data.plan import HELD_OUT_SHARE, MIN_DOCUMENTS, PlannedDocument, assign_splits
from expertcast.data.text import text_hash
from expertcast.data.trace_format import TRAFFIC, columns_of, documents_in, row_bytes, shard_names
from expertcast.data.trace_writer import TraceWriter, check_disk, claim, new_info, publish
from expertcast.predictors.messages import Json
from expertcast.predictors.view import MoEView

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_MARKS = ("first-question", "an-answer", "second-question")


@dataclass(slots=True, kw_only=True)
class LiveDocument:
    """Residuals and router logits of one request."""

    hash: str
    """:meth:`Conversations.hash`"""
    token_T: Tensor
    residual_TLD: Tensor
    """[T, L, D] in bf16, on the CPU."""
    logits_TLE: Tensor
    """[T, L, E], on the CPU."""
    start: int = 0
    """Position of the first row in the request; above 0 if a prefix cache had its beginning."""

    def rows(self, index: int) -> TraceBatch:
        """Return the rows of a shard, with `index` as document number."""
        tokens = len(self.token_T)
        return TraceBatch(
            residual_TLD=self.residual_TLD,
            logits_TLE=self.logits_TLE,
            document_T=torch.full((tokens,), index),
            position_T=torch.arange(self.start, self.start + tokens),
            token_T=self.token_T,
        )


class Conversations:
    """Identifies the conversation of a request by the hash of its first user message.

    All turns of a chat share that message, and a system prompt does not change it. Without a chat template the whole
    prompt is hashed. The hash equals that of a document with the same text
    (:attr:`expertcast.data.text.Document.hash`).

    Args:
        tokenizer: the model's tokenizer, with its chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._before, self._behind = tokenizer, "", ""
        if getattr(tokenizer, "chat_template", None):
            roles = ("user", "assistant", "user")
            turns = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=True)]
            first, whole = (
                str(tokenizer.apply_chat_template(part, tokenize=False, add_generation_prompt=True))
                for part in (turns[:1], turns)
            )
            head, _, tail = first.partition(_MARKS[0])
            again = whole.partition(_MARKS[1])[2].partition(_MARKS[2])[0]
            self._behind = _common(tail, whole.partition(_MARKS[0])[2])
            self._before = _common(head[::-1], again[::-1])[::-1]

    def hash(self, token_ids: Sequence[int]) -> str:
        """Return the document hash of a request with this prompt."""
        text = str(self._tokenizer.decode(token_ids, skip_special_tokens=False))
        end = text.find(self._behind) if self._behind else -1
        begin = text.rfind(self._before, 0, end) if self._before and end >= 0 else -1
        if begin < 0:
            return text_hash(str(self._tokenizer.decode(token_ids, skip_special_tokens=True)))
        return text_hash(text[begin + len(self._before) : end])


def _common(one: str, other: str) -> str:
    """Return the common prefix of two strings."""
    return "".join(first for first, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


SHARD_BYTES = 32 << 20
"""Bytes of buffered rows that trigger a commit, the most that a killed process loses."""
COMMIT_S = 60.0
"""Age in seconds of buffered rows that triggers a commit with the next rows."""
_MOST_SHARDS = 2
_MUCH = 50
"""A pause commits if the buffer has at least 1/50 of the committed tokens, which limits the number of shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """Limits of the traces of a server's traffic."""

    tokens: int
    """Maximum number of tokens in the folder."""
    window: int = 1024
    """Maximum number of tokens of one request, counted from its beginning."""
    shard_bytes: int = SHARD_BYTES
    """Bytes of buffered rows that trigger a commit."""
    commit_s: float = COMMIT_S
    """Age in seconds of buffered rows that triggers a commit."""


class LiveTraces:
    """A growing folder of traces. Every commit replaces trace.json, so the folder is readable at any moment.

    Only one process may write it (:func:`expertcast.data.processes.exclusive`).
    """

    def __init__(
        self, folder: Path, view: MoEView, options: LiveOptions, *, config: Json, logits: torch.dtype, dtype: str
    ) -> None:
        """Open a folder, or continue after the last commit of an earlier writer.

        Args:
            folder: destination, created if missing.
            view: the model's routers and norms.
            options: limits.
            config: transformers' configuration of the model.
            logits: dtype of the router logits.
            dtype: dtype of the model, by name.

        Raises:
            ExpertcastError: the folder contains other files, or traces of another model or with other settings, or
                the disk is too small for all tokens.
        """
        self.folder, self.options = folder, options
        self._columns = columns_of(view.shape, logits)
        self.row_bytes = row_bytes(self._columns)
        """Bytes of one token."""
        account = plan.account(view, [], window=options.window)
        settings = {
            "fingerprint": account["fingerprint"], "dtype": dtype, "window": options.window, "tokens": options.tokens,
            "batch_size": 1, "ranks": 1, "text": TRAFFIC, "early_rank": None, "not_early": [],
        }  # fmt: skip
        new = new_info(self._columns, settings, account, mark=str(time.time_ns()))
        found = claim(folder, new, view, config, may_change=("tokens",))
        self.disk, _ = check_disk(folder, options.tokens, self.row_bytes)
        """One line about the disk space that all tokens need."""
        self._info = new if found is None else {**new, "id": found["id"]}
        self.documents: list[PlannedDocument] = [] if found is None else documents_in(found)
        """Committed documents, in order of arrival."""
        shards = {} if found is None else {name: found["files"][name] for name in shard_names(found)}
        self._writer = TraceWriter(folder, self._columns, shards)
        self._splits = {document.hash: document.split for document in self.documents}
        self._held: list[LiveDocument] = []
        self._since = time.monotonic()
        if self.documents:
            self._publish()  # a killed process may have left dataset files that name a missing shard

    @property
    def tokens(self) -> int:
        """Number of committed and buffered tokens."""
        return sum(document.tokens for document in self.documents) + self._held_rows

    @property
    def left(self) -> int:
        """Number of tokens until the folder is full."""
        return max(0, self.options.tokens - self.tokens)

    @property
    def _held_rows(self) -> int:
        return sum(len(document.token_T) for document in self._held)

    def add(self, document: LiveDocument) -> None:
        """Buffer a request's rows, up to the limits; commit if the buffer is full or old."""
        rows = min(len(document.token_T), self.left, self.options.window)
        if not rows:
            return
        held = self._held_rows * self.row_bytes
        if held >= _MOST_SHARDS * self.options.shard_bytes and document.hash in {each.hash for each in self._held}:
            return  # too few different conversations for three splits, as in a benchmark
        if not self._held:
            self._since = time.monotonic()
        cut = {name: getattr(document, name)[:rows] for name in ("token_T", "residual_TLD", "logits_TLE")}
        self._held.append(replace(document, **cut))
        if held + rows * self.row_bytes >= self.options.shard_bytes or self._is_old() or not self.left:
            self.commit()

    def commit_if_idle(self) -> None:
        """Commit during a pause of the traffic, if the buffer is old or large relative to the committed tokens."""
        held = self._held_rows
        if held and (self._is_old() or held * _MUCH >= self.tokens - held):
            self.commit()

    def commit(self) -> bool:
        """Write the buffered rows.

        Returns:
            Whether rows were written; False if there are none, or too few different conversations for three splits.

        Raises:
            ExpertcastError: a value is NaN or infinity.
        """
        if not self._held or not self._assign_splits():
            return False
        for index, each in enumerate(self._held, start=len(self.documents)):
            self.documents.append(
                PlannedDocument(
                    index=index, domain="", tokens=len(each.token_T), split=self._splits[each.hash], hash=each.hash
                )
            )
            self._writer.append(each.rows(index))
        self._held = []
        self._writer.commit()
        self._publish()
        return True

    def _publish(self) -> None:
        publish(self.folder, self._info, self.documents, self._columns, self._writer.shards)

    def _is_old(self) -> bool:
        return time.monotonic() - self._since >= self.options.commit_s

    def _assign_splits(self) -> bool:
        """Assign a split to every buffered conversation; return False if there are too few."""
        lengths: dict[str, int] = {}
        for document in self._held:
            lengths[document.hash] = lengths.get(document.hash, 0) + len(document.token_T)
        if not self._splits and len(lengths) >= MIN_DOCUMENTS:
            self._splits = assign_splits(lengths)
        elif self._splits:
            self._splits = {own: _split_by_hash(own) for own in lengths} | self._splits
        return bool(self._splits)


def _split_by_hash(own: str) -> str:
    """Return the split of a conversation, independent of other conversations."""
    place = int(own, 16) / 2**64
    return "test" if place < HELD_OUT_SHARE else "validation" if place >= 1 - HELD_OUT_SHARE else "train"
