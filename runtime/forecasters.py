"""Forecasters of one offload: its predictor and the layers that execute forecasts.

L MoE layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from expertcast.checkpoints.checkpoint import PredictorCheckpoint
from expertcast.checkpoints.provenance import trained_for_another
from expertcast.predictors import ExpertcastError, MoEView, Predictor, predictor_class
from expertcast.predictors.hybrid import UNTRAINED, Hybrid, member_recall
from expertcast.predictors.view import ModelShape
from expertcast.runtime.config import OffloadConfig, named_checkpoint
from expertcast.runtime.engine.speculation import Speculator, check_layers, early_attention_for


def make_forecasters(
    config: OffloadConfig, model: PreTrainedModel, view: MoEView, device: torch.device
) -> tuple[Speculator, dict[str, float]]:
    """Return the forecasters that a configuration names, bound to the model and on its device, and their recall.

    The recall is the mean recall@k of the checkpoint's predictor and of the parameter-free ones, by name, as far as it
    is known.

    Args:
        config: `predictor`, `mode`, `ahead` and the fields that refine them.
        model: the model that runs, for early attention.
        view: its MoE layers.
        device: where it computes.

    Raises:
        ExpertcastError: an unknown predictor, a checkpoint of another model, or a mode or distance that needs
            another predictor.
    """
    predictor, checkpoint = resolve_predictor(config.resolved_predictor(), view)
    if predictor is not None:
        predictor.to(device)
    layers = executed_layers(config, len(view), recall_per_layer(checkpoint, config.ahead))
    early = early_attention_for(predictor, model, view)
    speculator = Speculator(
        view, predictor, layers=layers, prefill=config.speculate_prefill, ahead=config.ahead, early=early,
    )  # fmt: skip
    return speculator, mean_recall(checkpoint)


def resolve_predictor(
    given: str | Path | Predictor | None, view: MoEView
) -> tuple[Predictor | None, PredictorCheckpoint | None]:
    """Return the predictor that `predictor` names, bound to the model, and its checkpoint, if any.

    Raises:
        ExpertcastError: an unknown name, a predictor that needs training, or a checkpoint of another model.
    """
    if given is None:
        return None, None
    if isinstance(given, Predictor):
        return given.bind(view), None
    checkpoint = named_checkpoint(given)
    if checkpoint is not None:
        return checkpoint.load(view), checkpoint
    return _untrained(str(given), view.shape).bind(view), None


def check_forecasters(config: OffloadConfig, shape: ModelShape, model_id: str) -> None:
    """Refuse a predictor or a mode that :func:`make_forecasters` refuses, before there are weights.

    Args:
        config: as there.
        shape, model_id: of the model.

    Raises:
        ExpertcastError: a predictor that needs training, a checkpoint of another shape, a distance that it does not
            forecast, layers that do not exist, or a mode that needs another predictor.
    """
    given, checkpoint = config.resolved_predictor(), None
    if isinstance(given, (str, Path)):
        checkpoint = named_checkpoint(given)
        if checkpoint is None:
            with torch.device("meta"):
                given = _untrained(str(given), shape)
        elif ModelShape.from_dict(checkpoint.config["shape"]) != shape:
            raise trained_for_another(checkpoint.config, model_id, str(checkpoint.folder), "another shape")
    if isinstance(given, Predictor):
        given.check_ahead(config.ahead)
    elif checkpoint is not None:
        checkpoint.predictor()[1].check_ahead(config.ahead, checkpoint.name)
    check_layers(executed_layers(config, shape.layers, recall_per_layer(checkpoint, config.ahead)), shape.layers)


def _untrained(name: str, shape: ModelShape) -> Predictor:
    """Return a predictor without weights of its own."""
    cls = predictor_class(name)
    made = cls(cls.config_class(), shape)
    if made.state_dict():
        raise ExpertcastError(UNTRAINED.format(name))
    return made


def executed_layers(config: OffloadConfig, layers: int, recall: Mapping[int, float] | None) -> list[int]:
    """Return the layers that execute their forecast, by `mode`, `layers` and `min_recall`.

    Args:
        config: the options.
        layers: L of the model.
        recall: recall@k of the forecasts by target layer, where it is known.

    Raises:
        ExpertcastError: the mode executes forecasts and there is no predictor, or a hybrid mode without recall.
    """
    if config.mode == "exact":
        return []
    if config.resolved_predictor() is None:
        raise ExpertcastError(f"mode {config.mode!r} executes forecasts: give a predictor")
    if config.layers is not None:
        return list(config.layers)
    if config.mode == "speculate":
        return list(range(layers))
    if recall is None:
        raise ExpertcastError(
            "mode 'hybrid' needs the recall of each layer: give layers=[...], or a checkpoint with recall_at_k in its "
            "metrics.json"
        )
    return [layer for layer, value in recall.items() if value >= config.min_recall]


def recall_per_layer(checkpoint: PredictorCheckpoint | None, ahead: int = 1) -> dict[int, float] | None:
    """Return recall@k by target layer from metrics.json: of the validation split, or else of the split in the file.

    Args:
        checkpoint: its metrics are read.
        ahead: the distance in layers; a distance that metrics.json lacks stands for the shortest one in it.
    """
    if checkpoint is None:
        return None
    metrics = checkpoint.metrics.get("validation", checkpoint.metrics)
    metrics = metrics.get("further", {}).get(str(ahead), metrics)
    per_layer = metrics.get("recall_at_k", {}).get(checkpoint.name, {}).get("per_layer")
    if per_layer is None:
        return None
    targets = metrics.get("targets", range(1, len(per_layer) + 1))
    return {int(layer): float(value) for layer, value in zip(targets, per_layer, strict=True)}


def mean_recall(checkpoint: PredictorCheckpoint | None) -> dict[str, float]:
    """Return the mean recall@k of a checkpoint's predictor and of the parameter-free ones, from metrics.json; for a
    hybrid also of its members on the validation split, from its config."""
    if checkpoint is None:
        return {}
    found = {**checkpoint.metrics.get("baselines", {}), **checkpoint.metrics.get("recall_at_k", {})}
    means = {name: float(values["mean"]) for name, values in found.items()}
    return means | member_recall(
        checkpoint.config["predictor_config"]["choices"] if checkpoint.name == Hybrid.name else []
    )
