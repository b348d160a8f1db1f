"""Where the bundled reference model lies."""

from __future__ import annotations

from pathlib import Path

REFERENCE = "reference"
"""Its name, and that of its folder."""


def resolve_model(model_id: str) -> str:
    """`reference` becomes the path of the bundled model; anything else is returned unchanged."""
    if model_id == REFERENCE and not Path(model_id).exists():
        return str(Path(__file__).resolve().parent / REFERENCE)
    return model_id
