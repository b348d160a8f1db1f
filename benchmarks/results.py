"""Result files that a benchmark goes on with where it stopped."""

from __future__ import annotations

import json
from pathlib import Path

from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json


def earlier_result(path: Path, settings: Json) -> Json | None:
    """What a file already has; None where there is no file.

    Args:
        path: of the file.
        settings: with which its runs must have been made, under `settings` there.

    Raises:
        ExpertcastError: it is of other settings, or no result.
    """
    if not path.is_file():
        return None
    try:
        result = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ExpertcastError(f"{path} holds no result ({error}): remove it, or give another --out") from error
    if not isinstance(result, dict) or result.get("settings") != settings:
        raise ExpertcastError(f"{path} is of other settings: remove it, or give another --out")
    return result
