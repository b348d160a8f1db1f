"""Compression of exponents: zstd, set so that it codes the bytes by their frequency and all but gives up on matches.

Exponents of trained weights come in no order that repeats. zstd's ordinary levels find matches of three to six bytes in
them all the same, by chance, and these cost more than they save: level 1 takes 1.5 to 2.5 points more of the bytes, and
takes 1.5 to 2 times as long to decode. With matches of seven bytes and more only, found through a table of 64 entries,
what is left is the Huffman code of each 128 kB, and runs of equal bytes where there are some.
"""

from __future__ import annotations

import threading

import torch
import zstandard
from torch import Tensor

_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, search_log=1, window_log=17,
    write_content_size=True, write_checksum=False, write_dict_id=False,
)  # fmt: skip


class _Coders(threading.local):
    """zstd's working memory: each thread needs its own."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self.decompressor = zstandard.ZstdDecompressor()


_CODERS = _Coders()


def compress(data: Tensor) -> Tensor:
    """One zstd frame, uint8, of some bytes in host memory."""
    return torch.frombuffer(bytearray(_CODERS.compressor.compress(data.numpy().data)), dtype=torch.uint8)


def decompress(frame: Tensor, out: Tensor) -> bool:
    """Fill `out` from a frame, without the interpreter's lock; whether it is a frame of just as many bytes."""
    source, target = frame.numpy().data, out.numpy()
    try:
        fits = zstandard.frame_content_size(source) == len(target)
        return fits and _CODERS.decompressor.stream_reader(source).readinto(target) == len(target)
    except zstandard.ZstdError:
        return False
