"""Traces of a server's traffic, and default vectors from elsewhere, which such traces need.

A document is a request. Rows are buffered until there are enough of them for a shard.

T tokens, D hidden size, L MoE layers, E routed experts per layer.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from expertcast.checkpoints.checkpoint import PredictorCheckpoint, holds_predictor
from expertcast.checkpoints.hub import HubName, NotOnHubError, OutOfReachError
from expertcast.checkpoints.provenance import different_part, without_folders
from expertcast.data import plan
from expertcast.data.batch import TraceBatch
from expertcast.data.plan import HELD_OUT_SHARE, MIN_DOCUMENTS, PlannedDocument, assign_splits
from expertcast.data.text import text_hash
from expertcast.data.trace_format import (
    TRACE_FILE,
    TRAFFIC,
    columns_of,
    documents_in,
    row_bytes,
    shard_names,
    tensors_digest,
)
from expertcast.data.trace_writer import TraceWriter, claim, new_info, publish
from expertcast.data.traces import TraceDataset, TraceSource
from expertcast.predictors.base import Predictor
from expertcast.predictors.baselines import DefaultVectors, QuasiInput
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.predictors.view import MoEView

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_MARKS = ("first-question", "an-answer", "second-question")


@dataclass(slots=True, kw_only=True)
class LiveDocument:
    """What a request showed of a model."""

    hash: str
    """:meth:`Conversations.hash`"""
    token_T: Tensor
    residual_TLD: Tensor
    """bf16, on the CPU."""
    logits_TLE: Tensor
    """On the CPU."""
    start: int = 0
    """Position of the first row in the request: more than 0 where its beginning was in a prefix cache."""

    def rows(self, index: int) -> TraceBatch:
        """As a shard takes them, under this number."""
        tokens = len(self.token_T)
        return TraceBatch(
            residual_TLD=self.residual_TLD,
            logits_TLE=self.logits_TLE,
            document_T=torch.full((tokens,), index),
            position_T=torch.arange(self.start, self.start + tokens),
            token_T=self.token_T,
        )


class Conversations:
    """Knows requests by their conversation: by the text of its first user message, which all turns of a chat share and
    a system prompt before it does not change; without a chat template by the text of the whole prompt. The hash is
    that of a document with this text (:attr:`expertcast.data.text.Document.hash`).

    Args:
        tokenizer: the model's, with its chat template.
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
        """What the document of a request with this prompt is known by."""
        text = str(self._tokenizer.decode(token_ids, skip_special_tokens=False))
        end = text.find(self._behind) if self._behind else -1
        begin = text.rfind(self._before, 0, end) if self._before and end >= 0 else -1
        if begin < 0:
            return text_hash(str(self._tokenizer.decode(token_ids, skip_special_tokens=True)))
        return text_hash(text[begin + len(self._before) : end])


def _common(one: str, other: str) -> str:
    """The beginning that two texts share."""
    return "".join(first for first, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


SHARD_BYTES = 32 << 20
"""Of rows that are buffered before they are committed, which is also what a kill can cost."""
COMMIT_S = 60.0
"""Rows that are older are committed with the next ones."""
_MOST_SHARDS = 2
_MUCH = 50
"""A fiftieth of what is committed: so that there are not as many shards as lulls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """How much of a server's traffic is kept."""

    tokens: int
    """Tokens that the folder holds at most."""
    window: int = 1024
    """Tokens of one request at most, its first ones."""
    shard_bytes: int = SHARD_BYTES
    """Of rows that are buffered before they are committed."""
    commit_s: float = COMMIT_S
    """Seconds after which fewer are."""


class LiveTraces:
    """A folder of traces that grows: every commit replaces trace.json, so that what it names can be read at any moment,
    also after a kill. Nobody else may write it: see :mod:`expertcast.data.processes`.
    """

    def __init__(
        self, folder: Path, view: MoEView, options: LiveOptions, *, config: Json, logits: torch.dtype, dtype: str
    ) -> None:
        """Goes on where an earlier writer committed last.

        Args:
            folder: made where it is missing.
            view: the model's routers and norms.
            options: how much is kept.
            config: transformers' configuration of the model.
            logits: dtype of its router logits.
            dtype: its own, by name.

        Raises:
            ExpertcastError: the folder holds something else, or traces of another model or with other settings.
        """
        self.folder, self.options = folder, options
        self._columns = columns_of(view.shape, logits)
        self._row_bytes = row_bytes(self._columns)
        account = plan.account(view, [], window=options.window)
        settings = {
            "fingerprint": account["fingerprint"], "dtype": dtype, "window": options.window, "tokens": options.tokens,
            "batch_size": 1, "ranks": 1, "text": TRAFFIC, "early_rank": None, "not_early": [],
        }  # fmt: skip
        new = new_info(self._columns, settings, account, mark=str(time.time_ns()))
        found = claim(folder, new, view, config, may_change=("tokens",))
        self._info = new if found is None else {**new, "id": found["id"]}
        self.documents: list[PlannedDocument] = [] if found is None else documents_in(found)
        """Committed, in the order they came."""
        shards = {} if found is None else {name: found["files"][name] for name in shard_names(found)}
        self._writer = TraceWriter(folder, self._columns, shards)
        self._splits = {document.hash: document.split for document in self.documents}
        self._held: list[LiveDocument] = []
        self._since = time.monotonic()
        if self.documents:
            self._publish()  # a kill may have left the files for `datasets` naming a shard that is gone

    @property
    def tokens(self) -> int:
        """Committed and buffered."""
        return sum(document.tokens for document in self.documents) + self._held_rows

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return max(0, self.options.tokens - self.tokens)

    @property
    def _held_rows(self) -> int:
        return sum(len(document.token_T) for document in self._held)

    def add(self, document: LiveDocument) -> None:
        """Take a request's rows, as many as may still come; commits when there are enough of them or they are old."""
        rows = min(len(document.token_T), self.left, self.options.window)
        if not rows:
            return
        held = self._held_rows * self._row_bytes
        if held >= _MOST_SHARDS * self.options.shard_bytes and document.hash in {each.hash for each in self._held}:
            return  # too few different conversations for three splits, as a benchmark's are
        if not self._held:
            self._since = time.monotonic()
        cut = {name: getattr(document, name)[:rows] for name in ("token_T", "residual_TLD", "logits_TLE")}
        self._held.append(replace(document, **cut))
        if held + rows * self._row_bytes >= self.options.shard_bytes or self._is_old() or not self.left:
            self.commit()

    def lull(self) -> None:
        """Nothing has come for a moment: commit what is buffered if it is old, or much beside what is committed."""
        held = self._held_rows
        if held and (self._is_old() or held * _MUCH >= self.tokens - held):
            self.commit()

    def commit(self) -> bool:
        """Write what is buffered; False: there is nothing, or too few different conversations yet for three splits.

        Raises:
            ExpertcastError: the model gave NaN or infinity.
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
        """Give every buffered conversation a split; False: there are too few yet."""
        lengths: dict[str, int] = {}
        for document in self._held:
            lengths[document.hash] = lengths.get(document.hash, 0) + len(document.token_T)
        if not self._splits and len(lengths) >= MIN_DOCUMENTS:
            self._splits = assign_splits(lengths)
        elif self._splits:
            self._splits = {own: _split_by_hash(own) for own in lengths} | self._splits
        return bool(self._splits)


def _split_by_hash(own: str) -> str:
    """The split of a conversation, whatever others there are."""
    place = int(own, 16) / 2**64
    return "test" if place < HELD_OUT_SHARE else "validation" if place >= 1 - HELD_OUT_SHARE else "train"


# Default vectors of other traces of the model, or of a checkpoint

NOTE = "default_vectors_from"
"""In `TraceSource.info` and a fit's report: where the default vectors come from."""
_GIVE = "give traces of this model by expertcast collect, or a checkpoint of quasi_hidden, linear or estimator"

Source = TypeVar("Source", bound=TraceSource)


def with_default_vectors(source: Source, given: str | Path) -> Source:
    """The same source with default vectors from elsewhere, whether or not it has any of its own.

    Documents of its test split that these come from are left out of it: they are not held out any more.

    Args:
        source: traces on disk, or a running model.
        given: traces of the same model by :func:`expertcast.data.collect.collect`, or a checkpoint that holds default
            vectors: the folder, or `user/repo` or `user/repo@revision` of the hub.

    Raises:
        ExpertcastError: neither is there, or a file of it is not right; it holds no default vectors, or another
            model's; or they come from all documents of the source's test split.
    """
    found = _opened(str(given))
    if isinstance(found, TraceDataset):
        recorded, traces = {**found.info, "model_id": found.info["model"]}, found.info["id"]
    else:
        recorded, traces = found.config, _origin(found.config.get("training", {}))
    different = different_part(recorded, source.view)
    if different:
        raise ExpertcastError(
            f"{given} is of {recorded['model_id']!r} and its {different} are not those of {source.view.model_id!r}, "
            f"so neither are its default vectors: {_GIVE}"
        )
    if isinstance(found, TraceDataset):
        defaults, learned = found.defaults, frozenset(document.hash for document in found.chosen("train"))
    else:
        defaults, learned = _held(found), found.learned_from or frozenset()
    made = copy.copy(source)
    made.defaults, made.defaults_learned_from = defaults, learned
    made.documents = _held_out(source, learned, str(given))
    made.info = {
        **source.info,
        NOTE: {"given": without_folders(str(given)), "traces": traces, "digest": _digest_of(defaults)},
    }
    return made


def holder_in(predictor: Predictor) -> QuasiInput | None:
    """The predictor itself, or the member of a hybrid, that holds default vectors; None where none does."""
    parts = (part for part in predictor.modules() if isinstance(part, QuasiInput) and hasattr(part, "expert_LED"))
    return next(parts, None)


def _opened(given: str) -> TraceDataset | PredictorCheckpoint:
    if (Path(given) / TRACE_FILE).is_file():
        return TraceDataset.open(given)
    if holds_predictor(given):
        return PredictorCheckpoint.open(given)
    if Path(given).exists() or HubName.of(given) is None:
        raise ExpertcastError(f"{given} holds neither traces ({TRACE_FILE}) nor a predictor checkpoint: {_GIVE}")
    try:
        return TraceDataset.open(given)
    except (NotOnHubError, OutOfReachError):
        return PredictorCheckpoint.open(given)


def _origin(training: Json) -> object:
    """The id of the traces that a checkpoint's default vectors come from."""
    note = training.get(NOTE)
    return (note if isinstance(note, dict) else training).get("traces")


def _held(checkpoint: PredictorCheckpoint) -> DefaultVectors:
    """The default vectors in a checkpoint, which has the means and not their counts.

    Raises:
        ExpertcastError: there are none in it, or its weights are not right.
    """
    holder = holder_in(checkpoint.load())
    if holder is None:
        raise ExpertcastError(f"{checkpoint.folder} is of {checkpoint.name} and holds no default vectors: {_GIVE}")
    counts_LE = torch.zeros(holder.expert_LED.shape[:2], dtype=torch.int64)
    return DefaultVectors(expert_LED=holder.expert_LED, shared_LD=holder.shared_LD, count_LE=counts_LE, token_count=0)


def _held_out(source: TraceSource, learned: frozenset[str], given: str) -> list[PlannedDocument]:
    """The source's documents without those of its test split that the default vectors come from."""
    rest = [document for document in source.documents if document.split != "test" or document.hash not in learned]
    if not any(document.split == "test" for document in rest) and source.chosen("test"):
        raise ExpertcastError(
            f"the default vectors of {given} come from every document of the test split, none is left to score: give "
            "those of another text"
        )
    return rest


def _digest_of(defaults: DefaultVectors) -> str:
    """Of the values that a predictor takes."""
    return tensors_digest({"expert_LED": defaults.expert_LED, "shared_LD": defaults.shared_LD})
