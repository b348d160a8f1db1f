"""The benchmark: time per output token of an offloaded model, in several ways over one link (rows B11, B16, B17).

Runs alternate, so that a machine that slows down slows all of them. L MoE layers, K experts per token.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from expertcast.data.discovery import experts_implementation, find_moe_layers
from expertcast.predictors import ExpertcastError
from expertcast.runtime.benchmarking.bench_report import Measured, Run, report, step_times
from expertcast.runtime.benchmarking.decoding import Decoding, balanced_bandwidth, decode_greedily
from expertcast.runtime.benchmarking.lent_store import LentStore
from expertcast.runtime.engine.kernels import kernel_name
from expertcast.runtime.links.speed import link_speed
from expertcast.runtime.offloaded import OffloadedModel
from expertcast.runtime.offloading import offload
from expertcast.runtime.recording.recorder import Recorder
from expertcast.runtime.storage.store import ExpertStore


@dataclass(slots=True)
class Bench:
    """The runs of one prompt, measured."""

    runs: dict[str, Run]
    resident: Decoding | None
    link_rate: float | None = None
    """Bytes per second of one large copy over the link that the runs used."""
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def truth(self) -> Decoding | None:
        """What exact runs are compared with: the resident run, else the first on-demand run."""
        if self.resident is not None:
            return self.resident
        first = next((run for run in self.runs.values() if is_on_demand(run.arguments)), None)
        return first.repetitions[0].decoding if first is not None else None


def benchmark(
    model: PreTrainedModel,
    tokenizer: Any,
    prompt: str,
    *,
    runs: Mapping[str, Mapping[str, Any]],
    slots: int | None = None,
    bandwidth: float | None = None,
    latency: float = 0.0,
    new_tokens: int = 32,
    repetitions: int = 3,
) -> dict[str, Any]:
    """Decode a text greedily in each way, runs in alternation, and compare with the resident model.

    Args:
        runs: arguments of :func:`expertcast.offload` by name, such as
            `{"on_demand": {}, "exact": {"predictor": p}, "speculate": {"predictor": p, "mode": "speculate"}}`.
        slots: for the runs that name none.
        bandwidth: bytes per second of the emulated link. None: such that K copies take as long as one layer computes in
            the resident model, where prefetching can gain most (on a CUDA model the real link is used).

    Returns:
        `bandwidth`, `latency`, `prompt_tokens`, `new_tokens`, `resident.{tpot_s,ttft_s}`, `link_rate`, and
        `runs.<name>` as :func:`expertcast.runtime.benchmarking.bench_report.report` has it.

    Raises:
        ExpertcastError: as :func:`expertcast.offload`; fewer than 2 new tokens; no repetition; no token in the prompt.
    """
    prompt_ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(next(model.parameters()).device)
    if not prompt_ids.shape[1]:
        raise ExpertcastError("the prompt has no token: give some text")
    check_lengths(new_tokens, repetitions)
    resident = decode_resident(model, prompt_ids, new_tokens)
    link: dict[str, Any] = {}
    if not prompt_ids.is_cuda:
        link = {"bandwidth": bandwidth or balanced_bandwidth(model, resident), "latency": latency}
    store = LentStore(find_moe_layers(model), prompt_ids.device)
    try:
        measured = measure(
            model,
            prompt_ids,
            runs=runs,
            shared={"slots": slots, "store": store, **link},
            new_tokens=new_tokens,
            repetitions=repetitions,
            resident=resident,
        )
    finally:
        store.give_back()
    return {
        **link,
        "prompt_tokens": prompt_ids.shape[1],
        "new_tokens": new_tokens,
        "repetitions": repetitions,
        "link_rate": measured.link_rate,
        "resident": {"tpot_s": statistics.median(resident.steps_s), "ttft_s": resident.ttft_s},
        "runs": measured.reports,
    }


def measure(
    model: PreTrainedModel,
    prompt_ids: Tensor,
    *,
    runs: Mapping[str, Mapping[str, Any]],
    shared: Mapping[str, Any],
    new_tokens: int,
    repetitions: int,
    resident: Decoding | None,
    say: Callable[[str], None] = lambda _text: None,
) -> Bench:
    """Measure all runs on one prompt.

    Args:
        prompt_ids: [1, T] on the model's device.
        runs: arguments of :func:`expertcast.offload` by name; `shared` goes below them.
        resident: what every exact run must decode; None where the whole model does not fit the device, then the first
            on-demand run says it.
        say: told of progress, a line at a time.
    """
    check_lengths(new_tokens, repetitions)
    layers = len(find_moe_layers(model))
    bench = Bench({name: Run({**shared, **arguments}) for name, arguments in runs.items()}, resident)
    for number in range(repetitions):
        for name, run in bench.runs.items():
            say(f"{prompt_ids.shape[1]} tokens, repetition {number + 1} of {repetitions}: {name}")
            run.recorder = Recorder(prompt_ids.device)
            with offload(model, **run.arguments, observers=[run.recorder]) as offloaded:
                run.repetitions.append(_repetition(model, offloaded, run.recorder, prompt_ids, new_tokens, layers))
                run.slots = offloaded.pool.count
                if bench.link_rate is None:
                    bench.link_rate = link_speed(offloaded.link, offloaded.store).rate
    truth = bench.truth
    for name, run in bench.runs.items():
        bench.reports[name] = report(
            run,
            on_demand=on_demand_for(run, bench.runs),
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
    """Seconds that one layer computes in a decode step when its experts are there; the last norm and head left out."""
    layers, recorder = len(find_moe_layers(model)), Recorder(prompt_ids.device)
    with offload(model, cache=False, link="instant", store=store, observers=[recorder]) as offloaded:
        decode_greedily(model, prompt_ids[:, :64], new_tokens, offloaded=offloaded, recorder=recorder)
        steps = step_times(recorder, layers)
    return statistics.median(sum(step.compute_L[:layers]) / layers for step in steps)


def on_demand_for(run: Run, runs: Mapping[str, Run]) -> Run | None:
    """The run without forecasts and with the same cache setting."""
    cache = run.arguments.get("cache", True)
    return next(
        (
            other
            for other in runs.values()
            if is_on_demand(other.arguments) and other.arguments.get("cache", True) == cache
        ),
        None,
    )


def is_on_demand(arguments: Mapping[str, Any]) -> bool:
    """Whether these arguments of `offload` load every expert when its layer asks for it."""
    return arguments.get("predictor") is None


def check_lengths(new_tokens: int, repetitions: int) -> None:
    """
    Raises:
        ExpertcastError: too few of one of them.
    """
    if new_tokens < 2 or repetitions < 1:
        raise ExpertcastError(f"new_tokens={new_tokens}, repetitions={repetitions}: give 2 or more, and 1 or more")


def _repetition(
    model: PreTrainedModel,
    offloaded: OffloadedModel,
    recorder: Recorder,
    prompt_ids: Tensor,
    new_tokens: int,
    layers: int,
) -> Measured:
    decoding = decode_greedily(model, prompt_ids, new_tokens, offloaded=offloaded, recorder=recorder)
    link = offloaded.link
    if hasattr(link, "synchronize"):
        link.synchronize()
    return Measured(
        decoding=decoding,
        stats=offloaded.stats.as_dict(),
        steps=step_times(recorder, layers),
        link_bytes=link.bytes_moved,
        link_busy_s=link.busy_s,
    )
