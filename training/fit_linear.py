"""Fitting `linear`: one pass for the sums, one over validation for the ridge strengths.

T tokens, D hidden size, E routed experts, P layer pairs, S ridge strengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from expertcast.data.traces import TraceSource
from expertcast.predictors import ExpertcastError, PredictorConfig, RouterState
from expertcast.predictors.linear import Linear, LinearConfig
from expertcast.training.options import FitOptions, Fitted
from expertcast.training.ridge import RidgeStatistics
from expertcast.training.scoring import device_of, states_of, token_recall, train_batches, validation_batches

Features = Callable[[RouterState, int], Tensor]
"""Router state and distance to inputs [T, F]."""


def fit_linear(source: TraceSource, config: PredictorConfig, options: FitOptions) -> Fitted:
    """The ridge map of every layer and distance; the strength of each by recall on validation."""
    assert isinstance(config, LinearConfig)
    predictor = Linear(config, source.view.shape)
    predictor.set_defaults(source.defaults)
    predictor.to(device_of(source.view)).bind(source.view)
    report: dict[str, Any] = {"strengths": {}, "validation_recall": {}}
    for ahead, statistics in gather(source, predictor.input_vector, config.ahead, options).items():
        weight_SPFE, bias_SPE = statistics.solve(config.strengths)
        recall_SP = score_maps(source, predictor.input_vector, ahead, weight_SPFE, bias_SPE, options)
        best_P = recall_SP.argmax(dim=0)
        pairs = torch.arange(len(best_P))
        chosen = [config.strengths[index] for index in best_P]
        predictor.set_map(ahead, weight_SPFE[best_P, pairs], bias_SPE[best_P, pairs], torch.tensor(chosen))
        report["strengths"][str(ahead)] = chosen
        report["validation_recall"][str(ahead)] = recall_SP.amax(dim=0).tolist()
    return Fitted(predictor=predictor, report=report)


@torch.no_grad()
def gather(
    source: TraceSource, features: Features, aheads: Sequence[int], options: FitOptions
) -> dict[int, RidgeStatistics]:
    """The sums for every distance from one pass over the train split, over all ranks' shares together.

    Raises:
        ExpertcastError: the train split is empty.
    """
    shape = source.view.shape
    sums: dict[int, RidgeStatistics] = {}
    for batch in train_batches(source, options):
        states = states_of(source, batch)
        for ahead in aheads:
            for pair in range(shape.layers - ahead):
                x_TF = features(states[pair], ahead)
                if ahead not in sums:
                    sums[ahead] = RidgeStatistics(shape.layers - ahead, x_TF.shape[1], shape.experts, x_TF.device)
                sums[ahead].update(pair, x_TF, states[pair + ahead].logits_TE)
    if not sums:
        raise ExpertcastError("no tokens in the train split to fit from: collect more text")
    for statistics in sums.values():
        statistics.all_reduce()
    return sums


@torch.no_grad()
def score_maps(
    source: TraceSource,
    features: Features,
    ahead: int,
    weight_SPFE: Tensor,
    bias_SPE: Tensor,
    options: FitOptions,
) -> Tensor:
    """Recall@k [S, P] of S maps per layer pair on the validation split."""
    total_SP = torch.zeros(weight_SPFE.shape[:2], dtype=torch.float64)
    tokens = 0
    for batch in validation_batches(source, options):
        states = states_of(source, batch)
        for pair in range(weight_SPFE.shape[1]):
            true_TK = states[pair + ahead].topk_ids_TK
            x_TF = features(states[pair], ahead).float()
            for index, weight_FE in enumerate(weight_SPFE[:, pair]):
                ids_TK, _ = source.view[pair + ahead].route(x_TF @ weight_FE + bias_SPE[index, pair])
                total_SP[index, pair] += token_recall(ids_TK, true_TK).sum().cpu()
        tokens += len(batch)
    return total_SP / max(tokens, 1)
