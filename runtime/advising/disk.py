"""How to keep experts that lie on a disk: compressed or not, with which pools beside the slots, or in memory after all.

Recorded routing is replayed in virtual time with the disk's rate and the decoding time of this machine.

N experts of all layers, P parts of each.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from expertcast.data.machine import available_memory, usable_processors
from expertcast.data.routing_file import ABSENT, Routing
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.runtime.advising.advice import Advice, Option, milliseconds
from expertcast.runtime.advising.survey import Watcher, without_copies
from expertcast.runtime.benchmarking.runs import decode_greedily
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.links.base import InstantLink
from expertcast.runtime.links.virtual import StoredExperts
from expertcast.runtime.offloading import OffloadedModel
from expertcast.runtime.policies import Policies
from expertcast.runtime.pools.planner import plans
from expertcast.runtime.pools.ranks import rank_model
from expertcast.runtime.pools.states import POOLS, Costs, ExpertBytes, State
from expertcast.runtime.recording.recorder import LayerTimes, Recorder, layer_times
from expertcast.runtime.simulation.machine import Case, Machine, no_times
from expertcast.runtime.simulation.simulator import simulate
from expertcast.runtime.simulation.trace import Trace
from expertcast.runtime.storage.codecs import Codec, Part, make_codec
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.expert_file import ExpertFile
from expertcast.runtime.storage.layout import FULL
from expertcast.runtime.storage.memory import HostMemory
from expertcast.runtime.storage.reader import SECTOR, THREADS, DirectReader, Read, sectors
from expertcast.runtime.storage.store import ExpertStore

MOST_READ = 256 << 20
"""Bytes that are read to measure a disk, at most."""
_PASSES = 2
_DECODINGS = 3


def disk_rate(path: Path, block_bytes: int, *, most: int = MOST_READ) -> float:
    """Bytes per second of direct reads of one expert's size, one after another in a file, several in flight.

    Args:
        path: of the file, of one sector or more.
        block_bytes: of one expert.
        most: bytes that are read.

    Raises:
        ExpertcastError: it cannot be read, or holds less than a sector.
    """
    nbytes = min(path.stat().st_size, max(most, block_bytes)) // SECTOR * SECTOR
    if not nbytes:
        raise ExpertcastError(f"{str(path)!r} is too short to measure a disk by: pack the store again")
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
    """Read so many blocks; a block of memory is read into again when it has been filled."""
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
    """The same of a file of random bytes that is written there and removed again.

    Raises:
        ExpertcastError: the folder cannot be made or written.
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
    """Seconds that one of so many threads takes to decode an expert while the others decode too.

    Args:
        codec: that made the parts.
        coded: the parts of some experts.
        threads: L
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

    with ThreadPoolExecutor(threads) as pool:
        return statistics.median(each for own in pool.map(decode_all, range(threads)) for each in own)


def stored_in(file: ExpertFile) -> list[list[int]]:
    """[N][P] bytes of each part of a file of coded experts, in whole sectors as it is read."""
    nbytes_NP: list[list[int]] = (-(-file.nbytes // SECTOR) * SECTOR).tolist()
    return nbytes_NP


def stored_as(coded: Sequence[Sequence[Part]]) -> list[list[int]]:
    """The same for a file that is not there: one row, the mean over the parts of some experts."""
    sizes = [[sectors(len(part.data)) for part in parts] for parts in coded]
    return [[round(statistics.fmean(column)) for column in zip(*sizes, strict=True)]]


def stored(codec: Codec, nbytes_NP: Sequence[Sequence[int]], *, decoding_s: float, threads: int) -> StoredExperts:
    """Coded experts on a disk.

    Args:
        codec: that made them.
        nbytes_NP: bytes of each part of some experts.
        decoding_s: seconds of a thread for one expert.
        threads: L
    """
    compressed = [codec.planes[shard.plane].compressed for shard in codec.shards]
    shards = sum(compressed)
    coded = [sum(count for count, own in zip(sizes, compressed, strict=True) if own) for sizes in nbytes_NP]
    return StoredExperts(
        codec=codec.text,
        plain=sum(nbytes_NP[0]) - coded[0],
        coded=tuple(coded) if shards else (),
        shards=max(1, shards),
        decode_s=decoding_s / max(1, shards),
        threads=threads,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskOption(Option):
    """One way to keep the experts, on demand. Times are medians over decode steps."""

    store: str
    """`disk` or `memory`."""
    codec: str = "raw"
    pools: str = ""
    """Bytes beside the slots, as `C=2000000,E=300000`."""
    slots: int
    tpot_s: float
    wait_s: float
    """Waiting for experts, per token."""
    hit_rate: float
    """Bytes of the slots."""
    read_per_token: float
    """Bytes from the disk."""

    @property
    def name(self) -> str:
        """The option's name in a sentence."""
        if self.store == "memory":
            return "experts in memory"
        return f"codec {self.codec}" + (f" with pools {self.pools}" if self.pools else "")

    @property
    def cells(self) -> dict[str, str]:
        return {
            "store": self.store,
            "codec": self.codec,
            "pools": self.pools or "-",
            "slots": str(self.slots),
            "ms/token": f"{1e3 * self.tpot_s:.2f}",
            "waiting": f"{1e3 * self.wait_s:.2f}",
            "hit rate": f"{self.hit_rate:.3f}",
            "MB read": f"{self.read_per_token / 1e6:.2f}",
        }

    def config(self, given: OffloadConfig, folder: Path) -> OffloadConfig:
        """`given` with this store, codec, slots and pools; `folder` is that of a store on disk."""
        sized = replace(given, slots=self.slots, memory=None, predictor=None, bandwidth=None, link="auto")
        if self.store == "memory":
            return replace(sized, store="memory", store_folder=None, codec="raw", pools="")
        return replace(sized, store="disk", store_folder=str(folder), codec=self.codec, pools=self.pools)


COMPRESS = 0.1
"""Share of raw's time per token that compressing must be expected to save before it is advised: what decoding takes
beside its own time, memory and processors that others use, is not in the event model."""
_STEP = 0.1
_SIMULATED = 8
"""Number of the planner's allocations that are simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFindings:
    """Measurements of model, machine and routing."""

    trace: Trace
    """Routing that is replayed."""
    routing: str
    """Source of the routing."""
    times: LayerTimes
    """Seconds of a decode step without waits."""
    slots: int
    """Experts that fit the memory."""
    block_bytes: int
    """Bytes of one expert."""
    rate: float
    """Bytes per second of the disk."""
    rate_source: str
    """`given`, or what was measured."""
    stored: StoredExperts | None
    """How the codec's experts lie there; None where it cannot hold them."""
    refused: str = ""
    """Why it cannot."""
    memory_copy_s: float | None = None
    """Seconds of one expert's copy out of memory; None where there is no room for all of them."""
    late: str | None = None
    """The codec of the run that `times.late_s` comes from; None: of no run from a disk."""

    @property
    def raw(self) -> StoredExperts:
        """Experts on the disk as they are."""
        return StoredExperts(plain=self.block_bytes)

    @property
    def experts(self) -> int:
        """Experts of all layers together."""
        return self.trace.shape.layers * self.trace.shape.experts

    def option(self, stored: StoredExperts | None, slots: int | None = None) -> DiskOption:
        """Simulate experts on the disk as `stored`, or in memory (None), on demand.

        The time that a short run took beyond the event model is added: measured on a raw run, to raw and compressed
        ones; measured on a compressed run, only to compressed ones.
        """
        times, rate, slots = replace(self.times, late_s=0.0), self.rate, slots or self.slots
        if stored is None:
            assert self.memory_copy_s is not None, "they fit"
            rate = self.block_bytes / self.memory_copy_s
        elif self.late is not None and (stored.coded or self.late == "raw"):
            times = self.times
        machine = Machine(
            times=times, block_bytes={FULL: self.block_bytes}, bandwidth=rate, stored=stored, blocking=stored is None,
            prefill=no_times(self.trace.shape.layers),
        )  # fmt: skip
        done = simulate(self.trace, Case(policies=Policies(prefetch="none"), slots=slots, machine=machine), waits=True)
        return DiskOption(
            store="memory" if stored is None else "disk",
            codec="raw" if stored is None else stored.codec,
            pools="" if stored is None else stored.pools_text,
            slots=slots,
            tpot_s=done.tpot_s,
            wait_s=done.wait_s,
            hit_rate=done.hit_rate,
            read_per_token=done.bytes_read / len(done.steps_s),
        )


def advise_disk(found: DiskFindings) -> Advice[DiskOption]:
    """Choose the fastest way on demand, with compression only where it is expected to pay well."""
    options = [found.option(found.raw)]
    if found.stored is not None:
        options += [found.option(found.stored), *_pooled(found, found.stored)]
    if found.memory_copy_s is not None:
        options.append(found.option(None))
    best = min(options, key=_tpot)
    chosen = min((option for option in options if option.codec == "raw"), key=_tpot)
    if best.tpot_s < (1 - COMPRESS) * chosen.tpot_s:
        chosen = best
    facts = _facts(found)
    return Advice(
        headline=f"advice: {chosen.name}; expect {milliseconds(chosen.tpot_s)} per token on demand",
        chosen=chosen,
        options=options,
        reasons=_reasons(found, options, chosen),
        facts=facts,
        notes=_notes(facts),
        left=3,
    )


def _tpot(option: DiskOption) -> float:
    return option.tpot_s


def _facts(found: DiskFindings) -> Json:
    stored = found.stored
    return {
        "disk_rate": found.rate,
        "disk_source": found.rate_source,
        "decode_rate": None if stored is None or not stored.decoding_s else found.block_bytes / stored.decoding_s,
        "decoders": 1 if stored is None else stored.threads,
        "stored_share": None if stored is None else (stored.plain + stored.mean_coded) / found.block_bytes,
        "block_bytes": found.block_bytes,
        "experts": found.experts,
        "memory_bytes": found.slots * found.block_bytes,
        "routing": found.routing,
        "tokens": found.trace.steps,
        "layer_compute_s": found.times.compute_s,
        "unexplained_s": found.times.late_s if found.late is not None else 0.0,
    }


def _notes(facts: Json) -> str:
    decoder = late = ""
    if facts["decode_rate"] is not None:
        rate, share = facts["decode_rate"] / 1e9, facts["stored_share"]
        decoder = f"; {facts['decoders']} x {rate:.3g} GB/s decoded, {share:.3f} stored"
    if facts["unexplained_s"]:
        late = f"\nthe event model misses the short run by {milliseconds(facts['unexplained_s'])} per token"
    return (
        f"disk {facts['disk_rate'] / 1e9:.3g} GB/s ({facts['disk_source']}){decoder}; an expert is "
        f"{facts['block_bytes']:,} bytes, {facts['memory_bytes'] / 1e6:.4g} MB for some of {facts['experts']}; "
        f"{facts['tokens']} tokens replayed, routing: {facts['routing']}{late}"
    )


def routing_of(trace: Trace, source: str) -> Routing:
    """The same without a model: rows [T, L, K] of distinct experts, those of a forward one after another."""
    top_k, experts = trace.shape.top_k, trace.shape.experts
    rows, prompt = [], []
    for forward in trace.forwards:
        count = max(-(-len(keys) // top_k) for keys in forward.keys)
        ids_TLK = np.full((count, trace.shape.layers, top_k), ABSENT, dtype=np.int64)
        for layer, keys in enumerate(forward.keys):
            padded = np.full(count * top_k, ABSENT, dtype=np.int64)
            padded[: len(keys)] = np.array(keys) % experts
            ids_TLK[:, layer] = padded.reshape(count, top_k)
        rows.append(ids_TLK)
        prompt += [forward.fresh] * count
    return Routing(source=source, ids_TLK=np.concatenate(rows), prompt_T=np.array(prompt), experts=experts)


def _pooled(found: DiskFindings, stored: StoredExperts) -> list[DiskOption]:
    """Slots and pools that share the memory: the fastest, simulated, of the allocations that the planner puts first."""
    shape = found.trace.shape
    if not stored.coded or not shape.top_k < found.slots < found.experts:
        return []  # nothing to keep apart, or nothing is ever read twice
    costs = Costs(
        read_s=stored.plain / found.rate,
        ratio=stored.mean_coded / stored.plain,
        decode_s=stored.decode_s,
        shards=stored.shards,
        threads=stored.threads,
    )
    size = ExpertBytes(plane=stored.plain, exponents=max(stored.coded))
    memory = (found.slots - shape.top_k) * found.block_bytes // shape.layers  # a token's slots are no pool
    options = list[DiskOption]()
    for plan in plans(rank_model(routing_of(found.trace, found.routing)), costs, size=size, memory=memory, step=_STEP):
        pools = {state: shape.layers * plan.memory[state] for state in POOLS[1:] if plan.memory[state]}
        # prompts take turns in the slots, which decode steps do not show: a full expert of each layer at the least
        if len(options) < _SIMULATED and plan.experts[State.F] and any(plan.experts[state] for state in POOLS[1:]):
            slots = shape.layers * plan.experts[State.F] + shape.top_k
            options.append(found.option(replace(stored, pools=pools), slots))
    return [min(options, key=_tpot)] if options else []


def _reasons(found: DiskFindings, options: Sequence[DiskOption], chosen: DiskOption) -> list[str]:
    raw, *others = options
    if found.slots >= found.experts:
        return [f"all {found.experts} experts fit the slots: each is read once, so leave them as they are"]
    reasons = [f"codec raw waits {milliseconds(raw.wait_s)} of {milliseconds(raw.tpot_s)} per token for the disk"]
    for option in others:
        change = option.tpot_s / raw.tpot_s - 1
        less = f"{abs(change):.0%} {'less' if change < 0 else 'more'}"
        reasons.append(f"{option.name} would take {milliseconds(option.tpot_s)} per token, {less} than raw")
    if found.stored is None:
        reasons.append(found.refused)
    elif chosen.codec == "raw" and (coded := [option for option in options if option.codec != "raw"]):
        reasons.append(
            f"do not compress: {_why_not(found, found.stored, 1 - min(coded, key=_tpot).tpot_s / chosen.tpot_s)}"
        )
    return reasons


def _why_not(found: DiskFindings, stored: StoredExperts, gain: float) -> str:
    read_s, coded_s = found.block_bytes / found.rate, (stored.plain + stored.mean_coded) / found.rate
    decoding_s = stored.decoding_s / stored.threads
    if decoding_s >= read_s:
        return f"decoding an expert takes {milliseconds(decoding_s)}, reading it uncompressed {milliseconds(read_s)}"
    saved = f"an expert is read in {milliseconds(coded_s)} in place of {milliseconds(read_s)}"
    if gain <= 0:
        return f"{saved}, and decoding costs a token more than that saves"
    return f"{saved}, which saves {gain:.0%} of a token here; less than {COMPRESS:.0%} is not relied on"


CODEC = "bitsplit"
_SAMPLED = 6
"""Experts that are decoded to measure it."""
_COPIES = 8

OWN = "the model's own, in a short run"


def survey_disk(
    run: Callable[..., OffloadedModel],
    prompt_ids: Tensor,
    folder: Path,
    *,
    new_tokens: int,
    bandwidth: float | None = None,
    budget: int | None = None,
    routing: str = OWN,
    replayed: Trace | None = None,
) -> DiskFindings:
    """Decode a few tokens on demand, read some experts, decode some.

    Args:
        run: offloads the model on the CPU, with `observers`: from the store in `folder`, if there is one.
        prompt_ids: [1, T]
        folder: where experts are to lie.
        new_tokens: that are decoded.
        bandwidth: bytes per second of the disk; None: it is measured.
        budget: bytes that experts may take in all; None: what memory is available.
        routing: where the routing comes from.
        replayed: routing that the advice is for; None: the short run's own.

    Raises:
        ExpertcastError: as what `run` calls; a folder that cannot be written; traces of another model.
    """
    recorder, watched = Recorder(prompt_ids.device), Watcher()
    with run(observers=[recorder, watched]) as offloaded:
        store, slots, shape = offloaded.store, offloaded.pool.count, offloaded.view.shape
        decoding = decode_greedily(offloaded.model, prompt_ids, new_tokens, offloaded=offloaded, recorder=recorder)
        from_disk = offloaded.link.name == "disk"
        times = layer_times(recorder)
        if isinstance(offloaded.link, InstantLink):
            times = without_copies(times, recorder)
        rate, source = _rate(store, folder, bandwidth)
        coded, refused = None, ""
        try:
            coded = _coded(store, usable_processors())
        except ExpertcastError as error:
            refused = str(error)
        found = DiskFindings(
            trace=watched.trace(shape), routing=routing, times=times, slots=slots,
            block_bytes=store.layout.block_bytes, rate=rate, rate_source=source, stored=coded, refused=refused,
            memory_copy_s=_memory_copy(store, slots, budget),
        )  # fmt: skip
        codec = store.codec.text if isinstance(store, DiskStore) else "raw"
    if replayed is not None and replayed.shape != shape:
        raise ExpertcastError(f"{routing} is of a model of {replayed.shape}, this one has {shape}: give its own traces")
    if from_disk:  # what the event model misses of a run like those that it speaks of
        expected = found.option(coded if coded is not None and codec != "raw" else found.raw)
        late_s = max(0.0, statistics.median(decoding.steps_s) - expected.tpot_s)
        found = replace(found, times=replace(times, late_s=late_s), late=codec)
    return found if replayed is None else replace(found, trace=replayed)


def _rate(store: ExpertStore, folder: Path, bandwidth: float | None) -> tuple[float, str]:
    if bandwidth is not None:
        return bandwidth, "given"
    block_bytes = store.layout.block_bytes
    if isinstance(store, DiskStore):
        return disk_rate(store.path, block_bytes), "direct reads of the store"
    return scratch_rate(folder, block_bytes, most=store.nbytes), "direct reads of a scratch file"


def _coded(store: ExpertStore, threads: int) -> StoredExperts:
    """Decodes some experts as the store's codec, or the default one, keeps them.

    Raises:
        ExpertcastError: the codec cannot hold these experts.
    """
    count = store.layers * store.experts
    keys = sorted({round(place * (count - 1) / (_SAMPLED - 1)) for place in range(_SAMPLED)})
    if isinstance(store, DiskStore) and not store.addressable:
        codec = store.codec
        sample: list[Sequence[Part]] = [store.file.read(key) for key in keys]
        nbytes_NP = stored_in(store.file)
    else:
        codec = make_codec(CODEC, store.layout)
        sample = [codec.encode(store.block(key).clone()) for key in keys]
        nbytes_NP = stored_as(sample)
    return stored(codec, nbytes_NP, decoding_s=decoding_seconds(codec, sample, threads=threads), threads=threads)


def _memory_copy(store: ExpertStore, slots: int, budget: int | None) -> float | None:
    """Seconds of one expert's copy in memory; None where there is no room for all of them beside the slots."""
    block_bytes = store.layout.block_bytes
    least = store.nbytes + slots * block_bytes
    if isinstance(store, DiskStore):
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
