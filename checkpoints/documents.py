"""documents.json of a checkpoint: the documents that its predictor learned or was chosen from, by hash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from expertcast.predictors.artefacts import CLOSED, read_json
from expertcast.predictors.base import Predictor

_Hash = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]


class DocumentsFile(TypedDict):
    """documents.json"""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    learned_from: list[_Hash]
    """In no order that says anything."""


def documents_text(predictor: Predictor) -> bytes | None:
    """The file's contents: 19 bytes a document. None where the predictor's documents are not known."""
    if predictor.learned_from is None:
        return None
    values = {"learned_from": sorted(predictor.learned_from)}
    return (json.dumps(values, separators=(",", ":")) + "\n").encode()


def read_documents(path: Path, remedy: str) -> frozenset[str]:
    """The hashes in a file that :func:`documents_text` made.

    Args:
        path: of the file.
        remedy: what to do where it is not right, for messages.

    Raises:
        ExpertcastError: it cannot be read or is not by its schema.
    """
    return frozenset(read_json(path, DocumentsFile, remedy)["learned_from"])
