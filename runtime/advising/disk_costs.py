"""What experts cost that lie on a disk of this machine: the disk's rate, and what decoding takes.

N experts of all layers, P parts of each.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.links.virtual_disk import Stored
from expertcast.runtime.storage.codecs import Codec, Part
from expertcast.runtime.storage.coded_file import CodedFile
from expertcast.runtime.storage.direct_read import SECTOR, Read, sectors
from expertcast.runtime.storage.direct_reader import THREADS, DirectReader
from expertcast.runtime.storage.host_memory import HostMemory

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
        reads.append(Read(target, None, True, offset=number * len(target)))
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


def stored_in(file: CodedFile, codec: Codec, *, decoding_s: float, threads: int) -> Stored:
    """What lies in a file of coded experts, in whole sectors as it is read.

    Args:
        file: the file.
        codec: that made it.
        decoding_s: seconds of a thread for one expert.
        threads: L
    """
    nbytes_NP = -(-file.nbytes // SECTOR) * SECTOR
    return _stored(nbytes_NP.tolist(), codec, decoding_s=decoding_s, threads=threads)


def stored_as(codec: Codec, coded: Sequence[Sequence[Part]], *, decoding_s: float, threads: int) -> Stored:
    """What a file of coded experts would hold, by the parts of some of them; else as :func:`stored_in`."""
    sizes = [[sectors(len(part.data)) for part in parts] for parts in coded]
    mean = [[round(statistics.fmean(column)) for column in zip(*sizes, strict=True)]]
    return _stored(mean, codec, decoding_s=decoding_s, threads=threads)


def _stored(nbytes_NP: list[list[int]], codec: Codec, *, decoding_s: float, threads: int) -> Stored:
    compressed = [codec.planes[shard.plane].compressed for shard in codec.shards]
    shards = sum(compressed)
    coded = [sum(count for count, own in zip(sizes, compressed, strict=True) if own) for sizes in nbytes_NP]
    plain = [sum(count for count, own in zip(sizes, compressed, strict=True) if not own) for sizes in nbytes_NP]
    return Stored(
        codec=codec.text,
        plain=plain[0],
        coded=tuple(coded) if shards else (),
        shards=max(1, shards),
        decode_s=decoding_s / max(1, shards),
        threads=threads,
    )
