"""Default vectors from elsewhere: they are of the model, whatever text they were collected on.

Traces of a server's traffic hold none, so they are taken from other traces of the model, or from a checkpoint.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import TypeVar

import torch

from expertcast.checkpoints.fingerprints import different_part
from expertcast.checkpoints.kind import holds_predictor
from expertcast.checkpoints.provenance import without_folders
from expertcast.checkpoints.repositories import HubName, NotOnHubError, OutOfReachError
from expertcast.checkpoints.store import PredictorCheckpoint
from expertcast.data.plan import PlannedDocument
from expertcast.data.tensor_files import tensors_digest
from expertcast.data.trace_source import TraceSource
from expertcast.data.traces import TRACE_FILE, TraceDataset
from expertcast.predictors.base import Predictor
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.plain import Json
from expertcast.predictors.quasi_hidden import DefaultVectors, QuasiInput

NOTE = "default_vectors_from"
"""In `TraceSource.info` and a fit's report: where the default vectors come from."""
_GIVE = "give traces of this model by expertcast collect, or a checkpoint of quasi_hidden, linear or estimator"

Source = TypeVar("Source", bound=TraceSource)


def with_default_vectors(source: Source, given: str | Path) -> Source:
    """The same source with default vectors from elsewhere, whether or not it has any of its own.

    Documents of its test split that these come from are left out of it: they are not held out any more.

    Args:
        source: traces on disk, or a running model.
        given: traces of the same model by :func:`expertcast.data.collector.collect`, or a checkpoint that holds default
            vectors: the folder, or `user/repo` or `user/repo@revision` of the hub.

    Raises:
        ExpertcastError: neither is there, or a file of it is not right; it holds no default vectors, or another
            model's; or they come from all documents of the source's test split.
    """
    found = _opened(str(given))
    if isinstance(found, TraceDataset):
        recorded, traces = {**found.info, "model_id": found.info["model"]}, found.info["id"]
    else:
        recorded, traces = found.config, _origin(found.config.get("training", {}))
    different = different_part(recorded, source.view, str(given))
    if different:
        raise ExpertcastError(
            f"{given} is of {recorded['model_id']!r} and its {different} are not those of {source.view.model_id!r}, "
            f"so neither are its default vectors: {_GIVE}"
        )
    if isinstance(found, TraceDataset):
        defaults, documents = found.defaults, {document.hash for document in found.chosen("train")}
        learned = None if None in documents else frozenset(filter(None, documents))
    else:
        defaults, learned = _held(found), found.learned_from
    made = copy.copy(source)
    made.defaults, made.defaults_learned_from = defaults, learned
    made.documents = _held_out(source, learned, str(given))
    made.info = {
        **source.info,
        NOTE: {"given": without_folders(str(given)), "traces": traces, "digest": _digest_of(defaults)},
    }
    return made


def holder_in(predictor: Predictor) -> QuasiInput | None:
    """The predictor itself, or the member of a hybrid, that holds default vectors; None where none does."""
    parts = (part for part in predictor.modules() if isinstance(part, QuasiInput) and hasattr(part, "expert_LED"))
    return next(parts, None)


def _opened(given: str) -> TraceDataset | PredictorCheckpoint:
    if (Path(given) / TRACE_FILE).is_file():
        return TraceDataset.open(given)
    if holds_predictor(given):
        return PredictorCheckpoint.open(given)
    if Path(given).exists() or HubName.of(given) is None:
        raise ExpertcastError(f"{given} holds neither traces ({TRACE_FILE}) nor a predictor checkpoint: {_GIVE}")
    try:
        return TraceDataset.open(given)
    except (NotOnHubError, OutOfReachError):
        return PredictorCheckpoint.open(given)


def _origin(training: Json) -> object:
    """The id of the traces that a checkpoint's default vectors come from."""
    note = training.get(NOTE)
    return (note if isinstance(note, dict) else training).get("traces")


def _held(checkpoint: PredictorCheckpoint) -> DefaultVectors:
    """The default vectors in a checkpoint, which has the means and not their counts.

    Raises:
        ExpertcastError: there are none in it, or its weights are not right.
    """
    holder = holder_in(checkpoint.load())
    if holder is None:
        raise ExpertcastError(f"{checkpoint.folder} is of {checkpoint.name} and holds no default vectors: {_GIVE}")
    counts_LE = torch.zeros(holder.expert_LED.shape[:2], dtype=torch.int64)
    return DefaultVectors(expert_LED=holder.expert_LED, shared_LD=holder.shared_LD, count_LE=counts_LE, token_count=0)


def _held_out(source: TraceSource, learned: frozenset[str] | None, given: str) -> list[PlannedDocument]:
    """The source's documents without those of its test split that the default vectors come from."""
    known = all(document.hash is not None for document in source.documents)
    if learned is None or not known:
        what = given if learned is None else "what is trained on"
        warnings.warn(
            f"{what} is from before documents were known by their hashes: default vectors may come from what scores "
            "here; collect again to be sure",
            stacklevel=3,
        )
        return list(source.documents)
    rest = [document for document in source.documents if document.split != "test" or document.hash not in learned]
    if not any(document.split == "test" for document in rest) and source.chosen("test"):
        raise ExpertcastError(
            f"the default vectors of {given} come from every document of the test split, none is left to score: give "
            "those of another text"
        )
    return rest


def _digest_of(defaults: DefaultVectors) -> str:
    """Of the values that a predictor takes."""
    return tensors_digest({"expert_LED": defaults.expert_LED, "shared_LD": defaults.shared_LD})
