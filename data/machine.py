"""Memory and processors available to this process: those of the machine, within the limits of its control groups."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import torch
from torch import Tensor

from expertcast.predictors.messages import ExpertcastError, Json

_R = TypeVar("_R")
_ALIGNED = 64
"""Bytes to whose multiples memory is aligned."""


def available_memory(root: Path = Path("/")) -> int | None:
    """Return the host memory in bytes that can be allocated without swapping; None if the system does not report it.

    Args:
        root: file system with `proc` and the control groups.
    """
    kilobytes = _fields(root / "proc/meminfo").get("MemAvailable:")
    bounds = [None if kilobytes is None else 1024 * kilobytes]
    bounds += [_VERSIONS[kind].available(group) for kind, group in _groups(root, "memory")]
    return min((bound for bound in bounds if bound is not None), default=None)


def mapped(*sizes: int) -> list[Tensor]:
    """Return zeroed memory of so many bytes each, uint8 and aligned to 64, side by side in one mapping of the system.

    Its pages have 2 MB where the system has such. With packed linear layers in pages of 4 KB a token takes 3 to 10%
    more time (48 layers of Qwen3-30B-A3B and 6, on a virtual machine). Pages are committed when they are first written.

    Raises:
        ExpertcastError: the system cannot map that many bytes.
    """
    starts = [*accumulate((-(-nbytes // _ALIGNED) * _ALIGNED for nbytes in sizes), initial=0)]
    try:
        mapping = mmap.mmap(-1, starts[-1], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ExpertcastError(f"cannot map {starts[-1]} bytes of host memory ({error}): use store='disk'") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without such pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return [
        torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=start)
        for nbytes, start in zip(sizes, starts, strict=False)
    ]


def usable_processors(root: Path = Path("/")) -> int:
    """Return the number of processors in this process's affinity, limited by its control groups' quotas, rounded up.

    Args:
        root: file system with `proc` and the control groups.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([affinity, *(_quota(kind, group) or affinity for kind, group in _groups(root, "cpu"))])


def _quota(kind: str, group: Path) -> int | None:
    """Return the number of processors that a group's quota allows; None without a quota."""
    files = ("cpu.max",) if kind == "cgroup2" else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    words = [word for name in files for line in _lines(group / name) for word in line.split()]
    return math.ceil(int(words[0]) / int(words[1])) if len(words) == 2 and words[0].isdigit() else None


@dataclass(frozen=True, slots=True)
class _Version:
    """File names of a control group in one version of the interface."""

    limit: str
    used: str
    prefix: str
    """Prefix of statistics that include child groups."""

    def available(self, group: Path) -> int | None:
        """Return the bytes that a group may still allocate, counting its file cache as reclaimable."""
        bound, usage = _number(group / self.limit), _number(group / self.used)
        if bound is None or usage is None:
            return None
        statistics = _fields(group / "memory.stat")
        cached = sum(statistics.get(f"{self.prefix}{kind}_file", 0) for kind in ("inactive", "active"))
        return max(0, bound - usage + cached)


_VERSIONS = {
    "cgroup": _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    "cgroup2": _Version("memory.max", "memory.current", ""),
}
"""By file system type."""


def _groups(root: Path, controller: str) -> Iterator[tuple[str, Path]]:
    """Yield this process's control groups of a controller (`memory`, `cpu`) and all their parents.

    Yields the file system type and the folder of each.
    """
    own: dict[str, PurePosixPath] = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            own["cgroup2"] = PurePosixPath(path)
        elif controller in controllers.split(","):
            own["cgroup"] = PurePosixPath(path)
    for line in _lines(root / "proc/self/mountinfo"):
        mounted, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        if kind not in own or (kind == "cgroup" and controller not in options.split()[-1].split(",")):
            continue
        top, mount = (PurePosixPath(_unescaped(word)) for word in mounted.split()[3:5])
        # inside a container, the own group may be the root, with another name outside
        below = own[kind].relative_to(top) if own[kind].is_relative_to(top) else PurePosixPath()
        folder = mount / below
        for group in [folder, *folder.parents][: len(below.parts) + 1]:
            yield kind, root / group.relative_to("/")


def _unescaped(word: str) -> str:
    """Replace octal escapes (space, tab, backslash) in the list of mounts."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not Linux
        return []


def _fields(path: Path) -> dict[str, int]:
    """Parse lines of the form `name number ...`."""
    rows = [line.split() for line in _lines(path)]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such control group, or "max"
        return None


def run_alone() -> None:
    """Let torch run the calling thread's operators in this thread only.

    Each thread that calls torch otherwise gets a team of OpenMP threads of its own. `torch.set_num_threads` sets the
    number for other threads, too.
    """
    torch.get_num_threads()  # the first call in a thread sets the number
    with contextlib.suppress(AttributeError):  # torch without OpenMP
        ctypes.CDLL(None).omp_set_num_threads(1)


# Dtypes and devices


def without_onednn(function: Callable[..., _R], *args: Any, **kwargs: Any) -> _R:
    """Call a function without oneDNN, for products of one row: in bf16, oneDNN takes 10 to 60 us a product more than
    torch's own kernel (192 x 192 weights: 63 us in a model's step, torch 25). The setting is the process's: bf16
    products of other threads may differ in rounding meanwhile."""
    if not torch._C._get_mkldnn_enabled():  # type: ignore[attr-defined]
        return function(*args, **kwargs)
    torch._C._set_mkldnn_enabled(False)  # type: ignore[attr-defined]
    try:
        return function(*args, **kwargs)
    finally:
        torch._C._set_mkldnn_enabled(True)  # type: ignore[attr-defined]


def without_gradients(function: Callable[..., _R]) -> Callable[..., _R]:
    """Let a function that runs in each layer record no gradients; `torch.no_grad`, which takes 2 us, is entered only
    where some are recorded."""
    alone = torch.no_grad()(function)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> _R:
        return (alone if torch.is_grad_enabled() else function)(*args, **kwargs)

    return run


def one_row(tensor_XD: Tensor) -> bool:
    """Return whether a tensor has a single row."""
    return tensor_XD.numel() == tensor_XD.shape[-1]


def hardware() -> Json:
    """Return processor, cores, threads, memory in bytes, and the GPU (None without one)."""
    found: Json = {
        "machine": platform.machine(),
        "cpu": _processor_name(),
        "cores": usable_processors(),
        "threads": torch.get_num_threads(),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpu": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = {
            "name": properties.name,
            "memory": properties.total_memory,
            "capability": [properties.major, properties.minor],
            "cuda": torch.version.cuda,
        }
    return found


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def torch_dtype(name: str) -> torch.dtype | None:
    """Return the torch dtype of `bf16`, `fp16` or `fp32`; None for `auto`.

    Raises:
        ExpertcastError: the name is unknown.
    """
    names = {"auto": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if name not in names:
        raise ExpertcastError(f"unknown dtype {name!r}: choose from {', '.join(names)}")
    return names[name]


def native_dtype() -> torch.dtype:
    """Return bf16 if a GPU is there or the processor multiplies in it, else float32."""
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()  # type: ignore[no-untyped-call]
    return torch.bfloat16 if native or torch.cuda.is_available() else torch.float32


def torch_device(device: str | torch.device | None) -> torch.device:
    """Return a device with its index; default: the current CUDA device if there is one, else the CPU.

    Raises:
        ExpertcastError: the device is unknown, unsupported or missing.
    """
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ExpertcastError(f"unknown device {device!r}: use 'cpu', 'cuda' or 'cuda:0'") from None
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ExpertcastError(f"device {str(chosen)!r} is not available here: use 'cpu'")
    if chosen.type not in ("cpu", "cuda"):
        raise ExpertcastError(f"device {str(chosen)!r} is not supported: use 'cpu' or 'cuda'")
    return with_index(chosen)


def with_index(device: str | torch.device) -> torch.device:
    """Add the current index to `cuda`; torch treats `cuda` and `cuda:0` as different devices."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def free_memory(device: torch.device) -> int | None:
    """Return the bytes that can be allocated on a device, with torch's unused reserve on a GPU; None if unknown."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return available_memory() if device.type == "cpu" else None


def process_memory(device: torch.device) -> int:
    """Return the bytes that this process has on a device; 0 if the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return 1024 * _fields(Path("/proc/self/status")).get("VmRSS:", 0)
