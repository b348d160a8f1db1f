"""Choosing the predictor of each layer for `hybrid`.

Per target layer the candidate with the highest recall on validation wins, unless a cheaper one comes within the
threshold of it: then the cheapest such one does. At threshold 0 hybrid is on validation at least as good as every
candidate at every layer, and among equals the cheapest runs; a threshold t gives away at most t per layer.

With `rule=paper` layers are chosen as by Hybrid-PF of Speculating Experts (section 6.3, row B14): the estimator takes
over where the router's forecast from the quasi-hidden state has a low hit rate, and nowhere else, also where it would
be better. The paper gives no number for low.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from expertcast.data.traces import TraceSource
from expertcast.predictors import ExpertcastError, Predictor
from expertcast.predictors.hybrid import PAPER, Choice, Hybrid, HybridConfig
from expertcast.training.scoring import FitOptions, Fitted, states_of, validation_batch, validation_recall


def select_hybrid(
    members: Mapping[str, Predictor], source: TraceSource, config: HybridConfig, options: FitOptions
) -> Fitted:
    """A hybrid of fitted predictors.

    Args:
        members: the candidates, fitted for every distance in `config.ahead` and bound to the source's model.
        source: its validation split chooses.
        config: which candidates, and how much better a costlier one must be.
        options: how much of the validation split.

    Raises:
        ExpertcastError: a candidate is missing or does not look as far as the hybrid is to.
    """
    missing = [name for name in config.candidates if name not in members]
    if missing:
        raise ExpertcastError(f"hybrid's candidates {', '.join(missing)} are not fitted: fit them, or leave them out")
    members = {name: members[name] for name in config.candidates}
    for name, member in members.items():
        if not set(config.ahead) <= set(member.ahead):
            raise ExpertcastError(f"candidate {name} looks {list(member.ahead)} layers ahead, hybrid {config.ahead}")
    choices: list[Choice] = []
    for ahead in config.ahead:
        cost = forecast_flops(members, source, ahead, options)
        choices += _choose(validation_recall(members, source, ahead, options), cost, ahead, config)
    chosen = {choice["predictor"] for choice in choices}
    configs = {name: member.config.as_dict() for name, member in members.items() if name in chosen}
    hybrid = Hybrid(replace(config, choices=choices, member_configs=configs), source.view.shape)
    for name in hybrid.members:
        hybrid.member(name).load_state_dict(members[name].state_dict())
    brief = [{**choice, "recall": choice["recall"][choice["predictor"]]} for choice in choices]
    return Fitted(predictor=hybrid, report={"choices": brief})


def forecast_flops(
    members: Mapping[str, Predictor], source: TraceSource, ahead: int, options: FitOptions
) -> dict[str, int]:
    """Floating-point operations in matrix products of one forecast for one token, counted while it runs.

    Args:
        members: predictors by name.
        source: where the token comes from.
        ahead: how far the forecast looks.
        options: of its validation split.
    """
    state = states_of(source.view, validation_batch(source, options)[:1])[0]
    flops = {}
    for name, member in members.items():
        with FlopCounterMode(display=False) as counter:
            member.forecast(state, ahead)
        flops[name] = int(counter.get_total_flops())
    return flops


def _choose(recall: Mapping[str, Tensor], cost: Mapping[str, int], ahead: int, config: HybridConfig) -> list[Choice]:
    choices: list[Choice] = []
    for pair in range(len(next(iter(recall.values())))):
        values = {name: float(recall_P[pair]) for name, recall_P in recall.items()}
        chosen = _replaced_where_low(values, config) if config.rule == PAPER else _best(values, cost, config)
        choices.append({"ahead": ahead, "layer": pair + ahead, "predictor": chosen, "recall": values})
    return choices


def _best(values: Mapping[str, float], cost: Mapping[str, int], config: HybridConfig) -> str:
    most = max(values.values())
    within = [name for name, value in values.items() if value >= most - config.threshold]
    return min(within, key=lambda name: cost[name])  # the first of equals: registry order


def _replaced_where_low(values: Mapping[str, float], config: HybridConfig) -> str:
    used, replacement = config.candidates
    return replacement if values[used] < config.low_recall else used
