"""A short run and a few reads: all that is needed to say how experts on a disk of this machine are best kept."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from expertcast.data.memory import available_memory, usable_processors
from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.advising.disk import DiskFindings, expected
from expertcast.runtime.advising.disk_costs import decoding_seconds, disk_rate, scratch_rate, stored_as, stored_in
from expertcast.runtime.advising.observation import Watcher
from expertcast.runtime.advising.survey import without_copies
from expertcast.runtime.benchmarking.decoding import decode_greedily
from expertcast.runtime.links.base import InstantLink
from expertcast.runtime.links.virtual_disk import Stored
from expertcast.runtime.offloaded import OffloadedModel
from expertcast.runtime.recording.layer_times import layer_times
from expertcast.runtime.recording.observer import Observer
from expertcast.runtime.recording.recorder import Recorder
from expertcast.runtime.simulation.trace import Trace
from expertcast.runtime.storage.codecs import Codec, Part, make_codec
from expertcast.runtime.storage.coded_file import CodedFile
from expertcast.runtime.storage.coded_store import CodedStore
from expertcast.runtime.storage.file_store import FileStore
from expertcast.runtime.storage.store import ExpertStore

CODEC = "bitsplit"
_SAMPLED = 6
"""Experts that are decoded to measure it."""
_COPIES = 8

Run = Callable[[Sequence[Observer]], OffloadedModel]
"""Offloads a model, with observers."""


@dataclass(frozen=True, slots=True)
class _Coded:
    """The codec, and some experts as it stores them."""

    codec: Codec
    parts: list[Sequence[Part]]
    file: CodedFile | None
    """Where all of them lie, if they do."""

    def stored(self, threads: int) -> Stored:
        """As it is measured."""
        decoding_s = decoding_seconds(self.codec, self.parts, threads=threads)
        if self.file is None:
            return stored_as(self.codec, self.parts, decoding_s=decoding_s, threads=threads)
        return stored_in(self.file, self.codec, decoding_s=decoding_s, threads=threads)


def survey_disk(
    run: Run,
    prompt_ids: Tensor,
    folder: Path,
    *,
    new_tokens: int,
    bandwidth: float | None = None,
    budget: int | None = None,
    replayed: tuple[str, Trace] | None = None,
) -> DiskFindings:
    """Decode a few tokens on demand, read some experts, decode some.

    Args:
        run: offloads the model on the CPU: from the store in `folder`, if there is one.
        prompt_ids: [1, T]
        folder: where experts are to lie.
        new_tokens: that are decoded.
        bandwidth: bytes per second of the disk; None: it is measured.
        budget: bytes that experts may take in all; None: what memory is available.
        replayed: routing that the advice is for, and its name; None: the short run's own.

    Raises:
        ExpertcastError: as what `run` calls; a folder that cannot be written; traces of another model.
    """
    recorder, watched, threads = Recorder(prompt_ids.device), Watcher(), usable_processors()
    with run([recorder, watched]) as offloaded:
        store, slots = offloaded.store, offloaded.pool.count
        decoding = decode_greedily(offloaded.model, prompt_ids, new_tokens, offloaded=offloaded, recorder=recorder)
        from_disk = offloaded.link.name == "disk"
        times = layer_times(recorder)
        if isinstance(offloaded.link, InstantLink):
            times = without_copies(times, recorder)
        block_bytes, refused = store.layout.block_bytes, ""
        rate, source = _rate(store, folder, bandwidth)
        coded: _Coded | None = None
        try:
            coded = _coded(store)
        except ExpertcastError as error:
            refused = str(error)
        memory_copy_s = _memory_copy(store, slots, budget)
        codec = store.codec.text if isinstance(store, CodedStore) else "raw"
    shape = offloaded.view.shape
    own = watched.trace(shape)
    routing, trace = replayed or ("the model's own, in a short run", own)
    if trace.shape != shape:
        raise ExpertcastError(f"{routing} is of a model of {trace.shape}, this one has {shape}: give its own traces")
    found = DiskFindings(
        trace=own,
        routing=routing,
        times=times,
        slots=slots,
        block_bytes=block_bytes,
        rate=rate,
        rate_source=source,
        stored=None if coded is None else coded.stored(threads),
        refused=refused,
        memory_copy_s=memory_copy_s,
    )
    if from_disk:  # what the event model misses of a run like those that it speaks of
        late_s = max(0.0, statistics.median(decoding.steps_s) - expected(found, codec).tpot_s)
        found = replace(found, times=replace(times, late_s=late_s), late=codec)
    return replace(found, trace=trace)


def _rate(store: ExpertStore, folder: Path, bandwidth: float | None) -> tuple[float, str]:
    if bandwidth is not None:
        return bandwidth, "given"
    block_bytes = store.layout.block_bytes
    if isinstance(store, FileStore):
        return disk_rate(store.path, block_bytes), "direct reads of the store"
    return scratch_rate(folder, block_bytes, most=store.nbytes), "direct reads of a scratch file"


def _coded(store: ExpertStore) -> _Coded:
    """
    Raises:
        ExpertcastError: the codec cannot hold these experts.
    """
    count = store.layers * store.experts
    keys = sorted({round(place * (count - 1) / (_SAMPLED - 1)) for place in range(_SAMPLED)})
    if isinstance(store, CodedStore):
        return _Coded(store.codec, [store.file.read(key) for key in keys], store.file)
    codec = make_codec(CODEC, store.layout)
    return _Coded(codec, [codec.encode(store.block(key).clone()) for key in keys], None)


def _memory_copy(store: ExpertStore, slots: int, budget: int | None) -> float | None:
    """Seconds of one expert's copy in memory; None where there is no room for all of them beside the slots."""
    block_bytes = store.layout.block_bytes
    least = store.nbytes + slots * block_bytes
    if isinstance(store, FileStore):
        room = available_memory() if budget is None else budget
    else:  # they lie in memory already
        room = least if budget is None else budget
    if room is not None and room < least:
        return None
    source, target = torch.ones(block_bytes, dtype=torch.uint8), torch.empty(block_bytes, dtype=torch.uint8)
    seconds = []
    for _ in range(_COPIES):
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
