"""Quantised weights of a checkpoint: several tensors, read as the one weight that they make up.

    GPTQ                x.qweight [C b/32, R], x.qzeros [G, R b/32], x.scales [G, R], x.g_idx [C]
    AWQ (gemm)          x.qweight [C, R b/32], x.qzeros [G, R b/32], x.scales [G, R]
    compressed-tensors  x.weight_packed [R, C b/32], x.weight_scale [R, G], x.weight_zero_point [R b/32, G]
                        x.weight [R, C] (int8 or float8), x.weight_scale, x.weight_zero_point

R rows and C columns of a matrix as the model holds it, G groups of columns that share a scale, b bits a code. Words are
int32, their lowest bits first. Sources: gptqmodel's `model_dequant.py` (GPTQ and AWQ: in float32, rounded once to the
model's dtype) and compressed-tensors' `dequantize` (in the scales' dtype).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from expertcast.data.packed_experts import Piece
from expertcast.data.source import AWQ, COMPRESSED, GPTQ
from expertcast.data.weights.blocks import block_kind, nibbles, to_blocks
from expertcast.data.weights.files import ComputedTensor, Part, TensorFile
from expertcast.predictors.messages import ExpertcastError

# FP8: codes and scales
#
#     x.weight              float8 [R, C] or [E, R, C]
#     x.weight_scale_inv    [R / rows, C / columns], one number, or the same for each of E experts
#
# The last blocks of a matrix may be cut off.

FP8_CODES = ("F8_E4M3", "F8_E5M2")
"""safetensors' names of FP8."""
_WEIGHT = ".weight"
_SCALES = (".weight_scale_inv", ".scale", ".qscale_weight")
"""Names of the scales of `.weight`; transformers renames the latter two."""
_ACTIVATIONS = (".activation_scale", ".input_scale", ".qscale_act")
"""Scales of activations, which dequantised weights do not need."""


class Fp8Tensor:
    """A weight in FP8, read as the float32 of its codes and scales; transformers rounds that to the model's dtype.

    Args:
        name: name of the codes.
        codes: float8 [R, C] or [E, R, C].
        scales: see above.
        block: the configuration's rows and columns that share a scale; None: as many as divide the matrix.

    Raises:
        ExpertcastError: codes of another type, or scales that do not fit them.
    """

    __slots__ = ("_codes", "_scales", "block", "grid", "shape")

    def __init__(self, name: str, codes: TensorFile, scales: TensorFile, block: Sequence[int] | None = None) -> None:
        self._codes, self._scales = codes, scales
        self.shape, found = tuple(codes.get_shape()), tuple(scales.get_shape())
        """Shape of the weight."""
        self.grid: tuple[int, ...] = ()
        """Shape of the scales: [gR, gC] or [E, gR, gC]; with a scale for each row gR = R and gC = 1."""
        self.block = 0, 0
        """Rows and columns that share a scale."""
        if len(self.shape) > 1:
            self.grid, self.block = _grid(self.shape, found, *(block[:2] if block else (None, None)))
        if self.grid[:-2] != self.shape[:-2] or 0 in self.block:
            raise ExpertcastError(
                f"the checkpoint's {name} is {list(self.shape)}, its scales are {list(found)}: not supported"
            )

    def get_shape(self) -> list[int]:
        """Return the weight's sizes."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return the codes' dtype as safetensors names it."""
        return self._codes.get_dtype()

    def __getitem__(self, part: Part) -> Tensor:
        codes, scales = self._codes[part], self._scales[part if self.shape[:-2] else ...]
        # a byte is an exponent (MXFP8): transformers' formula
        scales = (scales.float() - 127.0).exp2() if scales.dtype == torch.uint8 else scales.float()
        scales = scales.reshape(*((-1,) if self.shape[:-2] else ()), *self.grid[-2:])
        if all(size % shared == 0 for size, shared in zip(self.shape[-2:], self.block, strict=True)):
            read: Tensor = Fp8Dequantize(None)._dequantize_one(codes, scales, output_dtype=torch.float32)
            return read
        for dim, (size, shared) in enumerate(zip(self.shape[-2:], self.block, strict=True), start=-2):
            scales = scales.repeat_interleave(shared, dim).narrow(dim, 0, size)
        return codes.float() * scales


@cache
def _grid(
    shape: tuple[int, ...], found: tuple[int, ...], rows: int | None, columns: int | None
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return the sizes of a weight's scales, and the rows and columns that share one, 0 where they do not fit."""
    outer = len(shape) - 2
    inner = found[outer:] if len(found) >= outer + 2 else (*found[outer:], 1, 1)[:2]
    shared = _shared(shape[-2], inner[-2], rows), _shared(shape[-1], inner[-1], columns)
    return (*found[:outer], *inner), shared


def join_scales(tensors: Mapping[str, TensorFile], block: Sequence[int] | None) -> dict[str, TensorFile]:
    """Join FP8 codes with their scales; return a checkpoint's weights by name.

    Args:
        tensors: the checkpoint's tensors by name.
        block: see :class:`Fp8Tensor`.

    Raises:
        ExpertcastError: an FP8 weight without scales, or with scales that do not fit.
    """
    joined, used = dict(tensors), set[str]()
    activations = any(name.endswith((*_ACTIVATIONS, "_activation_scale")) for name in tensors)
    for name, tensor in tensors.items():
        if tensor.get_dtype() not in FP8_CODES:
            continue
        stem = name.removesuffix(_WEIGHT)
        scales = [stem + suffix for suffix in _SCALES] if stem != name else [f"{name}_scale_inv"]
        found = next(filter(tensors.__contains__, scales), None)
        if found is None:
            raise ExpertcastError(f"the checkpoint's {name} is in FP8 and has no {scales[0]}: it is incomplete")
        joined[name] = Fp8Tensor(name, tensor, tensors[found], block)
        used.add(found)
        if activations:
            used |= {*(stem + suffix for suffix in _ACTIVATIONS), f"{name}_activation_scale"}
    for name in tensors:  # scales whose weight is in another type, such as packed FP4
        partner = name.removesuffix("_scale_inv")
        if partner != name and name not in used and partner in tensors:
            raise ExpertcastError(f"the checkpoint's {partner} is {tensors[partner].get_dtype()} with scales, not FP8")
    return {name: tensor for name, tensor in joined.items() if name not in used}


def _shared(size: int, count: int, wanted: int | None) -> int:
    """Return the rows (or columns) that share one of `count` scales; 0 if no number fits."""
    if wanted and -(-size // wanted) == count:
        return min(wanted, size)
    return 0 if count < 1 or size % count else size // count


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Positions of eight rows' codes in one 32-bit integer."""
_OF_OTHERS = re.compile(r"\.(input|output|q|k|v)_(scale|zero_point|global_scale)$")
"""Scales of activations, which dequantised weights do not need."""


def join_packed(tensors: Mapping[str, TensorFile], method: str, settings: Mapping[str, Any]) -> dict[str, TensorFile]:
    """Join the tensors of each packed weight; return a checkpoint's weights by name.

    Args:
        tensors: the checkpoint's tensors by name.
        method: `GPTQ`, `AWQ` or `COMPRESSED` of :mod:`expertcast.data.source`.
        settings: the configuration's section on quantisation.

    Raises:
        ExpertcastError: a weight lacks its scales, or has scales that do not fit.
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
    """Return the codes in words, lowest bits first: int32 [..., N] -> uint8 [..., N 32/bits]."""
    octets = words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], -1)
    if bits == 8:
        return octets
    if bits == 4:
        return nibbles(octets)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    codes: Tensor = ((octets.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(-2)
    return codes


class _Parts:
    """The tensors of one weight, by the ends of their names."""

    def __init__(self, tensors: Mapping[str, TensorFile], stem: str) -> None:
        self._tensors, self.stem = tensors, stem
        self.used: set[str] = set()
        """Names of the tensors that were looked up, without the weight's own."""

    def get(self, suffix: str) -> TensorFile | None:
        """Return the tensor of this end; None if the checkpoint has none."""
        name = f"{self.stem}.{suffix}"
        if suffix != "weight":
            self.used.add(name)
        return self._tensors.get(name)

    def __getitem__(self, suffix: str) -> TensorFile:
        if (found := self.get(suffix)) is None:
            raise ExpertcastError(f"the checkpoint has no {self.stem}.{suffix}: it is incomplete")
        return found

    def matrix(self, suffix: str) -> list[int]:
        """Return the two sizes of a matrix.

        Raises:
            ExpertcastError: the tensor is missing or is no matrix.
        """
        shape = self[suffix].get_shape()
        self.check(len(shape) == 2, suffix)
        return shape

    def check(self, right: bool, *suffixes: str) -> None:
        """Raise ExpertcastError unless the shapes are right."""
        if not right:
            shapes = ", ".join(f"{suffix} {self[suffix].get_shape()}" for suffix in suffixes)
            raise ExpertcastError(f"the checkpoint's {self.stem} has {shapes}: not supported")


def _gptq(parts: _Parts, settings: Mapping[str, Any]) -> ComputedTensor:
    codes, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    indices = parts.get("g_idx")
    parts.check(indices is None or len(indices.get_shape()) == 1, "g_idx")
    (groups, rows), (words, outputs) = parts.matrix("scales"), parts.matrix("qweight")
    columns = words * 32 // int(settings["bits"]) if indices is None else indices.get_shape()[0]
    bits = words * 32 // max(columns, 1)  # single modules may have other bits than the configuration says
    fits = bits in (2, 4, 8) and outputs == rows and zeros.get_shape() == [groups, rows * bits // 32]
    parts.check(fits and (indices is not None or columns % groups == 0), "qweight", "qzeros", "scales")
    # version 1 stores zeros less one
    older = (settings.get("checkpoint_format") or settings.get("format") or GPTQ) == GPTQ

    def index_C() -> Tensor:
        """Return the group of each column."""
        if indices is None:
            return ordered_C()
        found_C = indices[...].long()
        if not 0 <= int(found_C.min()) <= int(found_C.max()) < groups:
            raise ExpertcastError(f"the checkpoint's {parts.stem}.g_idx names a group that is not there")
        return found_C

    def ordered_C() -> Tensor:
        return torch.arange(columns) // (columns // groups)

    def read() -> tuple[Tensor, Tensor, Tensor]:
        code_RC = unpacked(codes[...].T, bits)
        zero_RG = unpacked(zeros[...], bits).T
        if older:
            zero_RG = (zero_RG + 1) & (2**bits - 1)
        return code_RC, zero_RG.float(), scales[...].float().T

    def make(part: Part) -> Tensor:
        (code_RC, zero_RG, scale_RG), group_C = read(), index_C()
        return (code_RC.float() - zero_RG[:, group_C]).mul_(scale_RG[:, group_C])[part]

    symmetric = settings.get("sym") is True

    def blocks(part: Part) -> Tensor:
        (code_RC, zero_RG, scale_RG), middle = read(), 2 ** (bits - 1)
        if not symmetric:
            return to_blocks("Q4_1", code_RC, scale_RG, -zero_RG * scale_RG)[part]
        if bool((zero_RG != middle).any()):
            raise ExpertcastError(f"{parts.stem}.qzeros are not those of symmetric codes: give experts='expanded'")
        if bits == 8:
            return to_blocks("Q8_0", code_RC ^ 128, scale_RG)[part]
        return to_blocks("Q4_0", code_RC, scale_RG)[part]

    def pieces() -> tuple[Piece, ...] | None:
        # a configuration need not say that inputs are ordered by activation
        if columns % groups or not torch.equal(index_C(), ordered_C()):
            return None
        return _piece(bits, columns // groups, symmetric, rows)

    return ComputedTensor((rows, columns), "F32", make, pieces, blocks)


def _piece(bits: int, group: int, symmetric: bool, rows: int) -> tuple[Piece, ...] | None:
    kind = block_kind(bits, group, symmetric)
    return None if kind is None else (Piece(kind, rows),)


def _awq(parts: _Parts, settings: Mapping[str, Any]) -> ComputedTensor:
    codes, zeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
    (groups, rows), (columns, words) = parts.matrix("scales"), parts.matrix("qweight")
    fits = words * 8 == rows and zeros.get_shape() == [groups, rows // 8] and columns % groups == 0
    parts.check(fits, "qweight", "qzeros", "scales")

    def by_rows(words: Tensor) -> Tensor:
        return unpacked(words, 4).view(len(words), -1, 8)[:, :, _AWQ_ORDER].flatten(1).T

    def make(part: Part) -> Tensor:
        each = columns // groups
        zero_RC = by_rows(zeros[...]).float().repeat_interleave(each, 1)
        scale_RC = scales[...].float().T.repeat_interleave(each, 1)
        return ((by_rows(codes[...]).float() - zero_RC) * scale_RC)[part]

    def blocks(part: Part) -> Tensor:
        scale_RG = scales[...].float().T
        return to_blocks("Q4_1", by_rows(codes[...]), scale_RG, -by_rows(zeros[...]).float() * scale_RG)[part]

    pieces = partial(_piece, 4, columns // groups, False, rows)
    return ComputedTensor((rows, columns), "F32", make, pieces, blocks)


def _compressed(parts: _Parts, settings: Mapping[str, Any]) -> TensorFile:
    weights, scales = _weights_of(parts.stem, settings), parts["weight_scale"]
    zeros, indices = parts.get("weight_zero_point"), parts.get("weight_g_idx")
    parts.get("weight_shape")
    packed = parts.get("weight_packed")
    codes = parts["weight"] if packed is None else packed
    if packed is None and codes.get_dtype() in FP8_CODES:
        return Fp8Tensor(f"{parts.stem}.weight", codes, scales, weights.get("block_structure"))
    bits = int(weights.get("num_bits") or 8)
    rows, columns = parts.matrix("weight" if packed is None else "weight_packed")
    columns = columns if packed is None else columns * 32 // bits
    high, wide = [*scales.get_shape(), 1, 1][:2]  # 1 where there is one scale for all
    names = ("weight" if packed is None else "weight_packed", "weight_scale")
    parts.check(codes.get_dtype() in ("I8", "I32") and high in (1, rows) and columns % wide == 0, *names)

    def make(part: Part) -> Tensor:
        scale = scales[...].reshape(high, wide)
        code_RC = codes[...] if packed is None else _signed(codes[...], bits)
        index_C = torch.arange(columns) // (columns // wide)
        if indices is not None and int((found_C := indices[...].long()).min()) >= 0:  # -1: not reordered
            index_C = found_C
        made = code_RC.to(scale.dtype)
        if zeros is not None:
            made -= signed_zeros().to(scale.dtype)[:, index_C]
        return made.mul_(scale[:, index_C])[part]

    def signed_zeros() -> Tensor:
        assert zeros is not None
        zero = _signed(zeros[...].T, bits).T if zeros.get_dtype() == "I32" else zeros[...]
        return zero.reshape(high, wide)

    def blocks(part: Part) -> Tensor:
        scale = scales[...].float().reshape(high, wide).expand(rows, wide)
        half = 2 ** (bits - 1)
        if bits == 8:
            code_RC = codes[...].view(torch.uint8) if packed is None else unpacked(codes[...], bits) ^ half
            return to_blocks("Q8_0", code_RC, scale)[part]
        code_RC = codes[...].view(torch.uint8) + half if packed is None else unpacked(codes[...], bits)
        if zeros is None:
            return to_blocks("Q4_0", code_RC, scale)[part]
        return to_blocks("Q4_1", code_RC, scale, -scale * (signed_zeros().float() + half))[part]

    def pieces() -> tuple[Piece, ...] | None:
        return None if indices is not None else _piece(bits, columns // wide, zeros is None, rows)

    return ComputedTensor((rows, columns), scales.get_dtype(), make, pieces, blocks)


def _signed(words: Tensor, bits: int) -> Tensor:
    """Return signed codes (int16); they are stored with half their range added."""
    codes: Tensor = unpacked(words, bits).to(torch.int16) - 2 ** (bits - 1)
    return codes


def _weights_of(module: str, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return compressed-tensors' settings of a module's weights: its own group's, else those of all linear ones."""
    groups = list(settings["config_groups"].values())

    def names(target: str) -> bool:
        return re.match(target[3:], module) is not None if target.startswith("re:") else target == module

    found = [group for group in groups if any(map(names, group["targets"]))]
    found += [group for group in groups if any(target.isidentifier() for target in group["targets"])]
    return (found or groups)[0]["weights"]  # type: ignore[no-any-return]


# bitsandbytes
#
#     4 bits  x [N/2 bytes], x.absmax [N/B], x.quant_map [16], x.quant_state.bitsandbytes__nf4 (JSON: shape, B, dtype)
#             nested: x.absmax are bytes, x.nested_quant_map [256], x.nested_absmax [N/B/256]
#     8 bits  x.weight int8 [R, C], x.SCB [R]
#
# N numbers in blocks of B, two codes a byte, the first one in the high bits. Source: bitsandbytes'
# `functional.dequantize_4bit` and `int8_vectorwise_dequant` (CPU kernels); this gives their bits.

_STATE = ".quant_state.bitsandbytes__"
_OF_127 = 7.874015718698502e-3
"""1 / 127, as bitsandbytes writes it."""


def _four_bits(parts: Mapping[str, TensorFile]) -> ComputedTensor:
    """Return a weight in 4 bits.

    Args:
        parts: tensors by the ends of their names: ``, `absmax`, `quant_map`, `state`, ...
    """
    state: dict[str, Any] = json.loads(bytes(parts["state"][...].tolist()))
    shape, each = list(state["shape"]), int(state["blocksize"])
    count, dtype = math.prod(shape), getattr(torch, state["dtype"])

    def make(part: Part) -> Tensor:
        octets = parts[""][...].reshape(-1).view(torch.uint8)
        codes = torch.stack((octets >> 4, octets & 15), -1).flatten()[:count]
        largest = parts["absmax"][...].reshape(-1)
        if "nested_absmax" in parts:
            outer = parts["nested_absmax"][...].repeat_interleave(int(state["nested_blocksize"]))
            factors = parts["nested_quant_map"][...][largest.long()] * outer[: len(largest)]
            largest = factors + float(state["nested_offset"])
        made = parts["quant_map"][...][codes.int()].mul_(largest.float().repeat_interleave(each)[:count])
        return made.view(shape).to(dtype)[part]

    return ComputedTensor(shape, {"bfloat16": "BF16", "float16": "F16"}.get(state["dtype"], "F32"), make)


def join_bnb(tensors: Mapping[str, TensorFile]) -> dict[str, TensorFile]:
    """Join the tensors of each weight in 4 or 8 bits; return a checkpoint's weights by name.

    Raises:
        ExpertcastError: a weight lacks its tables or scales.
    """
    joined, used = dict(tensors), set[str]()
    for name, tensor in tensors.items():
        if _STATE in name:
            weight = name.partition(_STATE)[0]
            needed = {"": weight, **{key: f"{weight}.{key}" for key in ("absmax", "quant_map")}, "state": name}
            nested = {key: f"{weight}.{key}" for key in ("nested_absmax", "nested_quant_map")}
            if missing := [each for each in needed.values() if each not in tensors]:
                raise ExpertcastError(f"the checkpoint has no {missing[0]}: it is incomplete")
            found = {**needed, **{key: each for key, each in nested.items() if each in tensors}}
            joined[weight] = _four_bits({key: tensors[each] for key, each in found.items()})
            used |= set(found.values()) - {weight}
        elif name.endswith(".weight") and tensor.get_dtype() == "I8":
            stem = name.removesuffix(".weight")
            if (scales := tensors.get(f"{stem}.SCB")) is None:
                raise ExpertcastError(f"the checkpoint has no {stem}.SCB: it is incomplete")
            joined[name] = _eight_bits(tensor, scales)
            used |= {f"{stem}.SCB", f"{stem}.weight_format"}
    return {name: tensor for name, tensor in joined.items() if name not in used}


def _eight_bits(codes: TensorFile, scales: TensorFile) -> ComputedTensor:
    def make(part: Part) -> Tensor:
        return codes[...].float().mul_(scales[...].float().view(-1, 1)).mul_(_OF_127)[part]

    return ComputedTensor(codes.get_shape(), "F32", make)
