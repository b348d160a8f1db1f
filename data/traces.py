"""Reading a trace dataset: rows of the Arrow shards as tensors, without a copy.

T tokens, D hidden size, L MoE layers, E routed experts per layer. The folder is drawn in :mod:`expertcast.data.layout`.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

import torch

from expertcast.checkpoints.downloads import blamed, located
from expertcast.data import layout
from expertcast.data.batch import TraceBatch
from expertcast.data.layout import TRACE_FILE as TRACE_FILE
from expertcast.data.live_skeleton import LAYERS
from expertcast.data.plan import ALL as ALL
from expertcast.data.plan import PlannedDocument
from expertcast.data.shards import Rows, Shard, places
from expertcast.data.stand_in_file import read_stand_in
from expertcast.data.tensor_files import read_tensors
from expertcast.data.trace_file import (
    REMEDY,
    TRACES,
    TraceInfo,
    documents_in,
    is_live,
    read_info,
    shape_in,
    shard_names,
)
from expertcast.data.trace_source import TraceSource as TraceSource
from expertcast.predictors.artefacts import SEAL, check_file
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.quasi_hidden import DefaultVectors
from expertcast.predictors.stand_in import StandIn
from expertcast.predictors.view import MoEView


class TraceDataset(TraceSource):
    """A complete trace dataset. Made by :func:`expertcast.data.collector.collect`, opened by :meth:`open`.

    The other files of the folder are compared with the digests in trace.json: small ones when they are read, a shard
    before its first rows are given out.
    """

    def __init__(self, folder: Path, info: TraceInfo) -> None:
        self.folder = folder
        self.info = {name: value for name, value in info.items() if name != SEAL}
        self.documents = documents_in(info)
        self._shape = shape_in(info)
        self._files = info.get("files")
        for name in (layout.DATASET_STATE_FILE, layout.DATASET_INFO_FILE):
            if not is_live(info):  # written after trace.json there: they may be older
                self._check(name)
        shards, begin = [], 0
        for name in shard_names(folder, info):
            self._digest_of(name)
            shards.append((begin, Shard(folder / name, info, partial(places, self.documents, begin))))
            begin += len(shards[-1][1])
        self._shards = Rows(shards)
        self._first, rows = dict[int, int](), 0
        """By `PlannedDocument.index`, the number of a document's first row."""
        for document in self.documents:
            self._first[document.index] = rows
            rows += document.tokens
        if begin != info["tokens"]:
            raise ExpertcastError(
                f"{folder}: {begin} rows in the {len(shards)} shards of {layout.DATASET_STATE_FILE}, {TRACE_FILE} has "
                f"{info['tokens']} tokens; {REMEDY}"
            )

    @classmethod
    def open(cls, folder: Path | str, *, revision: str | None = None) -> TraceDataset:
        """The traces in a folder; where there is none, those of `user/repo` or `user/repo@revision` of the hub.

        Raises:
            ExpertcastError: no traces there, a file that is not right, or their collection was not finished.
        """
        found, name = located(folder, TRACES, revision)
        with blamed(name, found, TRACES):
            info = read_info(found)
            if info is None:
                missing = f"{TRACE_FILE} missing" if found.is_dir() else "no such folder"
                raise ExpertcastError(f"{found} holds no traces ({missing}): make them with expertcast collect")
            if not info["complete"]:
                raise ExpertcastError(f"the collection in {found} is not finished: run the same collect command again")
            return cls(found, info)

    def without(self, documents: Collection[int]) -> TraceDataset:
        """The same traces as if there were not the rows of some documents (by `PlannedDocument.index`); what is of them
        all (`defaults`, `stand_in`, `info`) is as it was."""
        rest = copy.copy(self)
        rest.documents = [document for document in self.documents if document.index not in documents]
        return rest

    def verify(self) -> None:
        """Check every file that was not read since the traces were opened.

        Raises:
            ExpertcastError: one is missing, was changed, or holds what cannot be.
        """
        for name in self._files or ():
            if not name.endswith(".arrow"):
                self._check(name)
        self._shards.check()
        _ = self.view, self.stand_in
        if not is_live(self.info):
            _ = self.defaults

    @cached_property
    def view(self) -> MoEView:  # type: ignore[override]
        """The model's norms and routers, from the skeleton in the folder.

        Raises:
            ExpertcastError: a file of it is not right, or it is of another model than the traces.
        """
        from expertcast.data.skeleton import load_skeleton  # of all traces, this alone needs transformers

        folder = self.folder / layout.SKELETON_FOLDER
        self._check(f"{layout.SKELETON_FOLDER}/{LAYERS}")
        view = load_skeleton(folder)
        # traces from before norms were in it have that of routers alone
        own = (view.fingerprint(), view.router_fingerprint())
        if view.shape != self._shape or self.info["fingerprint"] not in own:
            raise ExpertcastError(f"{folder} is not of the model that {TRACE_FILE} was collected from; {REMEDY}")
        return replace(view, experts_known=self.info.get("experts_fingerprint"))

    @cached_property
    def defaults(self) -> DefaultVectors:  # type: ignore[override]
        """Default vectors over the documents of the train split.

        Raises:
            ExpertcastError: their file is not right, or there is none.
        """
        if layout.DEFAULTS_FILE not in (self._files or ()) and is_live(self.info):
            raise ExpertcastError(
                f"{self.folder} is of a server's traffic and holds no default vectors: take those of other traces or "
                "a checkpoint of the same model (expertcast train --default-vectors), or train linear "
                "with --set reads=router_input, or a predictor that needs none (router_input, next_norm, frequency, "
                "previous_token)"
            )
        path = self.folder / layout.DEFAULTS_FILE
        self._check(layout.DEFAULTS_FILE)
        tensors, _ = read_tensors(path, DefaultVectors.of_shape(self._shape).as_tensors(), REMEDY)
        defaults = DefaultVectors.from_tensors(tensors)
        count_LE, tokens = defaults.count_LE, self.info["splits"]["train"]
        if defaults.token_count != tokens or int(count_LE.min()) < 0 or int(count_LE.max()) > tokens:
            raise ExpertcastError(f"{path} is not of the {tokens} tokens of the train split; {REMEDY}")
        return defaults

    @cached_property
    def stand_in(self) -> StandIn | None:  # type: ignore[override]
        """What early attention ran on; None where it did not run.

        Raises:
            ExpertcastError: its file is not right.
        """
        rank = self.info["settings"].get("early_rank")
        if rank is None:
            return None
        self._check(layout.STAND_IN_FILE)
        return read_stand_in(self.folder, self._shape, rank)

    def _check(self, name: str) -> None:
        """Compare a file with its digest, where trace.json has any."""
        expected = self._digest_of(name)
        if expected is not None:
            check_file(self.folder / name, expected, REMEDY)

    def _digest_of(self, name: str) -> str | None:
        if self._files is None:
            return None
        if name not in self._files:
            raise ExpertcastError(f"{self.folder / TRACE_FILE}: files lacks {name}; {REMEDY}")
        return self._files[name]

    def _batches(
        self, own: list[PlannedDocument], tokens: int, batch_size: int, seed: int | None
    ) -> Iterator[TraceBatch]:
        """In order, tensors are views of the files where a batch lies in one of them, private ones: writing to them
        never reaches the disk."""
        spans, left = list[range](), tokens
        for document in own:
            first = self._first[document.index]
            begin = spans.pop().start if spans and spans[-1].stop == first else first
            spans.append(range(begin, first + min(document.tokens, left)))
            left -= min(document.tokens, left)
            if not left:
                break
        if seed is None:
            yield from self._shards.in_order(spans, batch_size)
            return
        rows_T = torch.cat([torch.arange(span.start, span.stop) for span in spans])
        order_T = rows_T[torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))]
        for batch_T in torch.split(order_T, batch_size):
            yield self._shards.gathered(batch_T)
