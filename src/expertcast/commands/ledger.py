"""What predictors cost on this machine, for `eval` and `train`: a forecast's time is measured as a decode step runs it.

A traced program is timed where the runtime would run one. Of early attention the stand-in is timed and what reads its
result, not the attention itself: that takes the model, and traces hold what came of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from expertcast.data.traces import TraceSource
from expertcast.predictors import MoEView, NextToken, Predictor, RouterState
from expertcast.predictors.next_token_tracker import NextTokenTracker
from expertcast.predictors.plain import Json
from expertcast.runtime.engine.traced import TracedForecasts
from expertcast.training.ledger import ledger_entry
from expertcast.training.options import Fitted
from expertcast.training.scoring import states_of

TOKENS = 32
"""Tokens that are timed, after two that are not."""
_WARM_UP = 2


def ledger_of(fitted: Mapping[str, Fitted], source: TraceSource, split: str, ahead: int) -> dict[str, Json]:
    """The costs of each predictor (:func:`expertcast.training.ledger.ledger_entry`), by the names given.

    Args:
        fitted: predictors with the reports of their fits.
        source: whose tokens are forecast.
        split: of it.
        ahead: how far the forecasts look.
    """
    times = forecast_seconds(fitted, source, split, ahead)
    return {name: ledger_entry(made.predictor, made.report, times.get(name)) for name, made in fitted.items()}


def forecast_seconds(fitted: Mapping[str, Fitted], source: TraceSource, split: str, ahead: int) -> dict[str, float]:
    """Seconds of one forecast for one token, median over tokens and layers: each is clocked for itself, so that what
    else the machine does meets few of them. On one thread, the same tokens for all, taking turns token by token. Of a
    predictor that looks tokens ahead: of all that it does at one token.

    Args:
        fitted, source, split, ahead: as for :func:`ledger_of`.
    """
    batch = next(source.batches(split, TOKENS + _WARM_UP), None)
    if batch is None:
        return {}
    steps = {name: _decode_step(made.predictor, source.view, ahead) for name, made in fitted.items()}
    seconds: dict[str, list[float]] = {name: [] for name in fitted}
    with _one_thread(), torch.no_grad():
        for token in range(len(batch)):
            states = states_of(source.view, batch[token : token + 1])
            for name, step in steps.items():
                clocked = step(states)
                if token >= _WARM_UP or len(batch) <= _WARM_UP:
                    seconds[name] += clocked
    return {name: statistics.median(times) for name, times in seconds.items()}


def _decode_step(predictor: Predictor, view: MoEView, ahead: int) -> Callable[[list[RouterState]], list[float]]:
    """What a predictor does in one decode step, timed: the states of one token at all layers to seconds."""
    if isinstance(predictor, NextToken):
        tracker = NextTokenTracker(predictor)
        tracker.start(True)

        def follow(states: list[RouterState]) -> list[float]:
            start = time.perf_counter()
            tracker.start(False)
            for state in states:
                tracker.see(state.layer, state.residual_TD, state.logits_TE, 1)
            return [time.perf_counter() - start]

        return follow
    traced = TracedForecasts(predictor)
    traced.prepare(view, ahead)

    def forecast(states: list[RouterState]) -> list[float]:
        clocked = []
        for state in states[: len(states) - ahead]:
            start = time.perf_counter()
            if predictor.wants_early(state.layer, ahead):
                traced.stand_in(state)
            traced.forecast(state, ahead)
            clocked.append(time.perf_counter() - start)
        return clocked

    return forecast


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
