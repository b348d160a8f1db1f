"""Memory and processors that this process may use: the machine's, within the limits of its control groups."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from expertcast.predictors.messages import ExpertcastError


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that can be allocated without swapping, within the limits of this process's control groups; None where the
    system tells not.

    Args:
        root: of the file system in which `proc` and the control groups are looked for.
    """
    kilobytes = _fields(root / "proc/meminfo").get("MemAvailable:")
    bounds = [None if kilobytes is None else 1024 * kilobytes]
    bounds += [_VERSIONS[kind].available(group) for kind, group in _groups(root, "memory")]
    return min((bound for bound in bounds if bound is not None), default=None)


def usable_processors(root: Path = Path("/")) -> int:
    """Processors that this process may keep busy: those of its affinity, within the quotas of its control groups,
    rounded up.

    Args:
        root: of the file system in which `proc` and the control groups are looked for.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([affinity, *(_quota(kind, group) or affinity for kind, group in _groups(root, "cpu"))])


def _quota(kind: str, group: Path) -> int | None:
    """Processors' worth of time that a group may take; None: as much as there is."""
    files = ("cpu.max",) if kind == "cgroup2" else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    words = [word for name in files for line in _lines(group / name) for word in line.split()]
    return math.ceil(int(words[0]) / int(words[1])) if len(words) == 2 and words[0].isdigit() else None


@dataclass(frozen=True, slots=True)
class _Version:
    """Files of a control group in one version of the interface."""

    limit: str
    used: str
    prefix: str
    """Of the statistics that count groups below too."""

    def available(self, group: Path) -> int | None:
        """What a group still allows; the file cache that counts against it can be reclaimed."""
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
"""By the name of the file system."""


def _groups(root: Path, controller: str) -> Iterator[tuple[str, Path]]:
    """This process's groups that a controller (`memory`, `cpu`) may limit, and all above them, to whose limits they are
    held: kind of file system and folder."""
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
        # a container may see its own group as the topmost, whatever the group is called outside
        below = own[kind].relative_to(top) if own[kind].is_relative_to(top) else PurePosixPath()
        folder = mount / below
        for group in [folder, *folder.parents][: len(below.parts) + 1]:
            yield kind, root / group.relative_to("/")


def _unescaped(word: str) -> str:
    """Spaces, tabs and backslashes are octal numbers in the list of mounts."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), word)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # another system
        return []


def _fields(path: Path) -> dict[str, int]:
    """`name number ...` per line."""
    rows = [line.split() for line in _lines(path)]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such control group, or "max"
        return None


# Dtypes and devices


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
