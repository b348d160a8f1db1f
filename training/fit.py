"""Fit any predictor from traces or from a running model.

`hybrid` combines other predictors. A predictor without an entry in `FITTERS` has no parameters to fit.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from expertcast.data.processes import join_ranks, sum_over_ranks, training_share
from expertcast.data.traced import TracedForecasts
from expertcast.data.traces import DEFAULTS_NOTE, TraceSource
from expertcast.predictors import ExpertcastError, Predictor, PredictorConfig, predictor_class
from expertcast.predictors.baselines import Frequency, PreviousToken, QuasiHidden, QuasiInput
from expertcast.predictors.early_attention import EarlyAttention, EarlyConfig
from expertcast.predictors.estimator import Estimator
from expertcast.predictors.hybrid import CANDIDATES, Choice, Hybrid, HybridConfig, member_recall
from expertcast.predictors.linear import Linear, default_inputs
from expertcast.predictors.messages import Json
from expertcast.training.calibrate import calibrate
from expertcast.training.estimator import fit_estimator, fit_linear
from expertcast.training.scoring import (
    NO_TRAINING,
    FitOptions,
    Fitted,
    device_of,
    require_stand_in,
    states_of,
    train_batches,
    train_tokens,
    validation_recall,
)

Fitter = Callable[[TraceSource, PredictorConfig, FitOptions], Fitted]


def fit_counts(cls: type[Frequency], source: TraceSource, config: PredictorConfig, options: FitOptions) -> Fitted:
    """Count how often each expert is used in the train split, up to `options.tokens` tokens.

    Raises:
        ExpertcastError: the train split is empty.
    """
    device, predictor = device_of(source.view), cls(config, source.view.shape)
    predictor.to(device)
    for batch in train_batches(source, options, f"{cls.name}: counting"):
        logits_TLE = batch.logits_TLE.to(device)
        for layer in source.view:
            predictor.observe(layer.index, *layer.route(logits_TLE[:, layer.index]))
    sum_over_ranks(training_share(), [predictor.count_LE, predictor.weight_sum_LE])
    if not predictor.count_LE.any():
        raise ExpertcastError(NO_TRAINING)
    return Fitted(predictor=predictor)


def fit_quasi_hidden(source: TraceSource, config: PredictorConfig, options: FitOptions) -> Fitted:
    """Copy the source's default vectors, which are means over the whole train split; `options` has no effect."""
    predictor = QuasiHidden(config, source.view.shape)
    predictor.set_defaults(source.defaults)
    return Fitted(predictor=predictor)


def fit_early_attention(source: TraceSource, config: PredictorConfig, options: FitOptions) -> Fitted:
    """Copy the source's stand-in, and its rank into the config; `options` has no effect.

    Raises:
        ExpertcastError: the source has no early attention.
    """
    assert isinstance(config, EarlyConfig)
    stand_in = require_stand_in(source, EarlyAttention.name)
    predictor = EarlyAttention(replace(config, stand_in_rank=stand_in.rank), source.view.shape)
    predictor.set_stand_in(stand_in)
    return Fitted(predictor=predictor)


FITTERS: dict[str, Fitter] = {
    "frequency": partial(fit_counts, Frequency),
    "previous_token": partial(fit_counts, PreviousToken),  # frequencies serve tokens without a previous token
    "quasi_hidden": fit_quasi_hidden,
    "linear": fit_linear,
    "early_attention": fit_early_attention,
    "estimator": fit_estimator,
}


def fit(
    name: str,
    source: TraceSource,
    *,
    config: PredictorConfig | None = None,
    options: FitOptions | None = None,
    known: Mapping[str, Fitted] | None = None,
) -> Fitted:
    """Fit a predictor on the train split and calibrate it on the validation split, without a fit on the train split.

    Args:
        name: registry name of the predictor.
        source: traces, or a running model.
        config: the predictor's configuration; default: its default configuration.
        options: tokens, seed, logging and resuming.
        known: predictors fitted earlier; `hybrid` chooses among them and fits the missing candidates.

    Returns:
        The predictor, bound and in eval mode, with a report of the fit.

    Raises:
        ExpertcastError: the name is unknown, the config belongs to another predictor, or a split has no tokens.

    Example:
        >>> import expertcast
        >>> expertcast.fit("quasi_hidden", expertcast.TraceDataset.open("traces")).predictor
        QuasiHidden(layers=12, experts=64, top_k=4, hidden=192, ahead=[1])
    """
    cls = predictor_class(name)
    config = cls.config_class() if config is None else replace(config)
    options = FitOptions() if options is None else options
    if not isinstance(config, cls.config_class):
        raise ExpertcastError(f"predictor {name!r} needs a {cls.config_class.__name__}, not a {type(config).__name__}")
    if max(config.ahead, default=0) >= source.view.shape.layers:
        raise ExpertcastError(
            f"ahead={max(config.ahead)}: the model has {source.view.shape.layers} MoE layers, "
            f"use distances of at most {source.view.shape.layers - 1}"
        )
    join_ranks()  # under torchrun: before the documents are divided among ranks
    start, earlier_s = time.perf_counter(), options.earlier_s
    fitter = partial(fit_hybrid, known=known) if name == Hybrid.name else FITTERS.get(name)
    fitted = Fitted(predictor=cls(config, source.view.shape)) if fitter is None else fitter(source, config, options)
    predictor = fitted.predictor.to(device_of(source.view)).bind(source.view).eval()
    calibrate(predictor, source, options, trained=fitter is not None)
    predictor.learned_from = source.learned_from()
    used = {
        "tokens": train_tokens(source, options),
        "traces": source.info.get("id"),
        "model": source.info.get("model"),
        "seed": options.seed,
        "ranks": training_share().world,
        "collection_s": source.info.get("collection_s"),
    }
    reads = any(isinstance(part, QuasiInput) and hasattr(part, "expert_LED") for part in predictor.modules())
    used |= {DEFAULTS_NOTE: source.info[DEFAULTS_NOTE]} if DEFAULTS_NOTE in source.info and reads else {}
    seconds = time.perf_counter() - start + options.earlier_s - earlier_s
    fitted.report = {**used, "seconds": seconds, **fitted.report}
    return fitted


def fit_many(
    names: Sequence[str],
    source: TraceSource,
    configs: Mapping[str, PredictorConfig],
    *,
    options: FitOptions | None = None,
) -> dict[str, Fitted]:
    """Fit several predictors; `hybrid` comes last, chooses among the others and fits missing candidates.

    Args:
        names: registry names.
        source: traces, or a running model.
        configs: configurations by name; others use their default.
        options: as for :func:`fit`.
    """
    fitted: dict[str, Fitted] = {}
    for name in sorted(names, key=lambda name: name == "hybrid"):
        fitted[name] = fit(name, source, config=configs.get(name), options=options, known=fitted)
    return {name: fitted[name] for name in names}


# Hybrid: one predictor per layer
#
# For each target layer, the cheapest candidate wins whose validation recall is within the threshold of the highest one.
# At threshold 0 the hybrid's validation recall is the highest at every layer, with the cheapest of equal candidates; a
# threshold t loses at most t per layer.
#
# A hybrid also keeps the rungs of a ladder: candidates that no other candidate beats in both recall and cost. The
# runtime chooses among them by their measured costs.

CLEARLY = 0.9
"""A candidate becomes a rung only if it takes at most this share of the time of rungs with higher recall. The factor
hides noise of the measured costs (3% under load), so that retraining keeps the same rungs."""


def fit_hybrid(
    source: TraceSource, config: PredictorConfig, options: FitOptions, known: Mapping[str, Fitted] | None = None
) -> Fitted:
    """Fit the candidates that are not `known`, then choose one per layer with :func:`select_hybrid`."""
    assert isinstance(config, HybridConfig)
    fitted = dict(known or {})
    if source.stand_in is None and tuple(config.candidates) == CANDIDATES:
        config = replace(config, candidates=[name for name in CANDIDATES if name != EarlyAttention.name])
    for name in config.candidates:
        if name not in fitted:
            values: Json = {"ahead": config.ahead} | config.member_configs.get(name, {})
            if name == Linear.name and Estimator.name in config.candidates and not values.get("inputs"):
                # the estimator has maps with early attention: these are the best forecasts without it
                values["inputs"] = default_inputs(source.view.shape, ["early"])
            fitted[name] = fit(name, source, config=predictor_class(name).config_class(**values), options=options)
    result = select_hybrid({name: f.predictor for name, f in fitted.items()}, source, config, options)
    result.report["candidates"] = {name: f.report for name, f in fitted.items()}
    result.report["known_seconds"] = sum(
        f.report.get("seconds", 0.0) for name, f in (known or {}).items() if name in config.candidates
    )
    return result


def select_hybrid(
    members: Mapping[str, Predictor], source: TraceSource, config: HybridConfig, options: FitOptions
) -> Fitted:
    """Create a hybrid from fitted predictors.

    Args:
        members: candidates by name, fitted for every distance in `config.ahead` and bound to the source's model.
        source: traces with a validation split.
        config: candidates and threshold.
        options: number of validation tokens.

    Raises:
        ExpertcastError: a candidate is missing, or does not support a distance of the hybrid.
    """
    missing = [name for name in config.candidates if name not in members]
    if missing:
        raise ExpertcastError(f"hybrid: candidates {', '.join(missing)} are not fitted: fit them, or leave them out")
    members = {name: members[name] for name in config.candidates}
    for name, member in members.items():
        if not set(config.ahead) <= set(member.ahead):
            raise ExpertcastError(f"candidate {name} forecasts {list(member.ahead)} layers ahead, not {config.ahead}")
    choices: list[Choice] = []
    cost_s = forecast_seconds(members, source, "validation", min(config.ahead))
    # traces have no decoder blocks to time: early attention costs more than any forecast without it, as in _front
    cost = {name: (members[name].uses_early, seconds) for name, seconds in cost_s.items()}
    for ahead in config.ahead:
        choices += _choose(validation_recall(members, source, ahead, options), cost, ahead, config)
    kept = {choice["predictor"] for choice in choices} | _front(members, member_recall(choices), cost_s)
    configs = {name: member.config.as_dict() for name, member in members.items() if name in kept}
    cost_ms = {name: 1e3 * cost_s[name] for name in configs}
    hybrid = Hybrid(replace(config, choices=choices, member_configs=configs, cost_ms=cost_ms), source.view.shape)
    for name in hybrid.members:
        _copy_state(members[name], hybrid.member(name))
    brief = [{**choice, "recall": choice["recall"][choice["predictor"]]} for choice in choices]
    return Fitted(predictor=hybrid, report={"choices": brief})


def _copy_state(fitted: Predictor, member: Predictor) -> None:
    tensors = fitted.state_dict()
    missing, shared = member.load_state_dict(tensors, strict=False)
    assert not missing
    for path in shared:
        assert torch.equal(member.get_buffer(path), tensors[path].cpu()), f"{fitted.name} has its own {path}"
    member.calibration = fitted.calibration


def _front(members: Mapping[str, Predictor], recall: Mapping[str, float], cost_s: Mapping[str, float]) -> set[str]:
    """Return the candidates that no other candidate beats in both recall and cost.

    Traces have no decoder blocks, so the block of early attention is not timed. It takes longer than any forecast here,
    so candidates with early attention count as costlier than all others.
    """
    kept: list[str] = []
    for name in sorted(members, key=lambda name: (-recall[name], cost_s[name])):
        early = members[name].uses_early
        dearer = [cost_s[other] for other in kept if early or not members[other].uses_early]
        if cost_s[name] <= CLEARLY * min(dearer, default=math.inf):
            kept.append(name)
    return set(kept)


TIMED_TOKENS, TIMED_PAIRS, WARM_UP = 32, 12, 4
"""Tokens and layer pairs that are timed, and tokens before them, in which programs are traced and checked."""


@torch.no_grad()
def forecast_seconds(members: Mapping[str, Predictor], source: TraceSource, split: str, ahead: int) -> dict[str, float]:
    """Time one forecast for one token in a decode step, as a traced program if the runtime would run one.

    All predictors run on one thread and on the same tokens, in turns, and each forecast is timed by itself, so that
    other load on the machine disturbs few of them. For early attention the time includes the stand-in and its readers,
    but not the attention itself, which needs the model.

    Args:
        members: predictors by name, bound to the source's view.
        source: tokens to forecast.
        split: the split of the source.
        ahead: distance in layers.

    Returns:
        Seconds by predictor, the median over tokens, averaged over layers; empty if the split is empty.
    """
    view = source.view
    ways = {name: TracedForecasts(member) for name, member in members.items()}
    for way in ways.values():
        way.folded, way.hinted = True, view.shape.top_k  # as in an exact run, if the predictor has hints
    pairs = range(view.shape.layers - ahead)[:: -(-(view.shape.layers - ahead) // TIMED_PAIRS)]
    seconds: dict[str, dict[int, list[float]]] = {name: {pair: [] for pair in pairs} for name in members}
    batch = next(source.batches(split, TIMED_TOKENS + WARM_UP), None)
    if batch is None:
        return {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for token in range(len(batch)):
            states = states_of(view, batch[token : token + 1])
            for pair, (name, way) in product(pairs, ways.items()):
                start = time.perf_counter()
                if way.predictor.wants_early(pair, ahead):
                    way.stand_in(states[pair])
                if way.hint(states[pair], ahead) is None:
                    way.forecast(states[pair], ahead)
                seconds[name][pair].append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return {
        name: statistics.fmean(statistics.median(times[WARM_UP:] or times) for times in of_pair.values())
        for name, of_pair in seconds.items()
    }


_Cost = tuple[bool, float]
"""Whether a forecast reads early attention, and its seconds without it."""


def _choose(recall: Mapping[str, Tensor], cost: Mapping[str, _Cost], ahead: int, config: HybridConfig) -> list[Choice]:
    choices: list[Choice] = []
    for pair in range(len(next(iter(recall.values())))):
        values = {name: float(recall_P[pair]) for name, recall_P in recall.items()}
        within = [name for name, value in values.items() if value >= max(values.values()) - config.threshold]
        chosen = min(within, key=cost.__getitem__)  # ties: the first candidate
        choices.append({"ahead": ahead, "layer": pair + ahead, "predictor": chosen, "recall": values})
    return choices
