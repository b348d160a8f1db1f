"""Tensors of a checkpoint, whole and by rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import dot_natural_key

from expertcast.data.source import ModelSource
from expertcast.data.weights.files import SafetensorsFiles
from expertcast.data.weights.packed import Fp8Tensor, join_scales
from expertcast.predictors import ExpertcastError

_NUMBERS = torch.arange(7 * 3 * 5, dtype=torch.float32).view(7, 3, 5)
_TENSORS = {
    str(dtype).removeprefix("torch."): (_NUMBERS % 2 if dtype == torch.bool else _NUMBERS).to(dtype)
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.uint8, torch.int8, torch.int64, torch.bool,
    )
}  # fmt: skip


@pytest.mark.parametrize("part", [..., slice(0, 1), slice(2, 5), slice(6, 7), slice(0, 7), slice(3, 3), slice(5, None)])
def test_rows_are_those_of_the_tensor(part: slice, tmp_path: Path) -> None:
    save_file({**_TENSORS, "vector": torch.arange(9.0)}, tmp_path / "model.safetensors")
    with SafetensorsFiles(ModelSource.of(tmp_path)) as files:
        for name, tensor in _TENSORS.items():
            found = files.tensors[name][part]
            assert found.dtype == tensor.dtype
            assert torch.equal(found.double(), tensor[part].double())
        assert torch.equal(files.tensors["vector"][part], torch.arange(9.0)[part])


def test_tensors_are_in_the_order_in_which_transformers_reads_them(tmp_path: Path) -> None:
    names = [
        "b.10.w",
        "b.9.w",
        "b.9.v2",
        "b.9.v10",
        "b.x.w",
        "b",
        "a.9.w",
        "b.9",
        "b.09.w",
        "c.v",
        "c.v3.1",
        "c.3v",
        "c.",
    ]
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    with SafetensorsFiles(ModelSource.of(tmp_path)) as files:
        assert list(files.tensors) == sorted(sorted(names), key=dot_natural_key)


def test_no_more_than_the_rows_is_read(tmp_path: Path) -> None:
    """The file ends behind the second row: the two are there, and a third is one error."""
    path = tmp_path / "model.safetensors"
    save_file({"fused": _NUMBERS}, path)
    with SafetensorsFiles(ModelSource.of(tmp_path)) as files:
        os.truncate(path, path.stat().st_size - 5 * 3 * 5 * 4)
        assert torch.equal(files.tensors["fused"][0:2], _NUMBERS[:2])
        with pytest.raises(OSError, match="is cut off"):
            files.tensors["fused"][2:3]


def test_reads_that_give_less_than_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux does above 2 GiB, and network file systems at any size."""
    preadv = os.preadv
    save_file(_TENSORS, tmp_path / "model.safetensors")
    monkeypatch.setattr(os, "preadv", lambda file, views, at: preadv(file, [memoryview(views[0])[:50]], at))
    with SafetensorsFiles(ModelSource.of(tmp_path)) as files:
        assert torch.equal(files.tensors["float32"][1:6], _NUMBERS[1:6])


# FP8 weights with their scales in every shape that checkpoints have


class Held:
    """A tensor of a checkpoint, as safetensors gives it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        names = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int8: "I8"}
        return names.get(self._tensor.dtype, "F32")

    def __getitem__(self, part: Any) -> Tensor:
        return self._tensor[part]


def _codes(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(50).to(dtype)


@pytest.mark.parametrize(
    ("shape", "scales", "each"),
    [
        ((6, 8), (), (6, 8)),
        ((6, 8), (1,), (6, 8)),
        ((6, 8), (6,), (1, 8)),  # one for each row
        ((6, 8), (6, 1), (1, 8)),
        ((6, 8), (3, 2), (2, 4)),
        ((4, 6, 8), (4, 3, 2), (2, 4)),  # fused experts
        ((4, 6, 8), (4, 1, 1), (6, 8)),
        ((4, 6, 8), (4,), (6, 8)),
        ((4, 6, 8), (4, 6), (1, 8)),
    ],
)
def test_scales_of_every_shape(shape: tuple[int, ...], scales: tuple[int, ...], each: tuple[int, int]) -> None:
    codes, factors = _codes(*shape), torch.rand(scales) + 0.1
    tensor = Fp8Tensor("w", Held(codes), Held(factors))
    assert tensor.block == each
    grid = (*shape[:-2], shape[-2] // each[0], shape[-1] // each[1])
    expected = codes.float() * factors.view(grid).repeat_interleave(each[0], -2).repeat_interleave(each[1], -1)
    assert torch.equal(tensor[...], expected)
    if len(shape) == 3:
        assert torch.equal(tensor[1:2], expected[1:2])


@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_scales_that_are_exponents(codes: torch.dtype) -> None:
    bytes_ = torch.tensor([[120, 127], [128, 130]], dtype=torch.uint8)
    weight = _codes(4, 8, dtype=codes)
    expected = weight.float() * bytes_.float().sub(127).exp2().repeat_interleave(2, 0).repeat_interleave(4, 1)
    for scales in (bytes_, bytes_.view(torch.float8_e8m0fnu)):
        assert torch.equal(Fp8Tensor("w", Held(weight), Held(scales))[...], expected)


@pytest.mark.parametrize(
    ("rows", "block", "shared"), [(576, 128, 128), (192, 128, 128), (64, 128, 64), (256, 128, 128)]
)
def test_blocks_are_those_of_the_configuration(rows: int, block: int, shared: int) -> None:
    """192 rows in blocks of 128 are 128 and 64, though two scales could also be for 96 rows each."""
    scales = torch.rand(-(-rows // block), 2)
    codes = _codes(rows, 256)
    tensor = Fp8Tensor("w", Held(codes), Held(scales), (block, 128))
    assert tensor.block == (shared, 128)
    each = scales.repeat_interleave(block, 0)[:rows].repeat_interleave(128, 1)
    assert torch.equal(tensor[...], codes.float() * each)


@pytest.mark.parametrize(
    ("shape", "scales"), [((6, 8), (4, 2)), ((6, 8), (3, 3)), ((6, 8), (0, 2)), ((6, 8), (2, 3, 2)), ((8,), (1,))]
)
def test_scales_that_do_not_fit(shape: tuple[int, ...], scales: tuple[int, ...]) -> None:
    with pytest.raises(ExpertcastError, match=r"the checkpoint's w is \[.*8\], its scales are .*: not supported"):
        Fp8Tensor("w", Held(_codes(*shape)), Held(torch.ones(scales)))


def test_what_scales_are_taken_up() -> None:
    """Those of FP8 weights, by any of their names, with those of activations; nothing else of a like name."""
    held = {
        "a.weight": _codes(4, 4), "a.weight_scale_inv": torch.ones(()), "a.activation_scale": torch.ones(()),
        "b.weight": _codes(4, 4), "b.qscale_weight": torch.ones(()), "b.qscale_act": torch.ones(()),
        "c.weight": torch.ones(4, 4), "c.scale": torch.ones(()),
        "d": _codes(2, 4, 4), "d_scale_inv": torch.ones(2),
    }  # fmt: skip
    joined = join_scales({name: Held(tensor) for name, tensor in held.items()}, None)
    assert list(joined) == ["a.weight", "b.weight", "c.weight", "c.scale", "d"]
    assert [name for name, tensor in joined.items() if isinstance(tensor, Fp8Tensor)] == ["a.weight", "b.weight", "d"]
