"""What else could follow the text: stochastic gradient descent, and least squares that begin with nothing.

T tokens, P layer pairs, F features, E routed experts, R learning rates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from expertcast.predictors import Predictor
from expertcast.runtime.engine.least_squares import RecursiveRidge
from expertcast.runtime.engine.refit_layer import BLOCK, PRIOR, SOLVE_EVERY
from expertcast.runtime.engine.refit_part import changed, ridge_part

from .streams import States, recall, rows

RATES = (0.3, 1.0, 3.0, 10.0)
"""Learning rates, each over 1 + |x|^2: a step of 1 takes away all of one token's error if it were a linear one."""


@torch.no_grad()
def inputs(predictor: Predictor, states: States, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """What the ridge parts read [P, T, F + 1] (standardised, a 1 behind), their forecasts and the routers' scores
    [P, T, E], of the stream's first tokens."""
    read, forecast, scores = [], [], []
    for pair in range(len(states) - 1):
        part = ridge_part(predictor, pair, 1)
        assert part is not None
        part.directions_of(rows(states[pair], 0, BLOCK))  # as in serving, the first block gives the spread
        state = rows(states[pair], 0, tokens)
        x_TF = part.directions_of(state)
        read.append(torch.cat([x_TF, torch.ones(len(x_TF), 1)], dim=1))
        forecast.append(part.frozen_logits(state, x_TF))
        scores.append(states[pair + 1].logits_TE[:tokens].float())
    return torch.stack(read), torch.stack(forecast), torch.stack(scores)


@torch.no_grad()
def descended(
    predictor: Predictor, states: States, made: tuple[Tensor, Tensor, Tensor], *, from_nothing: bool
) -> dict[float, Tensor]:
    """Recall [T] of a linear map that takes one gradient step of KL(router || forecast) after each token, by rate.

    Args:
        predictor: whose model routes.
        states: of the stream.
        made: what :func:`inputs` gave.
        from_nothing: it begins at zero, not at the predictor's own forecasts.
    """
    x_PTF, frozen_PTE, y_PTE = made
    if from_nothing:
        frozen_PTE = torch.zeros_like(frozen_PTE)
    truth_PTE = y_PTE.softmax(dim=2)
    step_PT = 1 / (1 + x_PTF.square().sum(dim=2))
    by_rate = {}
    for rate in RATES:
        change_PFE = x_PTF.new_zeros(x_PTF.shape[0], x_PTF.shape[2], y_PTE.shape[2])
        logits_PTE = torch.empty_like(y_PTE)
        for token in range(x_PTF.shape[1]):
            x_PF1 = x_PTF[:, token, :, None]
            logits_PE = frozen_PTE[:, token] + torch.bmm(x_PF1.transpose(1, 2), change_PFE)[:, 0]
            logits_PTE[:, token] = logits_PE
            error_PE = (truth_PTE[:, token] - logits_PE.softmax(dim=1)) * (rate * step_PT[:, token, None])
            change_PFE.baddbmm_(x_PF1, error_PE[:, None])
        by_rate[rate] = _recall(predictor, states, logits_PTE)
    return by_rate


@torch.no_grad()
def squares_from_nothing(predictor: Predictor, states: States, made: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Recall [T] of recursive least squares on the routers' scores themselves, without a trained predictor: `made` is
    what :func:`inputs` gave for this predictor and these states."""
    x_PTF, _, y_PTE = made
    logits_PTE = torch.zeros_like(y_PTE)
    for x_TF, y_TE, logits_TE in zip(x_PTF[:, :, :-1], y_PTE, logits_PTE, strict=True):
        ridge = RecursiveRidge(x_TF.shape[1], y_TE.shape[1], prior=PRIOR)
        for block, begin in enumerate(range(0, len(x_TF) - BLOCK + 1, BLOCK)):
            part = slice(begin, begin + BLOCK)
            if block:
                if block in (1, 2) or block % SOLVE_EVERY == 0:
                    change_GE = ridge.solve()
                assert change_GE is not None
                logits_TE[part] = changed(x_TF[part], change_GE)
            ridge.add(x_TF[part], y_TE[part])
    return _recall(predictor, states, logits_PTE)


def best(by_rate: dict[float, Tensor]) -> tuple[float, Tensor]:
    """The rate with the highest recall over the whole stream, chosen in hindsight, and its recall."""
    rate = max(by_rate, key=lambda rate: float(by_rate[rate].mean()))
    return rate, by_rate[rate]


def _recall(predictor: Predictor, states: States, logits_PTE: Tensor) -> Tensor:
    found: Sequence[Tensor] = [
        recall(predictor.view[pair + 1].route(logits_TE)[0], states[pair + 1].topk_ids_TK[: len(logits_TE)])
        for pair, logits_TE in enumerate(logits_PTE)
    ]
    return torch.stack(list(found)).mean(dim=0)
