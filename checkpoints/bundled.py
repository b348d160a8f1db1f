"""Path of the bundled reference model."""

from __future__ import annotations

from pathlib import Path

from expertcast.predictors.messages import ExpertcastError

REFERENCE = "reference"
"""Name of the bundled model and text, and of their folder."""
BUNDLED = Path(__file__).resolve().parent / REFERENCE


def is_bundled(name: str, *files: str) -> bool:
    """Return whether `name` is `reference`, the bundled model and text.

    Args:
        name: name of a model or of text.
        files: glob patterns that identify a local folder of the same kind.

    Raises:
        ExpertcastError: the working directory has a folder `reference` with such files, so the name is ambiguous.
    """
    here = Path(REFERENCE)
    found = name == REFERENCE and any(match for pattern in files for match in here.glob(pattern))
    if found and not here.samefile(BUNDLED):
        raise ExpertcastError(
            f"{REFERENCE!r} is the bundled model and also the folder {here.absolute()}: use ./{REFERENCE} for the "
            "folder, or rename it"
        )
    return name == REFERENCE


def resolve_model(model_id: str) -> str:
    """Return the path of the bundled model for `reference`, and any other name unchanged.

    Raises:
        ExpertcastError: the working directory has a model in a folder `reference`.
    """
    return str(BUNDLED) if is_bundled(model_id, "config.json") else model_id
