"""What stands in a predictor checkpoint's config.json and metrics.json, and the one reader of each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NotRequired

from pydantic import ConfigDict, Field, JsonValue
from typing_extensions import TypedDict

from expertcast.checkpoints import files
from expertcast.predictors.artefacts import CLOSED, read_json
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.plain import Json

REMEDY = "train it again with `expertcast train`"
_CONFIG_REMEDY = REMEDY + ", or upgrade expertcast if a newer one wrote it"

_Free = dict[str, JsonValue]
_Share = Annotated[float, Field(ge=0, le=1)]
_Readings = Annotated[list[Annotated[list[float], Field(min_length=3, max_length=3)]], Field(max_length=10_000)]
_Digest = Annotated[str, Field(pattern="^xxh3:[0-9a-f]{32}$")]


class _Shape(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]
    L: Annotated[int, Field(ge=1, le=10_000)]
    E: Annotated[int, Field(ge=1, le=65_536)]
    K: Annotated[int, Field(ge=1, le=65_536)]
    D: Annotated[int, Field(ge=1, le=1_000_000)]


_Files = TypedDict(
    "_Files",
    {files.WEIGHTS: _Digest, files.METRICS: _Digest, files.DOCUMENTS: NotRequired[_Digest]},  # type: ignore[misc]
)
_Files.__pydantic_config__ = CLOSED  # type: ignore[attr-defined]


class ConfigFile(TypedDict):
    """config.json; `files` and `digest` are missing from what was written before there were digests, `calibration` from
    what was before it, and `experts_fingerprint` where the experts were not at hand."""

    __pydantic_config__ = CLOSED  # type: ignore[misc]
    format: Annotated[int, Field(ge=1, le=files.FORMAT)]
    predictor: str
    predictor_config: _Free
    model_id: str
    fingerprint: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    experts_fingerprint: NotRequired[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]
    shape: _Shape
    tap_point: str
    expertcast_version: str
    command: str
    git_revision: str | None
    python_version: str
    versions: dict[str, str | None]
    calibration: NotRequired[dict[str, _Readings]]
    """By distance, slope, root and offset of each layer pair (:class:`LogOdds`); missing where there is none."""
    training: NotRequired[_Free]
    extra: NotRequired[_Free]
    files: NotRequired[_Files]
    digest: NotRequired[str]


class _Recall(TypedDict):
    __pydantic_config__ = CLOSED  # type: ignore[misc]
    mean: _Share
    per_layer: Annotated[list[_Share], Field(max_length=10_000)]


class _Scores(TypedDict):
    """An evaluation: what is computed from, and whatever else there is to read."""

    __pydantic_config__ = ConfigDict(CLOSED, extra="allow")  # type: ignore[misc]
    recall_at_k: NotRequired[dict[str, _Recall]]
    baselines: NotRequired[dict[str, _Recall]]
    """Recall@k of what needs no training, on the same tokens."""
    targets: NotRequired[list[Annotated[int, Field(ge=0, lt=10_000)]]]
    ahead: NotRequired[Annotated[int, Field(ge=1, le=10_000)]]


class _Evaluation(_Scores):
    further: NotRequired[Annotated[dict[Annotated[str, Field(pattern="^[0-9]{1,5}$")], _Scores], Field(max_length=64)]]
    """The same at longer distances, by distance."""


class MetricsFile(_Evaluation):
    """metrics.json: one evaluation, or that of the test split with that of the validation split in it."""

    validation: NotRequired[_Evaluation]


def read_config(path: Path) -> Json:
    """config.json by its schema.

    Raises:
        ExpertcastError: it cannot be read, is not by its schema, or was changed after it was written.
    """
    config = read_json(path, ConfigFile, _CONFIG_REMEDY)
    if config["shape"]["K"] > config["shape"]["E"]:
        raise ExpertcastError(f"{path}: shape has K={config['shape']['K']} of E={config['shape']['E']}; {REMEDY}")
    if ("files" in config) != ("digest" in config):
        absent = "digest" if "files" in config else "files"
        raise ExpertcastError(f"{path}: {absent} is missing; {REMEDY}")
    return dict(config)


def read_metrics(path: Path, layers: int) -> Json:
    """metrics.json of a model with so many MoE layers, by its schema.

    Raises:
        ExpertcastError: it cannot be read or is not by its schema.
    """
    metrics: Json = dict(read_json(path, MetricsFile, REMEDY))
    for evaluation in (metrics, metrics.get("validation", {})):
        for scores in (evaluation, *evaluation.get("further", {}).values()):
            _check_targets(path, scores, layers)
    return metrics


def _check_targets(path: Path, scores: Json, layers: int) -> None:
    """Each recall must belong to a layer.

    Raises:
        ExpertcastError: more or fewer of them than targets, or targets that are no rising layers of the model.
    """
    recall = {**scores.get("recall_at_k", {}), **scores.get("baselines", {})}
    longest = max((len(values["per_layer"]) for values in recall.values()), default=0)
    targets: list[int] = list(scores.get("targets", range(1, longest + 1)))
    if targets != sorted(set(targets)) or (targets and targets[-1] >= layers):
        raise ExpertcastError(f"{path}: targets are no rising layers of 0..{layers - 1}; {REMEDY}")
    for name, values in recall.items():
        if len(values["per_layer"]) != len(targets):
            raise ExpertcastError(
                f"{path}: recall_at_k.{name!r} has {len(values['per_layer'])} layers of {len(targets)}; {REMEDY}"
            )
