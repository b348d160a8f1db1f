"""Advice on prefetching: whether to, with which predictor and how far ahead. Based on a survey and the event model."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError, Predictor
from expertcast.predictors.view import ModelShape
from expertcast.runtime.advising.forms import WORTH, Advice, Option, milliseconds
from expertcast.runtime.benchmarking.bench import BenchSettings, LinkSpeed, decode_greedily, link_speed
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.forecasters import resolve_predictor
from expertcast.runtime.links.base import InstantLink
from expertcast.runtime.links.cuda import CudaLink
from expertcast.runtime.offloading import offload
from expertcast.runtime.policies.settings import ALWAYS
from expertcast.runtime.recording.recorder import LayerTimes, Observer, Recorder, layer_times
from expertcast.runtime.simulation.machine import Case, Machine, Simulation, no_times
from expertcast.runtime.simulation.simulator import simulate
from expertcast.runtime.simulation.trace import Forward, RecordedPrefetches, Trace
from expertcast.runtime.storage.layout import FULL

# Survey of a model: short recorded runs, from which the event model predicts other settings of the runtime.

_RECORDED = "recorded"
"""Name of the recorded prefetches in a trace's hints."""


class TraceObserver(Observer):
    """Records needed and forecast experts of one decoding, whose first forward pass is the prefill."""

    def __init__(self) -> None:
        self._needed: list[dict[int, list[int]]] = []
        """Needed keys by layer, of each forward pass."""
        self._prefetches: list[dict[int, list[int]]] = []
        """Requested keys by target layer, of each forward pass."""

    def needed(self, layer: int, keys: Sequence[int]) -> None:
        if layer == 0:
            self._needed.append({})
            self._prefetches.append({})
        self._needed[-1][layer] = list(keys)

    def requested(self, layer: int, keys: Sequence[int]) -> None:
        if layer > max(self._needed[-1]):
            self._prefetches[-1][layer] = list(keys)

    def trace(self, shape: ModelShape) -> Trace:
        """Return the recorded routing: the experts that each layer needed."""
        forwards = [
            Forward(fresh=index == 0, rows=slice(max(0, index - 1), index), keys=[keys[n] for n in sorted(keys)])
            for index, keys in enumerate(self._needed)
        ]
        return Trace(shape=shape, forwards=forwards)

    def forecasts(self, ahead: int) -> RecordedPrefetches:
        """Return the experts that forecasts requested in the decode steps; `ahead` is the distance of the run."""
        return RecordedPrefetches(ahead=ahead, steps=self._prefetches[1:])


def measured_recall(trace: Trace, prefetches: RecordedPrefetches) -> dict[int, float]:
    """Return recall@k by target layer: the fraction of needed experts that are among the k most probable forecast."""
    shares: dict[int, list[float]] = {}
    for forward, forecasts in zip(trace.decode, prefetches.steps, strict=True):
        for target, keys in forecasts.items():
            needed = set(forward.keys[target])
            shares.setdefault(target, []).append(len(needed.intersection(keys[: trace.shape.top_k])) / len(needed))
    return {target: sum(values) / len(values) for target, values in sorted(shares.items())}


def executed(trace: Trace, prefetches: RecordedPrefetches, layers: Iterable[int]) -> Trace:
    """Return the trace of a decoding that executes the forecasts instead of its routing at some layers."""
    chosen, top_k = frozenset(layers), trace.shape.top_k
    forwards = [
        replace(
            forward,
            keys=[
                list(step[layer][:top_k]) if layer in chosen and layer in step else keys
                for layer, keys in enumerate(forward.keys)
            ],
        )
        for forward, step in zip(trace.forwards, [{}, *prefetches.steps], strict=True)
    ]
    return replace(trace, forwards=forwards)


def replay(trace: Trace, case: Case, prefetches: RecordedPrefetches | None = None) -> Simulation:
    """Simulate a recorded decoding. Its prefill fills the cache and takes no time.

    Args:
        trace: the decoding, whose first forward pass is the prefill.
        case: settings, with the cost of forecasts at the layers that compute them.
        prefetches: recorded prefetches; None: load on demand.
    """
    machine = replace(case.machine, prefill=no_times(trace.shape.layers))
    hints = {} if prefetches is None else {_RECORDED: prefetches}
    case = replace(case, machine=machine, predictor=next(iter(hints), None))
    return simulate(replace(trace, hints=hints), case, waits=True)


def calibrated(tpot_s: float, trace: Trace, case: Case, prefetches: RecordedPrefetches | None = None) -> LayerTimes:
    """Return the case's layer times with `late_s`, the difference between a run's measured TPOT and its simulation.

    Args:
        tpot_s: measured seconds per token.
        trace: see :func:`replay`.
        case: see :func:`replay`.
        prefetches: see :func:`replay`.
    """
    return replace(case.machine.times, late_s=tpot_s - replay(trace, case, prefetches).tpot_s)


Given = str | Path | Predictor


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecasting:
    """Measurements of a predictor at one distance: its prefetches, recall and cost."""

    prefetches: RecordedPrefetches
    """Prefetches in the decode steps."""
    recall: dict[int, float]
    """Recall@k of these by target layer."""
    times: LayerTimes
    """Layer times of the run with these forecasts."""

    @property
    def mean_recall(self) -> float:
        """Mean recall@k over target layers."""
        return statistics.fmean(self.recall.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Result of the short runs."""

    case: Case
    """Settings of the runs, with the layer times of the on-demand run."""
    speed: LinkSpeed
    trace: Trace
    tpot_s: float
    """Median seconds per token, measured in the on-demand run."""
    forecasting: dict[tuple[str, int], Forecasting]
    """Measurements by predictor's label and layers ahead."""

    @property
    def experts(self) -> int:
        """Number of experts of all layers."""
        return self.trace.shape.layers * self.trace.shape.experts

    @property
    def block_bytes(self) -> int:
        """Bytes of one expert."""
        return self.case.machine.block_bytes[FULL]

    def predict(
        self,
        predictor: str | None = None,
        ahead: int = 1,
        *,
        executed_layers: Iterable[int] = (),
    ) -> Simulation:
        """Simulate a run by the event model.

        Args:
            predictor: label of the predictor; None: load on demand.
            ahead: layers between its forecasts and their targets.
            executed_layers: layers that execute their forecast (all layers for `speculate`).

        Raises:
            ExpertcastError: the survey did not run the predictor at this distance.
        """
        case = self.case
        if predictor is None:
            return replay(self.trace, case)
        found = self.forecasting_of(predictor, ahead)
        return replay(
            executed(self.trace, found.prefetches, executed_layers), case.with_times(found.times), found.prefetches
        )

    def forecasting_of(self, predictor: str, ahead: int) -> Forecasting:
        """Return the measurements of a predictor at one distance.

        Raises:
            ExpertcastError: the survey did not run the predictor at this distance.
        """
        if (predictor, ahead) not in self.forecasting:
            there = ", ".join(f"{name} {distance} ahead" for name, distance in self.forecasting) or "no predictor"
            raise ExpertcastError(
                f"predictor={predictor!r}, ahead={ahead} is not in this survey (it has {there}): add it to predictors"
            )
        return self.forecasting[predictor, ahead]


@dataclass(frozen=True, slots=True)
class _Run:
    """One short decoding."""

    tpot_s: float
    case: Case
    watched: TraceObserver
    speed: LinkSpeed


def survey(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    config: OffloadConfig | None = None,
    *,
    predictors: Sequence[Given] = (),
    new_tokens: int = 32,
    repetitions: int = 2,
) -> Survey:
    """Decode a few tokens on demand, and with each predictor at each of its distances, in alternation.

    The runs compute every forecast, as the event model assumes. `forecasts="auto"` would skip those that cost too much.

    Args:
        model: the model, as for :func:`expertcast.offload`.
        prompt_ids: typical prompt, [1, T] on the model's device.
        config: slots, cache, link, store and so on, without a predictor. Link `auto` on CUDA becomes `cuda`, since the
            tables of `kernel` are on the device.
        predictors: predictors, as for :func:`expertcast.offload`.
        new_tokens: number of tokens per run; the first comes from the prefill. With too few, the cache is still being
            filled.
        repetitions: number of repetitions of each run. The fastest one counts, as the least disturbed.

    Raises:
        ExpertcastError: :func:`expertcast.offload` raises it; `new_tokens` is below 2 or `repetitions` below 1;
            `prompt_ids` is not one prompt; the configuration has a predictor.
    """
    config = config or OffloadConfig()
    BenchSettings(new_tokens=new_tokens, repetitions=repetitions)  # validates both
    if prompt_ids.dim() != 2 or prompt_ids.shape[0] != 1 or not prompt_ids.shape[1]:
        raise ExpertcastError(f"prompt_ids has shape {list(prompt_ids.shape)}: give one prompt, [1, tokens]")
    if config.resolved_predictor() is not None:
        raise ExpertcastError("the configuration names a predictor: pass the predictors to compare as predictors=")
    policies = config.resolved_policies()
    cls = policies.eviction.cls
    if policies.lossy or policies.pre_eviction.cls.active or cls.reads_scores or cls.reads_forecasts:
        raise ExpertcastError(
            f"{policies}: a survey records which experts ran, and these policies read or change more: leave them out"
        )
    if prompt_ids.is_cuda and config.link == "auto":
        config = replace(config, link="cuda")
    view = find_moe_layers(model)
    resolved = {label_of(given): resolve_predictor(given, view)[0] for given in predictors}
    base_runs: list[_Run] = []
    runs: dict[tuple[str, int], list[_Run]] = defaultdict(list)
    for _ in range(repetitions):
        base_runs.append(_run(model, prompt_ids, new_tokens, config))
        for label, predictor in resolved.items():
            assert predictor is not None
            for ahead in (ahead for ahead in predictor.ahead if ahead < len(view)):
                own = replace(config, predictor=predictor, ahead=ahead, forecasts=ALWAYS)
                runs[label, ahead].append(_run(model, prompt_ids, new_tokens, own))
    base = min(base_runs, key=attrgetter("tpot_s"))
    trace = base.watched.trace(view.shape)
    return Survey(
        case=base.case.with_times(calibrated(base.tpot_s, trace, base.case)),
        speed=base.speed,
        trace=trace,
        tpot_s=base.tpot_s,
        forecasting={
            (label, ahead): _forecasting(trace, base.case, min(found, key=attrgetter("tpot_s")), ahead)
            for (label, ahead), found in runs.items()
        },
    )


def label_of(given: Given) -> str:
    """Return a predictor's name in a survey: the given text or path, or the name of an object."""
    return given.name if isinstance(given, Predictor) else str(given)


def _run(model: PreTrainedModel, prompt_ids: Tensor, new_tokens: int, config: OffloadConfig) -> _Run:
    recorder, watched = Recorder(prompt_ids.device), TraceObserver()
    with offload(model, config, observers=[recorder, watched]) as offloaded:
        link = offloaded.link
        speed = link_speed(link, offloaded.store)
        decoding = decode_greedily(model, prompt_ids, new_tokens, offloaded=offloaded, recorder=recorder)
        times, block_bytes = layer_times(recorder), offloaded.store.layout.block_bytes
        blocking, slots = isinstance(link, InstantLink), offloaded.pool.count
    machine = Machine(
        times=without_copies(times, recorder) if blocking else times,
        block_bytes={FULL: block_bytes},
        bandwidth=block_bytes / speed.copy_s,
        window=link.window if isinstance(link, CudaLink) else 1,
        blocking=blocking,
    )
    case = Case(policies=config.resolved_policies(), slots=slots, machine=machine, cache=config.cache)
    return _Run(statistics.median(decoding.steps_s), case, watched, speed)


def without_copies(times: LayerTimes, recorder: Recorder) -> LayerTimes:
    """Subtract the seconds of copies from layer times, for a link that copies in the model's thread."""
    steps = len(recorder.steps())
    misses_s, forecasts_s = [0.0] * len(times.request_s), [0.0] * len(times.request_s)
    for copy in recorder.copies():
        (misses_s if copy.urgent else forecasts_s)[copy.layer] += copy.seconds / steps
    return replace(
        times,
        request_s=[max(0.0, own - copying) for own, copying in zip(times.request_s, misses_s, strict=True)],
        prefetch_s=[max(0.0, own - copying) for own, copying in zip(times.prefetch_s, forecasts_s, strict=True)],
    )


def _forecasting(trace: Trace, base: Case, run: _Run, ahead: int) -> Forecasting:
    prefetches = run.watched.forecasts(ahead)
    times = calibrated(run.tpot_s, trace, base.with_times(run.case.machine.times), prefetches)
    return Forecasting(prefetches=prefetches, recall=measured_recall(trace, prefetches), times=times)


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
    prefetch, speed, memory_bytes = chosen is not on_demand, found.speed, found.case.slots * found.block_bytes
    excess_s = on_demand.unexplained_s + disturbed_s
    what = f"prefetch with {chosen.predictor}, {chosen.ahead} layer{'s' * (chosen.ahead != 1)} ahead"
    return Advice(
        headline=f"advice: {what if prefetch else 'load on demand'}; expect {milliseconds(chosen.tpot_s)} per token",
        chosen=chosen,
        options=[on_demand, *exact, *speculated],
        reasons=[
            _share_of_copies(found, on_demand, most),
            f"prefetching is advised if it takes {WORTH:.0%} less time per token; speculate changes the model's output",
        ],
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
