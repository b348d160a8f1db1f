"""Writing traces of a server's traffic: what was committed can be read at any moment, also after a kill.

A document is a request. Rows are buffered until there are enough of them; then each split gets a shard, and trace.json,
which names the shards and documents, replaces the old one. That replacement is the commit: what it does not name is
deleted by the next writer.
"""

from __future__ import annotations

import copy
import hashlib
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa
import torch
from torch import Tensor

from expertcast.checkpoints.checkpoint import PredictorCheckpoint, holds_predictor
from expertcast.checkpoints.hub import HubName, NotOnHubError, OutOfReachError
from expertcast.checkpoints.provenance import different_part, fingerprints, provenance, without_folders
from expertcast.data import trace_format as layout
from expertcast.data.batch import TraceBatch
from expertcast.data.plan import HELD_OUT_SHARE, MIN_DOCUMENTS, SPLITS, PlannedDocument, assign_splits
from expertcast.data.text import text_hash
from expertcast.data.trace_format import (
    LAYERS,
    TRACE_FILE,
    TraceInfo,
    documents_in,
    is_live,
    read_info,
    save_live_skeleton,
    shard_names,
    tensors_digest,
    write_info,
    write_shard,
)
from expertcast.data.traces import TraceDataset, TraceSource
from expertcast.predictors.artefacts import check_file, file_digest
from expertcast.predictors.base import Predictor
from expertcast.predictors.baselines import DefaultVectors, QuasiInput
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.predictors.view import MoEView

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# A request to a server as a document of traces. T tokens, D hidden size, L MoE layers, E routed experts per layer.

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

    def rows(self, index: int) -> tuple[TraceBatch, Tensor]:
        """As a shard takes them, under this number, with the tokens' ids."""
        tokens = len(self.token_T)
        batch = TraceBatch(
            residual_TLD=self.residual_TLD,
            logits_TLE=self.logits_TLE,
            document_T=torch.full((tokens,), index),
            position_T=torch.arange(self.start, self.start + tokens),
        )
        return batch, self.token_T


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
_REMEDY = "name another folder"
_KEPT = ("fingerprint", "dtype", "window")


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
    """A folder of traces that grows. Nobody else may write it: see :mod:`expertcast.data.processes`."""

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
        self._columns = layout.Columns(view.shape, layout.stored_logits_dtype(logits))
        own = self._new_info(view, dtype)
        folder.mkdir(parents=True, exist_ok=True)
        found = read_info(folder)
        if found is None and any(path.name != layout.SKELETON_FOLDER for path in folder.iterdir()):
            raise ExpertcastError(f"{folder} is not empty and holds no traces: {_REMEDY}")
        self.documents: list[PlannedDocument] = []
        """Committed, in the order they came."""
        self._shards: dict[str, dict[str, str]] = {split: {} for split in SPLITS}
        self._info = own if found is None else self._go_on(found, own)
        self._splits = {document.hash or "": document.split for document in self.documents}
        self._held: list[LiveDocument] = []
        self._since = time.monotonic()
        if not (folder / layout.SKELETON_FOLDER / LAYERS).exists():
            save_live_skeleton(view, config, folder / layout.SKELETON_FOLDER)

    @property
    def tokens(self) -> int:
        """Committed and buffered."""
        return sum(document.tokens for document in self.documents) + sum(len(each.token_T) for each in self._held)

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return max(0, self.options.tokens - self.tokens)

    def add(self, document: LiveDocument) -> None:
        """Take a request's rows, as many as may still come; commits when there are enough of them or they are old."""
        rows = min(len(document.token_T), self.left, self.options.window)
        if not rows:
            return
        held = sum(len(each.token_T) for each in self._held) * self._columns.row_bytes
        if held >= _MOST_SHARDS * self.options.shard_bytes and document.hash in {each.hash for each in self._held}:
            return  # too few different conversations for three splits, as a benchmark's are
        if not self._held:
            self._since = time.monotonic()
        cut = {name: getattr(document, name)[:rows] for name in ("token_T", "residual_TLD", "logits_TLE")}
        self._held.append(replace(document, **cut))
        held += rows * self._columns.row_bytes
        old = time.monotonic() - self._since >= self.options.commit_s
        if held >= self.options.shard_bytes or old or not self.left:
            self.commit()

    def lull(self) -> None:
        """Nothing has come for a moment: commit what is buffered if it is old, or much beside what is committed."""
        held = sum(len(each.token_T) for each in self._held)
        old = time.monotonic() - self._since >= self.options.commit_s
        if held and (old or held * _MUCH >= self.tokens - held):
            self.commit()

    def commit(self) -> bool:
        """Write what is buffered; False: there is nothing, or too few different conversations yet for three splits.

        Raises:
            ExpertcastError: the model gave NaN or infinity.
        """
        lengths: dict[str, int] = {}
        for document in self._held:
            lengths[document.hash] = lengths.get(document.hash, 0) + len(document.token_T)
        if not self._splits and len(lengths) >= MIN_DOCUMENTS:
            self._splits = assign_splits(lengths)
        if not self._held or not self._splits:
            return False
        for conversation in lengths:
            self._splits.setdefault(conversation, _split_by_hash(conversation))
        number = sum(len(shards) for shards in self._shards.values())
        index = len(self.documents)
        for split in SPLITS:
            own = [document for document in self._held if self._splits[document.hash] == split]
            if own:
                name = layout.shard_file(0, number)
                parts = [document.rows(index + place) for place, document in enumerate(own)]
                self._shards[split][name], _ = write_shard(self.folder / name, self._columns, parts)
                self.documents += [
                    PlannedDocument(
                        index=index + place, domain="", tokens=len(each.token_T), split=split, hash=each.hash
                    )
                    for place, each in enumerate(own)
                ]
                number, index = number + 1, index + len(own)
        self._held = []
        self._write_info()
        return True

    def close(self) -> None:
        """Commit what is buffered, and name the digests of all files: nothing more will be written."""
        self.commit()
        if self.documents:
            small = (layout.DATASET_STATE_FILE, layout.DATASET_INFO_FILE)
            self._write_info({name: file_digest(self.folder / name) for name in small})

    def _new_info(self, view: MoEView, dtype: str) -> Json:
        """trace.json of a collection that begins."""
        prints = fingerprints(view)
        settings = {
            "fingerprint": prints["fingerprint"], "dtype": dtype, "window": self.options.window,
            "tokens": self.options.tokens, "batch_size": 1, "ranks": 1, "text": "a server's traffic",
        }  # fmt: skip
        return {
            "format": layout.LIVE_FORMAT,
            "id": hashlib.sha256(f"{prints['fingerprint']} {time.time_ns()}".encode()).hexdigest()[:16],
            "complete": True,
            "settings": settings,
            "columns": self._columns.note(),
            "model": without_folders(view.model_id),
            **prints,
            "shape": view.shape.as_dict(),
            "window": self.options.window,
            "seed": 0,
            **provenance(),
        }

    def _go_on(self, found: TraceInfo, own: Json) -> Json:
        """What an earlier writer left, as it is gone on with.

        Raises:
            ExpertcastError: it is of other traffic, or a shard was changed.
        """
        if not is_live(found):
            raise ExpertcastError(f"{self.folder} holds traces that expertcast collect wrote: {_REMEDY}")
        begun: Json = {**found["settings"]}
        for name in _KEPT:
            if begun[name] != own["settings"][name]:
                raise ExpertcastError(
                    f"{self.folder} was begun with {name}={begun[name]}, now it is {own['settings'][name]}: {_REMEDY}"
                )
        self.documents = sorted(documents_in(found), key=lambda document: document.index)
        files, names = found.get("files", {}), shard_names(self.folder, found)
        ends = [sum(each.tokens for each in self.documents if each.split == split) for split in SPLITS]
        for path in self.folder.glob("data-*"):
            if path.name not in names:
                path.unlink()
        split, left = 0, ends[0]
        for name in names:
            check_file(self.folder / name, files[name], _REMEDY)
            while not left:
                split, left = split + 1, ends[split + 1]
            self._shards[SPLITS[split]][name] = files[name]
            left -= _rows_in(self.folder / name)
        return {**own, "id": found["id"]}

    def _write_info(self, small: Mapping[str, str] | None = None) -> None:
        """The commit: `small` are digests of files that will not change any more."""
        ordered = [document for split in SPLITS for document in self.documents if document.split == split]
        shards = {name: digest for split in SPLITS for name, digest in self._shards[split].items()}
        skeleton = sorted((self.folder / layout.SKELETON_FOLDER).iterdir())
        files = {path.relative_to(self.folder).as_posix(): file_digest(path) for path in skeleton}
        splits = {name: sum(each.tokens for each in ordered if each.split == name) for name in SPLITS}
        counted = {
            "tokens": sum(splits.values()),
            "splits": splits,
            "documents": [asdict(document) for document in ordered],
            "files": {**files, **shards, **(small or {})},
        }
        write_info(self.folder, {**self._info, **counted})
        if small is None:
            layout.write_dataset_files(self.folder, self._columns, list(shards), self._info["id"])


def _split_by_hash(own: str) -> str:
    """The split of a conversation, whatever others there are."""
    place = int(own, 16) / 2**64
    return "test" if place < HELD_OUT_SHARE else "validation" if place >= 1 - HELD_OUT_SHARE else "train"


def _rows_in(path: Path) -> int:
    """How many rows a shard has."""
    with pa.memory_map(str(path)) as source:
        return int(pa.ipc.open_stream(source).read_all().num_rows)


# Default vectors from elsewhere: they are of the model, whatever text they were collected on.
#
# Traces of a server's traffic hold none, so they are taken from other traces of the model, or from a checkpoint.

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
        defaults, documents = found.defaults, {document.hash for document in found.chosen("train")}
        learned = None if None in documents else frozenset(filter(None, documents))
    else:
        defaults, learned = _held(found), found.learned_from
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


def _held_out(source: TraceSource, learned: frozenset[str] | None, given: str) -> list[PlannedDocument]:
    """The source's documents without those of its test split that the default vectors come from."""
    known = all(document.hash is not None for document in source.documents)
    if learned is None or not known:
        what = given if learned is None else "what is trained on"
        warnings.warn(
            f"{what} is from before documents were known by their hashes: default vectors may come from what scores "
            "here; collect again to be sure",
            stacklevel=3,
        )
        return list(source.documents)
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
