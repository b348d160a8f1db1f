"""Where an artefact comes from: command, git revision and the versions that made it."""

from __future__ import annotations

import platform
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

import expertcast
from expertcast.predictors.plain import Json

PACKAGES = ("torch", "transformers", "lightning", "datasets", "safetensors")


def provenance(command: str | None = None) -> Json:
    """Command line (the running one when None), git revision of the code (None outside a work tree) and versions, as
    plain JSON values."""
    # the program by its name only: its path says nothing on another machine
    running = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {
        "expertcast_version": expertcast.__version__,
        "command": running if command is None else command,
        "git_revision": _git_revision(),
        "python_version": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
    }


@cache
def _git_revision() -> str | None:
    """HEAD of the work tree this code is in, with `-dirty` after it when there are changes."""
    # the directory of the package's root file: a wheel in site-packages has no work tree of ours around it
    root = Path(str(expertcast.__file__)).resolve().parents[2]
    if not (root / "pyproject.toml").is_file():
        return None
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, timeout=10)
        if head.returncode:
            return None
        state = ["git", "status", "--porcelain", "--untracked-files=no"]
        changed = subprocess.run(state, cwd=root, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() + ("-dirty" if changed else "")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
