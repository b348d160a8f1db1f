"""Advice on prefetching: whether to, with which predictor and how far ahead. Based on a survey and the event model."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from expertcast.runtime.advising.forms import WORTH, Advice, Option, milliseconds
from expertcast.runtime.advising.survey import Survey
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.simulation.machine import Case, Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchOption(Option):
    """Loading on demand, or prefetching with one predictor at one distance. Times are medians over decode steps."""

    mode: str
    """`on_demand`, `exact` or `speculate`."""
    predictor: str | None
    ahead: int | None
    tpot_s: float
    wait_s: float
    """Seconds of waiting for copies, per token."""
    forecast_s: float
    """Seconds of computing forecasts, per token."""
    unexplained_s: float
    """Seconds per token added to the event model's: the time of the short run that the model did not explain."""
    hit_rate: float
    bytes_per_token: float
    recall: float | None
    """Recall@k, mean over layers."""

    @property
    def name(self) -> str:
        """The option's name in a sentence."""
        return "on demand" if self.predictor is None else f"{self.predictor} {self.ahead} ahead"

    @property
    def cells(self) -> dict[str, str]:
        return {
            "mode": self.mode,
            "predictor": self.predictor or "-",
            "ahead": str(self.ahead or "-"),
            "ms/token": f"{1e3 * self.tpot_s:.2f}",
            "waiting": f"{1e3 * self.wait_s:.2f}",
            "forecasts": f"{1e3 * self.forecast_s:.2f}",
            "hit rate": f"{self.hit_rate:.3f}",
            "MB/token": f"{self.bytes_per_token / 1e6:.2f}",
            "recall": "-" if self.recall is None else f"{self.recall:.3f}",
        }

    def config(self, given: OffloadConfig) -> OffloadConfig:
        """Return `given` with this predictor and distance in mode `exact`. A predictor object becomes its name."""
        return replace(given, predictor=self.predictor, ahead=self.ahead or 1, mode="exact", layers=None)


_LEVERS: dict[str, Callable[[Case], Case]] = {
    "twice the slots": lambda case: replace(case, slots=2 * case.slots),
    "a link of twice the speed": lambda case: replace(
        case, machine=replace(case.machine, bandwidth=2 * case.machine.bandwidth)
    ),
}


def advice_from(found: Survey) -> Advice[PrefetchOption]:
    """Choose the fastest option for a survey; loading on demand unless prefetching saves at least `WORTH`."""
    exact = [_option(found, "exact", found.predict(*name), name) for name in found.forecasting]
    found, disturbed_s = _undisturbed(found, exact)
    replayed = found.predict()
    on_demand = _option(found, "on_demand", replayed)
    speculated = [
        _option(found, "speculate", found.predict(*name, executed_layers=range(found.trace.shape.layers)), name)
        for name in found.forecasting
    ]
    # where all experts fit, only the first copies of the measured tokens are waited for, and no later token's
    fit = found.case.slots >= found.experts
    best = min([] if fit else exact, key=lambda option: option.tpot_s, default=on_demand)
    chosen = best if best.tpot_s < (1 - WORTH) * on_demand.tpot_s else on_demand
    compute_s = found.case.machine.times.compute_s
    most = most_to_gain(replayed, compute_s, max((ahead for _, ahead in found.forecasting), default=1))
    levers = {
        name: found.predict(chosen.predictor, chosen.ahead or 1, case=change(found.case)).tpot_s
        for name, change in _LEVERS.items()
    }
    reasons = [_share_of_copies(found, on_demand, most)]
    if on_demand.wait_s and not fit:
        reasons += _choice(on_demand, exact, chosen)
    prefetch, speed, memory_bytes = chosen is not on_demand, found.speed, found.case.slots * found.block_bytes
    excess_s = on_demand.unexplained_s + disturbed_s
    what = f"prefetch with {chosen.predictor}, {chosen.ahead} layer{'s' * (chosen.ahead != 1)} ahead"
    return Advice(
        headline=f"advice: {what if prefetch else 'load on demand'}; expect {milliseconds(chosen.tpot_s)} per token",
        chosen=chosen,
        options=[on_demand, *exact, *speculated],
        reasons=reasons + _further(on_demand, speculated, chosen, levers),
        levers=levers,
        facts={
            "prefetch": prefetch,
            "predictor": chosen.predictor,
            "ahead": chosen.ahead,
            "tpot_s": chosen.tpot_s,
            "most_to_gain": most,
            "slots": found.case.slots,
            "experts": found.experts,
            "memory_bytes": memory_bytes,
            "link_rate": speed.rate,
            "copy_s": speed.copy_s,
            "layer_compute_s": compute_s,
            "measured_on_demand_s": found.tpot_s,
        },
        notes=f"link {speed.rate / 1e9:.3g} GB/s, {milliseconds(speed.copy_s)} per expert; {found.case.slots} of "
        f"{found.experts} experts in {memory_bytes / 1e6:.4g} MB\n"
        f"measured on demand: {milliseconds(found.tpot_s)} per token, "
        f"{milliseconds(abs(excess_s))} {'more' if excess_s >= 0 else 'less'} than the event model"
        + (f"; {milliseconds(disturbed_s)} left out, since runs with forecasts computed faster" * (disturbed_s > 0)),
        left=len(on_demand.cells),
    )


def _undisturbed(found: Survey, exact: Sequence[PrefetchOption]) -> tuple[Survey, float]:
    """Shorten the on-demand run by the seconds that it computed longer than a run with forecasts.

    Forecasts do not make computing faster, so such a run was disturbed. All options are then compared on one basis: an
    option that hides no waiting is never faster than loading on demand.

    Returns:
        The survey, and the seconds per token that its on-demand run lost.
    """
    plain = _option(found, "on_demand", found.predict())
    computed_s = [option.tpot_s - option.wait_s - option.forecast_s for option in (plain, *exact)]
    lost_s, times = computed_s[0] - min(computed_s), found.case.machine.times
    return replace(found, case=found.case.with_times(replace(times, late_s=times.late_s - lost_s))), lost_s


def most_to_gain(on_demand: Simulation, compute_s: Sequence[float], ahead: int = 1) -> float:
    """Return the fraction of the time per token that prefetching can hide: at each layer min(wait, ahead * compute).

    Args:
        on_demand: simulation without prefetching.
        compute_s: seconds of compute per layer.
        ahead: number of layers whose compute can hide the copies of one layer.
    """
    hidden_s = []
    for waits_s in on_demand.waits_s:
        pairs = zip(waits_s, compute_s, strict=True)
        hidden_s.append(min(sum(compute_s), sum(min(wait_s, ahead * own_s) for wait_s, own_s in pairs)))
    return statistics.median(hidden_s) / on_demand.tpot_s


def _option(found: Survey, mode: str, replayed: Simulation, name: tuple[str, int] | None = None) -> PrefetchOption:
    """Return the option of a simulation; `name` is the predictor's label and distance, None for on demand."""
    forecasting = None if name is None else found.forecasting_of(*name)
    label, ahead = name or (None, None)
    times = found.case.machine.times if forecasting is None else forecasting.times
    return PrefetchOption(
        mode=mode,
        predictor=label,
        ahead=ahead,
        tpot_s=replayed.tpot_s,
        wait_s=replayed.wait_s,
        forecast_s=0.0 if ahead is None else sum(times.forecast_s[: found.trace.shape.layers - ahead]),
        unexplained_s=times.late_s,
        hit_rate=replayed.hit_rate,
        bytes_per_token=replayed.copies * found.block_bytes,
        recall=None if forecasting is None else forecasting.mean_recall,
    )


def _share_of_copies(found: Survey, on_demand: PrefetchOption, most: float) -> str:
    if found.case.slots >= found.experts:
        return f"all {found.experts} experts fit the slots: each is copied once, so prefetching gains nothing"
    if found.case.machine.blocking:
        return "this link copies in the model's own thread: compute cannot hide its copies"
    return (
        f"on demand, waiting for copies is {on_demand.wait_s / on_demand.tpot_s:.0%} of "
        f"{milliseconds(on_demand.tpot_s)} per token (hit rate {on_demand.hit_rate:.0%}): prefetching can gain at most "
        f"{most:.0%}"
    )


def _choice(on_demand: PrefetchOption, exact: Sequence[PrefetchOption], chosen: PrefetchOption) -> list[str]:
    """Explain why the best prefetching option was chosen or not, and list the times of the others."""
    if not exact:
        return []
    best, *others = sorted(exact, key=lambda option: (option is not chosen, option.tpot_s))
    return [
        _verdict(on_demand, best, chosen),
        *(f"{option.name} would take {milliseconds(option.tpot_s)} per token" for option in others),
    ]


def _verdict(on_demand: PrefetchOption, best: PrefetchOption, chosen: PrefetchOption) -> str:
    change = best.tpot_s / on_demand.tpot_s - 1
    saved_s, cost_s = on_demand.wait_s - best.wait_s, best.tpot_s - best.wait_s - (on_demand.tpot_s - on_demand.wait_s)
    who = f"{best.name} ({best.recall:.0%} of experts forecast right)"
    if chosen is best:
        return (
            f"{who} hides {milliseconds(saved_s)} of waiting, and costs {milliseconds(cost_s)} of forecasts and slower "
            f"compute: {-change:.0%} less time per token"
        )
    if saved_s <= 0:
        return f"{who} hides nothing, since its wrong copies delay the needed ones: load on demand"
    if cost_s >= saved_s:
        return (
            f"{who} costs {milliseconds(cost_s)} of forecasts and slower compute, more than the "
            f"{milliseconds(saved_s)} of waiting that it hides: load on demand"
        )
    return f"{who} gains {-change:.1%}, too little to be worth it: load on demand"


def _further(
    on_demand: PrefetchOption, speculated: Sequence[PrefetchOption], chosen: PrefetchOption, levers: Mapping[str, float]
) -> list[str]:
    """List faster alternatives that change the output or the machine."""
    reasons = []
    fastest = min(speculated, key=lambda option: option.tpot_s, default=chosen)
    if fastest.tpot_s < (1 - WORTH) * chosen.tpot_s:
        reasons.append(
            f"executing the forecasts of {fastest.name} (mode speculate) would take {milliseconds(fastest.tpot_s)} per "
            "token, but changes the model's output"
        )
    lever = min(levers, key=lambda name: levers[name])
    gain = 1 - levers[lever] / chosen.tpot_s
    if gain > WORTH:
        most = "most" if gain > 1 - chosen.tpot_s / on_demand.tpot_s else "further"
        reasons.append(f"{lever} would help {most}: {milliseconds(levers[lever])} per token, {gain:.0%} less")
    return reasons
