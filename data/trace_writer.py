"""Write a trace dataset so that a kill at any moment neither loses nor duplicates a token.

Rows are appended to a :class:`TraceWriter` and committed a shard at a time. The shard is written under a temporary name
and renamed; then the record of committed shards is replaced. A later writer deletes shards that the record does not
list. A server's record is trace.json (`expertcast_vllm.traffic`); a collecting rank's record is a progress file with
its sums for the default vectors.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, with_config
from safetensors.torch import save
from typing_extensions import TypedDict

from expertcast.data import trace_format as layout
from expertcast.data.batch import TraceBatch
from expertcast.data.card import traces_card
from expertcast.data.plan import PlannedDocument, counted
from expertcast.data.skeleton import save_skeleton
from expertcast.data.trace_format import (
    Columns,
    TraceInfo,
    read_info,
    row_bytes,
    tensors_digest,
    write_shard,
)
from expertcast.predictors.artefacts import (
    CLOSED,
    check_file,
    file_digest,
    final_name,
    parse_json,
    read_tensors,
    seal,
    write_atomically,
)
from expertcast.predictors.early_attention import StandIn
from expertcast.predictors.messages import ExpertcastError, Json, format_bytes
from expertcast.predictors.view import ModelShape, MoEView

if TYPE_CHECKING:
    from expertcast.data.means import MeanOutputs

SHARD_BYTES = 128 * 2**20
REMEDY = "delete the folder and collect again"


class TraceWriter:
    """Appends rows to the numbered shards of one writer.

    Args:
        folder: existing folder of the trace dataset.
        columns: columns of the shards.
        shards: digests of committed shards by name; other shards of this writer are deleted.
        rank: rank of the writer.
        shard_bytes: largest size of a shard.

    Raises:
        ExpertcastError: a committed shard has changed.
    """

    def __init__(
        self, folder: Path, columns: Columns, shards: dict[str, str], rank: int = 0, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self.shards = shards
        self._shard_rows = max(1, shard_bytes // row_bytes(columns))
        self._folder, self._columns, self._rank = folder, columns, rank
        self._held: list[TraceBatch] = []
        for path in folder.glob(f"data-{rank:05d}-*"):
            if path.name not in shards:
                path.unlink()
        for name, expected in shards.items():
            check_file(folder / name, expected, REMEDY)

    @property
    def held(self) -> int:
        """Number of rows that are not committed."""
        return sum(map(len, self._held))

    def append(self, rows: TraceBatch) -> None:
        """Buffer rows; their token ids must be known."""
        self._held.append(rows)

    def commit(self) -> None:
        """Write the buffered rows, if any, as the next shards.

        Raises:
            ExpertcastError: a value is NaN or infinity.
        """
        if self._held:
            rows, self._held = TraceBatch.cat(self._held), []
            for begin in range(0, len(rows), self._shard_rows):
                name, part = layout.shard_file(self._rank, len(self.shards)), rows[begin : begin + self._shard_rows]
                self.shards[name] = write_shard(self._folder / name, self._columns, part)


# trace.json


def new_info(columns: Columns, settings: Json, account: Json, mark: str = "") -> Json:
    """Return trace.json of a new dataset.

    Args:
        columns: columns of its shards.
        settings: settings that must be unchanged for writing to resume.
        account: result of :func:`expertcast.data.plan.account`.
        mark: distinguishes datasets with equal settings.
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
    """Prepare a folder for traces: create it with the model's skeleton, or check that its settings are the same.

    Args:
        folder: folder of the dataset.
        new: trace.json of a new dataset.
        view: the model's routers and norms.
        config: transformers' configuration of the model.
        may_change: settings that may differ.

    Returns:
        The existing trace.json; None for a new folder.

    Raises:
        ExpertcastError: the folder contains other files, or traces with other settings.
    """
    if folder.exists() and not folder.is_dir():
        raise ExpertcastError(f"{folder} is a file: use a folder for the traces")
    found = read_info(folder)
    if found is not None:
        check_settings(folder, found, new, may_change)
        return found
    # files that a process killed before the first trace.json leaves behind
    begun = (layout.SKELETON_FOLDER, layout.CARD, layout.TRACE_FILE, layout.shard_file(0, 0), *layout.FOR_DATASETS)
    if folder.exists() and any(final_name(path.name) not in begun for path in folder.iterdir()):
        raise ExpertcastError(f"{folder} is not empty and has no traces: use a new or an empty folder")
    save_skeleton(view, config, folder / layout.SKELETON_FOLDER)
    return None


def check_settings(folder: Path, begun: TraceInfo, new: Json, may_change: Collection[str] = ()) -> None:
    """Raise an error if a dataset has other settings than `new`, except those that `may_change`."""
    before: Json = {**begun["settings"]}
    for key, value in new["settings"].items():
        if before[key] != value and key not in may_change:
            raise ExpertcastError(
                f"{folder} has {key}={before[key]}, not {value}: use the settings of its first run, or another folder"
            )


def check_disk(folder: Path, tokens: int, row_bytes: int, beside: int = 0) -> tuple[str, int]:
    """Compare the size of a folder's files with the free disk space.

    Args:
        folder: the traces, with the rows that are written already; it need not exist.
        tokens: number of rows in the end.
        row_bytes: size of a row.
        beside: bytes of the tensors beside the rows.

    Returns:
        One line about both, and the bytes that will be left over.

    Raises:
        ExpertcastError: the disk is too small.
    """
    files = (*folder.glob("data-*"), *folder.glob("*.safetensors"))
    total, there = tokens * row_bytes + beside, sum(path.stat().st_size for path in files)
    rows = f"{tokens:,} tokens of {row_bytes:,} bytes" + (f" and {format_bytes(beside)} beside them" if beside else "")
    free = shutil.disk_usage(next(place for place in (folder, *folder.absolute().parents) if place.exists())).free
    if total - there > free:
        raise ExpertcastError(
            f"{rows} need {format_bytes(total - there)} more in {folder} and "
            f"{format_bytes(free)} are free: "
            "collect fewer tokens, use another disk, or train without storing traces (expertcast train MODEL --data D)"
        )
    line = f"{folder}: {rows}, about {format_bytes(total)} on disk "
    line += f"({format_bytes(there)} already written), {format_bytes(free)} free"
    return line, free - (total - there)


def publish(
    folder: Path, info: Json, documents: Iterable[PlannedDocument], columns: Columns, shards: Mapping[str, str]
) -> None:
    """Write trace.json of a readable dataset, after the files for `datasets` and its card for the hub.

    Args:
        folder: folder of the dataset.
        info: trace.json without the documents and files.
        documents: documents in the order of their rows.
        columns: columns of the shards.
        shards: digest by name, in the order of their rows.
    """
    layout.write_dataset_files(folder, columns, list(shards), info["id"])
    # while a server appends, the files for `datasets` change independently of trace.json
    for_datasets = () if layout.is_live(info) else layout.FOR_DATASETS
    names = (layout.DEFAULTS_FILE, layout.STAND_IN_FILE, *for_datasets)
    others = [path for name in names if (path := folder / name).exists()]
    others += sorted((folder / layout.SKELETON_FOLDER).iterdir())
    files = {path.relative_to(folder).as_posix(): file_digest(path) for path in others}
    info = {**info, **counted(documents), "files": {**files, **shards}, "complete": True}
    write_atomically(folder / layout.CARD, traces_card(info, folder.name).encode())
    layout.write_info(folder, info)


# Progress of a collecting rank


@with_config(CLOSED)
class Progress(TypedDict):
    """Header of a progress file."""

    shards: dict[Annotated[str, Field(pattern=layout.SHARD_PATTERN)], str]
    """Digests of the shards by name, in order."""
    batches: Annotated[int, Field(ge=0, le=2**53)]
    """Number of the rank's batches in them."""
    rows: Annotated[int, Field(ge=0, le=2**53)]
    seconds: Annotated[float, Field(ge=0)]
    """Seconds of the rank's run, including runs that were killed."""
    sums: str
    """Digest of the tensors in the same file."""
    digest: str


class RankWriter(TraceWriter):
    """Writer of a collecting rank; continues after the rank's last commit.

    Args:
        folder: existing folder of the trace dataset.
        means: sums for default vectors, restored here and saved with every commit.
        rank: rank of the writer.
        columns: columns of the shards.
        shard_bytes: size of a shard.

    Raises:
        ExpertcastError: committed files are damaged.
    """

    def __init__(
        self, folder: Path, means: MeanOutputs, *, rank: int, columns: Columns, shard_bytes: int = SHARD_BYTES
    ) -> None:
        self.means, self.done = means, _load_progress(folder, rank, means)
        super().__init__(folder, columns, self.done["shards"], rank, shard_bytes)
        self._since = time.perf_counter()

    def append(self, rows: TraceBatch) -> None:
        """Buffer a batch; commit if a shard is full."""
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
    """Merge the progress of all ranks in order, with the first rank's seconds; sums are added to the first of `means`.

    Raises:
        ExpertcastError: a progress file is damaged.
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


def write_stand_in(folder: Path, stand_in: StandIn) -> None:
    write_atomically(folder / layout.STAND_IN_FILE, save(stand_in.state_dict()))


def read_stand_in(folder: Path, shape: ModelShape, rank: int) -> StandIn:
    """Read the stand-in from a folder of traces.

    Raises:
        ExpertcastError: the file is invalid.
    """
    stand_in = StandIn(shape, rank, "meta")
    tensors, _ = read_tensors(folder / layout.STAND_IN_FILE, stand_in.state_dict(), REMEDY)
    stand_in.load_state_dict(tensors, assign=True)
    return stand_in
