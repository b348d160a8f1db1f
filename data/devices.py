"""What may be said of dtypes and devices."""

from __future__ import annotations

import torch

from expertcast.data.memory import available_memory
from expertcast.predictors.errors import ExpertcastError


def torch_dtype(name: str) -> torch.dtype | None:
    """`bf16`, `fp16` and `fp32` as torch names them; None for `auto`, which is the weights' own.

    Raises:
        ExpertcastError: another name.
    """
    names = {"auto": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if name not in names:
        raise ExpertcastError(f"unknown dtype {name!r}: choose from {', '.join(names)}")
    return names[name]


def torch_device(device: str | torch.device | None) -> torch.device:
    """The device of that name, with its number; None is the current CUDA device where there is one, else the CPU.

    Raises:
        ExpertcastError: an unknown device, or one that is not there.
    """
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ExpertcastError(f"unknown device {device!r}: write 'cpu', 'cuda' or 'cuda:0'") from None
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ExpertcastError(f"device {str(chosen)!r} is not available here: use 'cpu'")
    if chosen.type not in ("cpu", "cuda"):
        raise ExpertcastError(f"device {str(chosen)!r} is not supported: use 'cpu' or 'cuda'")
    return with_index(chosen)


def with_index(device: str | torch.device) -> torch.device:
    """`cuda` as the CUDA device that is current now, any other as it is: torch takes `cuda` and `cuda:0` for two."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be allocated on a device now: a GPU's own memory, with what torch has reserved there and does not
    use, or the host's; None where the system does not say."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return available_memory() if device.type == "cpu" else None
