"""Memory that this process may still take: of the machine, and of every control group that it is in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that can be allocated without swapping, within the limits of this process's control groups; None where the
    system tells not.

    Args:
        root: of the file system in which `proc` and the control groups are looked for.
    """
    kilobytes = _fields(root / "proc/meminfo").get("MemAvailable:")
    bounds = [] if kilobytes is None else [1024 * kilobytes]
    for version, folder, mount in _groups(root):
        # a group is held to the limits of all above it
        groups = [folder, *folder.parents][: len(folder.parts) - len(mount.parts) + 1]
        bounds += [bound for group in groups if (bound := version.available(root / group.relative_to("/"))) is not None]
    return min(bounds, default=None)


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


def _groups(root: Path) -> Iterator[tuple[_Version, PurePosixPath, PurePosixPath]]:
    """This process's groups that may limit memory: version, folder, and where the topmost that is seen is mounted."""
    own: dict[str, PurePosixPath] = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            own["cgroup2"] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            own["cgroup"] = PurePosixPath(path)
    for line in _lines(root / "proc/self/mountinfo"):
        mounted, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        if kind not in own or (kind == "cgroup" and "memory" not in options.split()[-1].split(",")):
            continue
        top, mount = (PurePosixPath(_unescaped(word)) for word in mounted.split()[3:5])
        # a container may see its own group as the topmost, whatever the group is called outside
        below = own[kind].relative_to(top) if own[kind].is_relative_to(top) else PurePosixPath()
        yield _VERSIONS[kind], mount / below, mount


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
