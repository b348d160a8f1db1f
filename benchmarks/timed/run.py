"""A decode of one published shape on a device in virtual time.

The model is tiny, has the layers, experts and top-k of the shape, and routes by a process; everything between router
and slots is the runtime's own. A copy counts as that of the shape's expert.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace

import torch
from transformers import DynamicCache, PreTrainedModel

from benchmarks.timed.clockwork import Clockwork
from benchmarks.timed.costs import DriverCosts, StepCosts
from benchmarks.timed.device import TimedDevice
from benchmarks.timed.links import TimedCudaLink, TimedDiskLink, TimedKernelLink
from benchmarks.timed.streams import Span
from expertcast.data.models import meta_model
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError
from expertcast.runtime.benchmarking.routing import RoutingOptions, RoutingProcess, drawn
from expertcast.runtime.benchmarking.shapes import SHAPES, Shape, random_model
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.links.base import Link
from expertcast.runtime.links.driver import Readback
from expertcast.runtime.offloading import OffloadedModel, offload
from expertcast.runtime.policies import Policies
from expertcast.runtime.storage.layout import BlockLayout

_TINY = {
    "hidden_size": 8, "intermediate_size": 8, "moe_intermediate_size": 8, "num_attention_heads": 1,
    "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 32, "max_position_embeddings": 512,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCase:
    """What is decoded, and on what."""

    shape: str = "qwen3-30b-a3b"
    """One of `SHAPES`."""
    layers: int | None = None
    """None: all of the shape."""
    bandwidth: float = 55e9
    """Bytes per second."""
    accuracy: float | None = None
    """Of forecasts; None: on demand."""
    capacity: float = 0.0
    """Share of all experts that fit; 0: no cache."""
    step: StepCosts = field(default_factory=StepCosts)
    driver: DriverCosts = field(default_factory=DriverCosts)
    kernel_link: bool = False
    """Copies by a kernel and books on the device, in place of the copy engine's."""
    disk: float | None = None
    """Bytes per second of the disk that the experts lie on; None: in host memory."""
    policies: Policies = field(default_factory=Policies)
    routing: RoutingOptions = field(default_factory=RoutingOptions)
    """What experts the tokens take; accuracy stands above."""
    prompt: int = 8
    """Tokens before the decode steps; with a cache they fill it. Their layers cost what a decode step's do: for the
    order of events, not for a time to first token."""
    piece: int = 32
    """Tokens of the prompt that are read at once: few, so that the cache holds of every layer what came last."""
    warm_up: int = 16
    """Decode steps before those that count."""
    steps: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRun:
    """What a decode took; seconds per token, medians."""

    tpot_s: float
    host_s: float
    """The host's own work."""
    prefill_s: float
    """Of the prompt."""
    misses: float
    """Experts per token that were not there when their layer asked."""
    copies: float
    """Experts per token that were copied, forecasts included."""
    block_bytes: int
    layers: int
    races: tuple[str, ...]
    """What would have read a slot too early, or overwritten it."""
    spans: tuple[Span, ...]
    """What ran on the device in the tokens that count."""


def block_bytes(shape: Shape) -> int:
    """Bytes of one expert of a shape, in bf16."""
    return BlockLayout.of(find_moe_layers(meta_model(shape.config(1), torch.bfloat16))).block_bytes


def tiny_model(shape: Shape, layers: int | None = None) -> PreTrainedModel:
    """A model with a shape's layers, experts and top-k, and next to nothing else."""
    config = shape.config(layers)
    for name, value in _TINY.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return random_model(config, dtype=torch.float32, device="cpu", seed=0)


@torch.no_grad()
def decode_timed(case: TimedCase) -> TimedRun:
    """Decode some tokens.

    Raises:
        ExpertcastError: unknown shape, or what :func:`expertcast.offload` refuses.
    """
    if case.shape not in SHAPES:
        raise ExpertcastError(f"unknown shape {case.shape!r}: choose from {', '.join(SHAPES)}")
    shape = SHAPES[case.shape]
    size = block_bytes(shape)
    device = TimedDevice(case.bandwidth, case.driver)
    model = tiny_model(shape, case.layers)
    view = find_moe_layers(model)
    options = replace(case.routing, accuracy=1.0 if case.accuracy is None else case.accuracy)
    tables = drawn(view.shape, prompt=case.prompt, new_tokens=case.warm_up + case.steps + 1, options=options)
    clockwork = Clockwork(device, case.step)
    clockwork.follow(model, view)
    link = _link_of(case, device, size)
    with RoutingProcess(model, view, tables) as process:
        config = OffloadConfig(
            link=link,
            cache=bool(case.capacity),
            policies=case.policies,
            slots=round(case.capacity * view.shape.layers * view.shape.experts) or None,
            predictor=None if case.accuracy is None else process.predictor(),
        )
        with offload(model, config, observers=[clockwork]) as offloaded:
            clockwork.offloaded(offloaded, config.ahead)
            seconds, host = _decode(offloaded, clockwork, case)
            total = offloaded.stats.total
    clockwork.close()
    return TimedRun(
        tpot_s=statistics.median(seconds[1:]),
        host_s=statistics.median(host[1:]),
        prefill_s=seconds[0],
        misses=total.misses / case.steps,
        copies=(total.misses + total.prefetched) / case.steps,
        block_bytes=size,
        layers=view.shape.layers,
        races=tuple(device.races),
        spans=tuple(device.spans),
    )


def _link_of(case: TimedCase, device: TimedDevice, size: int) -> Link:
    if case.disk is not None:
        return TimedDiskLink(device, size, case.disk)
    return TimedKernelLink(device, size) if case.kernel_link else TimedCudaLink(device, size)


def _decode(offloaded: OffloadedModel, clockwork: Clockwork, case: TimedCase) -> tuple[list[float], list[float]]:
    """Seconds of the prompt and of each counted token, and those of them that the host worked.

    Args:
        offloaded: the model.
        clockwork: lets time pass.
        case: how many tokens, and what they cost.
    """
    device, costs, readback = clockwork.device, clockwork.costs, Readback(clockwork.device)
    cache = DynamicCache(config=offloaded.model.config)
    *before, inputs = torch.split(torch.zeros(1, case.prompt, dtype=torch.int64), case.piece, dim=1)
    start, busy = device.now, device.host_busy_s
    for piece in before:
        offloaded(input_ids=piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
    seconds, host = [], []
    for step in range(case.warm_up + case.steps + 1):
        if step == case.warm_up + 1:
            offloaded.reset_stats()
            device.spans.clear()
        if step:
            start, busy = device.now, device.host_busy_s
        logits_V = offloaded(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
        clockwork.work(costs.token_after_host_s, costs.token_device_s, name="head")
        inputs = logits_V.argmax().view(1, 1)
        readback.start(inputs).tolist()
        if step == 0 or step > case.warm_up:
            seconds.append(device.now - start)
            host.append(device.host_busy_s - busy)
    return seconds, host
