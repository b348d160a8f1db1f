"""Exponents are counted, and what they say is bounded, as by hand."""

from __future__ import annotations

import math

import pytest
import torch

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.storage.codecs import exponent_histogram
from tests.runtime.storage.codecs.layouts import layout_of, normal_block


def test_counts() -> None:
    """1 to 1.99 have 127, 2 has 128, 0 and denormals 0, infinities and NaN 255."""
    weights = torch.tensor([1.0, -1.0, 1.9, 2.0, 0.0, -0.0, 1e-40, math.inf, math.nan], dtype=torch.bfloat16)
    histogram = exponent_histogram([weights[:4], weights[4:].view(1, -1)])
    expected = torch.zeros(256, dtype=torch.int64)
    expected[[127, 128, 0, 255]] = torch.tensor([3, 1, 3, 2])
    assert torch.equal(histogram.counts, expected)
    by_hand = -sum(n / 9 * math.log2(n / 9) for n in (3, 1, 3, 2))
    assert histogram.entropy == pytest.approx(by_hand)
    assert histogram.bound == pytest.approx((8 + by_hand) / 16)


def test_fp16_has_five_bits() -> None:
    histogram = exponent_histogram([torch.tensor([1.0, -1.5, 2.0, 0.5], dtype=torch.float16)])
    assert histogram.counts.nonzero().flatten().tolist() == [14, 15, 16]
    assert histogram.entropy == pytest.approx(1.5)
    assert histogram.bound == pytest.approx((11 + 1.5) / 16)


def test_even_exponents_save_nothing() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert exponent_histogram([every]).bound == 1.0
    assert exponent_histogram([every[:128]]).bound == 0.5


def test_normal_weights() -> None:
    """Row E1 gives 2.55 to 2.65 bits for trained models; a normal distribution has 2.55, whatever its spread."""
    layout = layout_of((1024, 1024))
    weights = layout.views(normal_block(layout))["w0"]
    assert exponent_histogram([weights]).entropy == pytest.approx(2.55, abs=0.02)
    assert exponent_histogram([weights * 0.0137]).entropy == pytest.approx(2.55, abs=0.02)


def test_refused() -> None:
    with pytest.raises(ExpertcastError, match="float32: give tensors of one type, bf16 or fp16"):
        exponent_histogram([torch.zeros(3)])
    with pytest.raises(ExpertcastError, match="float16: give tensors of one type"):
        exponent_histogram([torch.zeros(3).bfloat16(), torch.zeros(3).half()])
    with pytest.raises(ExpertcastError, match="no tensors"):
        exponent_histogram([])
