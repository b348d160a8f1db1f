"""Short recorded runs of a model: all that is needed to say what other settings of the runtime would do.

L MoE layers, E routed experts per layer, K experts per token. An expert's key is layer * E + expert.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from expertcast.checkpoints.store import PredictorCheckpoint
from expertcast.data.discovery import find_moe_layers
from expertcast.predictors import ExpertcastError, ModelShape, MoEView, Predictor
from expertcast.runtime.advising.event_model import Forecasts, Replay, Setting, Trace, calibrated, replay
from expertcast.runtime.advising.observation import Forward, executed, measured_recall, observe, trace_of, with_recall
from expertcast.runtime.arguments import recall_per_layer, resolve_predictor
from expertcast.runtime.benchmarking.decoding import decode_greedily
from expertcast.runtime.links.cuda import CudaLink
from expertcast.runtime.links.instant import InstantLink
from expertcast.runtime.links.kernel import KernelLink
from expertcast.runtime.links.speed import LinkSpeed, link_speed
from expertcast.runtime.offloading import offload
from expertcast.runtime.recording.layer_times import LayerTimes, layer_times
from expertcast.runtime.recording.recorder import Recorder

Given = str | Path | Predictor


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecasting:
    """A predictor at one distance: what it asks for, how often it is right, and what it costs."""

    forecasts: Sequence[Forecasts]
    """Per decode step."""
    recall: dict[int, float]
    """Recall@k by target layer."""
    source: str
    """Where recall comes from: `metrics.json`, or `measured` over the run's own decode steps."""
    times: LayerTimes
    """Of the run that made these forecasts."""

    @property
    def mean_recall(self) -> float:
        return statistics.fmean(self.recall.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What the short runs found."""

    layers: int
    top_k: int
    block_bytes: int
    speed: LinkSpeed
    setting: Setting
    times: LayerTimes
    """On demand."""
    trace: Trace
    tpot_s: float
    """Measured in the on-demand run (median)."""
    forecasting: dict[tuple[str, int], Forecasting]
    """By predictor's label and layers ahead."""

    @property
    def experts(self) -> int:
        """Of all layers together."""
        return self.layers * self.trace.experts

    def predict(
        self, predictor: str | None = None, ahead: int = 1, *, executed_layers: Iterable[int] = (), **other: Any
    ) -> Replay:
        """What a run takes by the event model.

        Args:
            predictor: its label; None loads on demand.
            executed_layers: layers that execute their forecast (all of them for `speculate`).
            other: fields of :class:`Setting` that are other than in the survey: slots, cache, copy_s.

        Raises:
            ExpertcastError: a predictor or distance that the survey did not run.
        """
        setting = replace(self.setting, **other)
        setting = replace(setting, slots=min(setting.slots, self.experts))
        if predictor is None:
            return replay(self.trace, self.times, setting)
        found = self.known(predictor, ahead)
        trace = executed(self.trace, found.forecasts, executed_layers, self.top_k)
        return replay(trace, found.times, setting, found.forecasts, ahead)

    def known(self, predictor: str, ahead: int) -> Forecasting:
        """What was found of a predictor at one distance.

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
    times: LayerTimes
    forwards: list[Forward]
    setting: Setting
    speed: LinkSpeed
    block_bytes: int


def survey(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    *,
    predictors: Sequence[Given] = (),
    new_tokens: int = 32,
    repetitions: int = 2,
    **arguments: Any,
) -> Survey:
    """Decode a few tokens on demand, and with each predictor at each distance that it offers, in alternation.

    Args:
        prompt_ids: [1, T] on the model's device.
        predictors: as :func:`expertcast.offload` takes them.
        new_tokens: per run; the first comes from the prefill. Too few find a cache that is still filling up.
        repetitions: of each run, of which the fastest counts: the one that was disturbed least.
        arguments: slots or memory, cache, link, bandwidth, latency, overfetch: as for :func:`expertcast.offload`;
            `auto` on CUDA is `cuda`, for the books of `kernel` are out of sight on the device.

    Raises:
        ExpertcastError: as :func:`expertcast.offload`; fewer than 2 new tokens or no repetition; not one prompt.
    """
    _check(prompt_ids, new_tokens, repetitions)
    if prompt_ids.is_cuda and arguments.get("link", "auto") == "auto":
        arguments["link"] = "cuda"
    view = find_moe_layers(model)
    resolved = {label_of(given): resolve_predictor(given, view) for given in predictors}
    base_runs: list[_Run] = []
    runs: dict[tuple[str, int], list[_Run]] = defaultdict(list)
    for _ in range(repetitions):
        base_runs.append(_run(model, view, prompt_ids, new_tokens, arguments))
        for label, ahead, predictor in _distances(resolved, len(view)):
            own = {**arguments, "predictor": predictor, "ahead": ahead}
            runs[label, ahead].append(_run(model, view, prompt_ids, new_tokens, own))
    base = min(base_runs, key=_tpot)
    trace = trace_of(base.forwards, view.shape.experts)
    return Survey(
        layers=len(view),
        top_k=view.shape.top_k,
        block_bytes=base.block_bytes,
        speed=base.speed,
        setting=base.setting,
        times=calibrated(base.tpot_s, trace, base.times, base.setting),
        trace=trace,
        tpot_s=base.tpot_s,
        forecasting={
            (label, ahead): _forecasting(base, min(found, key=_tpot), resolved[label][1], ahead, view.shape)
            for (label, ahead), found in runs.items()
        },
    )


def label_of(given: Given) -> str:
    """A predictor's name in a survey: what was given, or the name of an object."""
    return given.name if isinstance(given, Predictor) else str(given)


def _check(prompt_ids: Tensor, new_tokens: int, repetitions: int) -> None:
    if new_tokens < 2 or repetitions < 1:
        raise ExpertcastError(f"new_tokens={new_tokens}, repetitions={repetitions}: give 2 or more, and 1 or more")
    if prompt_ids.dim() != 2 or prompt_ids.shape[0] != 1 or not prompt_ids.shape[1]:
        raise ExpertcastError(f"prompt_ids has shape {list(prompt_ids.shape)}: give one prompt, [1, tokens]")


def _distances(
    resolved: Mapping[str, tuple[Predictor | None, PredictorCheckpoint | None]], layers: int
) -> Iterator[tuple[str, int, Predictor]]:
    """(label, layers ahead, predictor) of all that a model of so many layers has use for."""
    for label, (predictor, _) in resolved.items():
        assert predictor is not None
        for ahead in predictor.ahead:
            if ahead < layers:
                yield label, ahead, predictor


def _tpot(run: _Run) -> float:
    return run.tpot_s


def _run(
    model: PreTrainedModel, view: MoEView, prompt_ids: Tensor, new_tokens: int, arguments: Mapping[str, Any]
) -> _Run:
    recorder = Recorder(prompt_ids.device)
    with offload(model, observers=[recorder], **arguments) as offloaded:
        link = offloaded.link
        if isinstance(link, KernelLink):
            raise ExpertcastError("link 'kernel' decides on the device, where nothing can be surveyed: use link='cuda'")
        speed = link_speed(link, offloaded.store)
        with observe(offloaded.residency, view.shape.experts) as forwards:
            decoding = decode_greedily(model, prompt_ids, new_tokens, offloaded=offloaded, recorder=recorder)
        times, block_bytes = layer_times(recorder), offloaded.store.layout.block_bytes
        setting = Setting(
            slots=offloaded.pool.count,
            copy_s=speed.copy_s,
            cache=offloaded.residency.keep,
            window=link.window if isinstance(link, CudaLink) else 1,
            blocking=isinstance(link, InstantLink),
        )
    if setting.blocking:
        times = _without_copies(times, recorder)
    return _Run(statistics.median(decoding.steps_s), times, forwards, setting, speed, block_bytes)


def _without_copies(times: LayerTimes, recorder: Recorder) -> LayerTimes:
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
    base: _Run, run: _Run, checkpoint: PredictorCheckpoint | None, ahead: int, shape: ModelShape
) -> Forecasting:
    """The forecasts of a run, at the checkpoint's own recall where its metrics have it for this distance."""
    steps: list[Forecasts] = [forward.forecast for forward in run.forwards[1:]]
    trace, top_k = trace_of(base.forwards, shape.experts), shape.top_k
    times = calibrated(run.tpot_s, trace, run.times, base.setting, steps, ahead)
    recall, source = measured_recall(trace, steps, top_k), "measured"
    known = None if checkpoint is None or checkpoint.metrics.get("ahead", 1) != ahead else recall_per_layer(checkpoint)
    if known is not None and set(known) == set(recall):
        steps, recall, source = with_recall(trace, steps, known, top_k), known, "metrics.json"
    return Forecasting(forecasts=steps, recall=recall, source=source, times=times)
