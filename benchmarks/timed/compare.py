"""What forecasts bring on a device in virtual time, beside loading on demand and the least time there is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from benchmarks.timed.costs import DriverCosts, StepCosts
from benchmarks.timed.run import TimedCase, TimedRun, decode_timed
from expertcast.predictors.messages import Json

GRAPH_DRIVER = DriverCosts(
    record_s=0.0, wait_s=0.0, query_s=0.0, copy_call_s=0.0, launch_s=0.0, stream_entry_s=DriverCosts().stream_entry_s
)
"""A captured step: the host makes no calls, the device has the same to do."""


def as_graph(case: TimedCase) -> TimedCase:
    """The same as one CUDA graph: the link that decides on the device, and no work of the host."""
    return replace(case, kernel_link=True, step=case.step.with_host(0.0), driver=GRAPH_DRIVER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One case with forecasts, and the same on demand. Seconds per token."""

    on_demand: TimedRun
    run: TimedRun
    link_s: float
    """What copying the on-demand run's misses takes of the link, with nothing between two copies."""
    device_s: float
    """What the device computes without a forecast."""
    host_s: float
    """What launching the resident model takes of the host."""
    hideable_s: float
    """Copies of each layer, as far as there is computation of one to hide them behind."""

    @property
    def bound_s(self) -> float:
        """No schedule is faster than the slowest of link, device and host."""
        return max(self.link_s, self.device_s, self.host_s)

    @property
    def limit(self) -> str:
        """Which of them that is."""
        return max(("link", "device", "host"), key=lambda name: float(getattr(self, f"{name}_s")))

    @property
    def efficiency(self) -> float | None:
        """Of what can be hidden, hidden; above 1 where the host waits less, too. None: nothing to hide."""
        return (self.on_demand.tpot_s - self.run.tpot_s) / self.hideable_s if self.hideable_s else None

    def as_dict(self) -> Json:
        """For JSON; milliseconds per token."""
        return {
            "efficiency": self.efficiency,
            "tpot_over_bound": self.run.tpot_s / self.bound_s,
            "on_demand_over_bound": self.on_demand.tpot_s / self.bound_s,
            "tpot_ms": self.run.tpot_s * 1e3,
            "bound_ms": self.bound_s * 1e3,
            "limit": self.limit,
            "misses_on_demand": self.on_demand.misses,
            "copies": self.run.copies,
        }


def compare(case: TimedCase) -> Comparison:
    """Decode a case that has forecasts, and the same on demand.

    Raises:
        ExpertcastError: as :func:`decode_timed`.
    """
    on_demand = _on_demand(replace(case, accuracy=None))
    run, step, layers = decode_timed(case), case.step, on_demand.layers
    copies_s = on_demand.misses * on_demand.block_bytes / case.bandwidth
    return Comparison(
        on_demand=on_demand,
        run=run,
        link_s=copies_s,
        device_s=layers * step.layer_device_s + step.token_device_s,
        host_s=_resident_host_s(step, layers),
        hideable_s=min(copies_s, layers * step.layer_device_s),
    )


def _resident_host_s(step: StepCosts, layers: int) -> float:
    layer_s = step.attention_host_s + step.experts_host_s
    return layers * layer_s + step.token_before_host_s + step.token_after_host_s


@lru_cache(maxsize=64)
def _on_demand(case: TimedCase) -> TimedRun:
    return decode_timed(case)
