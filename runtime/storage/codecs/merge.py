"""Words of 16 bits from planes of their low and high bytes: the recovery of :mod:`.bitsplit` (row E11).

N words.
"""

from __future__ import annotations

import importlib.util

import numpy as np
import torch
from torch import Tensor

_CHUNK = 1 << 18
"""Words at a time on the host: the second pass then finds them in a core's cache."""
_WIDTH = 4096
_WARPS = 8
"""Words of a program on the device: 16 to a thread, whose loads and stores are 16 bytes each."""


def has_triton() -> bool:
    """Whether kernels can be compiled here (CUDA builds of torch bring Triton along on Linux)."""
    return importlib.util.find_spec("triton") is not None


def merge(low: Tensor, high: Tensor, words: Tensor) -> None:
    """Write `words`, int16 [N], from `low` and `high`, uint8 [N], all on one device."""
    if words.device.type == "cpu":
        merge_host(low, high, words)
    elif words.device.type == "cuda" and has_triton():
        merge_kernel(low, high, words)
    else:
        merge_plain(low, high, words)


def merge_plain(low: Tensor, high: Tensor, words: Tensor) -> None:
    """The reference, by operations that every device has."""
    torch.bitwise_or(high.to(torch.int16) << 8, low, out=words)


def merge_host(low: Tensor, high: Tensor, words: Tensor) -> None:
    """In one thread, without the interpreter's lock. Copies of every other byte would take twice as long."""
    lows, highs, out = low.numpy(), high.numpy(), words.numpy().view(np.uint16)
    for start in range(0, len(out), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        np.left_shift(highs[chunk], 8, out=out[chunk], dtype=np.uint16)
        np.bitwise_or(out[chunk], lows[chunk], out=out[chunk])


def merge_kernel(low: Tensor, high: Tensor, words: Tensor) -> None:
    """By a Triton kernel, on the current stream."""
    from expertcast.runtime.storage.codecs.triton_kernels import merge_planes

    count = len(words)
    merge_planes[(-(-count // _WIDTH),)](low, high, words, count, WIDTH=_WIDTH, num_warps=_WARPS)
