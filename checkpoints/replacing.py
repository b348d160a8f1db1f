"""Putting a checkpoint's folder in the place of another one."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
from pathlib import Path

_OLD = ".old"
"""Ends the name of a checkpoint that a new one is about to replace."""


def replace_folder(new: Path, folder: Path) -> None:
    """Put `new` in the place of `folder`: each step is one rename, so a reader sees the old or the new whole."""
    aside: list[Path] = []
    while new.exists():
        if folder.exists():
            aside.append(new.with_name(f"{new.name}.{len(aside)}{_OLD}"))
            os.rename(folder, aside[-1])
        try:
            os.rename(new, folder)
        except OSError:
            if not folder.exists():  # else a reader has just put the old one back
                raise
    for old in aside:
        shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """A save that was killed between two renames left the checkpoint that it was to replace aside: it is put back."""
    with contextlib.suppress(OSError, ValueError):  # whatever else is wrong is said where the folder is read
        if not os.path.lexists(folder):
            aside = folder.parent.glob(f".{glob.escape(folder.name)}.*{_OLD}")
            os.rename(max(aside, key=os.path.getmtime), folder)
