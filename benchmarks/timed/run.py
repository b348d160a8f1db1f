"""A decode of one published shape on a device in virtual time.

The model is tiny, has the layers, experts and top-k of the shape, and routes by a process; everything between router
and slots is the runtime's own. A copy counts as that of the shape's expert.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from benchmarks.timed.costs import DriverCosts, StepCosts
from benchmarks.timed.device import Span, TimedDevice
from benchmarks.timed.links import TimedCudaLink, TimedDiskLink, TimedKernelLink
from expertcast.data.models import meta_model
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json
from expertcast.predictors.view import MoEView
from expertcast.runtime.benchmarking.routing import RoutingOptions, RoutingProcess, drawn
from expertcast.runtime.benchmarking.shapes import SHAPES, Shape, random_model
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.links.base import Link
from expertcast.runtime.links.driver import Readback
from expertcast.runtime.offloading import OffloadedModel, offload
from expertcast.runtime.policies import Policies
from expertcast.runtime.recording.recorder import Observer, State
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


_KERNELS = 5
"""Kernels of a layer's part are launched one after another: the first runs while the last is launched."""


class Clockwork(Observer):
    """Hooks on a model's layers, and the observer of its offload.

    Args:
        device: whose time passes.
        costs: how much, in a decode step.
    """

    def __init__(self, device: TimedDevice, costs: StepCosts) -> None:
        self.device, self.costs = device, costs
        self._stack = ExitStack()
        self._state: State = "compute"
        self._policies = 0
        """Times that the running layer entered `policy`."""
        self._forecasting = range(0)
        self._offloaded: OffloadedModel | None = None

    def follow(self, model: PreTrainedModel, view: MoEView) -> None:
        """Hook the model; before it is offloaded, so that the clock has moved when the engine's hooks run."""
        self._stack.callback(model.base_model.register_forward_pre_hook(self._before_model).remove)
        for layer in view:
            self._stack.callback(layer.norm.register_forward_pre_hook(self._attended).remove)

    def offloaded(self, offloaded: OffloadedModel, ahead: int) -> None:
        """What the model became: whose slots kernels read, and which layers forecast."""
        self._offloaded = offloaded
        layers = len(offloaded.view)
        self._forecasting = range(layers - ahead if offloaded.predictor is not None else 0)

    def close(self) -> None:
        """Take the hooks away."""
        self._stack.close()

    def work(self, host_s: float, device_s: float, reads: tuple[int, ...] = (), name: str = "kernel") -> None:
        """The host launches kernels, piece by piece."""
        for _ in range(_KERNELS):
            self.device.spend(host_s / _KERNELS)
            self.device.launch(device_s / _KERNELS, reads=reads, name=name)

    def enter(self, state: State, layer: int) -> None:
        before, self._state = self._state, state
        if state == "policy":
            self._policies += 1
            if self._policies in (1, 3):  # the router's hook begins; the experts' function begins
                self.device.spend(self.costs.policy_host_s / 2)
        elif state == "forecast" and layer in self._forecasting:
            self.work(self.costs.forecast_host_s, self.costs.forecast_device_s, name="forecast")
        elif state == "compute" and before == "wait":
            self.work(self.costs.experts_host_s, self.costs.experts_device_s, self._read(), name="experts")

    def _before_model(self, *_args: object) -> None:
        self.device.spend(self.costs.token_before_host_s)

    def _attended(self, _norm: nn.Module, _args: object) -> None:
        """Attention comes before the norm of the MoE block; forecasts call norms too, while the engine has the word."""
        if self._state != "compute":
            return
        self._policies = 0
        self.work(self.costs.attention_host_s, self.costs.attention_device_s, name="attention")

    def _read(self) -> tuple[int, ...]:
        """Addresses of the slots that the running layer reads."""
        assert self._offloaded is not None
        if self._offloaded.link.decides_on_device:
            return ()
        residency, pool = self._offloaded.residency, self._offloaded.pool
        here = residency.running.difference(residency.copies)
        return tuple(pool.block(pool.slots[key]).data_ptr() for key in sorted(here))


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
            forecasts="always",
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


GRAPH_DRIVER = DriverCosts(
    record_s=0.0, wait_s=0.0, query_s=0.0, copy_call_s=0.0, launch_s=0.0, stream_entry_s=DriverCosts().stream_entry_s
)
"""A captured step: the host makes no calls, the device has the same to do."""


def as_graph(case: TimedCase) -> TimedCase:
    """The same as one CUDA graph: the link that decides on the device, and no work of the host."""
    return replace(case, kernel_link=True, step=case.step.with_host(0.0), driver=GRAPH_DRIVER)


def compare(case: TimedCase) -> Json:
    """Decode a case that has forecasts, and the same on demand.

    Returns:
        Milliseconds per token, and `limit`: no schedule is faster than the slowest of the link (what copying the
        on-demand run's misses takes, with nothing between two copies), the device (computing without a forecast) and
        the host (launching the resident model). `efficiency`: of the copies that computing can hide, how much forecasts
        hid; above 1 where the host waits less, too; None where there is nothing to hide.

    Raises:
        ExpertcastError: as :func:`decode_timed`.
    """
    on_demand, run, step = _on_demand(replace(case, accuracy=None)), decode_timed(case), case.step
    assert not run.races, run.races
    copies_s = on_demand.misses * on_demand.block_bytes / case.bandwidth
    computed_s = on_demand.layers * step.layer_device_s
    launched_s = on_demand.layers * (step.attention_host_s + step.experts_host_s)
    bounds = {
        "link": copies_s,
        "device": computed_s + step.token_device_s,
        "host": launched_s + step.token_before_host_s + step.token_after_host_s,
    }
    limit, hideable_s = max(bounds, key=lambda name: bounds[name]), min(copies_s, computed_s)
    return {
        "efficiency": (on_demand.tpot_s - run.tpot_s) / hideable_s if hideable_s else None,
        "tpot_over_bound": run.tpot_s / bounds[limit],
        "on_demand_over_bound": on_demand.tpot_s / bounds[limit],
        "tpot_ms": run.tpot_s * 1e3,
        "bound_ms": bounds[limit] * 1e3,
        "limit": limit,
        "misses_on_demand": on_demand.misses,
        "copies": run.copies,
    }


@lru_cache(maxsize=64)
def _on_demand(case: TimedCase) -> TimedRun:
    return decode_timed(case)
