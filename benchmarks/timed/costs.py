"""How long the parts of a CUDA device and of an eager decode step take, in seconds and bytes per second.

Published figures, figures measured on a CPU, and estimates: each says which in brackets. Addresses, the machines behind
the figures and what would measure them on a GPU: docs/timed-device.md. A GPU may refute any of them.

E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from functools import cache

import torch
from torch import nn

from expertcast.data.models import meta_model
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError
from expertcast.runtime.benchmarking.shapes import SHAPES, Shape, weight_bytes

LINKS = {"pcie3": 12e9, "pcie4": 25e9, "pcie5": 55e9, "grace": 375e9}
"""Bytes per second of large page-locked copies, host to device: PCIe x16, and NVLink-C2C of a Grace Hopper.
[BaM 54: 12 and 25 GB/s; nvbandwidth's example: 55.6 GB/s; study of Grace Hopper: 375 GB/s]"""

HOSTS = {"fast": 7.5e-6, "a100": 23.4e-6}
"""Host seconds per kernel launch of an eager decode step, Python included.

`fast`: 4.3 us of Python and dispatch [measured, CPU of 2024] and 3.2 us of cudaLaunchKernel [exllama 29, H100]; others
fitted 7 us to an operator [autoparallel 146, H100]. `a100`: generate() of Qwen1.5-MoE-A2.7B with batched_mm takes
33.7 ms a token on an A100 machine [transformers 42697]; those are 1,440 launches."""

MEMORY_BANDWIDTH = 2.5e12
"""Bytes per second that kernels read of an H100 SXM's memory. [nccl 1264: 2.5 TB/s of local copies; 3.35 nominal]"""

KERNEL_S = 2e-6
"""Device: a small kernel, and the gap to the next. [FreeToken 338: 1.15 us; pytorch 191284: 2.0 us; gap: estimate]"""

_POLICY_S, _FORECAST_S = 27e-6, 18e-6
"""The runtime's Python per layer on the host `fast`: on demand, and what prefetching adds. [measured: overhead.json]"""
_TRACED = 0.87
"""Host time of a launch in a traced forecast over that of an eager one. [measured: 3.3 for 4.3 us of the `fast` 7.5]"""
_GRAPH_LAUNCHES = {"attention": 3, "experts": 4, "forecast": 7}
"""Of a part that is a CUDA graph: one, and a copy of each input into its place (a forecast's are six tensors)."""
_EXPERTS_READ = 3
"""Times that `batched_mm` moves a selected expert: read and written to gather it, read to multiply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverCosts:
    """Seconds of the driver's calls and of what the device does around each entry of a stream."""

    record_s: float = 1e-6
    """Host: recording an event. [PaRSEC 576: 0.47 us with its query, stream idle; torch's call, measured: 0.2 us]"""
    wait_s: float = 1e-6
    """Host: making a stream wait for an event. [estimate: as a record]"""
    query_s: float = 0.5e-6
    """Host: asking whether an event has been reached. [PaRSEC 576: 0.47 us with its record]"""
    copy_call_s: float = 6e-6
    """Host: queueing one asynchronous copy. [DualPath, section 5.2: 5 to 7 us; of it ctypes, measured: 0.8 us]"""
    wake_s: float = 2e-6
    """Host: from an event's time to the return of the call that waited for it, spinning. [estimate; CUDA.jl 896: 4.7 us
    for launch, kernel and wait]"""
    launch_s: float = 2.5e-6
    """From a call's end to the moment that the device sees it. [PaRSEC 576: 5.2 us from a record to a query that sees
    it, less both calls and the entry]"""
    stream_entry_s: float = 1.5e-6
    """Device: an event's record or wait in a stream. [velox 6096: 3 us for both, RTX 3080]"""
    copy_setup_s: float = 1.3e-6
    """Device: a copy, whatever its size. [profile of small copies, env notes: 1.3 us]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds of one decode step of one text, per MoE layer unless it says token; host: launching it all.

    The defaults are those of Qwen3-30B-A3B on the host `fast`, to the microsecond: see :func:`step_costs`.
    """

    attention_host_s: float = 428e-6
    """Attention, norms and router."""
    attention_device_s: float = 129e-6
    policy_host_s: float = 27e-6
    """The runtime's own work on a layer, without the driver's calls: half of it before the misses go out, half after
    the experts."""
    forecast_host_s: float = 70.5e-6
    forecast_device_s: float = 67e-6
    experts_host_s: float = 75e-6
    """The experts' products and what surrounds them."""
    experts_device_s: float = 111e-6
    token_before_host_s: float = 75e-6
    """Embedding and masks, before the first layer."""
    token_after_host_s: float = 195e-6
    """Head, choice of the token, and the caller's loop."""
    token_device_s: float = 321e-6

    @property
    def layer_host_s(self) -> float:
        """What the host spends on a layer with a forecast."""
        return self.attention_host_s + self.policy_host_s + self.forecast_host_s + self.experts_host_s

    @property
    def layer_device_s(self) -> float:
        """What the device computes of a layer, without a forecast."""
        return self.attention_device_s + self.experts_device_s

    def with_host(self, layer_host_s: float) -> StepCosts:
        """The same with every time of the host stretched alike, to so many seconds a layer."""
        factor = layer_host_s / self.layer_host_s
        host = [field.name for field in fields(self) if field.name.endswith("host_s")]
        return replace(self, **{name: factor * getattr(self, name) for name in host})


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """Kernels of a decode step of transformers' `generate`: operators that are no views; `batched_mm`, as on CUDA."""

    attention: int
    """Per layer, with norms, router and the first residual."""
    experts: int
    """Per layer, with the second residual."""
    before: int
    """Per token, before the first layer."""
    forecast: int
    """Per layer, by an estimator with its defaults."""
    after: int = 26
    """Per token, from the last norm to the stopping criteria of transformers' own loop, without an end token."""


LAUNCHES = {
    "qwen3_moe": Launches(attention=57, experts=10, before=10, forecast=33),
    "gpt_oss": Launches(attention=48, experts=19, before=34, forecast=31),
    "olmoe": Launches(attention=55, experts=10, before=10, forecast=31),
    "mixtral": Launches(attention=40, experts=11, before=10, forecast=33),
}
"""By model type. Counted on transformers 5.23, and again by the tests."""


def step_costs(
    shape: str, *, host: str = "fast", captured: Collection[str] = ("forecast",),
    memory_bandwidth: float = MEMORY_BANDWIDTH, kernel_s: float = KERNEL_S,
) -> StepCosts:  # fmt: skip
    """A decode step of one text with a short context, in bf16: the cache of keys and values is not read.

    Args:
        shape: one of `SHAPES`, of a family in `LAUNCHES`.
        host: one of `HOSTS`; the runtime's own Python is as much slower as its launches are.
        captured: parts of a layer (`attention`, `experts`, `forecast`) that are one CUDA graph each; the runtime makes
            none.
        memory_bandwidth: bytes per second at which kernels read weights.
        kernel_s: seconds of a kernel beside what it reads.

    Raises:
        ExpertcastError: unknown shape or host.
    """
    known = [name for name, each in SHAPES.items() if each.model_type in LAUNCHES]
    if shape not in known:
        raise ExpertcastError(f"no costs of shape {shape!r}: choose from {', '.join(known)}")
    if host not in HOSTS:
        raise ExpertcastError(f"unknown host {host!r}: choose from {', '.join(HOSTS)}")
    launches, weights = LAUNCHES[SHAPES[shape].model_type], _weights(SHAPES[shape])
    launch_s, slower = HOSTS[host], HOSTS[host] / HOSTS["fast"]

    def device_s(kernels: int, size: int = 0) -> float:
        return kernels * kernel_s + size / memory_bandwidth

    def host_s(part: str, kernels: float) -> float:
        return (_GRAPH_LAUNCHES[part] if part in captured else kernels) * launch_s

    return StepCosts(
        attention_host_s=host_s("attention", launches.attention),
        attention_device_s=device_s(launches.attention, weights.attention),
        policy_host_s=_POLICY_S * slower,
        forecast_host_s=_FORECAST_S * slower + host_s("forecast", launches.forecast * _TRACED),
        forecast_device_s=device_s(launches.forecast, weights.forecast),
        experts_host_s=host_s("experts", launches.experts),
        experts_device_s=device_s(launches.experts, _EXPERTS_READ * weights.experts),
        token_before_host_s=launches.before * launch_s,
        token_after_host_s=launches.after * launch_s,
        token_device_s=device_s(launches.before + launches.after, weights.head),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Bytes that a decode step reads, in bf16; forecasts in fp32."""

    attention: int
    """Per layer, with norms and router."""
    experts: int
    """Per layer: K experts."""
    forecast: int
    """Per layer, by an estimator: its ridge map from two hidden states and two rows over E; the rest is small."""
    head: int
    """Per token."""


@cache
def _weights(shape: Shape) -> _Weights:
    model = meta_model(shape.config(1), torch.bfloat16)
    view = find_moe_layers(model)
    experts = weight_bytes(view[0].experts)
    layer, head = model.base_model.layers[-1], model.get_output_embeddings()
    assert isinstance(head, nn.Module)
    hidden, routed = view.shape.hidden, view.shape.experts
    return _Weights(
        attention=weight_bytes(layer) - experts,
        experts=experts // routed * view.shape.top_k,
        forecast=4 * 2 * (hidden + routed) * routed,
        head=weight_bytes(head),
    )
