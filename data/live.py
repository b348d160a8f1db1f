"""Writing traces of a server's traffic: what was committed can be read at any moment, also after a kill.

A document is a request. Rows are buffered until there are enough of them; then each split gets a shard, and trace.json,
which names the shards and documents, replaces the old one. That replacement is the commit: what it does not name is
deleted by the next writer.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pyarrow as pa
import torch

from expertcast.checkpoints.fingerprints import fingerprints
from expertcast.checkpoints.provenance import provenance, without_folders
from expertcast.data import layout
from expertcast.data.live_document import LiveDocument as LiveDocument
from expertcast.data.live_skeleton import LAYERS, save_live_skeleton
from expertcast.data.plan import HELD_OUT_SHARE, MIN_DOCUMENTS, SPLITS, PlannedDocument, assign_splits
from expertcast.data.shard_file import write_shard
from expertcast.data.trace_file import TraceInfo, documents_in, is_live, read_info, shard_names, write_info
from expertcast.predictors.artefacts import check_file, file_digest
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.plain import Json
from expertcast.predictors.view import MoEView

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
    """A folder of traces that grows. Nobody else may write it: see :mod:`expertcast.data.exclusive`."""

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
