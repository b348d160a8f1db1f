"""Reading safetensors files of ours: names, shapes and kinds are compared with what is expected before a tensor is.

Ranges of any file are read here too.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from expertcast.predictors.artefacts import digest, open_file
from expertcast.predictors.errors import ExpertcastError, first_line

_FLOATS = ("F64", "F32", "F16", "BF16")
_INTEGERS = ("I64", "I32", "I16", "I8", "U8", "BOOL")


def read_tensors(path: Path, like: Mapping[str, Tensor], remedy: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a file, on the CPU, and the texts in its header.

    Args:
        path: of the file.
        like: the names that it has, and for each a tensor of its shape, floating or integer like it, on any device.
        remedy: what to do where the file is not right, for messages.

    Raises:
        ExpertcastError: it cannot be read, holds other tensors, or values that are not finite.
    """
    try:
        open_file(path).close()
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            if names != set(like):
                odd = sorted(names ^ set(like))[0]
                raise ExpertcastError(
                    f"{path} {'lacks' if odd in like else 'also holds'} tensor {odd[:60]!r}; {remedy}"
                )
            for name, tensor in like.items():
                part = file.get_slice(name)
                kinds = _FLOATS if tensor.is_floating_point() else _INTEGERS
                if part.get_shape() != list(tensor.shape) or part.get_dtype() not in kinds:
                    raise ExpertcastError(
                        f"{path}: tensor {name} is {part.get_dtype()} {part.get_shape()}, expected are "
                        f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}; {remedy}"
                    )
            tensors = {name: file.get_tensor(name) for name in like}
            notes = dict(file.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise ExpertcastError(f"cannot read {path}: {first_line(error)}; {remedy}") from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not is_finite(tensor):
            raise ExpertcastError(f"{path}: tensor {name} holds NaN or infinity; {remedy}")
    return tensors, notes


def read_range(file: int, start: int, nbytes: int) -> bytearray:
    """Bytes of an open file from `start` on; fewer where it ends before.

    Linux gives 2 GiB at most at a time, network file systems may give less.
    """
    read, done = bytearray(nbytes), 0
    while done < nbytes and (count := os.preadv(file, [memoryview(read)[done:]], start + done)):
        done += count
    del read[done:]
    return read


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """One digest over names, dtypes, shapes and bytes of tensors on the CPU."""
    lines = []
    for name, tensor in sorted(tensors.items()):
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        lines.append(f"{name} {tensor.dtype} {list(tensor.shape)} {digest(content)}")
    return digest("\n".join(lines).encode())


def is_finite(tensor: Tensor) -> bool:
    """Whether it holds neither NaN nor infinity: one pass without a copy."""
    return not tensor.numel() or all(math.isfinite(value) for value in torch.stack(tensor.aminmax()).tolist())
