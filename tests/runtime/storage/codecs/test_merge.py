"""Words from planes: on the host and on other devices the same."""

from __future__ import annotations

import pytest
import torch

from expertcast.runtime.storage.codecs.lossless import merge


@pytest.mark.parametrize("count", [1, 128, (1 << 16), (1 << 18) - 1, (1 << 18) + 128])
def test_merge_undoes_a_split(count: int) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).repeat(-(-count // (1 << 16)))[:count]
    low, high = (plane.contiguous() for plane in every.view(torch.uint8).view(-1, 2).unbind(1))
    words = torch.zeros_like(every)
    merge(low, high, words)
    assert torch.equal(words, every)
