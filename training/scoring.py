"""Recall on validation while predictors are fitted: only what choices are made by.

T tokens, P layer pairs, E routed experts, K experts per token. Reports are :mod:`expertcast.training.evaluation`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from expertcast.data.batch import TraceBatch
from expertcast.data.traces import TraceSource
from expertcast.predictors import Predictor, RouterState
from expertcast.training.options import FitOptions


def token_recall(forecast_ids_TK: Tensor, true_ids_TK: Tensor) -> Tensor:
    """Share of each token's true experts among the forecast ones (row B6)."""
    return (forecast_ids_TK[:, :, None] == true_ids_TK[:, None, :]).any(dim=1).float().mean(dim=1)


def validation_batches(source: TraceSource, options: FitOptions) -> Iterator[TraceBatch]:
    """The validation split in order, in full on every rank, so that all ranks choose alike."""
    return source.batches("validation", options.batch_size, max_tokens=options.validation_tokens)


def states_of(source: TraceSource, batch: TraceBatch, *, previous: bool = False) -> list[RouterState]:
    """The router states of a batch at all layers."""
    previous_TLE = batch.previous_logits() if previous else None
    return [batch.state(source.view, layer, previous_logits_TLE=previous_TLE) for layer in range(len(source.view))]


@torch.no_grad()
def validation_recall(
    members: Mapping[str, Predictor], source: TraceSource, ahead: int, options: FitOptions
) -> dict[str, Tensor]:
    """Recall@k [P] of each predictor on the validation split, teacher-forced, all on the same tokens."""
    previous = any(member.uses_previous_token for member in members.values())
    pairs = source.view.shape.layers - ahead
    total = {name: torch.zeros(pairs, dtype=torch.float64) for name in members}
    tokens, last = 0, None
    for batch in validation_batches(source, options):
        rows = batch if last is None else TraceBatch.cat([last, batch])
        states = states_of(source, rows, previous=previous)
        if last is not None:  # the row before was only there for the first row's previous token
            states = [_without_first(state) for state in states]
        for name, member in members.items():
            for pair in range(pairs):
                forecast = member.forecast(states[pair], ahead)
                score_T = token_recall(forecast.topk_ids_TK, states[pair + ahead].topk_ids_TK)
                total[name][pair] += score_T.sum().cpu()
        tokens += len(batch)
        last = batch[-1:] if previous else None
    return {name: total_P / max(tokens, 1) for name, total_P in total.items()}


def _without_first(state: RouterState) -> RouterState:
    previous_TLE = state.previous_logits_TLE
    return replace(
        state,
        residual_TD=state.residual_TD[1:],
        router_input_TD=state.router_input_TD[1:],
        logits_TE=state.logits_TE[1:],
        topk_ids_TK=state.topk_ids_TK[1:],
        topk_weights_TK=state.topk_weights_TK[1:],
        previous_logits_TLE=None if previous_TLE is None else previous_TLE[1:],
    )
