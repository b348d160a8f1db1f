"""FP8 weights of a checkpoint: two tensors, codes and scales, read as the one that they stand for.

    x.weight              float8 [R, C] or [E, R, C]
    x.weight_scale_inv    [R / rows, C / columns], one number, or the same for each of E experts

R rows and C columns of a matrix, E experts. The last blocks of a matrix may be cut off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from expertcast.data.weights.files import Part, TensorFile
from expertcast.predictors.errors import ExpertcastError

FP8_CODES = ("F8_E4M3", "F8_E5M2")
"""As safetensors names them."""
_WEIGHT = ".weight"
_SCALES = (".weight_scale_inv", ".scale", ".qscale_weight")
"""What the scales of `.weight` are called; transformers renames the latter two."""
_ACTIVATIONS = (".activation_scale", ".input_scale", ".qscale_act")
"""Scales of what weights are multiplied by: of no use to weights that are dequantised."""


class Fp8Tensor:
    """A weight as the float32 that its codes and scales stand for; transformers rounds those to the model's dtype.

    Args:
        name: of the codes.
        codes: float8 [R, C] or [E, R, C].
        scales: see above.
        block: rows and columns that share a scale, as the configuration says; None: as many as divide the matrix.

    Raises:
        ExpertcastError: codes of another type, or scales that do not fit them.
    """

    def __init__(self, name: str, codes: TensorFile, scales: TensorFile, block: Sequence[int] | None = None) -> None:
        self._codes, self._scales = codes, scales
        self.shape = tuple(codes.get_shape())
        """Of the weight."""
        *outer, rows, columns = self.shape
        self._outer = len(outer)
        found = scales.get_shape()
        inner = found[self._outer :]
        if len(inner) < 2:
            inner = [*inner, 1, 1][:2]
        self.grid = (*found[: self._outer], *inner)
        """Of the scales: [gR, gC] or [E, gR, gC]; one number for each row are gR = R and gC = 1."""
        wanted = block or (None, None)
        self.block = tuple(map(_shared, (rows, columns), self.grid[-2:], wanted))
        """Rows and columns that share a scale."""
        if self.grid[:-2] != self.shape[:-2] or 0 in self.block:
            raise ExpertcastError(
                f"the checkpoint's {name} is {list(self.shape)}, its scales are {found}: not supported"
            )

    @property
    def whole(self) -> bool:
        """Whether no block is cut off."""
        return all(size % shared == 0 for size, shared in zip(self.shape[-2:], self.block, strict=True))

    def get_shape(self) -> list[int]:
        """Of the weight."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Of the codes."""
        return self._codes.get_dtype()

    def codes(self, part: Part = ...) -> Tensor:
        """As shipped, of some experts or all."""
        return self._codes[part]

    def scales(self, part: Part = ...) -> Tensor:
        """float32 [gR, gC] or [E, gR, gC], of some experts or all."""
        scales = self._scales[part] if self._outer else self._scales[...]
        # a byte is an exponent (MXFP8): transformers' formula
        floats = (scales.float() - 127.0).exp2() if scales.dtype == torch.uint8 else scales.float()
        return floats.reshape(*((-1,) if self._outer else ()), *self.grid[-2:])

    def __getitem__(self, part: Part) -> Tensor:
        codes, scales = self.codes(part), self.scales(part)
        if self.whole:
            read: Tensor = Fp8Dequantize(None)._dequantize_one(codes, scales, output_dtype=torch.float32)
            return read
        for dim, (size, shared) in enumerate(zip(self.shape[-2:], self.block, strict=True), start=-2):
            scales = scales.repeat_interleave(shared, dim).narrow(dim, 0, size)
        return codes.float() * scales


def join_scales(tensors: Mapping[str, TensorFile], block: Sequence[int] | None) -> dict[str, TensorFile]:
    """A checkpoint's tensors by name, where each weight in FP8 has taken up its scales.

    Args:
        tensors: codes and scales by themselves.
        block: see :class:`Fp8Tensor`.

    Raises:
        ExpertcastError: an FP8 weight without scales, or as :class:`Fp8Tensor`.
    """
    joined, used = dict(tensors), set()
    for name, tensor in tensors.items():
        if tensor.get_dtype() not in FP8_CODES:
            continue
        stem = name.removesuffix(_WEIGHT)
        scales = [stem + suffix for suffix in _SCALES] if stem != name else [f"{name}_scale_inv"]
        found = next((each for each in scales if each in tensors), None)
        if found is None:
            raise ExpertcastError(f"the checkpoint's {name} is in FP8 and has no {scales[0]}: it is incomplete")
        joined[name] = Fp8Tensor(name, tensor, tensors[found], block)
        used |= {found, *(stem + suffix for suffix in _ACTIVATIONS), f"{name}_activation_scale"}
    for name in tensors:  # scales whose weight is in another type, such as packed FP4
        partner = name.removesuffix("_scale_inv")
        if partner != name and name not in used and partner in tensors:
            raise ExpertcastError(f"the checkpoint's {partner} is {tensors[partner].get_dtype()} with scales, not FP8")
    return {name: tensor for name, tensor in joined.items() if name not in used}


def _shared(size: int, count: int, wanted: int | None) -> int:
    """Rows (or columns) that share a scale when there are so many scales; 0: none fits."""
    if wanted and -(-size // wanted) == count:
        return min(wanted, size)
    return 0 if count < 1 or size % count else size // count
