"""Triton kernels of the codecs. Imported only where Triton is installed."""

# mypy: disable-error-code="import-not-found,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def merge_planes(low, high, words, count, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """`words[i] = high[i] << 8 | low[i]`, WIDTH of them a program.

    Args:
        low, high: uint8 [count].
        words: int16 [count].
    """
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    inside = at < count
    low_bytes = tl.load(low + at, mask=inside)
    high_bytes = tl.load(high + at, mask=inside)
    tl.store(words + at, (high_bytes.to(tl.int16) << 8) | low_bytes.to(tl.int16), mask=inside)
