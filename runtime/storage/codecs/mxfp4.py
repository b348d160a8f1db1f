"""Experts of MXFP4 checkpoints (gpt-oss): 4-bit codes with one power of two for each 32, at 17/64 of the bytes of bf16.

shipped, of one expert   blocks [N, G, 16], scales [N, G]: each byte two weights of a row of the transposed matrix
in the store             codes [D/2, N], scales [G, N]: transposed here, once, in place of each time it is expanded
in the slot              [D, N]

D rows and N columns of a matrix as the model holds it, G = D / 32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from expertcast.runtime.storage.codecs.scaled import Form, Scaled
from expertcast.runtime.storage.layout import Field

_GROUP = 32
_BIAS = 127
_SHIFT = 14
"""A code's bits, taken for those of fp16, stand for 2**-14 of its value: exponents there count from 15, not from 1."""
_FP16_BITS = ~0x71FF
"""Sign, and three bits from the lowest of the exponent on."""
_MOST_SCALE = 240
"""Times 2**14 it is still a float32. 241 to 254 would make weights of 2**113 and more, 255 is no number."""
_SCALES = torch.exp2(torch.arange(256, dtype=torch.float64) - _BIAS + _SHIFT).float()
_MAGNITUDES = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
"""Of the codes 0 to 7: two bits of exponent, one of mantissa."""
_TOP_EXPONENT = 2
"""Of the largest magnitude, 6 = 1.5 * 2**2."""
_CHUNK = 1 << 16
"""Codes expanded at once on the host: temporaries that stay in a core's cache."""


class Mxfp4(Scaled):
    """Moved as shipped, expanded by the formula of transformers' `convert_moe_packed_tensors`.

    A block is encoded too where every weight of it is one that MXFP4 can say: codes and scales are found again, perhaps
    others than those shipped, that stand for the same bits.
    """

    name = "mxfp4"

    def _forms(self, field: Field) -> tuple[Form, Form]:
        rows, columns = field.shape
        if rows % _GROUP:
            raise self._refuse(f"{field.name!r} has {rows} rows, no multiple of {_GROUP}")
        return ((rows // 2, columns), torch.uint8), ((rows // _GROUP, columns), torch.uint8)

    def _stored(self, field: Field, codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = field.shape
        shapes = (columns, rows // _GROUP, _GROUP // 2), (columns, rows // _GROUP)
        found = tuple(codes.shape), tuple(scales.shape)
        if found != shapes:
            raise self._refuse(f"blocks and scales of {field.name!r} are {found}, not {shapes}", "give it its own")
        if (scales > _MOST_SCALE).any():
            raise self._refuse(f"{field.name!r} has a scale of {int(scales.max())}, above {_MOST_SCALE}")
        return codes.reshape(columns, rows // 2).t(), scales.t()

    def _multiply(self, codes: Tensor, scales: Tensor, out: Tensor) -> None:
        groups, columns = scales.shape
        step = max(1, _CHUNK * 2 // (_GROUP * columns)) if out.device.type == "cpu" else groups
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
                raise self._refuse(f"{name!r} has weights that are no MXFP4 code times a scale", "choose 'bitsplit'")
        return (plane,)


def _factors(scales: Tensor) -> Tensor:
    """float32: what the floats that codes are taken for are multiplied by."""
    return _SCALES.to(scales.device)[scales.to(torch.int32)]


def _coded(weights_DN: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest codes and scales; the right ones where there are any.

    The scale that makes the largest weight of a group a 4 or a 6 serves whenever any does: what smaller codes with a
    larger scale can say, larger codes with a smaller one can say too.
    """
    rows, columns = weights_DN.shape
    weights = weights_DN.float().view(-1, _GROUP, columns)
    largest = weights.abs().amax(dim=1).nan_to_num(0.0, 0.0)
    exponent = largest.frexp().exponent - 1 - _TOP_EXPONENT
    scales = (exponent + _BIAS).clamp(0, _MOST_SCALE).to(torch.uint8)
    scaled = weights * 2.0**_SHIFT / _factors(scales)[:, None]
    codes = torch.bucketize(scaled.abs(), _MAGNITUDES, out_int32=True).clamp_max_(7).to(torch.uint8)
    codes = (codes | scaled.signbit().to(torch.uint8) << 3).view(rows // 2, 2, columns)
    return codes[:, 0] | codes[:, 1] << 4, scales
