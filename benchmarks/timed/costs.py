"""Assumed times of a CUDA device and of an eager decode step, in seconds, and bandwidths in bytes per second.

Each constant is published, measured on a CPU, or estimated; the brackets say which. docs/timed-device.md has the
sources, the machines behind the figures, and how to measure them on a GPU.

E routed experts per layer, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache

import torch
from torch import nn

from benchmarks.shapes import weight_bytes
from benchmarks.timed.routing import recorded_config
from expertcast.data.models import meta_model
from expertcast.data.moe_layers import find_moe_layers

LINKS = {"pcie3": 12e9, "pcie4": 25e9, "pcie5": 55e9, "grace": 375e9}
"""Bytes per second of large page-locked copies, host to device: PCIe x16, and NVLink-C2C of a Grace Hopper.
[BaM 54: 12 and 25 GB/s; nvbandwidth's example: 55.6 GB/s; study of Grace Hopper: 375 GB/s]"""

LAUNCH_S = 7.5e-6
"""Host seconds per kernel launch of an eager decode step, Python included.

4.3 us of Python and dispatch [measured, CPU of 2024] and 3.2 us of cudaLaunchKernel [exllama 29, H100]; others fitted
7 us to an operator [autoparallel 146, H100]. Slower hosts: :meth:`StepCosts.with_host`."""

MEMORY_BANDWIDTH = 2.5e12
"""Memory bandwidth of kernels on an H100 SXM, bytes per second. [nccl 1264: 2.5 TB/s of local copies; 3.35 nominal]"""

KERNEL_S = 2e-6
"""Device: a small kernel, and the gap to the next. [FreeToken 338: 1.15 us; pytorch 191284: 2.0 us; gap: estimate]"""

_POLICY_S, _FORECAST_S = 37e-6, 17e-6
"""Python time of runtime and link per layer: on demand, and additional time for prefetching. [measured:
overhead.json]
"""
_FORECAST_LAUNCHES = 7
"""Launches of a forecast captured as a CUDA graph: the graph, and one copy for each of six inputs. The runtime itself
captures none."""
_EXPERTS_READ = 3
"""Memory accesses of `batched_mm` per selected expert: read and written to gather it, read to multiply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverCosts:
    """Seconds of driver calls, and of the device's work around each entry of a stream."""

    record_s: float = 1e-6
    """Host: recording an event. [PaRSEC 576: 0.47 us with its query, stream idle; torch's call, measured: 0.2 us]"""
    wait_s: float = 1e-6
    """Host: making a stream wait for an event. [estimate: as a record]"""
    query_s: float = 0.5e-6
    """Host: querying an event. [PaRSEC 576: 0.47 us with its record]"""
    copy_call_s: float = 6e-6
    """Host: queueing one asynchronous copy. [DualPath, section 5.2: 5 to 7 us; of it ctypes, measured: 0.8 us]"""
    wake_s: float = 2e-6
    """Host: from an event to the return of a spinning wait. [estimate; CUDA.jl 896: 4.7 us for launch, kernel and wait]
    """
    launch_s: float = 2.5e-6
    """From the end of a call until the device sees it. [PaRSEC 576: 5.2 us from a record to a successful query, less
    both calls and the entry]
    """
    stream_entry_s: float = 1.5e-6
    """Device: an event's record or wait in a stream. [velox 6096: 3 us for both, RTX 3080]"""
    copy_setup_s: float = 1.3e-6
    """Device: fixed time per copy. [profile of small copies, env notes: 1.3 us]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds of one decode step of one sequence, per MoE layer unless the name says token. `host`: launching the work.

    The defaults are those of Qwen3-30B-A3B, rounded to microseconds: see :func:`step_costs`.
    """

    attention_host_s: float = 428e-6
    """Attention, norms and router."""
    attention_device_s: float = 129e-6
    policy_host_s: float = 41e-6
    """The runtime's work per layer without driver calls: half before the misses are issued, half after the experts."""
    forecast_host_s: float = 73.5e-6
    forecast_device_s: float = 61e-6
    experts_host_s: float = 75e-6
    """Expert matrix products and their surrounding operations."""
    experts_device_s: float = 111e-6
    token_before_host_s: float = 75e-6
    """Embedding and masks before the first layer."""
    token_after_host_s: float = 195e-6
    """Head, choice of the token, and the caller's loop."""
    token_device_s: float = 321e-6

    @property
    def layer_host_s(self) -> float:
        """Host time per layer with a forecast."""
        return self.attention_host_s + self.policy_host_s + self.forecast_host_s + self.experts_host_s

    @property
    def layer_device_s(self) -> float:
        """Device time per layer without a forecast."""
        return self.attention_device_s + self.experts_device_s

    def with_host(self, layer_host_s: float) -> StepCosts:
        """Return a copy with all host times scaled to `layer_host_s` seconds per layer."""
        factor = layer_host_s / self.layer_host_s
        host = [field.name for field in fields(self) if field.name.endswith("host_s")]
        return replace(self, **{name: factor * getattr(self, name) for name in host})


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches:
    """Kernel launches of a decode step of transformers' `generate`: operators other than views, with `batched_mm` as on
    CUDA.
    """

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
    "qwen3_moe": Launches(attention=57, experts=10, before=10, forecast=29),
    "gpt_oss": Launches(attention=48, experts=19, before=34, forecast=27),
}
"""Launches by model type, counted on transformers 5.23; tests count them again."""


def step_costs(shape: str, *, memory_bandwidth: float = MEMORY_BANDWIDTH, kernel_s: float = KERNEL_S) -> StepCosts:
    """Return the times of a decode step in bf16 with a short context, without reads of the KV cache.

    Args:
        shape: one of `RECORDINGS`.
        memory_bandwidth: bytes per second at which kernels read weights.
        kernel_s: seconds per kernel beside its reads.

    Raises:
        ExpertcastError: the shape has no recorded routing.
    """
    config = recorded_config(shape, 1)
    launches, weights = LAUNCHES[config.model_type], _weights(shape)

    def device_s(kernels: int, size: int = 0) -> float:
        return kernels * kernel_s + size / memory_bandwidth

    return StepCosts(
        attention_host_s=launches.attention * LAUNCH_S,
        attention_device_s=device_s(launches.attention, weights.attention),
        policy_host_s=_POLICY_S,
        forecast_host_s=_FORECAST_S + _FORECAST_LAUNCHES * LAUNCH_S,
        forecast_device_s=device_s(launches.forecast, weights.forecast),
        experts_host_s=launches.experts * LAUNCH_S,
        experts_device_s=device_s(launches.experts, _EXPERTS_READ * weights.experts),
        token_before_host_s=launches.before * LAUNCH_S,
        token_after_host_s=launches.after * LAUNCH_S,
        token_device_s=device_s(launches.before + launches.after, weights.head),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Bytes that a decode step reads: weights in bf16, forecasts in fp32."""

    attention: int
    """Per layer, with norms and router."""
    experts: int
    """Per layer: K experts."""
    forecast: int
    """Per layer, for an estimator's ridge map from two hidden states and two rows over E; the rest is small."""
    head: int
    """Per token."""


@cache
def _weights(shape: str) -> _Weights:
    model = meta_model(recorded_config(shape, 1), torch.bfloat16)
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
