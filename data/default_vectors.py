"""Default vectors from other traces of the model, or from a checkpoint, for traces without.

L MoE layers, D hidden size, E routed experts per layer.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TypeVar

import torch

from expertcast.checkpoints.checkpoint import PredictorCheckpoint, holds_predictor
from expertcast.checkpoints.hub import HubName, NotOnHubError, OutOfReachError
from expertcast.checkpoints.provenance import different_part, without_folders
from expertcast.data.plan import PlannedDocument
from expertcast.data.trace_format import TRACE_FILE, tensors_digest
from expertcast.data.traces import TraceDataset, TraceSource
from expertcast.predictors.base import Predictor
from expertcast.predictors.baselines import DefaultVectors, QuasiInput
from expertcast.predictors.messages import ExpertcastError, Json

NOTE = "default_vectors_from"
"""Key in `TraceSource.info` and in a fit's report: the origin of the default vectors."""
_GIVE = "use traces of this model by expertcast collect, or a checkpoint of quasi_hidden, linear or estimator"

Source = TypeVar("Source", bound=TraceSource)


def with_default_vectors(source: Source, given: str | Path) -> Source:
    """Return the source with default vectors from elsewhere.

    Test documents that contributed to these vectors leave the test split, as they are no longer held out.

    Args:
        source: traces, or a running model.
        given: traces of the same model, or a checkpoint with default vectors: a folder, or the hub repository
            `user/repo` or `user/repo@revision`.

    Raises:
        ExpertcastError: `given` does not exist, is invalid, has no default vectors or those of another model, or no
            test document would be left.
    """
    found = _opened(str(given))
    if isinstance(found, TraceDataset):
        recorded, traces = {**found.info, "model_id": found.info["model"]}, found.info["id"]
    else:
        recorded, traces = found.config, _origin(found.config.get("training", {}))
    different = different_part(recorded, source.view)
    if different:
        raise ExpertcastError(
            f"{given} belongs to {recorded['model_id']!r}; {source.view.model_id!r} has different {different}, so its "
            f"default vectors do not fit: {_GIVE}"
        )
    if isinstance(found, TraceDataset):
        defaults, learned = found.defaults, frozenset(document.hash for document in found.chosen("train"))
    else:
        defaults, learned = _held(found), found.learned_from or frozenset()
    result = copy.copy(source)
    result.defaults, result.defaults_learned_from = defaults, learned
    result.documents = _held_out(source, learned, str(given))
    result.info = {
        **source.info,
        NOTE: {"given": without_folders(str(given)), "traces": traces, "digest": _digest_of(defaults)},
    }
    return result


def default_vectors_holder(predictor: Predictor) -> QuasiInput | None:
    """Return the predictor or its first member with default vectors; None if there is none."""
    parts = (part for part in predictor.modules() if isinstance(part, QuasiInput) and hasattr(part, "expert_LED"))
    return next(parts, None)


def _opened(given: str) -> TraceDataset | PredictorCheckpoint:
    if (Path(given) / TRACE_FILE).is_file():
        return TraceDataset.open(given)
    if holds_predictor(given):
        return PredictorCheckpoint.open(given)
    if Path(given).exists() or HubName.of(given) is None:
        raise ExpertcastError(f"{given} has neither traces ({TRACE_FILE}) nor a predictor checkpoint: {_GIVE}")
    try:
        return TraceDataset.open(given)
    except (NotOnHubError, OutOfReachError):
        return PredictorCheckpoint.open(given)


def _origin(training: Json) -> object:
    """Return the id of the traces behind a checkpoint's default vectors."""
    note = training.get(NOTE)
    return (note if isinstance(note, dict) else training).get("traces")


def _held(checkpoint: PredictorCheckpoint) -> DefaultVectors:
    """Return the default vectors of a checkpoint, without counts.

    Raises:
        ExpertcastError: the checkpoint has no default vectors, or is invalid.
    """
    holder = default_vectors_holder(checkpoint.load())
    if holder is None:
        raise ExpertcastError(f"{checkpoint.folder} ({checkpoint.name}) has no default vectors: {_GIVE}")
    counts_LE = torch.zeros(holder.expert_LED.shape[:2], dtype=torch.int64)
    return DefaultVectors(expert_LED=holder.expert_LED, shared_LD=holder.shared_LD, count_LE=counts_LE, token_count=0)


def _held_out(source: TraceSource, learned: frozenset[str], given: str) -> list[PlannedDocument]:
    """Return the source's documents without test documents that contributed to the default vectors."""
    rest = [document for document in source.documents if document.split != "test" or document.hash not in learned]
    if not any(document.split == "test" for document in rest) and source.chosen("test"):
        raise ExpertcastError(
            f"the default vectors of {given} come from every document of the test split, so none is left to score: use "
            "default vectors from other text"
        )
    return rest


def _digest_of(defaults: DefaultVectors) -> str:
    return tensors_digest({"expert_LED": defaults.expert_LED, "shared_LD": defaults.shared_LD})
