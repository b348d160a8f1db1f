"""Writing a trace dataset so that a kill at any moment loses no token and doubles none.

Rows are appended to a :class:`TraceWriter` and committed a shard at a time: the shard is written under a temporary name
and renamed, then a record that names the committed shards replaces the old one. A later writer deletes shards that the
record does not name. A server's record is trace.json itself (:mod:`expertcast.data.live`); that of a collecting rank
is a progress file, which also holds its sums for the default vectors.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, with_config
from safetensors.torch import save
from typing_extensions import TypedDict

from expertcast.data import trace_format as layout
from expertcast.data.batch import TraceBatch
from expertcast.data.plan import PlannedDocument, counted
from expertcast.data.skeleton import save_skeleton
from expertcast.data.trace_format import (
    Columns,
    TraceInfo,
    read_info,
    read_tensors,
    row_bytes,
    tensors_digest,
    write_atomically,
    write_shard,
)
from expertcast.predictors.artefacts import CLOSED, check_file, file_digest, parse_json, seal
from expertcast.predictors.early_attention import StandIn
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.predictors.view import ModelShape, MoEView

if TYPE_CHECKING:
    from expertcast.data.means import MeanOutputs

SHARD_BYTES = 128 * 2**20
REMEDY = "delete the folder and collect again"


class TraceWriter:
    """Appends rows to the numbered shards of one writer.

    Args:
        folder: the trace dataset; it exists.
        columns: what is written of a token.
        shards: that are committed, by name with their digests; other shards of this writer are deleted.
        rank: of the writer, where several collect together.

    Raises:
        ExpertcastError: a committed shard was changed.
    """

    def __init__(self, folder: Path, columns: Columns, shards: dict[str, str], rank: int = 0) -> None:
        self.shards = shards
        self._folder, self._columns, self._rank = folder, columns, rank
        self._held: list[TraceBatch] = []
        for path in folder.glob(f"data-{rank:05d}-*"):
            if path.name not in shards:
                path.unlink()
        for name, expected in shards.items():
            check_file(folder / name, expected, REMEDY)

    @property
    def held(self) -> int:
        """Rows that are not committed."""
        return sum(map(len, self._held))

    def append(self, rows: TraceBatch) -> None:
        """Buffer rows, whose tokens' ids are known."""
        self._held.append(rows)

    def commit(self) -> None:
        """Write what is buffered, if anything, as the next shard.

        Raises:
            ExpertcastError: the model gave NaN or infinity.
        """
        if self._held:
            name = layout.shard_file(self._rank, len(self.shards))
            self.shards[name] = write_shard(self._folder / name, self._columns, TraceBatch.cat(self._held))
            self._held = []


# trace.json


def new_info(columns: Columns, settings: Json, account: Json, mark: str = "") -> Json:
    """trace.json of a dataset that begins.

    Args:
        columns: of its shards.
        settings: that must be the same for its writing to go on.
        account: :func:`expertcast.data.plan.account`
        mark: tells it from others with the same settings.
    """
    identity = hashlib.sha256((json.dumps(settings, sort_keys=True) + mark).encode()).hexdigest()
    return {
        "format": layout.FORMAT,
        "id": identity[:16],
        "complete": False,
        "settings": settings,
        "columns": layout.column_notes(columns),
        "files": {},
        **account,
    }


def claim(
    folder: Path, new: Json, view: MoEView, config: Json, *, may_change: Collection[str] = ()
) -> TraceInfo | None:
    """Take a folder for traces: make it with the model's skeleton, or see that what is there was begun likewise.

    Args:
        folder: of the dataset.
        new: its trace.json, were it new.
        view: the model's routers and norms.
        config: transformers' configuration of the model.
        may_change: settings that may be others now.

    Returns:
        The trace.json that is there; None for a new folder.

    Raises:
        ExpertcastError: the folder holds something else, or traces with other settings.
    """
    if folder.exists() and not folder.is_dir():
        raise ExpertcastError(f"{folder} is a file: give a folder for the traces")
    found = read_info(folder)
    if found is not None:
        check_settings(folder, found, new, may_change)
        return found
    # what a kill before the first trace.json leaves
    begun = (layout.SKELETON_FOLDER, layout.TRACE_FILE, layout.shard_file(0, 0), *layout.FOR_DATASETS)
    if folder.exists() and any(path.name.removesuffix(layout.PARTIAL) not in begun for path in folder.iterdir()):
        raise ExpertcastError(f"{folder} is not empty and holds no traces of ours: give a new or an empty folder")
    save_skeleton(view, config, folder / layout.SKELETON_FOLDER)
    return None


def check_settings(folder: Path, begun: TraceInfo, new: Json, may_change: Collection[str] = ()) -> None:
    """
    Raises:
        ExpertcastError: the dataset was begun with other settings than the `new` ones.
    """
    before: Json = {**begun["settings"]}
    for key, value in new["settings"].items():
        if before[key] != value and key not in may_change:
            raise ExpertcastError(
                f"{folder} was begun with {key}={before[key]}, now it is {value}: give the settings it was begun with, "
                "or another folder"
            )


def publish(
    folder: Path, info: Json, documents: Iterable[PlannedDocument], columns: Columns, shards: Mapping[str, str]
) -> None:
    """Write trace.json of a dataset that can be read, after the files with which `datasets` reads it.

    Args:
        folder: of the dataset.
        info: trace.json without what follows here.
        documents: in the order of their rows.
        columns: of the shards.
        shards: digest by name, in the order of their rows.
    """
    layout.write_dataset_files(folder, columns, list(shards), info["id"])
    # those for `datasets` change beside trace.json while a server appends
    for_datasets = () if layout.is_live(info) else layout.FOR_DATASETS
    names = (layout.DEFAULTS_FILE, layout.STAND_IN_FILE, *for_datasets)
    others = [path for name in names if (path := folder / name).exists()]
    others += sorted((folder / layout.SKELETON_FOLDER).iterdir())
    files = {path.relative_to(folder).as_posix(): file_digest(path) for path in others}
    layout.write_info(folder, {**info, **counted(documents), "files": {**files, **shards}, "complete": True})


# What a collecting rank has committed


@with_config(CLOSED)
class Progress(TypedDict):
    """In the header of a progress file."""

    shards: dict[Annotated[str, Field(pattern=layout.SHARD_PATTERN)], str]
    """Digest by name, in their order."""
    batches: Annotated[int, Field(ge=0, le=2**53)]
    """How many of the rank's batches they hold."""
    rows: Annotated[int, Field(ge=0, le=2**53)]
    seconds: Annotated[float, Field(ge=0)]
    """That the rank took for them, with those before a kill."""
    sums: str
    """Digest of the tensors beside it."""
    digest: str


class RankWriter(TraceWriter):
    """The writer of a collecting rank: goes on where an earlier one of this rank committed last.

    Args:
        folder: the trace dataset; it exists.
        means: saved with every commit, and set here to what was saved with the last one.
        rank: whose shards these are.
        columns: what is written of a token.
        shard_bytes: size at which a shard is committed.

    Raises:
        ExpertcastError: what was committed before is damaged.
    """

    def __init__(
        self, folder: Path, means: MeanOutputs, *, rank: int, columns: Columns, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self.means, self.done = means, _load_progress(folder, rank, means)
        super().__init__(folder, columns, self.done["shards"], rank)
        self._shard_rows = max(1, shard_bytes // row_bytes(columns))
        self._since = time.perf_counter()

    def append(self, rows: TraceBatch) -> None:
        """Take one batch's rows; commits when a shard is full."""
        super().append(rows)
        if self.held >= self._shard_rows:
            self.commit()

    def commit(self) -> None:
        rows, batches = self.held, len(self._held)
        if not rows:
            return
        super().commit()
        now = time.perf_counter()
        self.done["batches"] += batches
        self.done["rows"] += rows
        self.done["seconds"] += now - self._since
        self._since = now
        sums = self.means.as_tensors()
        self.done["sums"] = tensors_digest(sums)
        path = self._folder / layout.PROGRESS_FOLDER / layout.progress_file(self._rank)
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, save(sums, metadata={"progress": json.dumps(seal(self.done))}))


def merged_progress(folder: Path, means: Sequence[MeanOutputs]) -> Progress:
    """What all ranks have committed, in order, with the first one's seconds; in the first of `means` (one for each
    rank) the sum of theirs.

    Raises:
        ExpertcastError: a rank's account is damaged.
    """
    merged, *others = (_load_progress(folder, rank, own) for rank, own in enumerate(means))
    for done, own in zip(others, means[1:], strict=True):
        merged["shards"] |= done["shards"]
        merged["rows"] += done["rows"]
        means[0].merge(own)
    return merged


def _load_progress(folder: Path, rank: int, means: MeanOutputs) -> Progress:
    path = folder / layout.PROGRESS_FOLDER / layout.progress_file(rank)
    if not path.exists():
        return Progress(shards={}, batches=0, rows=0, seconds=0.0, sums="", digest="")
    tensors, texts = read_tensors(path, means.as_tensors(), REMEDY)
    done = parse_json(texts.get("progress", ""), Progress, str(path), REMEDY)
    if done["sums"] != tensors_digest(tensors):
        raise ExpertcastError(f"{path} was changed after it was written; {REMEDY}")
    means.load_tensors(tensors)
    return done


# Single files


def write_where_told(path: Path, content: bytes) -> None:
    """:func:`write_atomically` at a path that a user gave.

    Raises:
        ExpertcastError: its folder does not exist or cannot be written.
    """
    try:
        write_atomically(path, content)
    except OSError as error:
        raise ExpertcastError(f"cannot write {path}: {error.strerror}; give a path in a folder that exists") from error


def write_stand_in(folder: Path, stand_in: StandIn) -> None:
    """Keep a stand-in in the folder of traces."""
    write_atomically(folder / layout.STAND_IN_FILE, save(stand_in.state_dict()))


def read_stand_in(folder: Path, shape: ModelShape, rank: int) -> StandIn:
    """The stand-in in a folder of traces, of a model of this `shape` and of this `rank`.

    Raises:
        ExpertcastError: its file is not right.
    """
    stand_in = StandIn(shape, rank, "meta")
    tensors, _ = read_tensors(folder / layout.STAND_IN_FILE, stand_in.state_dict(), REMEDY)
    stand_in.load_state_dict(tensors, assign=True)
    return stand_in
