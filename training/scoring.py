"""Recall on validation while predictors are fitted: only what choices are made by.

T tokens, P layer pairs, E routed experts, K experts per token. Reports are :mod:`expertcast.training.evaluation`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from expertcast.data.batch import TraceBatch
from expertcast.data.distributed import training_share
from expertcast.data.traces import TraceSource
from expertcast.predictors import MoEView, Predictor, RouterState
from expertcast.training.options import FitOptions

RANK_BATCH = 256
FORGET_EVERY = 10


def token_recall(forecast_ids_TK: Tensor, true_ids_TK: Tensor) -> Tensor:
    """Share of each token's true experts among the forecast ones (row B6)."""
    return (forecast_ids_TK[:, :, None] == true_ids_TK[:, None, :]).any(dim=1).float().mean(dim=1)


def train_batches(source: TraceSource, options: FitOptions) -> Iterator[TraceBatch]:
    """This rank's share of the train split, in order."""
    share = training_share()
    # several ranks get equally many full batches: small ones leave few tokens over
    size = options.batch_size if share.world == 1 else min(options.batch_size, RANK_BATCH)
    return source.batches("train", size, max_tokens=options.tokens, share=share)


def validation_batches(source: TraceSource, options: FitOptions) -> Iterator[TraceBatch]:
    """The validation split in order, in full on every rank, so that all ranks choose alike."""
    return source.batches("validation", options.batch_size, max_tokens=options.validation_tokens)


def device_of(view: MoEView) -> torch.device:
    """Where the model's routers are; whatever is fitted is fitted there."""
    return next(view[0].router.parameters()).device


def states_of(source: TraceSource, batch: TraceBatch) -> list[RouterState]:
    """The router states of a batch at all layers, on the routers' device."""
    batch = batch.to(device_of(source.view))
    return [batch.state(source.view, layer) for layer in range(len(source.view))]


def forget_some(batch: TraceBatch) -> TraceBatch:
    """The batch with the previous token's routing unknown in every tenth row.

    A network trained without gaps leans on it: where nothing is known (a whole prompt at once) recall on the bootstrap
    was .892, and .902 with gaps in training; where all is known, gaps cost .001.
    """
    if batch.previous_TLE is None:
        return batch
    previous_TLE = batch.previous_TLE.clone()
    previous_TLE[::FORGET_EVERY] = float("nan")
    return replace(batch, previous_TLE=previous_TLE)


@torch.no_grad()
def validation_recall(
    members: Mapping[str, Predictor], source: TraceSource, ahead: int, options: FitOptions
) -> dict[str, Tensor]:
    """Recall@k [P] of each predictor on the validation split, teacher-forced, all on the same tokens."""
    pairs = source.view.shape.layers - ahead
    total = {name: torch.zeros(pairs, dtype=torch.float64) for name in members}
    tokens = 0
    for batch in validation_batches(source, options):
        states = states_of(source, batch)
        for name, member in members.items():
            for pair in range(pairs):
                forecast = member.forecast(states[pair], ahead)
                score_T = token_recall(forecast.topk_ids_TK, states[pair + ahead].topk_ids_TK)
                total[name][pair] += score_T.sum().cpu()
        tokens += len(batch)
    return {name: total_P / max(tokens, 1) for name, total_P in total.items()}
