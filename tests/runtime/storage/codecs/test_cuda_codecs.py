"""Codecs on a CUDA device: planes that were copied there become the block that the host makes of them."""

from __future__ import annotations

import torch

from expertcast.runtime.storage.codecs import Fp8, Mxfp4, make_codec
from tests.runtime.links.cuda_helpers import MARKS
from tests.runtime.storage.codecs.layouts import every_pattern, layout_of

pytestmark = MARKS
LAYOUT = layout_of((256, 1024), (1024,))


def test_bitsplit() -> None:
    codec, block = make_codec("bitsplit:shards=3", LAYOUT), every_pattern(LAYOUT)
    planes = codec.new_planes(block)
    for index, part in enumerate(codec.encode(block)):
        codec.expand(index, part, planes)
    device_planes, found = [plane.cuda() for plane in planes], torch.zeros_like(block, device="cuda")
    for shard in codec.shards[1:]:
        codec.recover(device_planes, found, shard)
    assert torch.equal(found.cpu(), block)


def test_shipped_codes() -> None:
    """Every product is exact or rounded once, so that a device has no other bits."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (1024, 8, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(20, 230, (1024, 8), dtype=torch.uint8, generator=generator)
    codes = torch.randn(256, 1024, generator=generator).to(torch.float8_e4m3fn)
    bias = torch.randn(1024, generator=generator).bfloat16()
    mxfp4, fp8 = make_codec("mxfp4", LAYOUT), make_codec("fp8", LAYOUT)
    assert isinstance(mxfp4, Mxfp4)
    assert isinstance(fp8, Fp8)
    shipped = mxfp4.encode_shipped({"w0": (blocks, scales)}, {"w1": bias})
    blockwise = fp8.encode_shipped({"w0": (codes, torch.rand(2, 8, generator=generator))}, {"w1": bias})
    for codec, parts in ((mxfp4, shipped), (fp8, blockwise)):
        expected = torch.zeros(LAYOUT.block_bytes, dtype=torch.uint8)
        codec.decode(parts, expected)
        found = torch.zeros_like(expected, device="cuda")
        codec.recover([parts[0].data.cuda()], found)
        assert torch.equal(found.cpu(), expected)
