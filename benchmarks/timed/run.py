"""Decoding of one published shape on a simulated device.

The model is tiny, but has the layers and experts of the shape, and routing that was recorded from the published model.
All code between router and slots is the runtime's own. A copy takes the time of the shape's full expert.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

from benchmarks.shapes import random_model
from benchmarks.timed.costs import DriverCosts, StepCosts
from benchmarks.timed.device import Span, TimedDevice
from benchmarks.timed.links import TimedCudaLink
from benchmarks.timed.routing import PrescribedRouting, recorded, recorded_config
from expertcast.data.models import meta_model
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors.messages import Json
from expertcast.predictors.view import MoEView
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
    """Configuration of a simulated decode."""

    shape: str = "qwen3-30b-a3b"
    """One of `RECORDINGS`."""
    layers: int | None = None
    """Number of MoE layers; None: all of the shape."""
    bandwidth: float = 55e9
    """Bytes per second."""
    accuracy: float | None = None
    """Forecast accuracy; None: on demand."""
    forecasts: str = "always"
    misses: str = "copy"
    host: Callable[[OffloadedModel, TimedDevice], None] = lambda *_: None
    """Gives the host its speed, where it computes missing experts."""
    capacity: float = 0.0
    """Slots as a share of all experts; 0: no cache."""
    step: StepCosts = field(default_factory=StepCosts)
    driver: DriverCosts = field(default_factory=DriverCosts)
    link: Callable[[TimedDevice, int], Link] = TimedCudaLink
    """Makes the link of a device, for experts of a number of bytes."""
    policies: Policies = field(default_factory=Policies)
    prompt: int = 8
    """Prompt tokens, which fill a cache. Their layers cost as much as in decode steps, so the prefill time is not
    meaningful.
    """
    piece: int = 32
    """Prompt tokens per forward pass: few, so that the cache has each layer's latest experts."""
    warm_up: int = 16
    """Uncounted decode steps at the start."""
    steps: int = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRun:
    """Results of a simulated decode; medians of seconds per token."""

    tpot_s: float
    host_s: float
    """Host work without waiting."""
    seconds: list[float]
    """Seconds of the prompt, then of each counted token."""
    misses: float
    """Misses per token."""
    copies: float
    """Copies per token, including prefetches."""
    block_bytes: int
    layers: int
    races: tuple[str, ...]
    """Accesses that would have read or overwritten a slot too early."""
    spans: tuple[Span, ...]
    """Device work during the counted tokens."""


def block_bytes(shape: str) -> int:
    """Return the bytes of one bf16 expert of a shape."""
    return BlockLayout.of(find_moe_layers(meta_model(recorded_config(shape, 1), torch.bfloat16))).block_bytes


def tiny_model(shape: str, layers: int | None = None) -> PreTrainedModel:
    """Return a model with a shape's layers and experts, the top-k of its recording, and tiny sizes otherwise."""
    config = recorded_config(shape, layers)
    for name, value in _TINY.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return random_model(config, dtype=torch.float32, device="cpu", seed=0)


_KERNELS = 5
"""Launches per part of a layer: the first kernel runs while the last one is launched."""


class Clockwork(Observer):
    """Hooks and observer that advance the simulated time of a model.

    Args:
        device: the simulated device.
        costs: times of a decode step.
    """

    def __init__(self, device: TimedDevice, costs: StepCosts) -> None:
        self.device, self.costs = device, costs
        self._stack = ExitStack()
        self._state: State = "compute"
        self._policies = 0
        """Times that the current layer entered state `policy`."""
        self._forecasting = range(0)
        self._offloaded: OffloadedModel | None = None

    def follow(self, model: PreTrainedModel, view: MoEView) -> None:
        """Hook the model. Call it before `offload`, so that time advances before the engine's hooks run."""
        self._stack.callback(model.base_model.register_forward_pre_hook(self._before_model).remove)
        for layer in view:
            self._stack.callback(layer.norm.register_forward_pre_hook(self._attended).remove)

    def offloaded(self, offloaded: OffloadedModel, ahead: int) -> None:
        """Set the offload, whose slots kernels read."""
        self._offloaded = offloaded
        layers = len(offloaded.view)
        self._forecasting = range(layers - ahead if offloaded.predictor is not None else 0)

    def close(self) -> None:
        """Remove the hooks."""
        self._stack.close()

    def work(self, host_s: float, device_s: float, reads: tuple[int, ...] = (), name: str = "kernel") -> None:
        """Launch kernels one after another."""
        for _ in range(_KERNELS):
            self.device.spend(host_s / _KERNELS)
            self.device.launch(device_s / _KERNELS, reads=reads, name=name)

    def enter(self, state: State, layer: int) -> None:
        before, self._state = self._state, state
        if state == "policy":
            self._policies += 1
            if self._policies in (1, 3):  # begin of the router's hook, and of the experts' function
                self.device.spend(self.costs.policy_host_s / 2)
        elif state == "forecast" and layer in self._forecasting:
            self.work(self.costs.forecast_host_s, self.costs.forecast_device_s, name="forecast")
        elif state == "compute" and before == "wait" and (reads := self._read()):  # else the device has none
            self.work(self.costs.experts_host_s, self.costs.experts_device_s, reads, name="experts")

    def _before_model(self, *_args: object) -> None:
        self.device.spend(self.costs.token_before_host_s)

    def _attended(self, _norm: nn.Module, _args: object) -> None:
        """Spend the time of attention before the norm of the MoE block. Forecasts call norms too, in another state."""
        if self._state != "compute":
            return
        self._policies = 0
        self.work(self.costs.attention_host_s, self.costs.attention_device_s, name="attention")

    def _read(self) -> tuple[int, ...]:
        """Return the addresses of the slots that the current layer reads."""
        assert self._offloaded is not None
        residency, pool = self._offloaded.residency, self._offloaded.pool
        here = residency.running.difference(residency.copies)
        return tuple(pool.block(pool.slots[key]).data_ptr() for key in sorted(here))


@torch.no_grad()
def decode_timed(case: TimedCase) -> TimedRun:
    """Simulate a decode.

    Raises:
        ExpertcastError: as for :func:`recorded` and :func:`expertcast.offload`.
    """
    size = block_bytes(case.shape)
    device = TimedDevice(case.bandwidth, case.driver)
    model = tiny_model(case.shape, case.layers)
    view = find_moe_layers(model)
    tables = recorded(
        case.shape, layers=case.layers, prompt=case.prompt, new_tokens=case.warm_up + case.steps + 1,
        accuracy=1.0 if case.accuracy is None else case.accuracy,
    )  # fmt: skip
    clockwork = Clockwork(device, case.step)
    clockwork.follow(model, view)
    with PrescribedRouting(model, view, tables) as routing:
        config = OffloadConfig(
            link=case.link(device, size), cache=bool(case.capacity), policies=case.policies, misses=case.misses,
            slots=round(case.capacity * view.shape.layers * view.shape.experts) or None,
            predictor=None if case.accuracy is None else routing, forecasts=case.forecasts,
        )  # fmt: skip
        with offload(model, config, observers=[clockwork]) as offloaded:
            clockwork.offloaded(offloaded, config.ahead)
            case.host(offloaded, device)
            seconds, host = _decode(offloaded, clockwork, case)
            total = offloaded.stats.total
    clockwork.close()
    return TimedRun(
        tpot_s=statistics.median(seconds[1:]),
        host_s=statistics.median(host[1:]),
        seconds=seconds,
        misses=total.misses / case.steps,
        copies=(total.misses + total.prefetched) / case.steps,
        block_bytes=size,
        layers=view.shape.layers,
        races=tuple(device.races),
        spans=tuple(device.spans),
    )


def _decode(offloaded: OffloadedModel, clockwork: Clockwork, case: TimedCase) -> tuple[list[float], list[float]]:
    """Decode; return the seconds of the prompt and of each counted token, and the host's work in them.

    Args:
        offloaded: the model.
        clockwork: advances the time.
        case: numbers of tokens.
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


def compare(case: TimedCase) -> Json:
    """Decode a case with forecasts, and the same on demand.

    Returns:
        Milliseconds per token, and `limit`, the slowest of three lower bounds: `link` (copying the on-demand run's
            misses back to back), `device` (computing without a forecast) and `host` (launching the resident model).
            `efficiency` is the share of the hideable copy time that forecasts hid; it exceeds 1 if the host waits less
            too, and is None if there is nothing to hide.

    Raises:
        ExpertcastError: as for :func:`decode_timed`.
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
        "tpot_ms": run.tpot_s * 1e3,
        "bound_ms": bounds[limit] * 1e3,
        "limit": limit,
    }


@lru_cache(maxsize=64)
def _on_demand(case: TimedCase) -> TimedRun:
    return decode_timed(case)
