"""Weights of a checkpoint that are packed into integers: several tensors, read as the one that they stand for.

    GPTQ                x.qweight [C b/32, R], x.qzeros [G, R b/32], x.scales [G, R], x.g_idx [C]
    AWQ (gemm)          x.qweight [C, R b/32], x.qzeros [G, R b/32], x.scales [G, R]
    compressed-tensors  x.weight_packed [R, C b/32], x.weight_scale [R, G], x.weight_zero_point [R b/32, G]
                        x.weight [R, C] (int8 or float8), x.weight_scale, x.weight_zero_point

R rows and C columns of a matrix as the model holds it, G groups of columns that share a scale, b bits a code. Words are
int32, their lowest bits first. Sources: gptqmodel's `model_dequant.py` (GPTQ and AWQ: in float32, rounded once to the
model's dtype) and compressed-tensors' `dequantize` (in the scales' dtype).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from expertcast.data.quantisation import AWQ, COMPRESSED, GPTQ
from expertcast.data.weights.files import Part, TensorFile
from expertcast.data.weights.fp8 import FP8_CODES, Fp8Tensor
from expertcast.predictors.errors import ExpertcastError

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word the codes of eight rows lie."""
_OF_OTHERS = re.compile(r"\.(input|output|q|k|v)_(scale|zero_point|global_scale)$")
"""Scales of activations: of no use to weights that are dequantised."""


class PackedTensor:
    """A weight [R, C] that is computed when it is read.

    Args:
        shape: R and C.
        dtype: of what is computed, as safetensors names it.
        make: computes it.
    """

    def __init__(self, shape: Sequence[int], dtype: str, make: Callable[[], Tensor]) -> None:
        self._shape, self._dtype, self._make = list(shape), dtype, make

    def get_shape(self) -> list[int]:
        """R and C."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """Of the weight, as safetensors names it."""
        return self._dtype

    def __getitem__(self, part: Part) -> Tensor:
        made = self._make()
        return made if part is ... else made[part]


def join_packed(tensors: Mapping[str, TensorFile], method: str, settings: Mapping[str, Any]) -> dict[str, TensorFile]:
    """A checkpoint's tensors by name, where each packed weight is one.

    Args:
        tensors: as they lie in the files.
        method: one of :mod:`expertcast.data.quantisation`'s.
        settings: the configuration's section on quantisation.

    Raises:
        ExpertcastError: a weight lacks its scales, or they do not fit it.
    """
    joiner = {GPTQ: _gptq, AWQ: _awq, COMPRESSED: _compressed}[method]
    marks = (".weight_packed", ".weight") if method == COMPRESSED else (".qweight",)
    joined: dict[str, TensorFile] = {}
    used: set[str] = set()
    for name, tensor in tensors.items():
        mark = next((mark for mark in marks if name.endswith(mark)), None)
        parts = _Parts(tensors, name.removesuffix(mark or ""))
        if mark is None or (mark == ".weight" and parts.get("weight_scale") is None):
            joined[name] = tensor
            continue
        joined[f"{parts.stem}.weight"] = joiner(parts, settings)
        used |= parts.used
    return {name: tensor for name, tensor in joined.items() if name not in used and not _OF_OTHERS.search(name)}


def unpacked(words: Tensor, bits: int) -> Tensor:
    """The codes (uint8) in words of int32 [..., N], lowest bits first: [..., N 32/bits]."""
    octets = words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], -1)
    if bits == 8:
        return octets
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    codes: Tensor = ((octets.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)
    return codes


class _Parts:
    """The tensors of one weight, by what follows its name."""

    def __init__(self, tensors: Mapping[str, TensorFile], stem: str) -> None:
        self._tensors, self.stem = tensors, stem
        self.used: set[str] = set()
        """Names that were asked for, but for the weight's own."""

    def get(self, suffix: str) -> TensorFile | None:
        """One of them; None: it is not there."""
        name = f"{self.stem}.{suffix}"
        if suffix != "weight":
            self.used.add(name)
        return self._tensors.get(name)

    def __getitem__(self, suffix: str) -> TensorFile:
        if (found := self.get(suffix)) is None:
            raise ExpertcastError(f"the checkpoint has no {self.stem}.{suffix}: it is incomplete")
        return found

    def check(self, right: bool, *suffixes: str) -> None:
        """That shapes fit each other."""
        if not right:
            shapes = ", ".join(f"{suffix} {self[suffix].get_shape()}" for suffix in suffixes)
            raise ExpertcastError(f"the checkpoint's {self.stem} has {shapes}: not supported")


def _gptq(parts: _Parts, settings: Mapping[str, Any]) -> PackedTensor:
    codes, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    indices = parts.get("g_idx")
    groups, rows = scales.get_shape()
    words = codes.get_shape()[0]
    columns = words * 32 // int(settings["bits"]) if indices is None else indices.get_shape()[0]
    bits = words * 32 // max(columns, 1)  # single modules may have other bits than the configuration says
    fits = bits in (2, 4, 8) and codes.get_shape()[1] == rows and zeros.get_shape() == [groups, rows * bits // 32]
    parts.check(fits and (indices is not None or columns % groups == 0), "qweight", "qzeros", "scales")
    # version 1 stores zeros less one
    older = (settings.get("checkpoint_format") or settings.get("format") or GPTQ) == GPTQ

    def make() -> Tensor:
        code_RC = unpacked(codes[...].T, bits)
        zero_RG = unpacked(zeros[...], bits).T
        if older:
            zero_RG = (zero_RG + 1) & (2**bits - 1)
        scale_RG = scales[...].float().T
        index_C = torch.arange(columns) // (columns // groups) if indices is None else indices[...].long()
        if not 0 <= int(index_C.min()) <= int(index_C.max()) < groups:
            raise ExpertcastError(f"the checkpoint's {parts.stem}.g_idx names a group that is not there")
        return (code_RC.float() - zero_RG.float()[:, index_C]).mul_(scale_RG[:, index_C])

    return PackedTensor((rows, columns), "F32", make)


def _awq(parts: _Parts, settings: Mapping[str, Any]) -> PackedTensor:
    codes, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    groups, rows = scales.get_shape()
    columns = codes.get_shape()[0]
    fits = codes.get_shape()[1] * 8 == rows and zeros.get_shape() == [groups, rows // 8] and columns % groups == 0
    parts.check(fits, "qweight", "qzeros", "scales")

    def by_rows(words: Tensor) -> Tensor:
        return unpacked(words, 4).view(len(words), -1, 8)[:, :, _AWQ_ORDER].flatten(1).T

    def make() -> Tensor:
        each = columns // groups
        zero_RC = by_rows(zeros[...]).float().repeat_interleave(each, 1)
        scale_RC = scales[...].float().T.repeat_interleave(each, 1)
        return (by_rows(codes[...]).float() - zero_RC) * scale_RC

    return PackedTensor((rows, columns), "F32", make)


def _compressed(parts: _Parts, settings: Mapping[str, Any]) -> TensorFile:
    weights, scales = _weights_of(parts.stem, settings), parts["weight_scale"]
    zeros, indices = parts.get("weight_zero_point"), parts.get("weight_g_idx")
    parts.get("weight_shape")
    packed = parts.get("weight_packed")
    codes = parts["weight"] if packed is None else packed
    if packed is None and codes.get_dtype() in FP8_CODES:
        return Fp8Tensor(f"{parts.stem}.weight", codes, scales, weights.get("block_structure"))
    bits = int(weights.get("num_bits") or 8)
    rows, columns = codes.get_shape()
    columns = columns if packed is None else columns * 32 // bits
    high, wide = [*scales.get_shape(), 1, 1][:2]  # 1 where there is one scale for all
    names = ("weight" if packed is None else "weight_packed", "weight_scale")
    parts.check(codes.get_dtype() in ("I8", "I32") and high in (1, rows) and columns % wide == 0, *names)

    def make() -> Tensor:
        scale = scales[...].reshape(high, wide)
        code_RC = codes[...] if packed is None else _signed(codes[...], bits)
        index_C = torch.arange(columns) // (columns // wide)
        if indices is not None and int((found_C := indices[...].long()).min()) >= 0:  # -1: not reordered
            index_C = found_C
        made = code_RC.to(scale.dtype)
        if zeros is not None:
            zero = _signed(zeros[...].T, bits).T if zeros.get_dtype() == "I32" else zeros[...]
            made -= zero.reshape(high, wide).to(scale.dtype)[:, index_C]
        return made.mul_(scale[:, index_C])

    return PackedTensor((rows, columns), scales.get_dtype(), make)


def _signed(words: Tensor, bits: int) -> Tensor:
    """Codes (int16) that are stored with half their range added."""
    codes: Tensor = unpacked(words, bits).to(torch.int16) - 2 ** (bits - 1)
    return codes


def _weights_of(module: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """What compressed-tensors says of a module's weights: the group that names it, else the one of all linear ones."""
    groups = list(settings["config_groups"].values())

    def names(target: str) -> bool:
        return re.match(target[3:], module) is not None if target.startswith("re:") else target == module

    found = [group for group in groups if any(map(names, group["targets"]))]
    found += [group for group in groups if any(target.isidentifier() for target in group["targets"])]
    return (found or groups)[0]["weights"]  # type: ignore[no-any-return]
