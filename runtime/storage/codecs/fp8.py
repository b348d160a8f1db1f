"""Experts of fp8 checkpoints: 8-bit floats with a scale for each block, row or matrix, at half of the bytes of bf16.

R rows and C columns of a matrix as the model holds it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.storage.codecs.base import CodecConfig
from expertcast.runtime.storage.codecs.scaled import Form, Scaled
from expertcast.runtime.storage.layout import Field

_CODE = torch.float8_e4m3fn
_CHUNK = 1 << 16
"""Weights expanded at once on the host: temporaries that stay in a core's cache."""
_SHIFT = 8
"""A code's bits, taken for those of fp16, stand for 2**-8 of its value: exponents there count from 15, not from 7."""
_MOST_SCALE = 2.0**119
"""Times 2**8 it is still a float32."""


@dataclass(frozen=True, kw_only=True)
class Fp8Config(CodecConfig):
    """What one scale is for. One per row of a matrix (compressed-tensors' channels) is `rows=1,columns=0`; so is one
    per matrix, which is then repeated.
    """

    rows: int = 128
    """Rows that share a scale; 0: all."""
    columns: int = 128
    """Columns that share a scale; 0: all."""

    def __post_init__(self) -> None:
        if min(self.rows, self.columns) < 0:
            raise ExpertcastError(f"rows={self.rows}, columns={self.columns}: give 0 or more")


class Fp8(Scaled):
    """Moved as shipped, expanded by the formula of transformers' `Fp8Dequantize`: code times scale in float32, rounded.

    Only e4m3 codes; a block is not encoded, for its scales cannot be told from it.
    """

    name = "fp8"
    config_class = Fp8Config
    config: Fp8Config

    def _forms(self, field: Field) -> tuple[Form, Form]:
        each = self.config.rows or field.shape[0], self.config.columns or field.shape[1]
        if any(size % shared for size, shared in zip(field.shape, each, strict=True)):
            raise self._refuse(f"{field.name!r} is {list(field.shape)}, which blocks of {list(each)} do not divide")
        grid = field.shape[0] // each[0], field.shape[1] // each[1]
        return (field.shape, torch.uint8), (grid, torch.float32)

    def _stored(self, field: Field, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        if codes.dtype != _CODE or tuple(codes.shape) != field.shape:
            found = f"{str(codes.dtype).removeprefix('torch.')} {list(codes.shape)}"
            raise self._refuse(f"{field.name!r} is {found}, not float8_e4m3fn {list(field.shape)}")
        if scales.dtype == torch.uint8:  # exponents alone (MXFP8); the formula is transformers'
            scales = (scales.float() - 127.0).exp2()
        grid = self._forms(field)[1][0]
        scales = scales.float().reshape(scales.shape if scales.dim() == 2 else (-1, 1))
        if any(size % found for size, found in zip(grid, scales.shape, strict=True)):
            raise self._refuse(
                f"{field.name!r} has {list(scales.shape)} scales, not {list(grid)}", "say rows= and columns="
            )
        for dim in range(2):
            scales = scales.repeat_interleave(grid[dim] // scales.shape[dim], dim)
        if codes.float().isnan().any() or not (scales.abs() < _MOST_SCALE).all():
            raise self._refuse(f"{field.name!r} holds codes that are no number, or scales of 2**119 and more")
        return codes.view(torch.uint8), scales

    def _multiply(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        (rows, columns), grid = out.shape, scales.shape
        step = max(1, _CHUNK // columns) if out.device.type == "cpu" else rows
        scale_of_row = scales.mul(2.0**_SHIFT).repeat_interleave(rows // grid[0], 0)[:, :, None]
        for row in range(0, rows, step):
            part = slice(row, row + step)
            bits = codes[part].view(torch.int8).to(torch.int16) << 7  # the sign lies in the top two bits now
            floats = bits.bitwise_and_(~0x4000).view(torch.float16).float()
            floats.view(-1, grid[1], columns // grid[1]).mul_(scale_of_row[part])
            out[part].copy_(floats)

    def split(self, block: Tensor) -> tuple[Tensor, ...]:
        raise self._refuse(
            "only a checkpoint in FP8 says their scales", "load one with load_offloaded, or choose codec 'bitsplit'"
        )
