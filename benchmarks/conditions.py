"""Conditions of a measurement: they are part of every result."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch

from expertcast.data.machine import hardware
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json

ROOT = Path(__file__).resolve().parents[1]
FEATURES = {"avx2": "AVX2", "avx512f": "AVX-512", "avx512_vnni": "VNNI", "avx_vnni": "AVX-VNNI", "avx512_bf16": "BF16",
            "amx_int8": "AMX", "asimddp": "NEON dot products", "i8mm": "NEON int8 matrices"}  # fmt: skip
_WRITTEN = (":!benchmarks/results", ":!benchmarks/*.md")
"""Files that benchmarks write: a change in them does not make the code another one."""


def conditions(folder: Path | None = None, *, threads: int | None = None) -> Json:
    """Return the conditions of this machine and moment.

    Args:
        folder: a folder on the disk that is read; None: no disk is measured.
        threads: compute threads of every side; None: torch's.
    """
    found = {
        **hardware(),
        "features": processor_features(),
        "governor": _read(Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        "free_memory": psutil.virtual_memory().available,
        "load": round(os.getloadavg()[0], 2),
        "threads": threads or torch.get_num_threads(),
        "git_revision": revision(),
    }
    return found if folder is None else {**found, "readahead_kib": readahead_kib(folder)}


def described(found: Json) -> str:
    """Return conditions as one paragraph."""
    features = ", ".join(found["features"]) or "no features known"
    parts = [
        f"{found['cpu'] or found['machine']}, {found['cores']} cores ({features})",
        f"{found['threads']} threads",
        f"{found['memory'] / 1e9:.0f} GB of memory, {found['free_memory'] / 1e9:.0f} GB of it free",
        f"load {found['load']} at the start",
        f"frequency governor {found['governor'] or 'unknown'}",
    ]
    if "readahead_kib" in found:
        parts.append(f"disk readahead of the machine {found['readahead_kib'] or 'unknown'} KiB")
    return "; ".join([*parts, f"revision {(found['git_revision'] or 'unknown')[:12]}"]) + "."


def processor_features() -> list[str]:
    """Return the processor's vector instructions that kernels use."""
    lines = (_read(Path("/proc/cpuinfo")) or "").splitlines()
    flags = next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
    return [name for flag, name in FEATURES.items() if flag in flags]


def revision() -> str | None:
    """Return the commit of the code, with the suffix `-dirty` if a file other than a result has changed."""
    try:
        head, changed = (
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True).stdout
            for words in (
                ["rev-parse", "HEAD"],
                ["status", "--porcelain", "--untracked-files=no", "--", ".", *_WRITTEN],
            )
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return head.strip() + ("-dirty" if changed.strip() else "")


def check_clean(*, allow_dirty: bool) -> None:
    """Refuse to measure code that no commit has.

    Raises:
        ExpertcastError: the work tree has changes that are not committed.
    """
    if not allow_dirty and (revision() or "").endswith("-dirty"):
        raise ExpertcastError("the work tree has uncommitted changes: commit them, or add --allow-dirty")


# Disk readahead. A mapped file's cost depends on it: with 8 MB a page fault reads up to ten times the bytes it needs.


def readahead_kib(folder: Path) -> int | None:
    """Return the readahead of the disk that a folder is on; None if unknown."""
    text = _read(_readahead(folder))
    return None if text is None else int(text)


@contextmanager
def readahead(folder: Path, kib: int | None) -> Iterator[None]:
    """Set the readahead of a folder's disk inside this context, and restore it afterwards; None: leave it."""
    before = readahead_kib(folder)
    if kib in (None, before):
        yield
        return
    try:
        _readahead(folder).write_text(str(kib))
        yield
    finally:
        with suppress(OSError):
            _readahead(folder).write_text(str(before))


def may_set_readahead(folder: Path) -> bool:
    """Return whether this process may set the readahead of a folder's disk."""
    return os.access(_readahead(folder), os.W_OK)


def disk_of(folder: Path) -> Path:
    """Return the directory in /sys of the whole disk that a folder is on; it need not exist."""
    device = folder.stat().st_dev
    disk = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    return disk.resolve().parent if (disk / "partition").exists() else disk


def _readahead(folder: Path) -> Path:
    return disk_of(folder) / "queue" / "read_ahead_kb"


def _read(path: Path) -> str | None:
    with suppress(OSError):
        return path.read_text().strip()
    return None
