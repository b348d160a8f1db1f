"""Fitting `linear`: one pass for the sums, one over validation for the ridge strengths.

T tokens, D hidden size, E routed experts, P layer pairs, S ridge strengths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from expertcast.data.distributed import training_share
from expertcast.data.traces import TraceSource
from expertcast.predictors import ExpertcastError, PredictorConfig
from expertcast.predictors.linear import Linear, LinearConfig
from expertcast.training.options import FitOptions, Fitted
from expertcast.training.ridge import RidgeStatistics
from expertcast.training.scoring import states_of, token_recall, validation_batches


def fit_linear(source: TraceSource, config: PredictorConfig, options: FitOptions) -> Fitted:
    """The ridge map of every layer and distance; the strength of each by recall on validation."""
    assert isinstance(config, LinearConfig)
    predictor = Linear(config, source.view.shape)
    predictor.set_defaults(source.defaults)
    predictor.bind(source.view)
    sums = gather(predictor, source, options)
    report: dict[str, Any] = {"strengths": {}, "validation_recall": {}}
    for ahead, statistics in sums.items():
        weight_SPDE, bias_SPE = statistics.solve(config.strengths)
        recall_SP = score_maps(predictor, source, ahead, weight_SPDE, bias_SPE, options)
        best_P = recall_SP.argmax(dim=0)
        pairs = torch.arange(len(best_P))
        strength_P = torch.tensor(config.strengths)[best_P]
        predictor.set_map(ahead, weight_SPDE[best_P, pairs], bias_SPE[best_P, pairs], strength_P)
        report["strengths"][str(ahead)] = strength_P.tolist()
        report["validation_recall"][str(ahead)] = recall_SP.amax(dim=0).tolist()
    return Fitted(predictor=predictor, report=report)


@torch.no_grad()
def gather(predictor: Linear, source: TraceSource, options: FitOptions) -> dict[int, RidgeStatistics]:
    """The sums for every distance from one pass over the train split, over all ranks' shares together.

    Raises:
        ExpertcastError: the train split is empty.
    """
    shape = source.view.shape
    sums = {ahead: RidgeStatistics(shape.layers - ahead, shape.hidden, shape.experts) for ahead in predictor.ahead}
    batches = source.batches("train", options.batch_size, max_tokens=options.tokens, share=training_share())
    for batch in batches:
        states = states_of(source, batch)
        for ahead, statistics in sums.items():
            for pair in range(shape.layers - ahead):
                vector_TD = predictor.input_vector(states[pair], ahead)
                statistics.update(pair, vector_TD, batch.logits_TLE[:, pair + ahead])
    for statistics in sums.values():
        statistics.all_reduce()
    if not all(bool((statistics.count_P > 1).all()) for statistics in sums.values()):
        raise ExpertcastError("no tokens in the train split to fit from: collect more text")
    return sums


@torch.no_grad()
def score_maps(
    predictor: Linear,
    source: TraceSource,
    ahead: int,
    weight_SPDE: Tensor,
    bias_SPE: Tensor,
    options: FitOptions,
) -> Tensor:
    """Recall@k [S, P] of each strength's map on the validation split."""
    total_SP = torch.zeros(weight_SPDE.shape[:2], dtype=torch.float64)
    tokens = 0
    for batch in validation_batches(source, options):
        states = states_of(source, batch)
        for pair in range(weight_SPDE.shape[1]):
            true_TK = states[pair + ahead].topk_ids_TK
            vector_TD = predictor.input_vector(states[pair], ahead).float()
            for index, weight_DE in enumerate(weight_SPDE[:, pair]):
                ids_TK, _ = source.view[pair + ahead].route(vector_TD @ weight_DE + bias_SPE[index, pair])
                total_SP[index, pair] += token_recall(ids_TK, true_TK).sum()
        tokens += len(batch)
    return total_SP / max(tokens, 1)
