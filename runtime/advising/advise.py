"""Whether to prefetch, how far ahead and with which predictor: from short recorded runs and the event model.

L MoE layers, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from expertcast.runtime.advising.advice import Advice, Option, milliseconds
from expertcast.runtime.advising.event_model import Replay
from expertcast.runtime.advising.survey import Given, Survey, label_of, survey
from expertcast.runtime.config import OffloadConfig

WORTH = 0.02
"""Share of the time per token that a change must save before it is advised."""
_LEVERS = {"twice the slots": {"slots": 2.0}, "a link of twice the speed": {"copy_s": 0.5}}


def advise(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    config: OffloadConfig | None = None,
    *,
    predictors: Sequence[Given] = (),
    new_tokens: int = 32,
    repetitions: int = 2,
    **fields: object,
) -> Advice:
    """Measure the link and the layers in short runs, and say what to do.

    Args:
        prompt_ids: [1, T] on the model's device; a text of the kind that will be run.
        predictors: names, checkpoint folders or objects to choose from. Where a checkpoint's metrics.json has recall
            for a distance, its forecasts count as good as that; else as good as they were in the short run.
        new_tokens, repetitions: of each short run.
        config, fields: slots or memory, cache, link, bandwidth, latency, overfetch: as for :func:`expertcast.offload`.

    Raises:
        ExpertcastError: as :func:`expertcast.offload`; fewer than 2 new tokens or no repetition; not one prompt.
    """
    return advice_from(
        survey(
            model, prompt_ids, config, predictors=predictors, new_tokens=new_tokens, repetitions=repetitions, **fields
        )
    )


def advice_from(found: Survey) -> Advice:
    """The advice that a survey leads to."""
    replayed = found.predict()
    on_demand = _option(found, "on_demand", None, None, replayed)
    exact = [_option(found, "exact", *name, found.predict(*name)) for name in found.forecasting]
    speculated = [
        _option(found, "speculate", *name, found.predict(*name, executed_layers=range(found.layers)))
        for name in found.forecasting
    ]
    # an option that hides no waiting can only look faster by a disturbance of the other run
    hiding = [option for option in exact if option.wait_s < on_demand.wait_s]
    best = min(hiding, key=lambda option: option.tpot_s, default=on_demand)
    chosen = best if best.tpot_s < (1 - WORTH) * on_demand.tpot_s else on_demand
    most = most_to_gain(replayed, found.times.compute_s, max((ahead for _, ahead in found.forecasting), default=1))
    levers = {name: _with_lever(found, chosen, change) for name, change in _LEVERS.items()}
    reasons = [_share_of_copies(found, on_demand, most)]
    if on_demand.wait_s:
        reasons += _choice(on_demand, exact, chosen)
    return Advice(
        prefetch=chosen is not on_demand,
        predictor=chosen.predictor,
        ahead=chosen.ahead,
        tpot_s=chosen.tpot_s,
        options=[on_demand, *exact, *speculated],
        most_to_gain=most,
        levers=levers,
        reasons=reasons + _further(on_demand, speculated, chosen, levers),
        slots=found.setting.slots,
        experts=found.experts,
        memory_bytes=found.setting.slots * found.block_bytes,
        link_rate=found.speed.rate,
        copy_s=found.setting.copy_s,
        layer_compute_s=found.times.compute_s,
        measured_on_demand_s=found.tpot_s,
    )


def most_to_gain(on_demand: Replay, compute_s: Sequence[float], ahead: int = 1) -> float:
    """Share of the time per token that can be hidden: sum over layers of min(copy, compute) (row B11). From further
    ahead, more than one layer's compute hides the copies of one.
    """
    hidden_s = []
    for waits_s in on_demand.waits_s:
        pairs = zip(waits_s, compute_s, strict=True)
        hidden_s.append(min(sum(compute_s), sum(min(wait_s, ahead * own_s) for wait_s, own_s in pairs)))
    return statistics.median(hidden_s) / on_demand.tpot_s


def expected_tpot(found: Survey, arguments: OffloadConfig | Mapping[str, Any]) -> float:
    """Seconds per token that the event model expects of a run with these arguments of :func:`expertcast.offload`.

    Args:
        arguments: predictor, mode, ahead, layers, min_recall, cache and slots count; the rest is as in the survey.

    Raises:
        ExpertcastError: a predictor or distance that the survey did not run.
    """
    if isinstance(arguments, OffloadConfig):
        arguments = vars(arguments)
    other = {key: arguments[key] for key in ("slots", "cache") if arguments.get(key) is not None}
    if arguments.get("predictor") is None:
        return found.predict(**other).tpot_s
    label, ahead = label_of(arguments["predictor"]), int(arguments.get("ahead", 1))
    found.known(label, ahead)
    return found.predict(label, ahead, executed_layers=_executed(found, label, ahead, arguments), **other).tpot_s


def advice_errors(
    found: Survey, runs: Mapping[str, OffloadConfig | Mapping[str, Any]], measured_s: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """How far the event model was from what a benchmark measured, run by run.

    Args:
        runs: arguments of :func:`expertcast.offload` by name, as :func:`expertcast.runtime.benchmark` takes them.
        measured_s: TPOT by the same names.

    Returns:
        By name `expected_tpot_s`, `tpot_s`, `relative_error` = expected / measured - 1, and `model_tpot_s`: what the
        event model says before it is calibrated. With the survey's own slots and cache, expected is what the survey's
        short run took for on-demand and exact runs; for others (speculate, hybrid, other slots) it is a prediction.
    """
    errors = {}
    for name, arguments in runs.items():
        expected = expected_tpot(found, arguments)
        errors[name] = {
            "expected_tpot_s": expected,
            "tpot_s": measured_s[name],
            "relative_error": expected / measured_s[name] - 1,
            "model_tpot_s": expected - _late(found, arguments),
        }
    return errors


def _late(found: Survey, arguments: OffloadConfig | Mapping[str, Any]) -> float:
    if isinstance(arguments, OffloadConfig):
        arguments = vars(arguments)
    if arguments.get("predictor") is None:
        return found.times.late_s
    return found.known(label_of(arguments["predictor"]), int(arguments.get("ahead", 1))).times.late_s


def _executed(found: Survey, label: str, ahead: int, arguments: Mapping[str, Any]) -> Iterable[int]:
    mode = arguments.get("mode", "exact")
    if mode == "exact":
        return ()
    if arguments.get("layers") is not None:
        return tuple(arguments["layers"])
    if mode == "speculate":
        return range(found.layers)
    recall = found.known(label, ahead).recall
    return [layer for layer, value in recall.items() if value >= arguments.get("min_recall", 0.9)]


def _option(found: Survey, mode: str, label: str | None, ahead: int | None, replayed: Replay) -> Option:
    forecasting = None if label is None or ahead is None else found.known(label, ahead)
    forecast_s = 0.0
    if forecasting is not None and ahead is not None:
        forecast_s = sum(forecasting.times.forecast_s[: found.layers - ahead])
    times = found.times if forecasting is None else forecasting.times
    return Option(
        mode=mode,
        predictor=label,
        ahead=ahead,
        tpot_s=replayed.tpot_s,
        wait_s=replayed.wait_s,
        forecast_s=forecast_s,
        unexplained_s=times.late_s,
        hit_rate=replayed.hit_rate,
        bytes_per_token=replayed.copies * found.block_bytes,
        recall=None if forecasting is None else forecasting.mean_recall,
        recall_source=None if forecasting is None else forecasting.source,
    )


def _with_lever(found: Survey, chosen: Option, change: Mapping[str, float]) -> float:
    """Seconds per token of the chosen option with a field of the setting multiplied."""
    other: dict[str, Any] = {key: getattr(found.setting, key) * factor for key, factor in change.items()}
    if "slots" in other:
        other["slots"] = int(other["slots"])
    return found.predict(chosen.predictor, chosen.ahead or 1, **other).tpot_s


def _share_of_copies(found: Survey, on_demand: Option, most: float) -> str:
    if found.setting.slots >= found.experts:
        return f"all {found.experts} experts fit the slots: each is copied once, then there is nothing to prefetch"
    if found.setting.blocking:
        return "this link copies in the model's own thread: nothing can be hidden behind compute"
    return (
        f"on demand, waiting for copies is {on_demand.wait_s / on_demand.tpot_s:.0%} of "
        f"{milliseconds(on_demand.tpot_s)} per token (hit rate {on_demand.hit_rate:.0%}): prefetching can gain at most "
        f"{most:.0%}"
    )


def _choice(on_demand: Option, exact: Sequence[Option], chosen: Option) -> list[str]:
    """Why the best prefetching option was taken or was not, and what the other predictors and distances would do."""
    if not exact:
        return []
    best, *others = sorted(exact, key=lambda option: (option is not chosen, option.tpot_s))
    return [_verdict(on_demand, best, chosen)] + [
        f"{option.name} would take {milliseconds(option.tpot_s)} per token" for option in others
    ]


def _verdict(on_demand: Option, best: Option, chosen: Option) -> str:
    change = best.tpot_s / on_demand.tpot_s - 1
    saved_s, cost_s = on_demand.wait_s - best.wait_s, best.tpot_s - best.wait_s - (on_demand.tpot_s - on_demand.wait_s)
    who = f"{best.name} ({best.recall:.0%} of experts forecast right, {best.recall_source})"
    if chosen is best:
        return (
            f"{who} hides {milliseconds(saved_s)} of waiting, and costs {milliseconds(cost_s)} of forecasts and slower "
            f"compute: {change:+.0%}"
        )
    if saved_s <= 0:
        return f"{who} hides nothing, its wrong copies keep the link from the needed ones: load on demand"
    if cost_s >= saved_s:
        return (
            f"{who} costs {milliseconds(cost_s)} of forecasts and slower compute, more than the "
            f"{milliseconds(saved_s)} of waiting that it hides: load on demand"
        )
    return f"{who} gains {-change:.1%}, too little to be worth it: load on demand"


def _further(on_demand: Option, speculated: Sequence[Option], chosen: Option, levers: Mapping[str, float]) -> list[str]:
    """What would be faster still, at a price."""
    reasons = []
    fastest = min(speculated, key=lambda option: option.tpot_s, default=chosen)
    if fastest.tpot_s < (1 - WORTH) * chosen.tpot_s:
        reasons.append(
            f"executing the forecasts of {fastest.name} (mode speculate) would take {milliseconds(fastest.tpot_s)} per "
            "token, and changes what the model writes"
        )
    lever = min(levers, key=lambda name: levers[name])
    gain = 1 - levers[lever] / chosen.tpot_s
    if gain > WORTH:
        most = "most" if gain > 1 - chosen.tpot_s / on_demand.tpot_s else "further"
        reasons.append(f"{lever} would help {most}: {milliseconds(levers[lever])} per token, {gain:.0%} less")
    return reasons
