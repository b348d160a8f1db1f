"""MXFP4 and fp8: the bits that transformers' own dequantisation gives, or a refusal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.storage.codecs import Codec, Part, make_codec
from expertcast.runtime.storage.codecs.quantised import Fp8, Mxfp4
from expertcast.runtime.storage.layout import BlockLayout
from tests.runtime.storage.codecs.layouts import layout_of, normal_block, same_bits

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
Shipped = dict[str, tuple[Tensor, Tensor]]


def _mxfp4(layout: BlockLayout) -> Mxfp4:
    codec = make_codec("mxfp4", layout)
    assert isinstance(codec, Mxfp4)
    return codec


def _fp8(text: str, layout: BlockLayout) -> Fp8:
    codec = make_codec(text, layout)
    assert isinstance(codec, Fp8)
    return codec


def _decoded(codec: Codec, parts: tuple[Part, ...]) -> dict[str, Tensor]:
    block = torch.zeros(codec.layout.block_bytes, dtype=torch.uint8)
    codec.decode(parts, block)
    return {name: view[0] for name, view in codec.layout.views(block).items()}


def _random_mxfp4(layout: BlockLayout, seed: int = 0) -> tuple[Shipped, dict[str, Tensor]]:
    """What gpt-oss ships for one expert: [N, G, 16] blocks and [N, G] scales of each matrix [D, N], and biases."""
    generator = torch.Generator().manual_seed(seed)
    shipped, kept = {}, {}
    for field in layout.fields:
        if len(field.shape) == 1:
            kept[field.name] = torch.randn(field.shape, generator=generator).to(field.dtype)
            continue
        rows, columns = field.shape
        shape = columns, rows // 32, 16
        blocks = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        shipped[field.name] = blocks, torch.randint(110, 130, shape[:2], dtype=torch.uint8, generator=generator)
    return shipped, kept


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_with_every_scale(dtype: torch.dtype) -> None:
    """241 columns with a scale each, and in each every pair of codes: -0, denormals and fp16's overflows among them."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(241, 1, 1)
    scales = torch.arange(241, dtype=torch.uint8)[:, None].repeat(1, 16)
    codec = _mxfp4(layout_of((512, 241), dtype=dtype))
    found = _decoded(codec, codec.encode_shipped({"w0": (blocks, scales)}, {}))["w0"]
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)[0]
    assert found.isinf().any() == (dtype == torch.float16)
    assert same_bits(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_expert_of_gpt_oss(dtype: torch.dtype) -> None:
    """Matrices and biases, at 17/64 of the bytes of bf16; the plain form of other devices gives the same."""
    layout = layout_of((96, 160), (160,), (80, 96), (96,), dtype=dtype)
    with pytest.raises(ExpertcastError, match="'w2' has 80 rows, not a multiple of 32"):
        _mxfp4(layout)
    layout = layout_of((96, 128), (128,), (64, 96), (96,), dtype=dtype)
    codec = _mxfp4(layout)
    shipped, kept = _random_mxfp4(layout)
    parts = codec.encode_shipped(shipped, kept)
    found = _decoded(codec, parts)
    for name, (blocks, scales) in shipped.items():
        expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)[0]
        assert same_bits(found[name], expected)
    assert all(same_bits(found[name], bias) for name, bias in kept.items())
    weights = 96 * 128 + 64 * 96
    assert len(parts[0].data) == codec.planes[0].nbytes < weights * 17 / 32 + (128 + 96) * dtype.itemsize + 6 * 256


def test_a_block_of_mxfp4_weights_is_encoded_too() -> None:
    """Codes and scales are found again; groups of zeros, of one magnitude, and of 6 and 0.5."""
    layout = layout_of((64, 96), (96,))
    codec = _mxfp4(layout)
    for seed in range(5):
        shipped, kept = _random_mxfp4(layout, seed)
        blocks, scales = shipped["w0"]
        blocks[0] = 0
        blocks[1] = 0x88  # -0
        blocks[2] = 0x11  # 0.5
        blocks[3, :, ::2] = 0x17
        scales[4:8] = torch.tensor([[0], [1], [237], [238]], dtype=torch.uint8)
        block = torch.zeros(layout.block_bytes, dtype=torch.uint8)
        codec.decode(codec.encode_shipped(shipped, kept), block)
        again = torch.zeros_like(block)
        codec.decode(codec.encode(block), again)
        assert torch.equal(again, block)


@pytest.mark.parametrize("value", [1.01, 5.0, 0.2, float("nan"), float("inf")])
def test_a_block_of_other_weights_is_refused(value: float) -> None:
    layout = layout_of((64, 32))
    codec = _mxfp4(layout)
    block = torch.zeros(layout.block_bytes, dtype=torch.uint8)
    codec.layout.views(block)["w0"][0, :, 3] = 4.0
    assert codec.encode(block)
    codec.layout.views(block)["w0"][0, 40, 3] = value
    with pytest.raises(ExpertcastError, match="'w0' has weights that MXFP4 cannot represent; choose"):
        codec.encode(block)
    with pytest.raises(ExpertcastError, match="MXFP4 cannot represent"):
        codec.encode(normal_block(layout))


def test_what_mxfp4_refuses() -> None:
    layout = layout_of((64, 32), (32,))
    codec = _mxfp4(layout)
    shipped, kept = _random_mxfp4(layout)
    blocks, scales = shipped["w0"]
    broken = scales.clone()
    broken[3, 1] = 241
    for given, rest, message in (
        ({"w0": (blocks, broken)}, kept, "'w0' has a scale of 241, above 240"),
        ({"w0": (blocks, scales[1:])}, kept, "blocks and scales of 'w0'"),
        (shipped, {}, "'w1' is missing"),
    ):
        with pytest.raises(ExpertcastError, match=message):
            codec.encode_shipped(given, rest)
    for wrong, message in (
        (layout_of((64,)), "none of their parameters is a matrix"),
        (layout_of((64, 32), dtype=torch.int16), "'w0' is not a matrix of floats"),
    ):
        with pytest.raises(ExpertcastError, match=message):
            _mxfp4(wrong)


def _dequantised(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    found: Tensor = Fp8Dequantize(None)._dequantize_one(codes, scales, output_dtype=dtype)
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("text", "grid"),
    [
        ("fp8", (2, 3)),  # blocks of 128 x 128
        ("fp8", (1, 1)),  # one scale, repeated
        ("fp8:rows=64,columns=32", (4, 12)),
        ("fp8:rows=1,columns=0", (256, 1)),  # a scale per channel
        ("fp8:rows=1,columns=0", (1, 1)),
        ("fp8:rows=0,columns=0", (1, 1)),
    ],
)
def test_every_fp8_code_with_scales_of_all_sizes(text: str, grid: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    every = [code for code in range(256) if code & 0x7F != 0x7F]
    codes = torch.tensor(every, dtype=torch.uint8).repeat(400)[: 256 * 384].view(256, 384)
    codes = codes[:, torch.randperm(384, generator=generator)].contiguous().view(torch.float8_e4m3fn)
    for low, high in ((-12.0, -4.0), (-140.0, 118.0)):
        scales = torch.exp2(torch.empty(grid).uniform_(low, high, generator=generator))
        scales *= torch.where(torch.rand(grid, generator=generator) < 0.2, -1.0, 1.0)
        codec = _fp8(text, layout_of((256, 384), (5,), dtype=dtype))
        bias = torch.arange(5).to(dtype)
        parts = codec.encode_shipped({"w0": (codes, scales)}, {"w1": bias})
        found = _decoded(codec, parts)
        assert same_bits(found["w0"], _dequantised(codes, scales, dtype))
        assert same_bits(found["w1"], bias)


@pytest.mark.parametrize("kind", [torch.uint8, torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_of_other_types(kind: torch.dtype) -> None:
    """Exponents alone, and bf16: widened as transformers widens them."""
    generator = torch.Generator().manual_seed(2)
    codes = torch.randn(128, 256, generator=generator).to(torch.float8_e4m3fn)
    raw = torch.randint(100, 140, (1, 2), dtype=torch.uint8, generator=generator)
    scales = torch.rand(1, 2, generator=generator).to(kind) if kind == torch.bfloat16 else raw.view(kind)
    codec = _fp8("fp8", layout_of((128, 256)))
    found = _decoded(codec, codec.encode_shipped({"w0": (codes, scales)}, {}))["w0"]
    assert same_bits(found, _dequantised(codes, scales, torch.bfloat16))


def test_an_expert_that_transformers_quantised() -> None:
    """Blocks of 128 x 128, half of the bytes and 4 for each block."""
    layout = layout_of((512, 256), (256, 256))
    weights = {name: view[0] for name, view in layout.views(normal_block(layout)).items()}
    quantiser = Fp8Quantize(FineGrainedFP8HfQuantizer(FineGrainedFP8Config(weight_block_size=(128, 128))))
    shipped = {}
    for name, weight in weights.items():
        made = quantiser.convert({name: weight})
        shipped[name] = made[name], made[f"{name}_scale_inv"]
    codec = _fp8("fp8", layout)
    parts = codec.encode_shipped(shipped, {})
    found = _decoded(codec, parts)
    for name, (codes, scales) in shipped.items():
        assert same_bits(found[name], _dequantised(codes, scales, torch.bfloat16))
        assert not same_bits(found[name], weights[name])
    assert len(parts[0].data) == layout.block_bytes // 2 + 2 * 256


def test_what_fp8_refuses() -> None:
    layout = layout_of((256, 256))
    codec = _fp8("fp8", layout)
    codes, scales = torch.zeros(256, 256).to(torch.float8_e4m3fn), torch.ones(2, 2)
    nan = codes.clone()
    nan.view(torch.uint8)[9, 9] = 0x7F
    refused = [
        (codes, torch.tensor([[1, 1], [1, bad]]), r"NaN codes, or scales of 2\*\*119")
        for bad in (float("nan"), float("inf"), 2.0**119)
    ]
    refused += [
        (codes, torch.ones(4, 4), r"'w0' has \[4, 4\] scales, not \[2, 2\]; say rows= and columns="),
        (codes.to(torch.float8_e5m2), scales, r"'w0' is float8_e5m2 \[256, 256\], not float8_e4m3fn"),
        (nan, scales, "has NaN codes"),
    ]
    for given, factors, message in refused:
        with pytest.raises(ExpertcastError, match=message):
            codec.encode_shipped({"w0": (given, factors)}, {})
    with pytest.raises(ExpertcastError, match="only an FP8 checkpoint has their scales; load one with load_off"):
        codec.encode(normal_block(layout))
    with pytest.raises(ExpertcastError, match=r"'w0' is \[200, 256\], which blocks of \[128, 128\] do not divide"):
        _fp8("fp8", layout_of((200, 256)))
    with pytest.raises(ExpertcastError, match="rows='-1': must be greater than or equal to 0"):
        _fp8("fp8:rows=-1", layout)
