"""What a folder of a predictor's checkpoint is, here and on the hub."""

from __future__ import annotations

from pathlib import Path

from pydantic import JsonValue

from expertcast.checkpoints import files
from expertcast.checkpoints.repositories import Kind
from expertcast.checkpoints.schema import REMEDY
from expertcast.predictors.artefacts import read_json
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.registry import PREDICTORS


def holds_predictor(folder: str | Path) -> bool:
    """Whether a folder is a predictor's checkpoint, be it a damaged one: not a model's, which has a config.json too."""
    config = Path(folder) / files.CONFIG
    if not config.is_file():
        return all((Path(folder) / name).is_file() for name in (files.METRICS, files.WEIGHTS))
    try:
        values = read_json(config, dict[str, JsonValue], REMEDY)
    except ExpertcastError:
        return (Path(folder) / files.METRICS).is_file()
    return "predictor" in values or "predictor_config" in values


def is_name(given: str | Path) -> bool:
    """Whether a word is a registered predictor's name; a path never is.

    Raises:
        ExpertcastError: a checkpoint lies here in a folder of that name.
    """
    if given not in PREDICTORS.names():
        return False
    if any((Path(given) / name).is_file() for name in (files.CONFIG, files.METRICS)):
        raise ExpertcastError(
            f"{given!r} is a predictor's name and a checkpoint's folder here: give ./{given} for the checkpoint, or "
            "rename the folder for the predictor"
        )
    return True


CHECKPOINT = Kind(
    what="predictor checkpoint", repo_type="model", files=files.ALL, marks=(files.CONFIG, files.METRICS),
    holds=holds_predictor, remedy=REMEDY,
)  # fmt: skip
