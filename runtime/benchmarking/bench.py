"""Time per output token of an offloaded model in several configurations over one link.

Runs alternate, so that a machine that slows down slows all of them. All figures describe decode steps without the
prefill. Overlap efficiency and the bound follow the latency model of "Speculating Experts Accelerates Inference for
Mixture-of-Experts": copies hide behind at most as much computation per layer.

L MoE layers, K experts per token. A step's times are split by MoE layer; time after the last one counts as layer L.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from expertcast.data.machine import with_index
from expertcast.data.moe_layers import experts_implementation, find_moe_layers
from expertcast.predictors import MoEView, Predictor
from expertcast.predictors.messages import Json, Progress
from expertcast.predictors.options import Validated
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.engine.kernels import kernel_name
from expertcast.runtime.links.base import Link
from expertcast.runtime.links.cuda import CudaLink
from expertcast.runtime.links.disk import DiskLink
from expertcast.runtime.links.disk_cuda import CudaDiskLink
from expertcast.runtime.links.driver import copy_seconds
from expertcast.runtime.offloading import OffloadedModel, offload
from expertcast.runtime.recording.recorder import Recorder
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore

# Measurement of a link's undisturbed speed.

_LARGE = 256 * 2**20
"""Bytes of the large copy; the store's size if that is less."""
_REPEATS = 5


def link_rate(link: Link, store: ExpertStore) -> float:
    """Measure an undisturbed link, attached, between two forward passes. The run's slots are not touched.

    Returns:
        Bytes per second. On CUDA: those of a large page-locked copy, timed by events.
        Other links: those of blocks back to back through a second link of the same kind, in the fastest of some series.

    Raises:
        ExpertcastError: the speed of this kind of link is unknown on the CPU.
    """
    block_bytes = store.layout.block_bytes
    if link.driver is not None and not isinstance(link, CudaDiskLink | DiskLink):
        large = min(_LARGE, max(store.nbytes, block_bytes))
        return large / copy_seconds(link.driver, large)
    other, count = link.unattached_copy(), min(16, store.layers * store.experts)
    other.attach(store, SlotPool(store.layout, count, store.device))
    try:
        seconds = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            for copy in [other.submit(key, key, urgent=True) for key in range(count)]:
                other.wait(copy)
            if isinstance(other, CudaLink):
                other.synchronize()
            seconds.append(time.perf_counter() - start)
    finally:
        other.close()
    return count * block_bytes / min(seconds)


# Timed greedy decoding, and a store shared by several offloads.
#
# V vocabulary, L MoE layers, E routed experts per layer.


@dataclass(slots=True)
class Decoding:
    """One greedy decoding."""

    tokens: list[int]
    logits: list[Tensor]
    """Logits [V] of each token."""
    ttft_s: float
    """Seconds of the prefill, up to the first token."""
    steps_s: list[float]
    """Seconds of each later token."""


@torch.no_grad()
def decode_greedily(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    new_tokens: int,
    *,
    offloaded: OffloadedModel | None = None,
    recorder: Recorder | None = None,
) -> Decoding:
    """Decode `new_tokens` tokens, past any end-of-text token.

    Statistics and recording start after the prefill and describe the tokens after the first.

    Args:
        model: the model, offloaded or not.
        prompt_ids: [1, T] on the model's device.
        new_tokens: number of tokens.
        offloaded: the model's offload, if any.
        recorder: the offload's recorder, if any.
    """
    cache = DynamicCache(config=model.config)
    decoding = Decoding([], [], 0.0, [])
    inputs = prompt_ids
    for step in Progress("decoding", unit="token", steps=range(new_tokens)):
        start = _now(prompt_ids.device)
        if recorder is not None:
            recorder.step_start()
        logits_V = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        inputs = logits_V.argmax().view(1, 1)
        if recorder is not None:
            recorder.step_end()
        seconds = _now(prompt_ids.device) - start
        decoding.logits.append(logits_V)
        if step:
            decoding.steps_s.append(seconds)
        else:
            decoding.ttft_s = seconds
            if offloaded is not None:
                offloaded.reset_stats()
            if recorder is not None:
                recorder.clear()
        decoding.tokens.append(int(inputs))
    return decoding


def same_logits(one: Decoding, other: Decoding) -> bool:
    """Return whether the logits of all common steps are equal bit for bit."""
    return all(torch.equal(own, its) for own, its in zip(one.logits, other.logits, strict=False))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class BorrowedStore(ExpertStore):
    """Store shared by several offloads of one model in turn: experts are packed once. :meth:`give_back` ends it.

    Between offloads the model's experts are views of the blocks in host memory. A model that computes on the CPU runs
    as usual; a model on `device` runs inside :meth:`resident`, and its experts may stay on the CPU otherwise.
    """

    def __init__(self, view: MoEView, device: torch.device) -> None:
        super().__init__(view, device=device, pinned=device.type == "cuda")
        self._view = view
        super().pack(view)
        self._lend(self.views)

    def pack(self, view: MoEView) -> None:
        """Do nothing: the experts are packed already."""
        assert view[0].experts is self._view[0].experts, "a shared store belongs to one model"

    def unpack(self) -> None:
        """Point the model's experts at the blocks again, for the next offload."""
        self._lend(self.views)

    def close(self) -> None:
        """Keep the blocks for the next offload."""

    def give_back(self, device: torch.device | None = None) -> None:
        """Copy the weights into the model's own parameters on `device` (None: the compute device); free the blocks."""
        if device is not None:
            self.device = device
        super().unpack()
        super().close()

    @property
    def fits(self) -> bool:
        """Whether the whole model fits the compute device."""
        if self.device.type != "cuda":
            return True
        return torch.cuda.mem_get_info(self.device)[0] > 1.1 * self.nbytes

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Put all experts on the compute device for a while."""
        if self.device.type != "cuda":
            yield
            return

        def on_device(layer: int) -> dict[str, Tensor]:
            blocks = self._layer_bytes[layer]
            assert blocks is not None
            return self.layout.views(blocks.to(self.device), layer)

        self._lend(on_device)
        try:
            yield
        finally:
            self._lend(self.views)
            torch.cuda.empty_cache()

    def _lend(self, views: Callable[[int], dict[str, Tensor]]) -> None:
        """Set these [E, ...] tensors as the model's parameters."""
        for layer in self._view:
            for name, tensor in views(layer.index).items():
                layer.experts._parameters[name] = nn.Parameter(tensor, requires_grad=False)


def loaded_model(offloaded: OffloadedModel) -> PreTrainedModel:
    """Close an offload of :func:`expertcast.load_offloaded`, and return its model with all of its experts in memory."""
    held = [(layer.experts, offloaded.store.views(layer.index)) for layer in offloaded.view]
    offloaded.close()
    for experts, parts in held:
        for name, part in parts.items():
            experts._parameters[name] = nn.Parameter(part, requires_grad=False)
    return offloaded.model


def without_experts_to(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Move a model to a device without its experts. A model on that device is returned unchanged."""
    if next(model.parameters()).device == with_index(device):
        return model
    kept = [(layer.experts._parameters, dict(layer.experts._parameters)) for layer in find_moe_layers(model)]
    for parameters, _ in kept:
        parameters.clear()
    try:
        return model.to(device)
    finally:
        for parameters, own in kept:
            parameters.update(own)


MOST_NOISE = 0.5
"""Largest standard error of a reported ratio; a ratio between 0 and 1, or near 1, is meaningless with a larger one."""
_MEDIAN = 1.2533
"""Standard error of a median as a multiple of that of the mean, for normally distributed values."""


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; 0 for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def figure(
    value: float, error: float, *, repetitions: int, least: float = -math.inf, most: float = math.inf
) -> float | str:
    """Return a ratio, or the reason why the noise is too large to report it.

    Args:
        value: the measured ratio.
        error: its standard error.
        repetitions: repetitions of the run with the fewest.
        least: lower bound of a correct ratio.
        most: upper bound of a correct ratio. A value outside by at most two standard errors is moved to the bound.
    """
    inside = min(max(value, least), most)
    if error > MOST_NOISE or abs(value - inside) > 2 * error:
        return f"too noisy: {repetitions} repetition{'s' * (repetitions != 1)}, spread {error:.2g}"
    return inside


_RATE_ERROR = 0.025
"""Smallest relative error of a link's measured rate."""


@dataclass(slots=True)
class StepTimes:
    """Times of one decode step in seconds."""

    compute_L: list[float]
    """Computation per layer [L + 1], without forecasts."""
    copy_L: list[float]
    """Expert copies per layer [L + 1]."""
    forecast: float = 0.0
    wait: float = 0.0
    idle: float = 0.0


@dataclass(slots=True)
class Measured:
    """One repetition of one run."""

    decoding: Decoding
    stats: Json
    steps: list[StepTimes]
    link_bytes: int
    link_busy_s: float


@dataclass(slots=True)
class Run:
    """One configuration with all its repetitions."""

    config: OffloadConfig
    repetitions: list[Measured] = field(default_factory=list)
    slots: int = 0

    @property
    def steps_s(self) -> list[float]:
        """Seconds of every decode step, over all repetitions."""
        return [seconds for measured in self.repetitions for seconds in measured.decoding.steps_s]

    @property
    def steps(self) -> list[StepTimes]:
        """Times of these decode steps."""
        return [step for measured in self.repetitions for step in measured.steps]

    @property
    def tpot_s(self) -> float:
        """Time per output token: the median step in seconds."""
        return statistics.median(self.steps_s)

    @property
    def error_s(self) -> float:
        """Standard error of the time per output token in seconds.

        A slow phase of a machine lasts longer than a step, so the spread of the repetitions' medians counts. The spread
        of the steps counts if it is larger, or if there is one repetition.
        """
        medians = [statistics.median(measured.decoding.steps_s) for measured in self.repetitions]
        return _MEDIAN * max(standard_error(self.steps_s), standard_error(medians))

    @property
    def bytes_per_step(self) -> float:
        """Bytes moved per decode step."""
        return float(sum(measured.stats["bytes_moved"] for measured in self.repetitions)) / len(self.steps)


def step_times(recorder: Recorder, layers: int) -> list[StepTimes]:
    """Return the recorded steps. A copy counts for the step in which it began; overlapping copies count once."""
    starts = [start for start, _ in recorder.steps()]
    steps = [StepTimes([0.0] * (layers + 1), [0.0] * (layers + 1)) for _ in starts]
    for span in recorder.spans():
        step = steps[span.step]
        if span.state == "compute":
            step.compute_L[span.layer] += span.seconds
        elif span.state == "forecast":
            step.forecast += span.seconds
        elif span.state == "wait":
            step.wait += span.seconds
        else:
            step.idle += span.seconds
    until = 0.0
    for copy in sorted(recorder.copies(), key=lambda copy: copy.start):
        number = bisect_right(starts, copy.start) - 1
        if number >= 0:
            steps[number].copy_L[copy.layer] += max(0.0, copy.end - max(copy.start, until))
        until = max(until, copy.end)
    return steps


def report(run: Run, *, on_demand: Run | None, truth: Decoding, link_rate: float | None) -> Json:
    """Return the results of one run.

    Args:
        run: the run with its repetitions.
        on_demand: the run without forecasts and with the same cache setting; None without one.
        truth: the decoding that every exact run must reproduce bit for bit.
        link_rate: bytes per second of one large copy over the same link.
    """
    steps_s, tokens = run.steps_s, len(run.steps)
    quartiles = statistics.quantiles(steps_s, n=4) if len(steps_s) > 1 else [steps_s[0]] * 3
    last = run.repetitions[-1]
    decodings = [measured.decoding for measured in run.repetitions]
    busy_s = sum(measured.link_busy_s for measured in run.repetitions)
    figures = {"link_utilisation": _utilisation(run, link_rate), **_against(run, on_demand)}
    return {
        "tpot_s": run.tpot_s,
        "tpot_quartiles_s": [quartiles[0], quartiles[2]],
        "tpot_mean_s": statistics.fmean(steps_s),
        "ttft_s": statistics.median(decoding.ttft_s for decoding in decodings),
        "compute_s": sum(sum(step.compute_L) + step.forecast for step in run.steps) / tokens,
        "copy_s": sum(step.wait for step in run.steps) / tokens,
        "idle_s": sum(step.idle for step in run.steps) / tokens,
        "forecast_s": sum(step.forecast for step in run.steps) / tokens,
        "bytes_per_token": last.stats["bytes_moved"] / len(last.steps),
        "hit_rate": last.stats["hit_rate"],
        "waited_s_per_token": last.stats["waited_s"] / len(last.steps),
        "link_busy_s": busy_s / tokens,
        **{name: None if isinstance(value, str) else value for name, value in figures.items()},
        "not_given": {name: value for name, value in figures.items() if isinstance(value, str)},
        "identical": all(
            len(decoding.logits) == len(truth.logits) and same_logits(decoding, truth) for decoding in decodings
        ),
        "same_tokens": all(decoding.tokens == truth.tokens for decoding in decodings),
        "stats": last.stats,
    }


def _utilisation(run: Run, link_rate: float | None) -> float | str | None:
    """Return bytes per second of busy link time as a share of `link_rate`."""
    rates = [own.link_bytes / own.link_busy_s for own in run.repetitions if own.link_busy_s]
    if not rates or not link_rate:
        return None
    busy_s = sum(own.link_busy_s for own in run.repetitions)
    bytes_moved = sum(own.link_bytes for own in run.repetitions)
    error = max(standard_error(rates) / link_rate, _RATE_ERROR)
    return figure(bytes_moved / busy_s / link_rate, error, repetitions=len(run.repetitions), most=1.0)


def _against(run: Run, on_demand: Run | None) -> dict[str, float | str | None]:
    """Return overlap efficiency and bound, computed from the medians of the on-demand run.

    A value is None without an on-demand run, and a string with the reason if it is too noisy. A layer's computation can
    hide min(copy, compute) of its copies; the first `ahead` layers, which have no forecast, count too.
    """
    names = ("hideable_s", "bound_s", "overlap_efficiency", "tpot_over_bound")
    found: dict[str, float | str | None] = dict.fromkeys(names)
    if on_demand is None:
        return found
    steps, repetitions = on_demand.steps, min(len(run.repetitions), len(on_demand.repetitions))
    compute_s = statistics.median(sum(step.compute_L) for step in steps)
    copy_s = statistics.median(sum(step.copy_L) for step in steps)
    less = min(1.0, run.bytes_per_step / on_demand.bytes_per_step) if on_demand.bytes_per_step else 1.0
    bound_s = max(compute_s, less * copy_s)  # no schedule is faster than all computation or all copies
    hideable_s = statistics.median(sum(map(min, step.compute_L, step.copy_L)) for step in steps)
    found |= {"hideable_s": hideable_s, "bound_s": bound_s}
    error_s = math.hypot(run.error_s, on_demand.error_s)
    if run is not on_demand and hideable_s:
        efficiency = (on_demand.tpot_s - run.tpot_s - (1 - less) * copy_s) / hideable_s  # copying less is not overlap
        found["overlap_efficiency"] = figure(efficiency, error_s / hideable_s, repetitions=repetitions, most=1.0)
    if bound_s:
        ratio = run.tpot_s / bound_s
        found["tpot_over_bound"] = figure(ratio, error_s / bound_s, repetitions=repetitions, least=1.0)
    return found


COPY_OVER_COMPUTE = 5.0
"""Copy time of K experts over compute time of one layer on the emulated link.

With 5, copies take 83% of the time per token when all experts load on demand. "Speculating Experts" measured 84 to 88%
on GPUs.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings(Validated):
    """Size of a measurement.

    Raises:
        ExpertcastError: `new_tokens` is below 2, or `repetitions` below 1.
    """

    new_tokens: Annotated[int, Field(ge=2)] = 32
    """Tokens decoded per run; the prefill gives the first one."""
    repetitions: Annotated[int, Field(ge=1)] = 3
    """Repetitions of each run."""


@dataclass(slots=True)
class Bench:
    """Measured runs of one prompt."""

    runs: dict[str, Run]
    resident: Decoding | None
    link_rate: float | None = None
    """Bytes per second of one large copy over the runs' link."""
    reports: dict[str, Json] = field(default_factory=dict)

    @property
    def truth(self) -> Decoding | None:
        """The reference decoding for exact runs: the resident run, else the first on-demand run."""
        if self.resident is not None:
            return self.resident
        first = next((run for run in self.runs.values() if run.config.on_demand), None)
        return first.repetitions[0].decoding if first is not None else None


def usual_runs(
    on_demand: OffloadConfig, predictor: str | Predictor, layers: Sequence[int] | None
) -> dict[str, OffloadConfig]:
    """Return the four standard runs: on demand, and with forecasts in each mode. `layers` are those that `hybrid`
    executes.
    """
    exact = replace(on_demand, predictor=predictor)
    return {
        "on_demand": on_demand,
        "exact": exact,
        "speculate": replace(exact, mode="speculate"),
        "hybrid": replace(exact, mode="hybrid", layers=None if layers is None else tuple(layers)),
    }


def measure(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    runs: Mapping[str, OffloadConfig],
    settings: BenchSettings,
    *,
    resident: Decoding | None,
    say: Callable[[str], None] = lambda _text: None,
) -> Bench:
    """Measure all runs on one prompt.

    Args:
        model: a model of a supported family, on the compute device.
        prompt_ids: [1, T] on the model's device.
        runs: configurations by name.
        settings: size of the measurement.
        resident: decoding that every exact run must reproduce. None if the whole model does not fit the device; the
            first on-demand run is the reference then.
        say: called with one line of progress.
    """
    bench = Bench({name: Run(config) for name, config in runs.items()}, resident)
    for number in range(settings.repetitions):
        for name, run in bench.runs.items():
            say(f"{prompt_ids.shape[1]} tokens, repetition {number + 1} of {settings.repetitions}: {name}")
            _repeat(run, model, prompt_ids, settings.new_tokens, bench)
    truth, on_demand = bench.truth, [run for run in bench.runs.values() if run.config.on_demand]
    for name, run in bench.runs.items():
        bench.reports[name] = report(
            run,
            on_demand=next((other for other in on_demand if other.config.cache == run.config.cache), None),
            truth=truth if truth is not None else run.repetitions[0].decoding,
            link_rate=bench.link_rate,
        )
    return bench


def decode_resident(model: PreTrainedModel, prompt_ids: Tensor, new_tokens: int) -> Decoding:
    """Decode with the resident model and the kernel that its offload will use."""
    with experts_implementation(model, kernel_name(model)):
        decode_greedily(model, prompt_ids[:, :64], 2)  # warm-up
        return decode_greedily(model, prompt_ids, new_tokens)


def layer_seconds(model: PreTrainedModel, prompt_ids: Tensor, new_tokens: int, store: ExpertStore) -> float:
    """Measure the seconds of one layer in a decode step with its experts present, without the last norm and head.

    Args:
        model: a model that is not offloaded.
        prompt_ids: [1, T]; only the first 64 tokens are used.
        new_tokens: decoded tokens.
        store: store of the model's experts.
    """
    layers, recorder = len(find_moe_layers(model)), Recorder(prompt_ids.device)
    with offload(model, cache=False, link="instant", store=store, observers=[recorder]) as offloaded:
        decode_greedily(model, prompt_ids[:, :64], new_tokens, offloaded=offloaded, recorder=recorder)
        steps = step_times(recorder, layers)
    return statistics.median(sum(step.compute_L[:layers]) / layers for step in steps)


def _repeat(run: Run, model: PreTrainedModel, prompt_ids: Tensor, new_tokens: int, bench: Bench) -> None:
    """Run one more repetition; the first one also measures the link."""
    recorder, layers = Recorder(prompt_ids.device), len(find_moe_layers(model))
    with offload(model, run.config, observers=[recorder]) as offloaded:
        decoding = decode_greedily(model, prompt_ids, new_tokens, offloaded=offloaded, recorder=recorder)
        link = offloaded.link
        if hasattr(link, "synchronize"):
            link.synchronize()
        steps, stats = step_times(recorder, layers), offloaded.stats.as_dict()
        run.repetitions.append(Measured(decoding, stats, steps, link.bytes_moved, link.busy_s))
        run.slots = offloaded.pool.count
        if bench.link_rate is None:
            bench.link_rate = link_rate(link, offloaded.store)
