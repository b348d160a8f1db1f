"""Which engine drives which link."""

from __future__ import annotations

from expertcast.runtime.engine.base import Engine, EngineParts
from expertcast.runtime.engine.device import DeviceEngine
from expertcast.runtime.engine.host import HostEngine


def engine_for(parts: EngineParts) -> Engine:
    """The engine of a link that decides on the device, or the one that decides on the host."""
    return (DeviceEngine if parts.link.decides_on_device else HostEngine).of(parts)
