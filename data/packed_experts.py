"""Experts in 4 or 8 bits per weight: matrices of codes and scales, multiplied by torch's own kernels.

    weight = scale * code + minimum        inputs of one output that share scale and minimum are a group

A packed module holds these parameters in place of each matrix `name` [E, N, I]:

    name_codes    uint8 [E, N, I/2], in 8 bits [E, 2, N, I/2]: high halves, low halves; in the kernel's order
    name_scales   bf16 [E, J, N, 2]: scale and zero of each group, weight = scale * (code - 8) + zero
                  bf16 [E, J, N]: scales alone, where all zeros are 0 (4 bits, symmetric)

or, in a form that no kernel multiplies by, `name_codes` uint8 [E, bytes]: the checkpoint's own tensors.

The kernel multiplies by 4-bit codes in bf16. 8 bits are two products, 16 * high + low. Biases stay as they are.

E experts (or slots), N outputs, I inputs, G inputs in a group, J = I / G groups, P rows, D and F sizes of a row.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from types import EllipsisType, MethodType
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import MoEView

GROUPS = (256, 128, 64, 32)
"""Sizes of groups that torch's kernels take."""
CODES, SCALES = "_codes", "_scales"
_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
WIDE = torch.bfloat16 if _ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
"""Dtype of products with expanded weights: bf16 where oneDNN multiplies in it, else float32, which rounds less."""
_CUDA = "cuda"
"""Device that orders codes for CUDA's kernel."""
MANY_ROWS = {4: 384, 8: 112} if torch.bfloat16 == WIDE else {4: 64, 8: 32}
"""Rows of one expert, by bits, from which expanding its weights takes less time; fixed for a processor, since the
choice changes bits. Measured: benchmarks/packed.md."""

# Codes and scales of one matrix


MIDDLE = {4: 8, 8: 136}
"""The code that stands for a group's zero, by bits."""


class Coding(NamedTuple):
    """Number of bits, size of groups and symmetry of a matrix's codes."""

    bits: int
    """4 or 8."""
    group: int
    """G"""
    symmetric: bool
    """Whether every zero is 0."""

    def __str__(self) -> str:
        return f"int{self.bits}, groups of {self.group}, {'symmetric' if self.symmetric else 'with zeros'}"

    @classmethod
    def over(cls, codings: Iterable[Coding]) -> Coding:
        """Return the coding with the most bits and the smallest groups: it represents all of them exactly."""
        bits, groups, symmetric = zip(*codings, strict=True)
        return cls(max(bits), min(groups), all(symmetric))

    @classmethod
    def within(cls, bits: int, group: int, symmetric: bool) -> Coding | None:
        """Return the coding with groups split to a size that the kernel takes; None if there is none."""
        found = next((each for each in GROUPS if group % each == 0), None)
        return None if found is None or bits not in MIDDLE else cls(bits, found, symmetric)


@dataclass(frozen=True, slots=True)
class Coded:
    """Matrices [..., N, I] as unsigned codes."""

    bits: int
    """4 or 8."""
    codes: Tensor
    """uint8 [..., N, I]"""
    scales: Tensor
    """float32 [..., N, J]"""
    zeros: Tensor | None
    """float32 [..., N, J], weight = scale * (code - middle) + zero; None: all zeros are 0."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the codes."""
        return self.codes.shape

    def __getitem__(self, part: slice | EllipsisType | Tensor | None) -> Coded:
        return Coded(self.bits, self.codes[part], self.scales[part], None if self.zeros is None else self.zeros[part])

    @property
    def mT(self) -> Coded:
        """The transposed matrices [..., I, N]."""
        return Coded(self.bits, self.codes.mT, self.scales.mT, None if self.zeros is None else self.zeros.mT)

    def expanded(self) -> Tensor:
        """Return the weights, float32 [..., N, I]."""
        codes = self.codes.to(torch.int16) - MIDDLE[self.bits]
        weights = torch.unflatten(codes, -1, (self.scales.shape[-1], -1)) * self.scales.unsqueeze(-1)
        if self.zeros is not None:
            weights += self.zeros.unsqueeze(-1)
        return weights.flatten(-2)

    def fitted(self, coding: Coding) -> Coded:
        """Return the same weights in a coding with at least as many bits and no larger groups."""
        codes, scales, zeros = self.codes, self.scales, self.zeros
        if self.bits < coding.bits:
            codes = codes + (MIDDLE[coding.bits] - MIDDLE[self.bits])
        if zeros is None and not coding.symmetric:
            zeros = torch.zeros_like(scales)
        repeats = codes.shape[-1] // scales.shape[-1] // coding.group
        if repeats > 1:
            scales = scales.repeat_interleave(repeats, -1)
            zeros = None if zeros is None else zeros.repeat_interleave(repeats, -1)
        return Coded(coding.bits, codes, scales, zeros)


def rounded(weights: Tensor, bits: int, group: int) -> Coded:
    """Round weights [..., N, I] of any float dtype to the nearest code.

    4 bits are symmetric: a group's weight of largest magnitude becomes code 0, which stands for -8, whatever its sign;
    so scales may be negative, and every code is used. 8 bits divide a group's range evenly. Scales and zeros are
    rounded to bf16 first.
    """
    groups = torch.unflatten(weights.float(), -1, (-1, group))
    zeros = None
    if bits == 4:
        extreme = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))
        scales = (extreme / -8).bfloat16().float()
    else:
        low, high = torch.aminmax(groups, dim=-1, keepdim=True)
        scales = ((high - low) / 255).bfloat16().float()
        zeros = ((low + MIDDLE[8] * scales) / 17).bfloat16().float() * 17  # both halves of a code take the zero
        groups = groups - zeros
    divisors = torch.where(scales == 0, torch.ones_like(scales), scales)
    codes = (groups / divisors).round_().add_(MIDDLE[bits]).clamp_(0, (1 << bits) - 1).to(torch.uint8)
    return Coded(bits, codes.flatten(-2), scales.squeeze(-1), None if zeros is None else zeros.squeeze(-1))


@dataclass(frozen=True, slots=True)
class PackedForm:
    """One matrix of every expert as codes and scales in the kernel's order.

    Raises:
        ExpertcastError: the kernel does not take a matrix of this shape or coding.
    """

    coding: Coding
    outputs: int
    """N"""
    inputs: int
    """I"""
    device: str = "cpu"
    """`cpu` or `cuda`: the device whose kernel reads the codes, which lie in another order for each."""

    def __post_init__(self) -> None:
        bits, group, _ = self.coding
        if self.outputs % 16 or self.inputs % group or group not in GROUPS or bits not in MIDDLE:
            raise ExpertcastError(
                f"a matrix of {self.outputs} outputs and {self.inputs} inputs cannot be packed in {bits} bits by "
                f"groups of {group}: outputs must be a multiple of 16, inputs of the group, the group 32 to 256; "
                "give experts='expanded'"
            )

    def __str__(self) -> str:
        return str(self.coding) if self.device == "cpu" else f"{self.coding}, for {self.device}"

    def parts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of the parameters of one expert's matrix, by the end of their names."""
        halves = (self.outputs, self.inputs // 2)
        groups = (self.inputs // self.coding.group, self.outputs)
        return {
            CODES: ((2, *halves) if self.coding.bits == 8 else halves, torch.uint8),
            SCALES: (groups if self.coding.symmetric else (*groups, 2), torch.bfloat16),
        }

    @property
    def nbytes(self) -> int:
        """Bytes of one expert's parts."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.parts().values())

    def encode(self, matrices_ENI: Coded, codes: Tensor, scales: Tensor) -> None:
        """Write some experts' matrices to codes and scales [E, ...] on any device."""
        fitted, pack = matrices_ENI.fitted(self.coding), _pack_cuda if self.device == "cuda" else _pack
        if fitted.bits == 8:
            pack(fitted.codes >> 4, codes[:, 0])
            pack(fitted.codes & 15, codes[:, 1])
        else:
            pack(fitted.codes, codes)
        scale_EJN = fitted.scales.mT
        if fitted.zeros is None:
            scales.copy_(scale_EJN)
            return
        scales[..., 0].copy_(scale_EJN)
        # both halves of 8 bits take the same zero, the high ones 16 times
        scales[..., 1].copy_(fitted.zeros.mT / (1 if fitted.bits == 4 else 17))

    def multiply(self, rows_PI: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        """Multiply bf16 rows [P, I] by one expert's matrix, with sums in float32; return bf16 [P, N].

        Rows of another dtype are rounded to bf16 first.
        """
        rows_PI, bits = rows_PI.bfloat16(), self.coding.bits
        if len(rows_PI) >= MANY_ROWS[bits] and self.device == "cpu":
            return self._multiply_expanded(rows_PI.to(WIDE), codes, scales)
        pairs = _pairs(scales) if self.coding.symmetric else scales
        if bits == 4:
            return self.product(rows_PI, codes, pairs)
        return self.product(rows_PI * 16, codes[0], pairs).add_(self.product(rows_PI, codes[1], pairs))

    def product(self, rows_PI: Tensor, codes: Tensor, pairs: Tensor) -> Tensor:
        """Multiply bf16 rows [P, I] by one matrix in 4 bits, with scales and zeros `pairs` bf16 [J, N, 2].

        Returns:
            bf16 [P, N].
        """
        if self.device == "cuda":
            words = codes.view(torch.int32).view(self.outputs // 8, -1, 32, _tiles(self.inputs) // 2)
            return torch._weight_int4pack_mm(rows_PI.contiguous(), words, self.coding.group, pairs)
        return torch._weight_int4pack_mm_for_cpu(rows_PI, codes, self.coding.group, pairs)

    def _multiply_expanded(self, rows_PI: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        output_PN = torch.empty(len(rows_PI), self.outputs, dtype=torch.bfloat16)
        for blocks in _parts(self.outputs, self.inputs):
            taken_PM = torch.empty(len(rows_PI), blocks.last - blocks.first, dtype=rows_PI.dtype)
            for columns, weights_IC in self._expanded(blocks, codes, scales):
                taken_PM[:, columns] = rows_PI @ weights_IC.to(rows_PI.dtype)
            blocks.put(taken_PM, output_PN[:, blocks.first : blocks.last])
        return output_PN

    def expand(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the weights bf16 [N, I] of one expert's matrix on the CPU, from parts on any device."""
        if self.device == "cuda":  # its kernel alone knows the order: multiply the identity
            identity_II = torch.eye(self.inputs, dtype=torch.bfloat16, device=_CUDA)
            return self.multiply(identity_II, codes.to(_CUDA), scales.to(_CUDA)).T.cpu()
        weights_NI = torch.empty(self.outputs, self.inputs, dtype=torch.bfloat16)
        for blocks in _parts(self.outputs, self.inputs):
            taken_IM = torch.empty(self.inputs, blocks.last - blocks.first, dtype=torch.bfloat16)
            for columns, weights_IC in self._expanded(blocks, codes, scales):
                taken_IM[:, columns] = weights_IC
            ordered_IM = torch.empty_like(taken_IM)
            blocks.put(taken_IM, ordered_IM)
            weights_NI[blocks.first : blocks.last] = ordered_IM.T
        return weights_NI

    def _expanded(self, blocks: _Blocks, codes: Tensor, scales: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Iterate over the weights of some blocks of one expert's matrix: columns of M, and float32 [I, columns].

        Outputs M are in the order of :meth:`_Blocks.take`. The next weights overwrite the memory of those before: they
        lie in a core's cache when they are multiplied by.
        """
        bits, group, symmetric = self.coding
        scale_JN, zero_JN = (scales.float(), None) if symmetric else scales.float().unbind(-1)
        if bits == 8:  # a signed byte is the code less 128, not 136
            zero_JN = -8 * scale_JN if zero_JN is None else 17 * zero_JN - 8 * scale_JN
        else:
            scale_JN = scale_JN / 16
        scale_J1M = blocks.take(scale_JN).unsqueeze(1)
        zero_J1M = None if zero_JN is None else blocks.take(zero_JN).unsqueeze(1)
        signed_JGM = torch.unflatten(blocks.signed(codes, self.inputs), 0, (-1, group))
        most = max(_PIECE // self.inputs, 16)
        for first in range(0, signed_JGM.shape[2], most):
            columns = slice(first, min(first + most, signed_JGM.shape[2]))
            weights_JGC = _scratch("weights", (*signed_JGM.shape[:2], columns.stop - first), torch.float32)
            weights_JGC.copy_(signed_JGM[..., columns])
            if zero_J1M is None:
                weights_JGC.mul_(scale_J1M[..., columns])
            else:
                torch.addcmul(zero_J1M[..., columns], weights_JGC, scale_J1M[..., columns], out=weights_JGC)
            yield columns, weights_JGC.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class ShippedForm:
    """One matrix of every expert of a layer as bytes of the checkpoint, expanded for each product.

    Products have the bits of the expanded model's.
    """

    outputs: int
    """N"""
    inputs: int
    """I"""
    nbytes: int
    """Bytes of one expert."""
    transposed: bool
    """Whether the parameter is [I, N]."""
    parameter: Callable[[Tensor], Tensor]
    """Computes the parameter [N, I] or [I, N] of such bytes, uint8 [nbytes], in the model's dtype."""

    def __str__(self) -> str:
        return f"as shipped, {8 * self.nbytes / self.outputs / self.inputs:.2f} bits, expanded for each product"

    def parts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of the parameters of one expert's matrix, by the end of their names."""
        return {CODES: ((self.nbytes,), torch.uint8)}

    def multiply(self, rows_PI: Tensor, octets: Tensor) -> Tensor:
        """Multiply rows [P, I] by one expert's matrix, in the model's dtype; return [P, N]."""
        weights_IN = self.expand(octets).T
        return torch.mm(rows_PI.to(weights_IN.dtype), weights_IN)

    def expand(self, octets: Tensor) -> Tensor:
        """Return the weights [N, I] of one expert's matrix in the model's dtype."""
        parameter = self.parameter(octets)
        return parameter.T if self.transposed else parameter


Form = PackedForm | ShippedForm


_HELD = threading.local()
"""Memory of each thread that calls of its functions overwrite. Fresh memory would cost page faults."""


def _pairs(scales: Tensor) -> Tensor:
    """Return scales and zeros bf16 [J, N, 2] of a symmetric form, in memory that the next call overwrites."""
    held: dict[tuple[torch.Size, torch.device], tuple[Tensor, Tensor]] = _HELD.__dict__.setdefault("pairs", {})
    key = scales.shape, scales.device
    if key not in held:
        with torch.inference_mode(False):
            octets = torch.empty(scales.shape, dtype=torch.int32, device=scales.device)
            held[key] = octets, torch.unflatten(octets.view(torch.bfloat16), -1, (-1, 2))
    octets, pairs = held[key]
    # two bf16 are one int32: a scale's bits in its low half, and 0 in its high one
    octets.copy_(scales.view(torch.uint16))
    return pairs


def _scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return memory of a name and one dtype on the CPU, which the next call with this name returns again."""
    held: dict[str, Tensor] = _HELD.__dict__.setdefault("scratch", {})
    count = math.prod(shape)
    if name not in held or held[name].numel() < count:
        with torch.inference_mode(False):
            held[name] = torch.empty(count, dtype=dtype)
    return held[name][:count].view(shape)


def _tiles(inputs: int) -> int:
    """Return the tiles of 16 inputs that the CUDA kernel reads at a time."""
    return next(tiles for tiles in (8, 4, 2) if inputs % (16 * tiles) == 0)


def _pack_cuda(codes_ENI: Tensor, packed: Tensor) -> None:
    """Write 4-bit codes in the order of CUDA's kernel, uint8 [E, N, I/2]; torch orders them on the device."""
    for codes_NI, octets in zip(codes_ENI, packed, strict=True):
        pairs = codes_NI[:, ::2] << 4 | codes_NI[:, 1::2]  # the first code in the high bits
        words = torch._convert_weight_to_int4pack(pairs.to(_CUDA).contiguous(), _tiles(codes_NI.shape[1]))
        octets.copy_(words.view(torch.uint8).view_as(octets))


# torch's CPU kernel orders codes in blocks of outputs; within a block by input, with two outputs in a byte


def _pack(codes_ENI: Tensor, packed: Tensor) -> None:
    """Write 4-bit codes in the order of the CPU's kernel, uint8 [E, N, I/2]."""
    inputs = codes_ENI.shape[2]
    for blocks in _parts(codes_ENI.shape[1], inputs, most=codes_ENI.shape[1]):
        low, high = _order(blocks.rows)
        rows_EBRI = torch.unflatten(codes_ENI[:, blocks.first : blocks.last], 1, (-1, blocks.rows))
        blocks.octets(packed, inputs).copy_((rows_EBRI[:, :, high] << 4).bitwise_or_(rows_EBRI[:, :, low]).mT)


class _Blocks(NamedTuple):
    """Neighbouring blocks of the kernel's order: B blocks of R outputs, M outputs in all; H = R / 2."""

    first: int
    last: int
    rows: int
    """R"""

    def octets(self, packed_ENH: Tensor, inputs: int) -> Tensor:
        """Return the blocks' bytes [E, B, I, H]."""
        own = packed_ENH.flatten(1)[:, self.first * inputs // 2 : self.last * inputs // 2]
        return torch.unflatten(own, 1, (-1, inputs, self.rows // 2))

    def signed(self, codes: Tensor, inputs: int) -> Tensor:
        """Return int8 [I, M]: in 4 bits 16 times the code less 8, in 8 bits the code less 128.

        Outputs are in the order of :meth:`take`, and the next call overwrites them.
        """
        halves = self.octets(codes.view(-1, codes.shape[-2], codes.shape[-1]), inputs)
        shape = inputs, (self.last - self.first) // 2
        octets = [_scratch(f"octets {place}", shape, torch.uint8) for place in range(len(halves))]
        word = torch.complex128 if self.rows % 32 == 0 else torch.complex64  # torch moves 16 or 8 bytes at a time
        for half_BIH, octets_IC in zip(halves, octets, strict=True):
            octets_IBH = torch.unflatten(octets_IC, 1, (-1, self.rows // 2))
            octets_IBH.view(word).copy_(half_BIH.view(word).transpose(0, 1))
        signed_I2C = _scratch("signed", (inputs, 2, shape[1]), torch.uint8)
        low_IC, high_IC = signed_I2C.unbind(1)
        octets[0].bitwise_xor_(0x88)  # a half's upper bit becomes its sign
        torch.bitwise_left_shift(octets[0], 4, out=low_IC)
        torch.bitwise_and(octets[0], 0xF0, out=high_IC)
        if len(octets) == 2:
            high_IC.bitwise_or_(torch.bitwise_right_shift(octets[1], 4, out=octets[0]))
            low_IC.bitwise_or_(octets[1].bitwise_and_(15))
        return signed_I2C.view(torch.int8).flatten(1)

    def take(self, each_JN: Tensor) -> Tensor:
        """Return the blocks' outputs [J, M]: those in the low halves of bytes, then those in the high halves."""
        blocks_JBR = torch.unflatten(each_JN[:, self.first : self.last], 1, (-1, self.rows))
        return torch.stack([blocks_JBR[:, :, half] for half in _order(self.rows)], 1).flatten(1)

    def put(self, taken_PM: Tensor, each_PM: Tensor) -> None:
        """Write the blocks' outputs, in the order of :meth:`take`, in their own order."""
        taken_P2BH = taken_PM.view(len(taken_PM), 2, -1, self.rows // 2)
        blocks_PBR = torch.unflatten(each_PM, 1, (-1, self.rows))
        for place, half in enumerate(_order(self.rows)):
            blocks_PBR[:, :, half] = taken_P2BH[:, place]


_PART, _PIECE = 1 << 22, 1 << 19
"""Weights whose codes are unpacked at once, in at most 16 MB, and weights that are expanded at once, in 2 MB."""


def _parts(outputs: int, inputs: int, most: int | None = None) -> Iterator[_Blocks]:
    """Iterate over a matrix's blocks, in parts of at most `most` outputs. The last outputs form a smaller block."""
    rows = 64 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 32
    whole = outputs - outputs % rows
    step = max(rows, (most or _PART // inputs) // rows * rows)
    for first in range(0, whole, step):
        yield _Blocks(first, min(first + step, whole), rows)
    if whole < outputs:
        yield _Blocks(whole, outputs, outputs - whole)


@cache
def _order(rows: int) -> tuple[slice, slice]:
    """Return the outputs of a block in the low and in the high halves of its bytes, found by torch's own packing."""
    row_RI = torch.arange(rows, dtype=torch.int32)[:, None].expand(rows, 32).contiguous()
    sixteens, ones = (torch._convert_weight_to_int4pack_for_cpu(each, 1) for each in (row_RI >> 4, row_RI & 15))
    first, second = sixteens.reshape(32, -1)[0].int(), ones.reshape(32, -1)[0].int()
    return _run((first & 15) * 16 + (second & 15)), _run((first >> 4) * 16 + (second >> 4))


def _run(numbers: Tensor) -> slice:
    """Return evenly spaced numbers as a slice, which torch reads faster."""
    first, *_, last = numbers.tolist()
    step = (last - first) // (len(numbers) - 1)
    assert numbers.tolist() == list(range(first, last + 1, step))
    return slice(first, last + 1, step)


# Experts as groups of rows

Groups: TypeAlias = Sequence[tuple[int, int]]
"""(expert, number of its rows), in the order of the rows."""
_COMBINED = 1024
"""Tokens whose experts' outputs are weighted at once."""


def run_groups(
    outputs: Callable[[Tensor, Groups, Tensor], Tensor], hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor,
    order_P: Tensor | None = None, ids: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Return the weighted sum [T, D] of experts' outputs.

    Args:
        outputs: computes [P, D] of rows [P, D], their groups and their experts [P].
        hidden_TD, ids_TK, weights_TK: arguments of transformers' experts functions.
        order_P: order of the token-expert pairs, those of one expert adjacent; None: that of torch's sort, or for one
            token that of its experts.
        ids: `ids_TK`, flat, where the host has them.
    """
    tokens, top_k = ids_TK.shape
    ids_P = ids_TK.reshape(-1)
    if not tokens:
        return torch.empty_like(hidden_TD)
    if tokens == 1 and order_P is None:
        groups = [(expert, 1) for expert in (ids_P.tolist() if ids is None else ids)]
        return combine(outputs(hidden_TD.expand(top_k, -1), groups, ids_P), weights_TK, hidden_TD.dtype)
    if order_P is None:
        order_P = torch.sort(ids_P).indices
    sorted_P = ids_P[order_P]
    groups = [(expert, len(list(rows))) for expert, rows in groupby(sorted_P.tolist())]
    sorted_PD = outputs(hidden_TD[order_P // top_k], groups, sorted_P)
    output_PD = torch.empty_like(sorted_PD)
    output_PD[order_P] = sorted_PD
    return combine(output_PD, weights_TK, hidden_TD.dtype)


def products(rows_PI: Tensor, weight_SIN: Tensor, groups: Groups) -> Tensor:
    """Return the products [P, N] of rows with their groups' weights; the rows of a group are adjacent."""
    output_PN = rows_PI.new_empty(rows_PI.shape[0], weight_SIN.shape[-1])
    start = 0
    for slot, count in groups:
        end = start + count
        torch.mm(rows_PI[start:end], weight_SIN[slot], out=output_PN[start:end])
        start = end
    return output_PN


def activated(experts: Any, rows_PN: Tensor) -> Tensor:
    """Apply the gate or activation between the two projections, by the experts' own code."""
    made: Tensor = experts._apply_gate(rows_PN) if experts.has_gate else experts.act_fn(rows_PN)
    return made


def combine(output_PD: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weighted sum over K with the products and the reduction of transformers' kernels, for some tokens at a
    time."""
    tokens, top_k = weights_TK.shape
    if tokens > _COMBINED:
        parts = zip(torch.split(output_PD, _COMBINED * top_k), torch.split(weights_TK, _COMBINED), strict=True)
        return torch.cat([combine(*part, dtype) for part in parts])
    weighted_PD = output_PD * weights_TK.reshape(-1, 1)
    return weighted_PD.view(tokens, top_k, output_PD.shape[1]).sum(dim=1).to(dtype)


# A module of packed experts


class PackedMatrix:
    """Packed matrices in place of a parameter [E, N, I] or [E, I, N].

    Args:
        experts: the module whose parameters hold the parts.
        name: the parameter's name.
        form: the form of the matrices.
        transposed: whether the parameter was [E, I, N].
        dtype: the parameter's and the products' dtype.
    """

    def __init__(self, experts: nn.Module, name: str, form: Form, transposed: bool, dtype: torch.dtype) -> None:
        self._own, self.dtype = experts._parameters, dtype
        self.form, self.transposed = form, transposed
        self.names = [name + end for end in form.parts()]
        """Names of the parameters that hold the parts."""

    def parts(self, own: Mapping[str, Tensor | None] | None = None) -> list[Tensor]:
        """Return the parts in the form's order: of all experts here, or from other parameters by name."""
        own = self._own if own is None else own
        return [cast(Tensor, own[name]) for name in self.names]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the replaced parameter."""
        sizes = (self.form.outputs, self.form.inputs)
        return (len(self.parts()[0]), *(sizes[::-1] if self.transposed else sizes))

    @property
    def device(self) -> torch.device:
        """Device of the parts."""
        return self.parts()[0].device

    def products(self, rows_PI: Tensor, groups: Groups) -> Tensor:
        """Multiply each group's rows by its expert's matrix; return [P, N] in the rows' dtype."""
        parts = self.parts()
        outputs = [
            self.form.multiply(own_RI, *[part[expert] for part in parts])
            for (expert, _), own_RI in zip(groups, torch.split(rows_PI, [count for _, count in groups]), strict=True)
        ]
        return torch.cat(outputs).to(rows_PI.dtype)


Forms = Mapping[str, Form]
"""Forms by the parameter's name."""


def matrices(experts: nn.Module, count: int) -> dict[str, nn.Parameter]:
    """Return a module's matrices [E, N, I] by name."""
    return {
        name: parameter
        for name, parameter in experts.named_parameters(recurse=False)
        if parameter.dim() == 3 and len(parameter) == count and parameter.is_floating_point()
    }


def sizes_of(experts: nn.Module, matrix: Tensor) -> tuple[int, int]:
    """Return the outputs N and inputs I of one of a module's matrices [E, N, I] or [E, I, N]."""
    first, second = matrix.shape[1:]
    return (second, first) if getattr(experts, "is_transposed", False) else (first, second)


def form_for(experts: nn.Module, matrix: Tensor, bits: int, device: str = "cpu") -> PackedForm:
    """Return the form of one of a module's matrices once it is rounded to 4 or 8 bits.

    4 bits are symmetric, in groups of 128 inputs; 8 bits have zeros, and groups of 64: or the largest group below that
    divides the inputs. `device` is the type of the one that computes.
    """
    outputs, inputs = sizes_of(experts, matrix)
    most = 128 if bits == 4 else 64
    group = next((each for each in GROUPS if each <= most and inputs % each == 0), GROUPS[-1])
    return PackedForm(Coding(bits, group, bits == 4), outputs, inputs, device)


def down_projection(experts: nn.Module) -> Tensor | PackedMatrix:
    """Return a module's down projection, packed or not."""
    return experts.down_proj  # type: ignore[return-value]


def weight_bits(view: MoEView) -> float:
    """Return the bits per weight of the experts' matrices of all layers, scales included."""
    forms = [matrix.form for layer in view for matrix in packed_matrices(layer.experts).values()]
    if not forms:
        return 8.0 * down_projection(view[0].experts).dtype.itemsize
    return 8 * sum(form.nbytes for form in forms) / sum(form.outputs * form.inputs for form in forms)


def make_packed(experts: nn.Module, count: int, forms: Forms) -> None:
    """Replace a module's matrices by empty packed ones on the same device.

    The module then runs :func:`run_experts` in place of transformers' functions, whichever the model names.
    """
    if forms:
        experts.forward = MethodType(_run_named, experts)
    transposed = bool(getattr(experts, "is_transposed", False))
    for name, form in forms.items():
        matrix = experts._parameters.pop(name)
        assert matrix is not None
        for end, (shape, dtype) in form.parts().items():
            empty = torch.empty(count, *shape, dtype=dtype, device=matrix.device)
            experts.register_parameter(name + end, nn.Parameter(empty, requires_grad=False))
        experts.__dict__[name] = PackedMatrix(experts, name, form, transposed, matrix.dtype)


def _run_named(experts: nn.Module, *args: Any) -> Tensor:
    """Run the function that the model names; :func:`run_experts` in place of transformers' own."""
    from expertcast.compat import ALL_EXPERTS_FUNCTIONS

    name = experts.config._experts_implementation  # type: ignore[union-attr]
    named = ALL_EXPERTS_FUNCTIONS.get_interface(name, run_experts)
    output: Tensor = (run_experts if named.__module__.startswith("transformers.") else named)(experts, *args)
    return output


def run_experts(
    experts: Any, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, order_P: Tensor | None = None,
    ids: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Return the output [T, D] of experts, or of slots in place of experts, with one product per group of rows.

    Args:
        experts: a module, packed or not; then the products are those of transformers' grouped kernel on the CPU.
        hidden_TD, ids_TK, weights_TK, order_P, ids: as for :func:`run_groups`.
    """
    up_name = "gate_up_proj" if experts.has_gate else "up_proj"

    def project(name: str, rows_PI: Tensor, groups: Groups, ids_P: Tensor) -> Tensor:
        packed, weight = experts.__dict__.get(name), experts._parameters.get(name)
        output_PN: Tensor
        if packed is not None:
            output_PN = packed.products(rows_PI, groups)
        else:
            output_PN = products(rows_PI, weight if experts.is_transposed else weight.transpose(-2, -1), groups)
        return output_PN.add_(experts._parameters[f"{name}_bias"][ids_P]) if experts.has_bias else output_PN

    def outputs(rows_PD: Tensor, groups: Groups, ids_P: Tensor) -> Tensor:
        inner_PI = activated(experts, project(up_name, rows_PD, groups, ids_P))
        output_PD = project("down_proj", inner_PI, groups, ids_P)
        return experts.post_expert_norm(output_PD) if experts.has_post_expert_norm else output_PD

    return run_groups(outputs, hidden_TD, ids_TK, weights_TK, order_P, ids)


def is_packed(experts: nn.Module) -> bool:
    """Return whether a module's matrices are packed."""
    return isinstance(experts.__dict__.get("down_proj"), PackedMatrix)


def packed_matrices(experts: nn.Module) -> dict[str, PackedMatrix]:
    """Return a module's packed matrices by name; empty for an expanded module."""
    return {name: each for name, each in experts.__dict__.items() if isinstance(each, PackedMatrix)}


def write_packed(
    experts: nn.Module, name: str, matrices_EDF: Tensor | Coded, parts: Mapping[str, Tensor], first: int = 0
) -> None:
    """Pack matrices of some experts.

    Args:
        experts, name: module and name of the matrices.
        matrices_EDF: [E, N, I] or [E, I, N] as the module has them, in any float dtype or coded, on the CPU.
        parts: parameters of all experts by name, which are written.
        first: number of the first expert.
    """
    own = packed_matrices(experts)[name]
    form, matrices_ENI = own.form, matrices_EDF.mT if own.transposed else matrices_EDF
    assert isinstance(form, PackedForm)
    if isinstance(matrices_ENI, Tensor):
        matrices_ENI = rounded(matrices_ENI, form.coding.bits, form.coding.group)
    last = first + len(matrices_ENI.codes)
    form.encode(matrices_ENI, *(part[first:last] for part in own.parts(parts)))


def expanded_experts(experts: nn.Module, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return one expert's parameters by name, without the expert dimension and with packed ones expanded."""
    packed = packed_matrices(experts)
    held = {name for matrix in packed.values() for name in matrix.names}
    plain = {name: part for name, part in parts.items() if name not in held}
    for name, matrix in packed.items():
        weights = matrix.form.expand(*(part.cpu() for part in matrix.parts(parts)))
        plain[name] = weights.T if matrix.transposed else weights
    return plain


def pack_module(experts: nn.Module, count: int, bits: int, device: str = "cpu") -> None:
    """Round a module's matrices and hold them packed for a type of device, one matrix after another.

    Raises:
        ExpertcastError: the kernel does not take one of them; the module is unchanged.
    """
    own = matrices(experts, count)
    forms = {name: form_for(experts, matrix, bits, device) for name, matrix in own.items()}
    for name, matrix in own.items():
        make_packed(experts, count, {name: forms[name]})
        parts = {full: each.data for full, each in experts._parameters.items() if each is not None}
        step = at_once(matrix)
        for first in range(0, count, step):
            write_packed(experts, name, matrix.detach()[first : first + step], parts, first)


def at_once(matrices_EDF: Tensor) -> int:
    """Return the number of experts packed in one call; larger numbers are no faster and take more memory."""
    return max(1, 2**22 // matrices_EDF[0].numel())


def iterate_plain(experts: nn.Module, count: int) -> Iterator[dict[str, Tensor]]:
    """Iterate over the experts' parameters by name, with packed ones expanded."""
    own = {
        name: each.detach()
        for name, each in experts.named_parameters(recurse=False)
        if each.dim() and len(each) == count
    }
    for expert in range(count):
        yield expanded_experts(experts, {name: each[expert] for name, each in own.items()})
