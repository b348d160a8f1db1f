"""Writing a trace dataset so that a kill at any moment loses no token and doubles none.

Tokens are buffered until a shard is full; the shard is written under a temporary name and renamed; then one progress
file (shards done and their digests, batches done, sums for the default vectors) replaces the old one. That replacement
is the commit: on resumption, shards it does not name are deleted and the batches after it are run again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NotRequired

from pydantic import Field, with_config
from safetensors.torch import save
from torch import Tensor
from typing_extensions import TypedDict

from expertcast.data import trace_format as layout
from expertcast.data.batch import TraceBatch
from expertcast.data.means import MeanOutputs
from expertcast.data.trace_format import read_tensors, tensors_digest, write_atomically, write_shard
from expertcast.predictors.artefacts import CLOSED, SEAL, check_file, file_digest, parse_json, seal, warn_unsealed
from expertcast.predictors.early_attention import StandIn
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import ModelShape

SHARD_BYTES = 128 * 2**20
REMEDY = "delete the folder and collect again"
_ShardName = Annotated[str, Field(pattern=layout.SHARD_PATTERN)]


@with_config(CLOSED)
class _Note(TypedDict):
    """In the header of a progress file."""

    shards: list[_ShardName]
    batches_done: Annotated[int, Field(ge=0, le=2**53)]
    rows_done: Annotated[int, Field(ge=0, le=2**53)]
    seconds: NotRequired[Annotated[float, Field(ge=0)]]
    """That they took, with those before a kill."""
    digests: NotRequired[dict[_ShardName, str]]
    """Of the shards, in their order."""
    sums: NotRequired[str]
    """Digest of the tensors beside it."""
    digest: NotRequired[str]


@dataclass(slots=True, kw_only=True)
class Progress:
    """What is committed."""

    shards: dict[str, str] = field(default_factory=dict)
    """Name to digest, in order."""
    batches: int = 0
    """How many of the rank's batches they hold."""
    rows: int = 0
    seconds: float = 0.0
    """That the first rank took for them."""


class ShardWriter:
    """One rank's shards and progress."""

    def __init__(
        self,
        folder: Path,
        means: MeanOutputs,
        *,
        rank: int,
        columns: layout.Columns,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Goes on where an earlier writer of this rank committed last.

        Args:
            folder: the trace dataset; it exists.
            means: saved with every commit, and set here to what was saved with the last one.
            rank: whose shards these are.
            columns: what is written of a token.
            shard_bytes: size at which a shard is committed.

        Raises:
            ExpertcastError: what was committed before is damaged.
        """
        self.means = means
        self._folder, self._rank, self._columns = folder, rank, columns
        self._shard_rows = max(1, shard_bytes // columns.row_bytes)
        self._batches: list[tuple[TraceBatch, Tensor]] = []
        self.done = _load_progress(folder, rank, means)
        self._since = time.perf_counter()
        for path in folder.glob(f"data-{rank:05d}-*"):
            if path.name not in self.done.shards:
                path.unlink()
        for name, expected in self.done.shards.items():
            check_file(folder / name, expected, REMEDY)

    def add(self, batch: TraceBatch, token_T: Tensor) -> None:
        """Take one batch's rows; commits when a shard is full."""
        self._batches.append((batch, token_T))
        if sum(len(held) for held, _ in self._batches) >= self._shard_rows:
            self.commit()

    def commit(self) -> None:
        """Write what is buffered, if anything.

        Raises:
            ExpertcastError: the model gave NaN or infinity.
        """
        if not self._batches:
            return
        name = layout.shard_file(self._rank, len(self.done.shards))
        digest, rows = write_shard(self._folder / name, self._columns, self._batches)
        self.done.shards[name] = digest
        self.done.batches += len(self._batches)
        self.done.rows += rows
        now = time.perf_counter()
        self.done.seconds, self._since = self.done.seconds + now - self._since, now
        self._batches = []
        self._save_progress()

    def _save_progress(self) -> None:
        sums = self.means.as_tensors()
        note = seal(
            {
                "shards": list(self.done.shards),
                "batches_done": self.done.batches,
                "rows_done": self.done.rows,
                "seconds": self.done.seconds,
                "digests": self.done.shards,
                "sums": tensors_digest(sums),
            }
        )
        path = self._folder / layout.PROGRESS_FOLDER / layout.progress_file(self._rank)
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, save(sums, metadata={"progress": json.dumps(note)}))


def write_where_told(path: Path, content: bytes) -> None:
    """:func:`write_atomically` at a path that a user gave.

    Raises:
        ExpertcastError: its folder does not exist or cannot be written.
    """
    try:
        write_atomically(path, content)
    except OSError as error:
        raise ExpertcastError(f"cannot write {path}: {error.strerror}; give a path in a folder that exists") from error


def merged_progress(folder: Path, means: Sequence[MeanOutputs]) -> Progress:
    """What all ranks have committed, in order, and in the first of `means` (one for each rank) the sum of theirs.

    Raises:
        ExpertcastError: a rank's account is damaged.
    """
    merged = Progress()
    for rank, own in enumerate(means):
        done = _load_progress(folder, rank, own)
        merged.shards |= done.shards
        merged.rows += done.rows
        if rank:
            means[0].merge(own)
        else:
            merged.seconds = done.seconds
    return merged


def _load_progress(folder: Path, rank: int, means: MeanOutputs) -> Progress:
    path = folder / layout.PROGRESS_FOLDER / layout.progress_file(rank)
    if not path.exists():
        return Progress()
    tensors, texts = read_tensors(path, means.as_tensors(), REMEDY)
    note = parse_json(texts.get("progress", ""), _Note, str(path), REMEDY)
    names = note["shards"]
    if SEAL not in note:
        warn_unsealed(path)
    elif note.get("sums") != tensors_digest(tensors) or list(note.get("digests", {})) != names:
        raise ExpertcastError(f"{path} was changed after it was written; {REMEDY}")
    means.load_tensors(tensors)
    try:
        shards = note.get("digests") or {name: file_digest(folder / name) for name in names}
    except OSError as error:
        raise ExpertcastError(f"cannot read {error.filename}: {error.strerror}; {REMEDY}") from error
    seconds = note.get("seconds", 0.0)
    return Progress(shards=shards, batches=note["batches_done"], rows=note["rows_done"], seconds=seconds)


# The stand-in that a collection's early attention runs on, in a file.


def write_stand_in(folder: Path, stand_in: StandIn) -> None:
    """Keep a stand-in in the folder of traces."""
    write_atomically(folder / layout.STAND_IN_FILE, save(stand_in.as_tensors()))


def read_stand_in(folder: Path, shape: ModelShape, rank: int) -> StandIn:
    """The stand-in in a folder of traces, of a model of this `shape` and of this `rank`.

    Raises:
        ExpertcastError: its file is not right.
    """
    like = StandIn.of_shape(shape, rank, "meta").as_tensors()
    tensors, _ = read_tensors(folder / layout.STAND_IN_FILE, like, REMEDY)
    return StandIn(**tensors)
