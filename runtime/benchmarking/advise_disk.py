"""Advice on experts on a disk: compressed or not, and with which pools beside the slots.

The planner of pools estimates the waiting of every option from recorded routing and the rates of disk and decoding that
were measured on this machine.

T tokens, L MoE layers, K experts per token.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from expertcast.data.machine import run_alone, usable_processors
from expertcast.data.routing_file import ABSENT, Routing
from expertcast.predictors.messages import ExpertcastError, Json, aligned
from expertcast.predictors.view import ModelShape
from expertcast.runtime.benchmarking.bench import decode_greedily, step_times
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.links.base import InstantLink
from expertcast.runtime.offloading import OffloadedModel
from expertcast.runtime.pools.planner import RankModel, expected_makespans, plans, rank_model
from expertcast.runtime.pools.states import POOLS, Costs, ExpertBytes, State, pools_text
from expertcast.runtime.recording.recorder import Observer, Recorder
from expertcast.runtime.storage.codecs import Codec, Part, make_codec
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.layout import SECTOR, sectors
from expertcast.runtime.storage.memory import HostMemory
from expertcast.runtime.storage.reader import THREADS, DirectReader, Read
from expertcast.runtime.storage.store import ExpertStore

MOST_READ = 256 << 20
"""Default maximum of bytes read to measure a disk."""
_PASSES = 2
"""Measurements of the disk, of which the fastest counts."""
_DECODINGS = 3
"""Decodings of each sampled expert per thread."""


def disk_rate(path: Path, block_bytes: int, *, most: int = MOST_READ) -> float:
    """Measure the rate of direct reads of a file in bytes per second: consecutive ranges of one expert's size.

    Args:
        path: the file.
        block_bytes: bytes of one expert.
        most: maximum of bytes read, but at least one expert.

    Raises:
        ExpertcastError: the file cannot be read, or is shorter than a sector.
    """
    nbytes = min(path.stat().st_size, max(most, block_bytes)) // SECTOR * SECTOR
    if not nbytes:
        raise ExpertcastError(f"{str(path)!r} is too short to measure the disk: pack the store again")
    size = min(sectors(block_bytes), nbytes)
    memory = HostMemory(size * min(THREADS + 1, nbytes // size)).bytes.view(-1, size).unbind(0)
    seconds = []
    reader = DirectReader(path, threads=THREADS)
    try:
        for _ in range(_PASSES):
            start = time.perf_counter()
            _read_all(reader, memory, nbytes // size)
            seconds.append(time.perf_counter() - start)
    finally:
        reader.close()
    return nbytes // size * size / min(seconds)


def _read_all(reader: DirectReader, memory: Sequence[Tensor], count: int) -> None:
    """Read `count` blocks, reusing each buffer of `memory` once it has been filled."""
    reads: list[Read] = []
    for number in range(count):
        if number >= len(memory):
            reads[number - len(memory)].wait()
        target = memory[number % len(memory)]
        reads.append(Read(urgent=True, target=target, offset=number * len(target)))
        reader.submit(reads[-1])
    for read in reads[-len(memory) :]:
        read.wait()


def scratch_rate(folder: Path, block_bytes: int, *, most: int = MOST_READ) -> float:
    """Measure :func:`disk_rate` of a temporary file of random bytes in `folder`.

    Raises:
        ExpertcastError: the folder cannot be created or written.
    """
    size = sectors(max(block_bytes, min(most, MOST_READ)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="expertcast-", suffix=".scratch") as file:
            random_ = np.random.default_rng(0)
            for start in range(0, size, 1 << 24):
                file.write(random_.bytes(min(1 << 24, size - start)))
            file.flush()
            os.fsync(file.fileno())
            return disk_rate(Path(file.name), block_bytes, most=most)
    except OSError as error:
        raise ExpertcastError(
            f"cannot write to {str(folder)!r} ({error.strerror or error}): give another --store-folder, or --bandwidth"
        ) from error


def decoding_seconds(codec: Codec, coded: Sequence[Sequence[Part]], *, threads: int) -> float:
    """Measure the seconds that a thread takes to decode an expert while `threads` threads decode.

    Args:
        codec: codec that encoded the parts.
        coded: parts of some experts.
        threads: number of threads.
    """
    block_bytes = codec.layout.block_bytes

    def decode_all(number: int) -> list[float]:
        block, seconds = torch.empty(block_bytes, dtype=torch.uint8), []
        for _ in range(_DECODINGS):
            for parts in coded:
                start = time.perf_counter()
                codec.decode(parts, block)
                seconds.append(time.perf_counter() - start)
        return seconds

    with ThreadPoolExecutor(threads, initializer=run_alone) as pool:
        return statistics.median(each for own in pool.map(decode_all, range(threads)) for each in own)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredExperts:
    """Form of the experts on a disk, with the mean bytes of one."""

    codec: str = "raw"
    plain: float
    """Uncompressed bytes, all of them if nothing is compressed."""
    coded: float = 0.0
    """Compressed bytes."""
    shards: int = 1
    """Compressed shards, decoded one by one."""
    decode_s: float = 0.0
    """Seconds that a thread takes for a shard."""
    threads: int = 1
    """Decoding threads."""

    def costs(self, rate: float) -> Costs:
        """Return the costs over a disk of `rate` bytes per second."""
        return Costs(
            read_s=self.plain / rate, ratio=self.coded / self.plain, decode_s=self.decode_s, shards=self.shards,
            threads=self.threads,
        )  # fmt: skip


def stored_experts(codec: Codec, sample: Sequence[Sequence[Part]], *, decoding_s: float, threads: int) -> StoredExperts:
    """Describe a codec's experts by the parts of some, each part rounded up to sectors.

    Args:
        codec: codec of the experts.
        sample: parts of some experts.
        decoding_s: seconds that a thread takes to decode one expert.
        threads: number of decoding threads.
    """
    compressed = [codec.planes[shard.plane].compressed for shard in codec.shards]
    shards = max(1, sum(compressed))
    nbytes = [0, 0]
    for parts in sample:
        for part, own in zip(parts, compressed, strict=True):
            nbytes[own] += sectors(len(part.data))
    plain, coded = (count / len(sample) for count in nbytes)
    return StoredExperts(
        codec=codec.name, plain=plain, coded=coded, shards=shards, decode_s=decoding_s / shards, threads=threads
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskOption:
    """A store on a disk with codec, pools and slots, loading on demand, with estimates of a decode step."""

    codec: str = "raw"
    pools: str = ""
    """Bytes of the pools beside the slots, such as `C=2000000,E=300000`."""
    slots: int
    tpot_s: float
    wait_s: float
    """Seconds of waiting for experts, per token."""
    hit_rate: float

    @property
    def cells(self) -> list[str]:
        times = [f"{1e3 * seconds:.2f}" for seconds in (self.tpot_s, self.wait_s)]
        return [self.codec, self.pools or "-", str(self.slots), *times, f"{self.hit_rate:.3f}"]

    def config(self, given: OffloadConfig, folder: Path) -> OffloadConfig:
        """Return `given` with a store in `folder` of this codec, slots and pools."""
        return replace(
            given, slots=self.slots, memory=None, predictor=None, bandwidth=None, link="auto", store="disk",
            store_folder=str(folder), codec=self.codec, pools=self.pools,
        )  # fmt: skip


class RoutingObserver(Observer):
    """Records the needed experts of one decoding, whose first forward pass is the prefill."""

    def __init__(self) -> None:
        self.passes: list[list[list[int]]] = []
        """Keys by layer, of each forward pass."""

    def needed(self, layer: int, keys: Sequence[int]) -> None:
        if layer == 0:
            self.passes.append([])
        self.passes[-1].append(list(keys))


def routing_of(needed: Sequence[Sequence[Sequence[int]]], shape: ModelShape) -> Routing:
    """Convert the keys of forward passes, by layer, to a routing table; the first pass is a prompt.

    The distinct experts of a pass fill its rows, [T, L, K], in order.
    """
    rows, prompt = [], []
    for number, by_layer in enumerate(needed):
        count = max(-(-len(keys) // shape.top_k) for keys in by_layer)
        ids_TLK = np.full((count, shape.layers, shape.top_k), ABSENT, dtype=np.int64)
        for layer, keys in enumerate(by_layer):
            padded = np.full(count * shape.top_k, ABSENT, dtype=np.int64)
            padded[: len(keys)] = np.array(keys) % shape.experts
            ids_TLK[:, layer] = padded.reshape(count, shape.top_k)
        rows.append(ids_TLK)
        prompt += [number == 0] * count
    return Routing(source="a short run", ids_TLK=np.concatenate(rows), prompt_T=np.array(prompt), experts=shape.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The option chosen among several, with its reasons."""

    chosen: DiskOption
    options: Sequence[DiskOption]
    """All options considered, the simplest first."""
    reasons: Sequence[str]
    """One sentence each."""
    facts: Json
    """Measured values, by name; part of the JSON result."""

    def as_dict(self) -> Json:
        """Return plain values for JSON."""
        options = [asdict(option) for option in self.options]
        return {"chosen": asdict(self.chosen), "options": options, "reasons": list(self.reasons), **self.facts}

    def text(self) -> str:
        """Return the advice as text for the terminal."""
        pools = f" with pools {self.chosen.pools}" if self.chosen.pools else ""
        expected = f"expect {milliseconds(self.chosen.tpot_s)} per token on demand"
        headline = f"advice: codec {self.chosen.codec}{pools}; {expected}"
        reasons = "\n".join(f"- {reason}" for reason in self.reasons)
        headings = ["codec", "pools", "slots", "ms/token", "waiting", "hit rate"]
        table = aligned([headings, *(option.cells for option in self.options)], left=2)
        return "\n\n".join([headline, reasons, table, _notes(self.facts)])


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds."""
    return f"{1e3 * seconds:.3g} ms"


COMPRESS = 0.1
"""Fraction of the time per token with codec raw that compression must save to be advised. The estimate does not
include decoding's use of memory bandwidth and of processors that compute needs."""
_STEP = 0.1
"""Step of the planner, as a fraction of the memory."""


@dataclass(frozen=True, kw_only=True)
class DiskFindings:
    """Measurements of model, machine and routing."""

    routing: Routing
    """Recorded routing."""
    compute_s: float
    """Seconds of a decode step without waits."""
    slots: int
    """Number of experts that fit the memory."""
    block_bytes: int
    """Bytes of one expert."""
    rate: float
    """Disk rate in bytes per second."""
    rate_source: str
    """Source of the rate: `given`, or how it was measured."""
    stored: StoredExperts | None
    """Stored form of the experts with the codec; None if it cannot hold them."""
    refused: str = ""
    """Reason why the codec cannot hold them."""

    @property
    def experts(self) -> int:
        """Number of experts of all layers."""
        return self.routing.layers * self.routing.experts

    @cached_property
    def ranks(self) -> RankModel:
        """Statistics of the routing."""
        return rank_model(self.routing)

    def option(self, stored: StoredExperts) -> DiskOption:
        """Return the option of loading on demand, without pools."""
        counts_14 = np.array([[self.slots // self.routing.layers, 0, 0, 0]])
        layer_s = float(expected_makespans(self.ranks, stored.costs(self.rate), counts_14)[0])
        if self.slots >= self.experts:  # each is read once
            layer_s = 0.0
        return self.estimated(stored, layer_s, self.slots)

    def estimated(self, stored: StoredExperts, layer_s: float, slots: int, pools: str = "") -> DiskOption:
        """Return an option whose layers wait `layer_s` each."""
        layers = self.routing.layers
        return DiskOption(
            codec=stored.codec,
            pools=pools,
            slots=slots,
            tpot_s=self.compute_s + layers * layer_s,
            wait_s=layers * layer_s,
            hit_rate=self.ranks.hit_rate(slots // layers),
        )


def advise_disk(found: DiskFindings) -> Advice:
    """Choose the fastest option on demand; a compressed one only if it saves at least `COMPRESS`."""
    options = [found.option(StoredExperts(plain=found.block_bytes))]
    if found.stored is not None:
        options += [found.option(found.stored), *_pooled(found, found.stored)]
    best, chosen = min(options, key=attrgetter("tpot_s")), options[0]
    if best.tpot_s < (1 - COMPRESS) * chosen.tpot_s:
        chosen = best
    return Advice(chosen=chosen, options=options, reasons=_reasons(found, options[0]), facts=_facts(found))


def _facts(found: DiskFindings) -> Json:
    stored = found.stored
    return {
        "disk_rate": found.rate,
        "disk_source": found.rate_source,
        "decode_rate": None if stored is None else found.block_bytes / (stored.shards * stored.decode_s),
        "decoders": 1 if stored is None else stored.threads,
        "stored_share": None if stored is None else (stored.plain + stored.coded) / found.block_bytes,
        "block_bytes": found.block_bytes,
        "experts": found.experts,
        "memory_bytes": found.slots * found.block_bytes,
        "routing": found.routing.source,
        "tokens": int((~found.routing.prompt_T).sum()),
        "compute_s": found.compute_s,
    }


def _notes(facts: Json) -> str:
    decoder = ""
    if facts["decode_rate"] is not None:
        rate, share = facts["decode_rate"] / 1e9, facts["stored_share"]
        decoder = f"; {facts['decoders']} x {rate:.3g} GB/s decoded, {share:.3f} stored"
    return (
        f"disk {facts['disk_rate'] / 1e9:.3g} GB/s ({facts['disk_source']}){decoder}; an expert is "
        f"{facts['block_bytes']:,} bytes, {facts['memory_bytes'] / 1e6:.4g} MB for some of {facts['experts']}; "
        f"routing of {facts['tokens']} tokens of {facts['routing']}"
    )


def _pooled(found: DiskFindings, stored: StoredExperts) -> list[DiskOption]:
    """Return the planner's best allocation of memory to slots and pools, if there is one."""
    layers, top_k = found.routing.layers, found.routing.top_k
    if not stored.coded or not top_k < found.slots < found.experts:
        return []  # no parts to keep, too few slots, or every expert is read once only
    size = ExpertBytes(plane=math.ceil(stored.plain), exponents=math.ceil(stored.coded))
    memory = (found.slots - top_k) * found.block_bytes // layers  # K slots of the running token are no pool
    for plan in plans(found.ranks, stored.costs(found.rate), size=size, memory=memory, step=_STEP):
        pools = {state: layers * plan.memory[state] for state in POOLS[1:] if plan.memory[state]}
        # at least one full expert per layer, since prompts cycle through the slots, which decode steps do not show
        if plan.experts[State.F] and pools:
            slots = layers * plan.experts[State.F] + top_k
            return [found.estimated(stored, plan.expected_s, slots, pools_text(pools))]
    return []


def _reasons(found: DiskFindings, raw: DiskOption) -> list[str]:
    if found.slots >= found.experts:
        return [f"all {found.experts} experts fit the slots: each is read once, so leave them uncompressed"]
    reasons = [f"codec raw waits {milliseconds(raw.wait_s)} of {milliseconds(raw.tpot_s)} per token for the disk"]
    if found.stored is None:
        return [*reasons, found.refused]
    return [
        *reasons,
        f"compression is advised if it takes {COMPRESS:.0%} less time per token: smaller gains are not reliable",
    ]


CODEC = "bitsplit"
"""Codec that is measured if the store has none that compresses."""
_SAMPLED = 6
"""Number of experts that are decoded to measure decoding."""


def survey_disk(
    run: Callable[..., OffloadedModel],
    prompt_ids: Tensor,
    folder: Path,
    *,
    new_tokens: int,
    bandwidth: float | None = None,
    routing: Routing | None = None,
) -> DiskFindings:
    """Measure a short run on demand, the disk, and decoding of some experts.

    Args:
        run: offloads the model on the CPU with the given `observers`, from the store in `folder` if there is one.
        prompt_ids: [1, T]
        folder: folder of the store, or a folder on the disk to measure.
        new_tokens: number of tokens to decode.
        bandwidth: bytes per second of the disk; None: measure it.
        routing: routing to advise for; None: that of the short run.

    Raises:
        ExpertcastError: `run` raises it, the folder cannot be written, or `routing` is of another model.
    """
    recorder, watched = Recorder(prompt_ids.device), RoutingObserver()
    with run(observers=[recorder, watched]) as offloaded:
        store, slots, shape = offloaded.store, offloaded.pool.count, offloaded.view.shape
        own = (shape.layers, shape.top_k)
        if routing and ((routing.layers, routing.top_k) != own or routing.experts > shape.experts):
            raise ExpertcastError(
                f"{routing.source} is of another model: it has {routing.layers} MoE layers and {routing.top_k} of "
                f"{routing.experts} experts per token, this model {shape.layers} and {shape.top_k} of {shape.experts}; "
                "give routing of this model"
            )
        decode_greedily(offloaded.model, prompt_ids, new_tokens, offloaded=offloaded, recorder=recorder)
        copying = isinstance(offloaded.link, InstantLink)  # in the thread that computes
        compute_s = statistics.median(
            sum(step.compute_L) + step.idle - copying * sum(step.copy_L) for step in step_times(recorder, shape.layers)
        )
        rate, source = _rate(store, folder, bandwidth)
        coded, refused = None, ""
        try:
            coded = _coded(store, usable_processors())
        except ExpertcastError as error:
            refused = str(error)
        found = DiskFindings(
            routing=routing_of(watched.passes, shape), compute_s=compute_s, slots=slots,
            block_bytes=store.layout.block_bytes, rate=rate, rate_source=source, stored=coded, refused=refused,
        )  # fmt: skip
    return found if routing is None else replace(found, routing=replace(routing, experts=shape.experts))


def _rate(store: ExpertStore, folder: Path, bandwidth: float | None) -> tuple[float, str]:
    if bandwidth is not None:
        return bandwidth, "given"
    block_bytes = store.layout.block_bytes
    if isinstance(store, DiskStore):
        return disk_rate(store.path, block_bytes), "direct reads of the store"
    return scratch_rate(folder, block_bytes, most=store.nbytes), "direct reads of a scratch file"


def _coded(store: ExpertStore, threads: int) -> StoredExperts:
    """Measure the stored form and decoding of some experts, with the store's codec if it compresses, else `CODEC`.

    Raises:
        ExpertcastError: the codec cannot hold these experts.
    """
    count = store.layers * store.experts
    keys = sorted({round(place * (count - 1) / (_SAMPLED - 1)) for place in range(_SAMPLED)})
    if isinstance(store, DiskStore) and store.compressed:
        codec = store.codec
        sample: list[Sequence[Part]] = [store.file.read(key) for key in keys]
    else:
        codec = make_codec(CODEC, store.layout)
        sample = [codec.encode(store.block(key).clone()) for key in keys]
    decoding_s = decoding_seconds(codec, sample, threads=threads)
    return stored_experts(codec, sample, decoding_s=decoding_s, threads=threads)
