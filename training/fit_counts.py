"""Fitting what takes one pass or none: counts for `frequency` and `previous_token`, means for `quasi_hidden`."""

from __future__ import annotations

from expertcast.data.distributed import sum_over_ranks, training_share
from expertcast.data.traces import TraceSource
from expertcast.predictors import ExpertcastError, PredictorConfig
from expertcast.predictors.frequency import Frequency, PreviousToken
from expertcast.predictors.quasi_hidden import QuasiHidden
from expertcast.training.options import NO_TRAINING, FitOptions, Fitted
from expertcast.training.scoring import device_of, train_batches


def fit_frequency(source: TraceSource, config: PredictorConfig, options: FitOptions) -> Fitted:
    """Counts and weight sums of every expert on the train split."""
    return Fitted(predictor=count_routing(Frequency(config, source.view.shape), source, options))


def fit_previous_token(source: TraceSource, config: PredictorConfig, options: FitOptions) -> Fitted:
    """What `frequency` learns: it stands in where there is no previous token."""
    return Fitted(predictor=count_routing(PreviousToken(config, source.view.shape), source, options))


def count_routing(predictor: Frequency, source: TraceSource, options: FitOptions) -> Frequency:
    """Add the routing of the train split to the predictor's counts, over all ranks' shares together.

    Raises:
        ExpertcastError: the train split is empty.
    """
    device = device_of(source.view)
    predictor.to(device)
    for batch in train_batches(source, options):
        logits_TLE = batch.logits_TLE.to(device)
        for layer in source.view:
            predictor.observe(layer.index, *layer.route(logits_TLE[:, layer.index]))
    sum_over_ranks(training_share(), [predictor.count_LE, predictor.weight_sum_LE])
    if not predictor.count_LE.any():
        raise ExpertcastError(NO_TRAINING)
    return predictor


def fit_quasi_hidden(source: TraceSource, config: PredictorConfig, options: FitOptions) -> Fitted:
    """Take the means over the source's whole train split, whatever `options.tokens` says."""
    del options
    predictor = QuasiHidden(config, source.view.shape)
    predictor.set_defaults(source.defaults)
    return Fitted(predictor=predictor)
