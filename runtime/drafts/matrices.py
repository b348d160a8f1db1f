"""One projection of all experts of a layer on the computing device, and products of rows with single experts of it.

Rows come sorted by expert, and each expert is read once for all its rows. An expert is a product of its own: torch has
grouped products of 16-bit weights, none of 4-bit ones, and to expand the experts for it takes 8 to 54 times as long.

E experts, N outputs, I inputs, G inputs in a group, J = I // G groups, R rows of one expert, P rows of all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from expertcast.runtime.drafts.rounding import expanded

Groups: TypeAlias = Sequence[tuple[int, int]]
"""(expert, its rows), in the order of the rows."""
Coded: TypeAlias = tuple[Tensor, Tensor]
"""One expert's codes, int8 [N, I], and scales, float32 [N, J]."""

_FAST_CPU = ("AVX2", "AVX512")
"""Where torch's kernels of 4 and 8 bits are more than a plain loop."""


class Matrices(ABC):
    """E matrices [N, I].

    Args:
        dtype: what rows are multiplied in; None is their own.
        held: all memory that the matrices take.
    """

    def __init__(self, dtype: torch.dtype | None, held: Iterable[Tensor]) -> None:
        self._dtype = dtype
        self.nbytes = sum(tensor.nbytes for tensor in held)
        """Bytes that they take on the device."""

    def products(self, rows_PI: Tensor, groups: Groups) -> Tensor:
        """[P, N] in the rows' dtype."""
        given = rows_PI if self._dtype is None else rows_PI.to(self._dtype)
        parts = torch.split(given, [count for _, count in groups])
        outputs = [self.product(part, expert) for part, (expert, _) in zip(parts, groups, strict=True)]
        return torch.cat(outputs).to(rows_PI.dtype)

    @abstractmethod
    def product(self, rows_RI: Tensor, expert: int) -> Tensor:
        """[R, N] of one expert, in the dtype of its rows."""


class WholeMatrices(Matrices):
    """Weights as they are: [E, N, I], strided in any way."""

    def __init__(self, weights_ENI: Tensor) -> None:
        super().__init__(None, [weights_ENI])
        self._experts = weights_ENI.mT.unbind(0)

    def product(self, rows_RI: Tensor, expert: int) -> Tensor:
        return rows_RI @ self._experts[expert]


class CodedMatrices(Matrices):
    """Codes of any size, on any device: an expert is expanded for its product, and dropped.

    Args:
        experts: each with its codes and scales.
        bits: of a code; of 4, two share a byte, the first in its low bits.
    """

    def __init__(self, experts: Iterable[Coded], bits: int) -> None:
        self._packed = bits == 4
        self._experts = [(_pairs(codes) if self._packed else codes, scales.bfloat16()) for codes, scales in experts]
        super().__init__(None, (tensor for expert in self._experts for tensor in expert))

    def product(self, rows_RI: Tensor, expert: int) -> Tensor:
        codes, scales = self._experts[expert]
        if self._packed:  # shifting right carries the sign
            codes = torch.stack((codes << 4 >> 4, codes >> 4), dim=-1).flatten(-2)
        return rows_RI @ expanded(codes, scales).to(rows_RI.dtype).T


class FourBitKernel(Matrices):
    """torch's own product with 4-bit weights, in bf16: it takes 1.5 to 5 times less than bf16 weights for few rows.

    Args:
        experts: each with its codes and scales, all on one device.
        device: that.
    """

    def __init__(self, experts: Iterable[Coded], device: torch.device) -> None:
        on_host = device.type == "cpu"
        pack = _packed_for_cpu if on_host else _packed_for_cuda
        self._multiply = torch._weight_int4pack_mm_for_cpu if on_host else torch._weight_int4pack_mm
        self._experts = [
            (pack(codes), codes.shape[-1] // scales.shape[-1], _with_zeros(scales)) for codes, scales in experts
        ]
        super().__init__(torch.bfloat16, (tensor for codes, _, scales in self._experts for tensor in (codes, scales)))

    @staticmethod
    def takes(outputs: int, inputs: int, device: torch.device) -> bool:
        """Whether the kernel takes such matrices there, and is fast."""
        if device.type == "cpu":
            return outputs % 16 == 0 and torch.backends.cpu.get_cpu_capability() in _FAST_CPU
        ampere = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
        return ampere and torch.version.hip is None and outputs % 8 == 0 and inputs % 32 == 0

    def product(self, rows_RI: Tensor, expert: int) -> Tensor:
        codes, group, scales = self._experts[expert]
        return self._multiply(rows_RI, codes, group, scales)


class EightBitKernel(Matrices):
    """torch's own product with 8-bit weights on the CPU, in bf16; one scale for each output.

    Args:
        experts: each with its codes and scales.
    """

    def __init__(self, experts: Iterable[Coded]) -> None:
        self._experts = [(codes, scales.squeeze(-1).bfloat16()) for codes, scales in experts]
        super().__init__(torch.bfloat16, (tensor for expert in self._experts for tensor in expert))

    @staticmethod
    def takes(outputs: int, inputs: int, device: torch.device) -> bool:
        """Whether the kernel takes such matrices there, and is fast; with other inputs it reads what is not its own."""
        whole = outputs % 4 == 0 and inputs % 32 == 0
        return whole and device.type == "cpu" and torch.backends.cpu.get_cpu_capability() in _FAST_CPU

    def product(self, rows_RI: Tensor, expert: int) -> Tensor:
        return torch._weight_int8pack_mm(rows_RI, *self._experts[expert])


def coded_matrices(experts: Iterable[Coded], bits: int, outputs: int, inputs: int, device: torch.device) -> Matrices:
    """The fastest matrices that these codes make on the device where they lie.

    Args:
        experts: each with its codes and scales; held one at a time.
        bits: of a code; of 8, an output's inputs are one group.
        outputs, inputs: N and I.
        device: where the codes are.
    """
    if bits == 4 and FourBitKernel.takes(outputs, inputs, device):
        return FourBitKernel(experts, device)
    if bits == 8 and EightBitKernel.takes(outputs, inputs, device):
        return EightBitKernel(experts)
    return CodedMatrices(experts, bits)


def _pairs(codes_NI: Tensor) -> Tensor:
    return codes_NI[:, ::2] & 15 | codes_NI[:, 1::2] << 4


def _packed_for_cpu(codes_NI: Tensor) -> Tensor:
    return torch._convert_weight_to_int4pack_for_cpu(codes_NI.int() + 8, 1)


def _packed_for_cuda(codes_NI: Tensor) -> Tensor:
    """As torch's CUDA kernel wants it: the first code in the high bits, 2, 4 or 8 tiles of 16 inputs at a time."""
    codes = (codes_NI + 8).view(torch.uint8)
    tiles = next(tiles for tiles in (8, 4, 2) if codes.shape[-1] % (16 * tiles) == 0)
    return torch._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], tiles)


def _with_zeros(scales_NJ: Tensor) -> Tensor:
    """bf16 [J, N, 2]: the kernels take weight = scale * (code - 8) + zero."""
    scales_JN = scales_NJ.T.bfloat16()
    return torch.stack((scales_JN, torch.zeros_like(scales_JN)), dim=-1)
