"""Run by test_merge.py with TRITON_INTERPRET=1: the Triton kernel, interpreted, against the reference."""

from __future__ import annotations

import torch

from expertcast.runtime.storage.codecs.merge import merge_kernel, merge_plain


def compare(count: int) -> None:
    """All patterns, as far as there is room; the bytes behind the words stay."""
    every = torch.arange(count, dtype=torch.int32).to(torch.int16)
    low, high = (plane.contiguous() for plane in every.view(torch.uint8).view(-1, 2).unbind(1))
    found, expected = (torch.full((count + 8,), 77, dtype=torch.int16) for _ in range(2))
    merge_kernel(low, high, found[:count])
    merge_plain(low, high, expected[:count])
    assert torch.equal(found, expected), count
    assert torch.equal(found[:count], every), count


if __name__ == "__main__":
    for words in (128, 4096, 4096 + 128, 1 << 16):
        compare(words)
    print("same")
