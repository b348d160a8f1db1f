"""Where the bundled reference model lies."""

from __future__ import annotations

from pathlib import Path

from expertcast.predictors.messages import ExpertcastError

REFERENCE = "reference"
"""Its name, and that of its folder."""
BUNDLED = Path(__file__).resolve().parent / REFERENCE


def is_bundled(name: str, *files: str) -> bool:
    """Whether `reference` is named, which is the bundled model and text.

    Args:
        name: of a model or of text.
        files: patterns of files that such a thing has.

    Raises:
        ExpertcastError: a folder of that name lies here and holds such files too.
    """
    here = Path(REFERENCE)
    found = name == REFERENCE and any(match for pattern in files for match in here.glob(pattern))
    if found and not here.samefile(BUNDLED):
        raise ExpertcastError(
            f"{REFERENCE!r} is bundled with expertcast, and {here.absolute()} is a folder of that name: give "
            f"./{REFERENCE} for the folder, or rename it"
        )
    return name == REFERENCE


def resolve_model(model_id: str) -> str:
    """`reference` becomes the path of the bundled model; anything else is returned unchanged.

    Raises:
        ExpertcastError: there is a model in a folder of that name, too.
    """
    return str(BUNDLED) if is_bundled(model_id, "config.json") else model_id
