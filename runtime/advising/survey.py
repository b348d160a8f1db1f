"""Short recorded runs of a model: all that is needed to say what other settings of the runtime would do."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from expertcast.checkpoints.checkpoint import PredictorCheckpoint
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError, Predictor
from expertcast.predictors.view import ModelShape
from expertcast.runtime.benchmarking.bench import BenchSettings
from expertcast.runtime.benchmarking.runs import decode_greedily
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.experimental.kernel_link import KernelLink
from expertcast.runtime.forecasters import recall_per_layer, resolve_predictor
from expertcast.runtime.links.base import InstantLink
from expertcast.runtime.links.cuda import CudaLink
from expertcast.runtime.links.speed import LinkSpeed, link_speed
from expertcast.runtime.offloading import offload
from expertcast.runtime.policies import Policies
from expertcast.runtime.policies.settings import ALWAYS
from expertcast.runtime.recording.recorder import LayerTimes, Observer, Recorder, layer_times
from expertcast.runtime.simulation.machine import Case, Machine, Simulation, no_times
from expertcast.runtime.simulation.simulator import simulate
from expertcast.runtime.simulation.trace import Forward, RecordedPrefetches, Trace
from expertcast.runtime.storage.layout import FULL

_ASKED = "asked"


class Watcher(Observer):
    """Collects the forwards of one decoding, the first of which is the prefill (numbers only: no device is read)."""

    def __init__(self) -> None:
        self._needed: list[dict[int, list[int]]] = []
        """Per forward, keys by layer."""
        self._asked: list[dict[int, list[int]]] = []
        """Per forward, keys by target layer, without requests for the next token."""

    def needed(self, layer: int, keys: Sequence[int]) -> None:
        if layer == 0:
            self._needed.append({})
            self._asked.append({})
        self._needed[-1][layer] = list(keys)

    def asked(self, layer: int, keys: Sequence[int]) -> None:
        if layer > max(self._needed[-1]):
            self._asked[-1][layer] = list(keys)

    def trace(self, shape: ModelShape) -> Trace:
        """Experts that each layer needed."""
        forwards = [
            Forward(fresh=index == 0, rows=slice(max(0, index - 1), index), keys=[keys[n] for n in sorted(keys)])
            for index, keys in enumerate(self._needed)
        ]
        return Trace(shape=shape, forwards=forwards)

    def forecasts(self, ahead: int) -> RecordedPrefetches:
        """Return the experts that forecasts of so many layers ahead requested in the decode steps."""
        return RecordedPrefetches(ahead=ahead, steps=self._asked[1:])


def measured_recall(trace: Trace, asked: RecordedPrefetches) -> dict[int, float]:
    """Recall@k by target layer: share of the experts that a layer needed among the k that were forecast for it."""
    shares: dict[int, list[float]] = {}
    for forward, forecasts in zip(trace.decode, asked.steps, strict=True):
        for target, keys in forecasts.items():
            needed = set(forward.keys[target])
            shares.setdefault(target, []).append(len(needed.intersection(keys[: trace.shape.top_k])) / len(needed))
    return {target: sum(values) / len(values) for target, values in sorted(shares.items())}


def with_recall(
    trace: Trace, asked: RecordedPrefetches, wanted: Mapping[int, float], seed: int = 0
) -> RecordedPrefetches:
    """The same forecasts, changed at random so that they are right as often as `wanted` says, by target layer.

    A few steps say little about recall, but much about which experts are forecast wrongly: those that the layer needs
    at other times. A right expert is exchanged for one of these, or a wrong one for a needed one that was left out.

    Args:
        trace: what the layers needed.
        asked: what was forecast.
        wanted: recall@k by target layer.
        seed: of the random choices.
    """
    choose, measured, decode = random.Random(seed), measured_recall(trace, asked), trace.decode
    changed: list[dict[int, list[int]]] = []
    for forward, forecasts in zip(decode, asked.steps, strict=True):
        step: dict[int, list[int]] = {}
        for target, keys in forecasts.items():
            have, want, needed = measured[target], wanted[target], forward.keys[target]
            popular = sorted({key for other in decode for key in other.keys[target]}.difference(needed))
            step[target] = list(keys)
            for place, key in enumerate(keys[: trace.shape.top_k]):
                right = key in needed
                spoil = right and have > want and choose.random() < 1 - want / have
                mend = not right and have < want and choose.random() < (want - have) / (1 - have)
                others = [other for other in (popular if spoil else needed) if other not in step[target]]
                if (spoil or mend) and others:
                    step[target][place] = choose.choice(others)
        changed.append(step)
    return replace(asked, steps=changed)


def executed(trace: Trace, asked: RecordedPrefetches, layers: Iterable[int]) -> Trace:
    """A decoding (its first forward is the prefill) that executes forecasts in place of its routing at these layers."""
    chosen, top_k = frozenset(layers), trace.shape.top_k
    forwards = [
        replace(
            forward,
            keys=[
                list(step[layer][:top_k]) if layer in chosen and layer in step else keys
                for layer, keys in enumerate(forward.keys)
            ],
        )
        for forward, step in zip(trace.forwards, [{}, *asked.steps], strict=True)
    ]
    return replace(trace, forwards=forwards)


def replay(trace: Trace, case: Case, asked: RecordedPrefetches | None = None) -> Simulation:
    """Run a recorded decoding in virtual time; its prefill leaves the cache as the decode steps find it. The case has
    the cost of a forecast at layers that make one; without `asked`, the replay loads on demand.
    """
    machine = replace(case.machine, prefill=no_times(trace.shape.layers))
    hints = {} if asked is None else {_ASKED: asked}
    case = replace(case, machine=machine, predictor=next(iter(hints), None))
    return simulate(replace(trace, hints=hints), case, waits=True)


def calibrated(tpot_s: float, trace: Trace, case: Case, asked: RecordedPrefetches | None = None) -> LayerTimes:
    """The case's layer times, with what a run took beyond a replay of it as `late_s`: `tpot_s` is what it took per
    token, `trace`, `case` and `asked` are what :func:`replay` takes.
    """
    return replace(case.machine.times, late_s=tpot_s - replay(trace, case, asked).tpot_s)


Given = str | Path | Predictor


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecasting:
    """A predictor at one distance: its requests, its recall and its cost."""

    asked: RecordedPrefetches
    """In the decode steps."""
    recall: dict[int, float]
    """Recall@k by target layer."""
    source: str
    """Where recall comes from: `metrics.json`, or `measured` over the run's own decode steps."""
    times: LayerTimes
    """Layer times of the run that made these forecasts."""

    @property
    def mean_recall(self) -> float:
        """Recall@k over all target layers."""
        return statistics.fmean(self.recall.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Result of the short runs."""

    case: Case
    """How the runs were set up, with the layer times of the on-demand run."""
    speed: LinkSpeed
    trace: Trace
    tpot_s: float
    """Measured in the on-demand run (median)."""
    forecasting: dict[tuple[str, int], Forecasting]
    """By predictor's label and layers ahead."""

    @property
    def experts(self) -> int:
        """Experts of all layers together."""
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
        case: Case | None = None,
    ) -> Simulation:
        """Simulate a run by the event model.

        Args:
            predictor: its label; None loads on demand.
            ahead: layers between its forecasts and their targets.
            executed_layers: layers that execute their forecast (all of them for `speculate`).
            case: how the runtime is set up, where it is other than in the survey.

        Raises:
            ExpertcastError: a predictor or distance that the survey did not run.
        """
        case = case or self.case
        if predictor is None:
            return replay(self.trace, case)
        found = self.known(predictor, ahead)
        return replay(executed(self.trace, found.asked, executed_layers), case.with_times(found.times), found.asked)

    def known(self, predictor: str, ahead: int) -> Forecasting:
        """Return the measurements of a predictor at one distance.

        Raises:
            ExpertcastError: the survey did not run it.
        """
        if (predictor, ahead) not in self.forecasting:
            there = ", ".join(f"{name} {distance} ahead" for name, distance in self.forecasting) or "no predictor"
            raise ExpertcastError(
                f"predictor={predictor!r}, ahead={ahead} is not in this survey (it has {there}): name it in predictors"
            )
        return self.forecasting[predictor, ahead]


@dataclass(frozen=True, slots=True)
class _Run:
    """One short decoding."""

    tpot_s: float
    case: Case
    watched: Watcher
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
    """Decode a few tokens on demand, and with each predictor at each distance that it offers, in alternation. These
    runs make every forecast, as the event model does: `forecasts="auto"` leaves out those that cost too much.

    Args:
        model: as :func:`expertcast.offload` takes it.
        prompt_ids: [1, T] on the model's device; a text of the kind that will be run.
        config: slots, cache, link, store and so on, without a predictor; link `auto` on CUDA is `cuda`, for the tables
            of `kernel` lie on the device.
        predictors: as :func:`expertcast.offload` takes them. Where a checkpoint's metrics.json has recall for a
            distance, its forecasts count as good as that; else as good as they were in the short run.
        new_tokens: per run; the first comes from the prefill. Too few find a cache that is still filling up.
        repetitions: of each run, of which the fastest counts: the one that was disturbed least.

    Raises:
        ExpertcastError: as :func:`expertcast.offload`; fewer than 2 new tokens or no repetition; not one prompt; a
            configuration with a predictor.
    """
    config = config or OffloadConfig()
    BenchSettings(new_tokens=new_tokens, repetitions=repetitions)  # which refuses too few
    if prompt_ids.dim() != 2 or prompt_ids.shape[0] != 1 or not prompt_ids.shape[1]:
        raise ExpertcastError(f"prompt_ids has shape {list(prompt_ids.shape)}: give one prompt, [1, tokens]")
    if config.resolved_predictor() is not None:
        raise ExpertcastError("the configuration names a predictor: name those that are to be compared in predictors")
    if prompt_ids.is_cuda and config.link == "auto":
        config = replace(config, link="cuda")
    view = find_moe_layers(model)
    resolved = {label_of(given): resolve_predictor(given, view) for given in predictors}
    base_runs: list[_Run] = []
    runs: dict[tuple[str, int], list[_Run]] = defaultdict(list)
    for _ in range(repetitions):
        base_runs.append(_run(model, prompt_ids, new_tokens, config))
        for label, (predictor, _) in resolved.items():
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
            (label, ahead): _forecasting(
                trace, base.case, min(found, key=attrgetter("tpot_s")), resolved[label][1], ahead
            )
            for (label, ahead), found in runs.items()
        },
    )


def label_of(given: Given) -> str:
    """A predictor's name in a survey: what was given, or the name of an object."""
    return given.name if isinstance(given, Predictor) else str(given)


def _run(model: PreTrainedModel, prompt_ids: Tensor, new_tokens: int, config: OffloadConfig) -> _Run:
    recorder, watched = Recorder(prompt_ids.device), Watcher()
    with offload(model, config, observers=[recorder, watched]) as offloaded:
        link = offloaded.link
        if isinstance(link, KernelLink):
            raise ExpertcastError("link 'kernel' decides on the device, where nothing can be surveyed: use link='cuda'")
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
    case = Case(policies=Policies(), slots=slots, machine=machine, cache=config.cache)
    return _Run(statistics.median(decoding.steps_s), case, watched, speed)


def without_copies(times: LayerTimes, recorder: Recorder) -> LayerTimes:
    """Layer times of a link that copies in the model's own thread: that time is the link's, not the runtime's."""
    steps = len(recorder.steps())
    misses_s, forecasts_s = [0.0] * len(times.request_s), [0.0] * len(times.request_s)
    for copy in recorder.copies():
        (misses_s if copy.urgent else forecasts_s)[copy.layer] += copy.seconds / steps
    return replace(
        times,
        request_s=[max(0.0, own - copying) for own, copying in zip(times.request_s, misses_s, strict=True)],
        prefetch_s=[max(0.0, own - copying) for own, copying in zip(times.prefetch_s, forecasts_s, strict=True)],
    )


def _forecasting(
    trace: Trace, base: Case, run: _Run, checkpoint: PredictorCheckpoint | None, ahead: int
) -> Forecasting:
    """The forecasts of a run, at the checkpoint's own recall where its metrics have it for this distance."""
    asked = run.watched.forecasts(ahead)
    times = calibrated(run.tpot_s, trace, base.with_times(run.case.machine.times), asked)
    recall, source = measured_recall(trace, asked), "measured"
    known = recall_per_layer(checkpoint, ahead)
    if known is not None and set(known) == set(recall):
        asked, recall, source = with_recall(trace, asked, known), known, "metrics.json"
    return Forecasting(asked=asked, recall=recall, source=source, times=times)
