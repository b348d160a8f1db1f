"""Fitting `linear`: one pass for the sums, one over validation for the ridge strengths.

T tokens, D hidden size, E routed experts, P layer pairs, S ridge strengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from expertcast.data.traces import TraceSource
from expertcast.predictors import ExpertcastError, PredictorConfig, RouterState
from expertcast.predictors.linear import Linear, LinearConfig
from expertcast.predictors.plain import Json
from expertcast.training.options import NO_TRAINING, FitOptions, Fitted
from expertcast.training.ridge import RidgeStatistics
from expertcast.training.scoring import candidate_recall, device_of, states_of, train_batches

Features = Callable[[RouterState, int], Tensor]
"""Router state and distance to inputs [T, F]."""


def fit_linear(source: TraceSource, config: PredictorConfig, options: FitOptions) -> Fitted:
    """The ridge map of every layer and distance; the strength of each by recall on validation."""
    assert isinstance(config, LinearConfig)
    predictor = Linear(config, source.view.shape)
    predictor.set_defaults(source.defaults)
    predictor.to(device_of(source.view)).bind(source.view)
    report: Json = {"strengths": {}, "validation_recall": {}}
    for ahead, statistics in gather(source, predictor.input_vector, config.ahead, options).items():
        weight_SPFE, bias_SPE = solved = statistics.solve(config.strengths)
        recall_SP = score_maps(source, predictor.input_vector, ahead, solved, options)
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
    """The sums for every distance (`aheads`) from one pass over the `source`'s train split, all ranks' shares together.

    Args:
        features: what is mapped.
        options: how many tokens.

    Raises:
        ExpertcastError: the train split is empty.
    """
    shape = source.view.shape
    sums: dict[int, RidgeStatistics] = {}
    for batch in train_batches(source, options):
        states = states_of(source.view, batch)
        for ahead in aheads:
            for pair in range(shape.layers - ahead):
                x_TF = features(states[pair], ahead)
                if ahead not in sums:
                    sums[ahead] = RidgeStatistics(shape.layers - ahead, x_TF.shape[1], shape.experts, x_TF.device)
                sums[ahead].update(pair, x_TF, states[pair + ahead].logits_TE)
    if not sums:
        raise ExpertcastError(NO_TRAINING)
    for statistics in sums.values():
        statistics.all_reduce()
    return sums


def score_maps(
    source: TraceSource, features: Features, ahead: int, solved: tuple[Tensor, Tensor], options: FitOptions
) -> Tensor:
    """Recall@k [S, P] of S maps per layer pair on the validation split.

    Args:
        source: whose validation split.
        features: what the maps take.
        ahead: layers from a pair's first to its second.
        solved: weights [S, P, F, E] and biases [S, P, E].
        options: how many tokens.
    """
    weight_SPFE, bias_SPE = solved

    def forecasts(states: list[RouterState]) -> Iterator[Iterable[Tensor]]:
        for pair, layer in enumerate(source.view.layers[ahead:]):
            x_TF = features(states[pair], ahead).float()
            maps = zip(weight_SPFE[:, pair], bias_SPE[:, pair], strict=True)
            yield [layer.route(x_TF @ weight_FE + bias_E)[0] for weight_FE, bias_E in maps]

    return candidate_recall(source, ahead, options, len(weight_SPFE), forecasts)
