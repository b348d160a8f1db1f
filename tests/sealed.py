"""Changing JSON files of ours by hand, as nothing but a reader's checks can notice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from expertcast.predictors.artefacts import SEAL, seal


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the object in a file in place; one that was sealed is sealed again.

    Args:
        path: of the file.
        change: takes the object without its seal; what it returns is not looked at.
    """
    values = json.loads(path.read_bytes())
    sealed = values.pop(SEAL, None) is not None
    change(values)
    path.write_text(json.dumps(seal(values) if sealed else values))
