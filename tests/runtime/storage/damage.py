"""Changes of a store's file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def flip_a_byte(path: Path, *, from_end: int = 5000) -> None:
    """Of the parts, by default: behind them comes the index."""
    with path.open("r+b") as file:
        file.seek(-from_end, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-from_end, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def rewrite_header(path: Path, change: Callable[[Any], None]) -> None:
    """Change the header's JSON, in its room."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + size])
    change(entries)
    text = json.dumps(entries).encode()
    assert len(text) <= size
    path.write_bytes(content[:8] + text.ljust(size) + content[8 + size :])


def say(entries: Any, **changes: object) -> None:
    """Other values in the header's own part, under the old digest."""
    metadata = entries["__metadata__"]
    metadata["header"] = json.dumps(json.loads(metadata["header"]) | changes)
