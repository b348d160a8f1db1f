"""What the options of an :class:`OffloadConfig` stand for on one model: predictor, layers, slots, what follows them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from expertcast.checkpoints.store import PredictorCheckpoint
from expertcast.predictors import ExpertcastError, MoEView, NextToken, Predictor, predictor_class
from expertcast.predictors.view import ModelShape, overfetched
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.drafts.names import QUANTISED
from expertcast.runtime.drafts.quantised import expected_bytes
from expertcast.runtime.engine.drift import DriftMonitor
from expertcast.runtime.engine.refit import OnlineRefit
from expertcast.runtime.option_values import named_checkpoint, pool_bytes, size_bytes
from expertcast.runtime.policies import Policies
from expertcast.runtime.storage.codecs import make_codec
from expertcast.runtime.storage.coded_reader import decoding_bytes
from expertcast.runtime.storage.coded_store import CodedStore
from expertcast.runtime.storage.layout import BlockLayout, device_of


def resolve_predictor(
    given: str | Path | Predictor | None, view: MoEView
) -> tuple[Predictor | None, PredictorCheckpoint | None]:
    """What `predictor` (or `next_token`) stands for: bound to the model, and the checkpoint it came from.

    Raises:
        ExpertcastError: unknown name, one that must be trained first, or a checkpoint of another model.
    """
    if given is None:
        return None, None
    if isinstance(given, Predictor):
        return given.bind(view), None
    checkpoint = named_checkpoint(given)
    if checkpoint is not None:
        return checkpoint.load(view), checkpoint
    cls = predictor_class(str(given))
    made = cls(cls.config_class(), view.shape)
    if made.state_dict():
        raise ExpertcastError(
            f"predictor {given!r} must be trained for a model: give the folder that `expertcast train` wrote"
        )
    return made.bind(view), None


def executed_layers(config: OffloadConfig, layers: int, recall: Mapping[int, float] | None) -> list[int]:
    """What `mode`, `layers` and `min_recall` stand for: the layers that execute their forecast.

    Args:
        layers: L of the model.
        recall: recall@k of the forecasts by target layer, where it is known.

    Raises:
        ExpertcastError: no predictor to execute, or nothing that says where a hybrid should.
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
            "mode 'hybrid' needs to know where forecasts are good: give layers=[...], or a checkpoint with recall_at_k "
            "in its metrics.json"
        )
    return [layer for layer, value in recall.items() if value >= config.min_recall]


def recall_per_layer(checkpoint: PredictorCheckpoint | None, ahead: int = 1) -> dict[int, float] | None:
    """Recall@k by target layer on the validation split, as metrics.json has it; of whatever it has, without one.

    Args:
        checkpoint: whose.
        ahead: the distance; where metrics.json does not have it, recall is at the shortest one that was scored.
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


def make_monitor(
    config: OffloadConfig, view: MoEView, predictor: Predictor | None, checkpoint: PredictorCheckpoint | None
) -> DriftMonitor | None:
    """What `drift` stands for: compares forecasts with their checkpoint's recall at the distance that they are made at.

    Args:
        config: the options.
        view: the model's MoE layers.
        predictor: what forecasts; None where nothing does.
        checkpoint: where it comes from.
    """
    if predictor is None or not config.drift:
        return None
    expected = recall_per_layer(checkpoint, config.ahead)
    if expected is not None and min(expected, default=0) != config.ahead:
        expected = None
    return DriftMonitor(view.shape.layers, view.shape.top_k, expected, predictor.name)


def make_refit(config: OffloadConfig, predictor: Predictor | None) -> OnlineRefit | None:
    """What `refit` stands for; `predictor` is bound to the model and on its device.

    Raises:
        ExpertcastError: nothing to refit.
    """
    if not config.refit:
        return None
    if predictor is None:
        raise ExpertcastError("refit changes forecasts: give a predictor")
    return OnlineRefit(predictor, config.ahead, config.refit)


def slot_count(config: OffloadConfig, view: MoEView) -> int:
    """Slots to make, at most one per expert: what `slots`, `memory`, or else `cache` and `overfetch` stand for.

    Raises:
        ExpertcastError: too few for one token.
    """
    if config.memory is None:
        return slots_for(config, view.shape, 0)
    layout, store, decoding = BlockLayout.of(view), config.store, 0
    drafts = expected_bytes(view, config.draft) if config.draft in QUANTISED else 0
    if isinstance(store, CodedStore) and store.device.type == "cpu":
        decoding = decoding_bytes(store.codec)
    elif (codec := config.resolved_codec()) != "raw" and device_of(view).type == "cpu":
        decoding = decoding_bytes(make_codec(codec, layout))
    return slots_for(config, view.shape, layout.block_bytes, drafts, decoding)


def slots_for(config: OffloadConfig, shape: ModelShape, block_bytes: int, drafts: int = 0, decoding: int = 0) -> int:
    """The same for a model of this shape.

    Args:
        config: the options.
        shape: of the model.
        block_bytes: bytes of one expert; read where `memory` is given.
        drafts, decoding: bytes that drafts, and threads that decode, take of `memory`.

    Raises:
        ExpertcastError: too few for one token.
    """
    slots, everything = config.slots, shape.layers * shape.experts
    if config.memory is not None:
        pools = sum(pool_bytes(config.pools).values())
        slots = (size_bytes(config.memory) - drafts - decoding - pools) // block_bytes
        if slots < shape.top_k:
            beside = f" beside pools={config.pools!r}" if config.pools else ""
            beside += f" beside {drafts} bytes for draft={config.draft!r}" if drafts else ""
            beside += f" beside {decoding} bytes to decode in" if decoding else ""
            raise ExpertcastError(
                f"memory={config.memory!r} holds {max(0, slots)} experts of {block_bytes} bytes{beside}, one token "
                f"needs {shape.top_k}: give {shape.top_k * block_bytes} bytes or more{beside}"
            )
    elif slots is None:
        # the running layer's, a forecast's, and those of a wrong forecast whose copies are under way
        least = shape.top_k + 2 * overfetched(config.overfetch, shape.top_k, shape.experts)
        slots = max(least, everything // 4) if config.cache else least
    if slots < shape.top_k:
        raise ExpertcastError(
            f"slots={slots} is fewer than the {shape.top_k} experts one token needs: give slots={shape.top_k} or more"
        )
    return min(slots, everything)


def resolve_next_token(
    given: str | Path | Predictor | None, view: MoEView, policies: Policies, device: torch.device
) -> NextToken | None:
    """What `next_token` stands for: the forecaster of the next tokens, bound to the model and on its device.

    Args:
        given: a checkpoint's folder, or the predictor itself; None where nothing looks tokens ahead.
        view: the model's MoE layers.
        policies: which must do something with its forecasts.
        device: where the model computes.

    Raises:
        ExpertcastError: another predictor, or no policy that does anything with its forecasts.
    """
    if given is None:
        return None
    found, _ = resolve_predictor(given, view)
    if not isinstance(found, NextToken):
        raise ExpertcastError(
            f"next_token={str(given)!r} forecasts no tokens: give what `expertcast train --predictor next_token` wrote"
        )
    if not policies.eviction.cls.reads_tokens and policies.prefetch.name == "none":
        raise ExpertcastError(
            f"next_token serves prefetching and the eviction policy 'forecast', here are prefetch 'none' and eviction "
            f"{policies.eviction.name!r}: give policies=Policies(eviction='forecast'), or another prefetch"
        )
    return found.to(device)
