"""How long the parts of a CUDA device and of an eager decode step take: estimates, until a GPU says otherwise."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverCosts:
    """Seconds of the driver's calls and of what the device does around each entry of a stream."""

    record_s: float = 1e-6
    """Host: recording an event."""
    wait_s: float = 1e-6
    """Host: making a stream wait for an event."""
    query_s: float = 1e-6
    """Host: asking whether an event has been reached."""
    copy_call_s: float = 3e-6
    """Host: queueing one asynchronous copy."""
    wake_s: float = 8e-6
    """Host: from an event's time to the return of the call that waited for it."""
    launch_s: float = 4e-6
    """From a call's end to the moment that the device sees it."""
    stream_entry_s: float = 2e-6
    """Device: an event's record or wait in a stream."""
    copy_setup_s: float = 2e-6
    """Device: a copy, whatever its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds of one decode step of one text, per MoE layer unless it says token; host: launching it all."""

    attention_host_s: float = 350e-6
    """Attention, norms and router."""
    attention_device_s: float = 110e-6
    policy_host_s: float = 60e-6
    """The runtime's own work on a layer, without the driver's calls: half of it before the misses go out, half after
    the experts."""
    forecast_host_s: float = 60e-6
    forecast_device_s: float = 25e-6
    experts_host_s: float = 180e-6
    """Grouped products and what surrounds them."""
    experts_device_s: float = 45e-6
    token_before_host_s: float = 200e-6
    """Embedding and masks, before the first layer."""
    token_after_host_s: float = 600e-6
    """Head, choice of the token, and the caller's loop."""
    token_device_s: float = 270e-6

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
