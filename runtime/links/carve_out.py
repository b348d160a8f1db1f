"""Multiprocessors that torch's grouped matmul leaves to a kernel that copies beside it.

torch's `grouped_mm` of Hopper and Blackwell is persistent: one block per multiprocessor, with all its registers, takes
one tile after another. Where another kernel holds a multiprocessor, that block waits until the other one ends, and the
matmul with it. torch can be told how many to leave out (pytorch, aten/src/ATen/Context.h: `_SMCarveout_EXPERIMENTAL`).

The bits of `grouped_mm` stay: the count says how many blocks share the tiles, while tile and order of summation follow
from the shapes (aten/src/ATen/native/cuda/GroupMM.cu: `hw_info.sm_count`). cuBLASLt, which torch uses for linear layers
with a bias, chooses its kernel by the count (aten/src/ATen/cuda/CUDABlas.cpp: `CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET`)
and may give other bits. So the count is set around the experts only, where nothing goes through cuBLASLt, and not at
all where torch is told to prefer it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GET, _SET = "_get_sm_carveout_experimental", "_set_sm_carveout_experimental"


class CarveOut:
    """While entered, matmuls leave so many multiprocessors alone; without torch's setting nothing happens.

    It may be entered again inside itself or another one: the larger count holds. The setting is the process's: matmuls
    that other threads launch meanwhile keep to it too. torch says once, on stderr, that it is experimental.
    """

    def __init__(self, multiprocessors: int) -> None:
        known = hasattr(torch._C, _GET) and hasattr(torch._C, _SET)
        preferred = torch.backends.cuda.preferred_blas_library()
        self.multiprocessors = multiprocessors if known and preferred != torch._C._BlasBackend.Cublaslt else 0
        self._before: list[int | None] = []

    def __enter__(self) -> None:
        if self.multiprocessors:
            before = torch._C._get_sm_carveout_experimental()
            torch._C._set_sm_carveout_experimental(max(before or 0, self.multiprocessors))
            self._before.append(before)

    def __exit__(self, *_error: object) -> None:
        if self.multiprocessors:
            torch._C._set_sm_carveout_experimental(self._before.pop())


def has_persistent_grouped_mm(weight: Tensor) -> bool:
    """Whether torch multiplies groups by this weight [S, ...] with that kernel: bf16 on Hopper or Blackwell.

    Source: aten/src/ATen/native/cuda/GroupMM.cu; `_grouped_mm` takes other devices and types group by group.
    """
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(weight.device)[0] in (9, 10)
