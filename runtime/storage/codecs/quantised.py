"""Codecs that keep the codes and scales of quantised checkpoints: FP8, and MXFP4 (gpt-oss).

MXFP4 has 4-bit codes and one power of two per 32 weights, in 17/64 of the bytes of bf16:

shipped, of one expert   blocks [N, G, 16], scales [N, G]: each byte two weights of a row of the transposed matrix
in the store             codes [D/2, N], scales [G, N]: transposed once, when stored, not at each expansion
in the slot              [D, N]

D rows and N columns of a matrix as the model holds it, G = D / 32.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import pydantic
import torch
from torch import Tensor

from expertcast.runtime.storage.codecs.base import Codec, CodecConfig, Part, Plane, Shard, shards_of
from expertcast.runtime.storage.layout import BlockLayout, Field, aligned_bytes

# Base of the codecs of quantised checkpoints: matrices as codes and scales, other parameters uncoded.
#
# plane    [ codes | scales | codes | scales | biases ... ]      each at a multiple of 256 bytes

_CODES, _SCALES = ".codes", ".scales"
Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of codes or of scales in the store."""


class Scaled(Codec):
    """Stores codes and scales of the checkpoint in one part, and recovers the block that transformers dequantises.

    The recovered block equals that of transformers bit for bit, except for padding between parameters.
    """

    def __init__(self, config: CodecConfig, layout: BlockLayout) -> None:
        super().__init__(config, layout)
        self._coded = tuple(field for field in layout.fields if len(field.shape) > 1)
        if not self._coded:
            raise self._refuse("none of their parameters is a matrix")
        places: list[Field] = []
        offset = 0
        for field in layout.fields:
            forms: dict[str, Form] = {field.name: (field.shape, field.dtype)}
            if field in self._coded:
                if len(field.shape) > 2 or not field.dtype.is_floating_point:
                    raise self._refuse(f"{field.name!r} is not a matrix of floats")
                codes, scales = self._forms(field)
                forms = {field.name + _CODES: codes, field.name + _SCALES: scales}
            for name, (shape, dtype) in forms.items():
                places.append(Field(name=name, shape=shape, dtype=dtype, offset=offset))
                offset = aligned_bytes(offset + places[-1].nbytes)
        self.packed = BlockLayout(fields=tuple(places), block_bytes=offset)
        """Layout of the plane."""
        self.planes = (Plane(name="shipped", nbytes=offset),)
        self.shards = shards_of(self.planes)

    @abstractmethod
    def _forms(self, field: Field) -> tuple[Form, Form]:
        """Return the forms of a matrix's codes and scales; raises ExpertcastError if the codec cannot hold it."""

    @abstractmethod
    def _stored(self, field: Field, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """Convert codes and scales of the checkpoint to the store's form; raises ExpertcastError if it cannot."""

    @abstractmethod
    def _multiply(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        """Write the matrix [rows, columns] from codes and scales in the store's form."""

    def encode_shipped(
        self, shipped: Mapping[str, tuple[Tensor, Tensor]], kept: Mapping[str, Tensor]
    ) -> tuple[Part, ...]:
        """Encode an expert from its codes and scales in the checkpoint.

        Args:
            shipped: codes and scales of each matrix, by the parameter's name, without the expert dimension.
            kept: the other parameters, by name.

        Raises:
            ExpertcastError: a parameter is missing, has another shape, or cannot be held.
        """
        plane = torch.zeros(self.packed.block_bytes, dtype=torch.uint8)
        views = self.packed.views(plane)
        for field in self.layout.fields:
            if field.name not in (shipped if field in self._coded else kept):
                raise self._refuse(f"{field.name!r} is missing", "pass it")
            if field in self._coded:
                codes, scales = self._stored(field, *shipped[field.name])
                self._put(views, field, codes, scales)
            else:
                views[field.name][0].copy_(kept[field.name])
        return self._parts((plane,))

    def recover(self, planes: Sequence[Tensor], block: Tensor, shard: Shard | None = None) -> None:
        packed, full = self.packed.views(planes[0]), self.layout.views(block)
        for field in self.layout.fields:
            target = full[field.name][0]
            if field in self._coded:
                self._multiply(packed[field.name + _CODES][0], packed[field.name + _SCALES][0], target)
            else:
                target.copy_(packed[field.name][0])

    def _put(self, views: Mapping[str, Tensor], field: Field, codes: Tensor, scales: Tensor) -> None:
        views[field.name + _CODES][0].copy_(codes)
        views[field.name + _SCALES][0].copy_(scales)


# FP8 checkpoints: 8-bit floats with one scale per block, row or matrix, in half of the bytes of bf16.
#
# R rows and C columns of a matrix as the model holds it.

_CODE = torch.float8_e4m3fn
_CHUNK = 1 << 16
"""Weights (FP8) or bytes of two codes (MXFP4) expanded at a time, so that temporaries stay in a core's cache."""
_SHIFT = 8
"""The bits of a code, read as fp16, mean 2**-8 times its value: fp16 has an exponent bias of 15, e4m3 of 7."""
_MOST_SCALE = 2.0**119
"""Exclusive upper bound of a scale, which is multiplied by 2**8 in float32."""


@dataclass(frozen=True, kw_only=True)
class Fp8Config(CodecConfig):
    """Size of the blocks of weights that share a scale.

    One scale per row of a matrix (compressed-tensors' channels) is `rows=1,columns=0`. One scale per matrix also fits
    it, and is repeated for each row.
    """

    rows: Annotated[int, pydantic.Field(ge=0)] = 128
    """Rows that share a scale; 0: all."""
    columns: Annotated[int, pydantic.Field(ge=0)] = 128
    """Columns that share a scale; 0: all."""


class Fp8(Scaled):
    """FP8 codes (e4m3) and scales, expanded as by transformers' `Fp8Dequantize`: code times scale in float32, rounded.

    A block of weights cannot be encoded, since it does not determine its scales.
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
        if scales.dtype == torch.uint8:  # exponents only (MXFP8), converted as in transformers
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
            raise self._refuse(f"{field.name!r} has NaN codes, or scales of 2**119 and more")
        return codes.view(torch.uint8), scales

    def _multiply(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        (rows, columns), grid = out.shape, scales.shape
        step = max(1, _CHUNK // columns)
        scale_of_row = scales.mul(2.0**_SHIFT).repeat_interleave(rows // grid[0], 0)[:, :, None]
        for row in range(0, rows, step):
            part = slice(row, row + step)
            bits = codes[part].view(torch.int8).to(torch.int16) << 7  # the top two bits are now both the sign
            floats = bits.bitwise_and_(~0x4000).view(torch.float16).float()
            floats.view(-1, grid[1], columns // grid[1]).mul_(scale_of_row[part])
            out[part].copy_(floats)

    def split(self, block: Tensor) -> tuple[Tensor, ...]:
        raise self._refuse(
            "only an FP8 checkpoint has their scales", "load one with load_offloaded, or choose codec 'bitsplit'"
        )


_GROUP = 32
_BIAS = 127
_MXFP4_SHIFT = 14
"""The bits of a code, read as fp16, mean 2**-14 times its value: fp16 has an exponent bias of 15, a code of 1."""
_FP16_BITS = ~0x71FF
"""Mask of the sign, the two lowest exponent bits and the highest mantissa bit of fp16."""
_MOST_EXPONENT = 240
"""Largest scale byte whose scale times 2**14 is a float32. Larger ones mean weights of 2**113 and more; 255 is NaN."""
_MXFP4_SCALES = torch.exp2(torch.arange(256, dtype=torch.float64) - _BIAS + _MXFP4_SHIFT).float()
_MAGNITUDES = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
"""Values of the codes 0 to 7, which have two exponent bits and one mantissa bit."""
_TOP_EXPONENT = 2
"""Exponent of the largest magnitude, 6 = 1.5 * 2**2."""


class Mxfp4(Scaled):
    """MXFP4 codes and scales, expanded as by transformers' `convert_moe_packed_tensors`.

    A block of weights can be encoded if MXFP4 represents all of them exactly. Its codes and scales may then differ from
    those of the checkpoint, but expand to the same bits.
    """

    name = "mxfp4"

    def _forms(self, field: Field) -> tuple[Form, Form]:
        rows, columns = field.shape
        if rows % _GROUP:
            raise self._refuse(f"{field.name!r} has {rows} rows, not a multiple of {_GROUP}")
        return ((rows // 2, columns), torch.uint8), ((rows // _GROUP, columns), torch.uint8)

    def _stored(self, field: Field, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = field.shape
        shapes = (columns, rows // _GROUP, _GROUP // 2), (columns, rows // _GROUP)
        found = tuple(codes.shape), tuple(scales.shape)
        if found != shapes:
            raise self._refuse(
                f"blocks and scales of {field.name!r} are {found}, not {shapes}", "pass those of this matrix"
            )
        if (scales > _MOST_EXPONENT).any():
            raise self._refuse(f"{field.name!r} has a scale of {int(scales.max())}, above {_MOST_EXPONENT}")
        return codes.reshape(columns, rows // 2).t(), scales.t()

    def _multiply(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        groups, columns = scales.shape
        step = max(1, _CHUNK * 2 // (_GROUP * columns))
        codes, pairs = codes.view(groups, -1, columns), out.view(groups, -1, 2, columns)
        scale = _factors(scales)[:, None]
        for group in range(0, groups, step):
            part = slice(group, group + step)
            for half, high in enumerate((codes[part] << 4, codes[part])):
                bits = high.view(torch.int8).to(torch.int16) << 5  # four bits of sign, then three of magnitude
                floats = bits.bitwise_and_(_FP16_BITS).view(torch.float16).float()
                pairs[part, :, half].copy_(floats.mul_(scale[part]))

    def split(self, block: Tensor) -> tuple[Tensor, ...]:
        plane = torch.zeros(self.packed.block_bytes, dtype=torch.uint8)
        views, full, again = self.packed.views(plane), self.layout.views(block), torch.empty_like(block)
        for field in self.layout.fields:
            if field in self._coded:
                self._put(views, field, *_coded(full[field.name][0]))
            else:
                views[field.name][0].copy_(full[field.name][0])
        self.recover((plane,), again)
        for name, found in self.layout.views(again).items():
            if not torch.equal(found.view(torch.uint8), full[name].view(torch.uint8)):
                raise self._refuse(f"{name!r} has weights that MXFP4 cannot represent", "choose codec 'bitsplit'")
        return (plane,)


def _factors(scales: Tensor) -> Tensor:
    """Return the float32 factors of the codes read as fp16: scale times 2**14."""
    return _MXFP4_SCALES[scales.to(torch.int32)]


def _coded(weights_DN: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and scales of weights: exact if MXFP4 represents the weights, else approximate.

    If a group has an exact scale, the scale that maps its largest weight to 4 or 6 is exact too, since smaller codes
    with a larger scale can be replaced by larger codes with a smaller scale.
    """
    rows, columns = weights_DN.shape
    weights = weights_DN.float().view(-1, _GROUP, columns)
    largest = weights.abs().amax(dim=1).nan_to_num(0.0, 0.0)
    exponent = largest.frexp().exponent - 1 - _TOP_EXPONENT
    scales = (exponent + _BIAS).clamp(0, _MOST_EXPONENT).to(torch.uint8)
    scaled = weights * 2.0**_MXFP4_SHIFT / _factors(scales)[:, None]
    codes = torch.bucketize(scaled.abs(), _MAGNITUDES, out_int32=True).clamp_max_(7).to(torch.uint8)
    codes = (codes | scaled.signbit().to(torch.uint8) << 3).view(rows // 2, 2, columns)
    return codes[:, 0] | codes[:, 1] << 4, scales
