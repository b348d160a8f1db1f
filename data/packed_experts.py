"""Experts of 4 or 8 bits a weight: matrices as codes and scales, multiplied as they lie by torch's own kernels.

    weight = scale * code + minimum        a group of inputs of one output shares scale and minimum

A module that is packed holds, in place of each matrix `name` [E, N, I]:

    name_codes    uint8 [E, N, I/2], of 8 bits [E, 2, N, I/2]: high halves, low halves; ordered as the kernel reads them
    name_scales   bf16 [E, J, N, 2]: scale and zero of each group, weight = scale * (code - 8) + zero
                  bf16 [E, J, N]: scale alone, where all zeros are 0 (4 bits, symmetric)

The kernel multiplies by 4-bit codes in bf16. 8 bits are two products, 16 * high + low. Biases stay as they are.

E experts (or slots), N outputs, I inputs, G inputs in a group, J = I / G groups, P rows, D and F a row's sizes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from expertcast.predictors.messages import ExpertcastError, Json

GROUPS = (256, 128, 64, 32)
"""What torch's kernels take."""
CODES, SCALES = "_codes", "_scales"
MANY_ROWS = 192
"""From so many rows on an expert's weights are expanded and multiplied in bf16, which then takes less time."""

# Codes and scales of one matrix


@dataclass(frozen=True, slots=True)
class Coded:
    """A matrix [..., N, I] as unsigned codes of 4 or 8 bits."""

    codes: Tensor
    """uint8 [..., N, I]"""
    scales: Tensor
    """float32 [..., N, J]"""
    minima: Tensor
    """float32 [..., N, J]: the weight of code 0"""

    def expanded(self) -> Tensor:
        """float32 [..., N, I]."""
        group = self.codes.shape[-1] // self.scales.shape[-1]
        grouped = self.codes.unflatten(-1, (-1, group)).float()
        return (grouped * self.scales.unsqueeze(-1) + self.minima.unsqueeze(-1)).flatten(-2)


def rounded(weights: Tensor, bits: int, group: int) -> Coded:
    """To nearest, of weights [..., N, I] of any float dtype.

    Of 4 bits symmetric: a group's weight of largest magnitude becomes code 0, which is -8, whatever its sign; so scales
    may be negative, and no code is left unused. Of 8 bits a group's range is divided evenly.
    """
    groups = weights.float().unflatten(-1, (-1, group))
    if bits == 4:
        extreme = groups.gather(-1, groups.abs().argmax(dim=-1, keepdim=True))
        scales = (extreme / -8).bfloat16().float()
        minima = -8 * scales
    else:
        minima, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
        scales = (high - minima) / 255
    divisors = torch.where(scales == 0, torch.ones_like(scales), scales)
    codes = ((groups - minima) / divisors).round_().clamp_(0, (1 << bits) - 1).to(torch.uint8)
    return Coded(codes.flatten(-2), scales.squeeze(-1), minima.squeeze(-1))


@dataclass(frozen=True, slots=True)
class PackedForm:
    """How one matrix of every expert lies, and how it is multiplied.

    Raises:
        ExpertcastError: the kernel takes no such matrix.
    """

    bits: int
    """4 or 8."""
    group: int
    """G"""
    symmetric: bool
    """Whether every zero is 0."""
    outputs: int
    """N"""
    inputs: int
    """I"""

    def __post_init__(self) -> None:
        if self.outputs % 16 or self.inputs % self.group or self.group not in GROUPS or self.bits not in (4, 8):
            raise ExpertcastError(
                f"a matrix of {self.outputs} outputs and {self.inputs} inputs cannot be packed in {self.bits} bits by "
                f"groups of {self.group}: outputs must be a multiple of 16, inputs one of the group, 32 to 256; "
                "give experts='expanded'"
            )

    def __str__(self) -> str:
        kind = "symmetric" if self.symmetric else "with zeros"
        return f"int{self.bits}, groups of {self.group}, {kind}"

    def parts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of what holds one expert's matrix, by the end of its name."""
        halves = (self.outputs, self.inputs // 2)
        groups = (self.inputs // self.group, self.outputs)
        return {
            CODES: ((2, *halves) if self.bits == 8 else halves, torch.uint8),
            SCALES: (groups if self.symmetric else (*groups, 2), torch.bfloat16),
        }

    def encode(self, matrix: Coded, codes: Tensor, scales: Tensor) -> None:
        """Write one expert's matrix into its parts on the CPU."""
        scale_JN, minimum_JN = matrix.scales.T, matrix.minima.T
        if self.bits == 8:
            codes[0].copy_(_packed(matrix.codes >> 4))
            codes[1].copy_(_packed(matrix.codes & 15))
            zero_JN = (minimum_JN + 136 * scale_JN) / 17  # both halves take the same zero, the high ones 16 times
        else:
            codes.copy_(_packed(matrix.codes))
            zero_JN = minimum_JN + 8 * scale_JN
        scales.copy_(scale_JN if self.symmetric else torch.stack((scale_JN, zero_JN), dim=-1))

    def multiply(self, rows_PI: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        """bf16 [P, N] of bf16 rows [P, I]."""
        if len(rows_PI) >= MANY_ROWS:
            return rows_PI @ self.expand(codes, scales).T
        pairs = self._pairs(scales)
        if self.bits == 4:
            return _product(rows_PI, codes, self.group, pairs)
        return _product(rows_PI * 16, codes[0], self.group, pairs).add_(_product(rows_PI, codes[1], self.group, pairs))

    def expand(self, codes: Tensor, scales: Tensor) -> Tensor:
        """The weights bf16 [N, I] that the parts stand for."""
        scale, zero = (scales, None) if self.symmetric else scales.unbind(-1)
        code = _unpacked(codes if self.bits == 4 else codes[1], self.outputs, self.inputs).to(torch.int16)
        if self.bits == 8:
            code = code + 16 * _unpacked(codes[0], self.outputs, self.inputs).to(torch.int16)
        offset, share = (8, 1) if self.bits == 4 else (136, 17)
        weights_NJG = (code - offset).unflatten(-1, (-1, self.group)) * scale.T.float().unsqueeze(-1)
        if zero is not None:
            weights_NJG += share * zero.T.float().unsqueeze(-1)
        return weights_NJG.flatten(-2).bfloat16()

    def _pairs(self, scales: Tensor) -> Tensor:
        """bf16 [J, N, 2] as the kernel reads them; of a symmetric form in memory that the next call takes."""
        if not self.symmetric:
            return scales
        pairs = _scratch(scales.shape, scales.device)
        # two bf16 are one int32: a scale's bits in its low half, and 0 in its high one
        pairs.copy_(scales.view(torch.uint16))
        return pairs.view(torch.bfloat16).unflatten(-1, (-1, 2))


_HELD = threading.local()


def _scratch(shape: torch.Size, device: torch.device) -> Tensor:
    """int32 memory of this thread."""
    held: dict[tuple[torch.Size, torch.device], Tensor] = _HELD.__dict__.setdefault("by_shape", {})
    if (shape, device) not in held:
        held[shape, device] = torch.empty(shape, dtype=torch.int32, device=device)
    return held[shape, device]


# torch's kernel on the CPU and its order of codes: blocks of outputs; in a block input after input, two outputs a byte


def _product(rows_PI: Tensor, codes: Tensor, group: int, pairs: Tensor) -> Tensor:
    return torch._weight_int4pack_mm_for_cpu(rows_PI, codes, group, pairs)


def _packed(codes_NI: Tensor) -> Tensor:
    return torch._convert_weight_to_int4pack_for_cpu(codes_NI.int(), 1)


def _unpacked(packed: Tensor, outputs: int, inputs: int) -> Tensor:
    """uint8 [N, I] of what :func:`_packed` made."""
    block = 64 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 32
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    whole = outputs - outputs % block
    flat = packed.reshape(-1)
    for first, last, size in ((0, whole, block), (whole, outputs, outputs - whole)):
        if first == last:
            continue
        octets = flat[first * inputs // 2 : last * inputs // 2].view(-1, inputs, size // 2)
        halves = torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2).transpose(1, 2)
        codes[first:last].view(-1, size, inputs)[:, _order(size)] = halves
    return codes


@cache
def _order(size: int) -> Tensor:
    """Which output of a block of this size each half byte is of."""
    row_RI = torch.arange(size)[:, None].expand(size, 32)
    high, low = (packed.reshape(32, -1)[0] for packed in (_packed(row_RI >> 4), _packed(row_RI & 15)))
    found = torch.stack(((high & 15) * 16 + (low & 15), (high >> 4) * 16 + (low >> 4)), dim=-1)
    return found.flatten().long()


# A module of packed experts


class PackedMatrix:
    """In place of a parameter [E, N, I] or [E, I, N]: transformers' grouped kernel multiplies by it.

    Args:
        experts: the module, whose parameters hold the parts.
        name: of the parameter.
        form: how it lies.
        transposed: whether the parameter was [E, I, N].
    """

    dtype = torch.bfloat16
    """In which it is multiplied."""

    def __init__(self, experts: nn.Module, name: str, form: PackedForm, transposed: bool) -> None:
        self._own = experts._parameters
        self._codes, self._scales = name + CODES, name + SCALES
        self.form, self.transposed = form, transposed

    def parts(self) -> tuple[Tensor, Tensor]:
        """Codes and scales of all experts that are here."""
        codes, scales = self._own[self._codes], self._own[self._scales]
        assert codes is not None
        assert scales is not None
        return codes, scales

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the parameter."""
        sizes = (self.form.outputs, self.form.inputs)
        return (len(self.parts()[0]), *(sizes[::-1] if self.transposed else sizes))

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.parts()[0].device

    def data_ptr(self) -> int:
        """Of the codes."""
        return self.parts()[0].data_ptr()

    def transpose(self, *_dims: int) -> PackedMatrix:
        """Itself: it knows its outputs."""
        return self

    def products(self, rows_PI: Tensor, groups: Sequence[tuple[int, int]]) -> Tensor:
        """bf16 [P, N]: one product per group (expert, rows), the groups' rows one after another."""
        codes, scales = self.parts()
        outputs, start = [], 0
        for expert, count in groups:
            outputs.append(self.form.multiply(rows_PI[start : start + count], codes[expert], scales[expert]))
            start += count
        return (
            outputs[0]
            if len(outputs) == 1
            else torch.cat(outputs)
            if outputs
            else rows_PI.new_empty(0, self.form.outputs)
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: Json | None = None
    ) -> Tensor:
        rows_PI, weight = args[:2]
        ends = (args[2] if len(args) > 2 else (kwargs or {})["offs"]).tolist()
        groups = [(expert, end - start) for expert, (start, end) in enumerate(pairwise([0, *ends])) if end > start]
        made: Tensor = weight.products(rows_PI, groups)
        return made


Forms = Mapping[str, PackedForm]
"""By the parameter's name."""


def matrices(experts: nn.Module, count: int) -> dict[str, nn.Parameter]:
    """A module's matrices [E, N, I], by name."""
    return {
        name: parameter
        for name, parameter in experts.named_parameters(recurse=False)
        if parameter.dim() == 3 and len(parameter) == count and parameter.is_floating_point()
    }


def form_for(
    experts: nn.Module, matrix: Tensor, bits: int, group: int | None = None, symmetric: bool | None = None
) -> PackedForm:
    """Of one of a module's matrices [E, N, I].

    Args:
        experts, matrix: which.
        bits: 4 or 8.
        group: None: 128 for 4 bits and 64 for 8, or the largest below that divides the inputs.
        symmetric: None: of 4 bits.
    """
    outputs, inputs = matrix.shape[1:]
    if getattr(experts, "is_transposed", False):
        outputs, inputs = inputs, outputs
    most = 128 if bits == 4 else 64
    group = group or next((each for each in GROUPS if each <= most and inputs % each == 0), GROUPS[-1])
    return PackedForm(bits, group, bits == 4 if symmetric is None else symmetric, outputs, inputs)


def down_projection(experts: nn.Module) -> Tensor | PackedMatrix:
    """A module's down projection, packed or not."""
    return experts.down_proj  # type: ignore[return-value]


def make_packed(experts: nn.Module, count: int, forms: Forms) -> None:
    """Replace a module's matrices by packed ones, not filled, on the device of the matrices."""
    transposed = bool(getattr(experts, "is_transposed", False))
    for name, form in forms.items():
        matrix = experts._parameters.pop(name)
        assert matrix is not None
        for end, (shape, dtype) in form.parts().items():
            empty = torch.empty(count, *shape, dtype=dtype, device=matrix.device)
            experts.register_parameter(name + end, nn.Parameter(empty, requires_grad=False))
        experts.__dict__[name] = PackedMatrix(experts, name, form, transposed)


def packed_matrices(experts: nn.Module) -> dict[str, PackedMatrix]:
    """By name; none of a module that is not packed."""
    return {name: each for name, each in experts.__dict__.items() if isinstance(each, PackedMatrix)}


def write_packed(
    experts: nn.Module, name: str, matrix: Tensor | Coded, parts: Mapping[str, Tensor], expert: int
) -> None:
    """Pack one expert's matrix, given as the module has it, [N, I] or [I, N], or as its codes.

    Args:
        experts, name: the matrix's module and name.
        matrix: of any float dtype, on the CPU.
        parts: what holds all experts, by name.
        expert: whose.
    """
    own = packed_matrices(experts)[name]
    form = own.form
    if isinstance(matrix, Tensor):
        matrix = rounded(matrix.T if own.transposed else matrix, form.bits, form.group)
    form.encode(matrix, parts[name + CODES][expert], parts[name + SCALES][expert])


def expanded_experts(experts: nn.Module, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One expert's parameters by name, without the expert dimension, its packed ones expanded."""
    packed = packed_matrices(experts)
    ends = {name + end for name in packed for end in (CODES, SCALES)}
    plain = {name: part for name, part in parts.items() if name not in ends}
    for name, matrix in packed.items():
        weights = matrix.form.expand(parts[name + CODES].cpu(), parts[name + SCALES].cpu())
        plain[name] = weights.T if matrix.transposed else weights
    return plain


def pack_module(experts: nn.Module, count: int, bits: int) -> None:
    """Round a module's matrices and hold them packed, one matrix at a time."""
    for name, matrix in matrices(experts, count).items():
        make_packed(experts, count, {name: form_for(experts, matrix, bits)})
        parts = {full: each for full, each in experts._parameters.items() if each is not None}
        if not matrix.is_meta:
            for expert in range(count):
                write_packed(experts, name, matrix[expert].detach(), parts, expert)


def iterate_plain(experts: nn.Module, count: int) -> Iterator[dict[str, Tensor]]:
    """Each expert's own parameters by name, packed ones expanded."""
    own = {
        name: each.detach()
        for name, each in experts.named_parameters(recurse=False)
        if each.dim() and len(each) == count
    }
    for expert in range(count):
        yield expanded_experts(experts, {name: each[expert] for name, each in own.items()})
