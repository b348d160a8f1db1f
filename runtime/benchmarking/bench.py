"""The benchmark: time per output token of an offloaded model, in several ways over one link (rows B11, B16, B17).

Runs alternate, so that a machine that slows down slows all of them. L MoE layers, K experts per token.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from expertcast.data.discovery import experts_implementation, find_moe_layers
from expertcast.predictors import ExpertcastError, Predictor
from expertcast.predictors.plain import Json
from expertcast.runtime.benchmarking.bench_report import Measured, Run, report, step_times
from expertcast.runtime.benchmarking.decoding import Decoding, balanced_bandwidth, decode_greedily
from expertcast.runtime.benchmarking.lent_store import LentStore
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.engine.kernels import kernel_name
from expertcast.runtime.links.speed import link_speed
from expertcast.runtime.offloading import offload
from expertcast.runtime.recording.recorder import Recorder
from expertcast.runtime.storage.store import ExpertStore

COPY_OVER_COMPUTE = 5.0
"""On an emulated link, copying K experts takes so many times as long as computing one layer: copies are then 83% of the
time per token when all is loaded on demand; 84 to 88% were measured on GPUs (Speculating Experts, row B17)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """How much is measured.

    Raises:
        ExpertcastError: too few tokens or repetitions.
    """

    new_tokens: int = 32
    """Tokens decoded per run; the first comes from the prefill."""
    repetitions: int = 3
    """Of each run."""

    def __post_init__(self) -> None:
        if self.new_tokens < 2 or self.repetitions < 1:
            raise ExpertcastError(
                f"new_tokens={self.new_tokens}, repetitions={self.repetitions}: give 2 or more, and 1 or more"
            )


@dataclass(slots=True)
class Bench:
    """The runs of one prompt, measured."""

    runs: dict[str, Run]
    resident: Decoding | None
    link_rate: float | None = None
    """Bytes per second of one large copy over the link that the runs used."""
    reports: dict[str, Json] = field(default_factory=dict)

    @property
    def truth(self) -> Decoding | None:
        """What exact runs are compared with: the resident run, else the first on-demand run."""
        if self.resident is not None:
            return self.resident
        first = next((run for run in self.runs.values() if run.config.on_demand), None)
        return first.repetitions[0].decoding if first is not None else None


def usual_runs(
    on_demand: OffloadConfig, predictor: str | Predictor, layers: Sequence[int] | None
) -> dict[str, OffloadConfig]:
    """The runs that are usually compared: on demand, and with forecasts in each mode; `hybrid` executes at `layers`."""
    exact = replace(on_demand, predictor=predictor)
    return {
        "on_demand": on_demand,
        "exact": exact,
        "speculate": replace(exact, mode="speculate"),
        "hybrid": replace(exact, mode="hybrid", layers=None if layers is None else tuple(layers)),
    }


def benchmark(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    runs: Mapping[str, OffloadConfig],
    settings: BenchSettings | None = None,
    *,
    bandwidth: float | None = None,
    latency: float = 0.0,
) -> Json:
    """Decode a text greedily in each way, runs in alternation, and compare with the resident model.

    Args:
        model: a model of a supported family, on the device that computes.
        tokenizer: the model's own.
        prompt: what to continue.
        runs: by name, such as `{"on_demand": OffloadConfig(), "exact": OffloadConfig(predictor=p)}`. Those that keep
            their experts in memory share one copy of them.
        settings: how much is measured; none is the default :class:`BenchSettings`.
        bandwidth: bytes per second of the emulated link, for runs that name none. None: such that K copies take as long
            as one layer computes in the resident model, where prefetching can gain most (on a CUDA model the real link
            is used).
        latency: seconds per copy of the emulated link, for runs that name none.

    Returns:
        `bandwidth`, `latency`, `prompt_tokens`, `new_tokens`, `resident.{tpot_s,ttft_s}`, `link_rate`, and
        `runs.<name>` as :func:`expertcast.runtime.benchmarking.bench_report.report` has it.

    Raises:
        ExpertcastError: as :func:`expertcast.offload`; no token in the prompt.
    """
    settings = settings or BenchSettings()
    prompt_ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(next(model.parameters()).device)
    if not prompt_ids.shape[1]:
        raise ExpertcastError("the prompt has no token: give some text")
    resident = decode_resident(model, prompt_ids, settings.new_tokens)
    link: dict[str, float] = {}
    if not prompt_ids.is_cuda:
        link = {"bandwidth": bandwidth or balanced_bandwidth(model, resident), "latency": latency}
    store = LentStore(find_moe_layers(model), prompt_ids.device)
    sharing = {
        name: replace(
            config,
            store=store if config.store == "memory" else config.store,
            bandwidth=config.bandwidth or link.get("bandwidth"),
            latency=config.latency or link.get("latency", 0.0),
        )
        for name, config in runs.items()
    }
    try:
        measured = measure(model, prompt_ids, sharing, settings, resident=resident)
    finally:
        store.give_back()
    return {
        **link,
        "prompt_tokens": prompt_ids.shape[1],
        "new_tokens": settings.new_tokens,
        "repetitions": settings.repetitions,
        "link_rate": measured.link_rate,
        "resident": {"tpot_s": statistics.median(resident.steps_s), "ttft_s": resident.ttft_s},
        "runs": measured.reports,
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
        model: a model of a supported family, on the device that computes.
        prompt_ids: [1, T] on the model's device.
        runs: by name.
        settings: how much is measured.
        resident: what every exact run must decode; None where the whole model does not fit the device, then the first
            on-demand run says it.
        say: told of progress, a line at a time.
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
    """The model as it is, under the kernel that its offload will use."""
    with experts_implementation(model, kernel_name(model)):
        decode_greedily(model, prompt_ids[:, :64], 2)  # warm-up
        return decode_greedily(model, prompt_ids, new_tokens)


def layer_seconds(model: PreTrainedModel, prompt_ids: Tensor, new_tokens: int, store: ExpertStore) -> float:
    """Seconds that one layer computes in a decode step when its experts are there; the last norm and head left out.

    Args:
        model: as it is, not offloaded.
        prompt_ids: [1, T]; its first 64 tokens are read.
        new_tokens: decoded behind them.
        store: of the model's experts.
    """
    layers, recorder = len(find_moe_layers(model)), Recorder(prompt_ids.device)
    with offload(model, cache=False, link="instant", store=store, observers=[recorder]) as offloaded:
        decode_greedily(model, prompt_ids[:, :64], new_tokens, offloaded=offloaded, recorder=recorder)
        steps = step_times(recorder, layers)
    return statistics.median(sum(step.compute_L[:layers]) / layers for step in steps)


def _repeat(run: Run, model: PreTrainedModel, prompt_ids: Tensor, new_tokens: int, bench: Bench) -> None:
    """One more repetition of a run; the first of all also measures the link."""
    recorder, layers = Recorder(prompt_ids.device), len(find_moe_layers(model))
    with offload(model, run.config, observers=[recorder]) as offloaded:
        decoding = decode_greedily(model, prompt_ids, new_tokens, offloaded=offloaded, recorder=recorder)
        link = offloaded.link
        if hasattr(link, "synchronize"):
            link.synchronize()
        steps, stats = step_times(recorder, layers), offloaded.stats.as_dict()
        run.repetitions.append(Measured(decoding, stats, steps, link.bytes_moved, link.busy_s))
        run.recorder, run.slots = recorder, offloaded.pool.count
        if bench.link_rate is None:
            bench.link_rate = link_speed(link, offloaded.store).rate
