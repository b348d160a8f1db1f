"""Calibrate a predictor on text that it did not learn from: one :class:`LogOdds` per layer pair.

T tokens, E routed experts per layer, K experts per token, P layer pairs.

Slope, bend and offset minimise the cross-entropy of all (token, expert) pairs, which is convex for each of the units
tried. The solver is Newton's method with step halving.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from expertcast.data.traces import TraceSource
from expertcast.predictors import Predictor
from expertcast.predictors.base import LogOdds, margin, signed_log
from expertcast.training.scoring import (
    FitOptions,
    states_of,
    train_batches,
    train_tokens,
    validation_pass,
    validation_tokens,
)

READ, TOKENS = 16_384, 4096
"""Tokens at the beginning of the train split over which those of calibration are spread, and their number."""
_PRIOR = 1.0
"""Weight of the prior (slope 1, bend 0, offset 0); without it, perfect forecasts have no finite optimum."""
_UNITS = (0.01, 0.03, 0.1, 0.3, 1.0)
"""Units to choose from by cross-entropy: routers differ in the scale of their logits."""
_STEPS, _HALVINGS = 30, 20
_TOLERANCE = 1e-6


@torch.no_grad()
def calibrate(predictor: Predictor, source: TraceSource, options: FitOptions, *, trained: bool = True) -> None:
    """Set a predictor's calibration for all its distances; no change if the split is empty.

    Args:
        predictor: predictor of layers, bound to the source's model.
        source: traces; every rank reads the same tokens, so all ranks compute the same result.
        options: number of tokens.
        trained: whether the predictor learned from the train split, whose tokens then show fewer of its errors. If
            not, they are used: there are more of them, and the validation split of few tokens is one document.
    """
    margins: dict[tuple[int, int], list[Tensor]] = {}
    members: dict[int, list[Tensor]] = {}
    if trained:
        tokens, batches = validation_tokens(source, options), validation_pass(source, options, "calibrating")
    else:
        first = replace(options, tokens=min(READ, options.tokens or READ))
        tokens, batches = train_tokens(source, first), train_batches(source, first, "calibrating", whole=True)
    every = max(1, -(-tokens // TOKENS))
    for batch in batches:
        states = states_of(source.view, batch[::every])
        for state in states:
            members.setdefault(state.layer, []).append(
                torch.zeros_like(state.logits_TE, dtype=torch.bool).scatter_(1, state.topk_ids_TK, True)
            )
        for ahead in predictor.ahead:
            for state in states[:-ahead]:
                logits_TE = predictor.forecast(state, ahead).logits_TE
                margins.setdefault((ahead, state.layer), []).append(margin(logits_TE, predictor.shape.top_k))
    if margins:
        predictor.calibration = {
            ahead: [
                fit_log_odds(torch.cat(margins[ahead, layer]), torch.cat(members[layer + ahead]))
                for layer in range(predictor.shape.layers - ahead)
            ]
            for ahead in predictor.ahead
        }


def fit_log_odds(margin_TE: Tensor, member_TE: Tensor) -> LogOdds:
    """Fit a calibration by cross-entropy between margins [T, E] and membership in the K chosen (bool)."""
    margin_N, member_N = margin_TE.flatten().double(), member_TE.flatten().double()
    fits = {unit: _fit(margin_N, member_N, unit) for unit in _UNITS}
    unit = min(fits, key=lambda unit: fits[unit][1])
    slope, bend, offset = fits[unit][0]
    return LogOdds(slope, bend, offset, unit)


def _fit(margin_N: Tensor, member_N: Tensor, unit: float) -> tuple[list[float], float]:
    """Return slope, bend and offset for a unit, and their cross-entropy in nats with the prior's."""
    x_N3 = torch.stack([margin_N, signed_log(margin_N / unit), torch.ones_like(margin_N)], dim=1)
    start_3 = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64, device=margin_N.device)

    def loss(fit_3: Tensor, odds_N: Tensor) -> Tensor:
        nats = functional.binary_cross_entropy_with_logits(odds_N, member_N, reduction="sum")
        return nats + 0.5 * _PRIOR * (fit_3 - start_3).square().sum()

    fit_3, odds_N = start_3, x_N3 @ start_3
    nats = loss(fit_3, odds_N)
    for _ in range(_STEPS):
        p_N = torch.sigmoid(odds_N)
        gradient_3 = (p_N - member_N) @ x_N3 + _PRIOR * (fit_3 - start_3)
        information_33 = (x_N3 * (p_N * (1 - p_N))[:, None]).T @ x_N3
        information_33.diagonal().add_(_PRIOR)
        step_3 = torch.linalg.solve(information_33, gradient_3)
        for _ in range(_HALVINGS):
            tried_N = x_N3 @ (fit_3 - step_3)
            better = loss(fit_3 - step_3, tried_N)
            if better <= nats:
                break
            step_3 = step_3 / 2
        else:
            break
        gained, fit_3, odds_N, nats = nats - better, fit_3 - step_3, tried_N, better
        if gained <= _TOLERANCE * nats.abs():
            break
    return fit_3.tolist(), float(nats)
