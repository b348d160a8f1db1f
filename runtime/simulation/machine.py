"""What a simulation runs on, and what it took."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.recording.layer_times import LayerTimes
from expertcast.runtime.recording.statistics import RunStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What computes and what copies."""

    times: LayerTimes
    """Of a decode step of one text. More experts than K, of a prefill or a batch, take their part longer: a layer's
    experts are bound by reading their weights."""
    block_bytes: Mapping[str, int]
    """Of one expert, by precision; `full` is among them."""
    bandwidth: float
    """Bytes per second."""
    latency: float = 0.0
    """Seconds per copy."""
    expand_s: float = 0.0
    """Seconds of the model's thread per copy in lower precision."""
    write_back: float = 0.0
    """Share of a copy that giving up an expert takes on the link; 0 where the host keeps all weights, as the runtime's
    store does."""


@dataclass(slots=True, kw_only=True)
class Simulation:
    """What a trace took."""

    decode: RunStatistics
    prefill: RunStatistics
    steps_s: list[float] = field(default_factory=list)
    """Seconds of each decode step, of whatever text."""
    prefills_s: list[float] = field(default_factory=list)
    """Seconds of each prefill: until the first token."""

    @property
    def tpot_s(self) -> float:
        """Median over the decode steps, as the benchmark reports it."""
        return statistics.median(self.steps_s)

    @property
    def ttft_s(self) -> float:
        """Median over the prefills."""
        return statistics.median(self.prefills_s)


def check_slots(slots: int, top_k: int) -> None:
    """
    Raises:
        ExpertcastError: fewer slots than one token needs (trap 12 of the definitions).
    """
    if slots < top_k:
        raise ExpertcastError(
            f"slots={slots} is fewer than the {top_k} experts one token needs: give slots={top_k} or more"
        )


def constant_times(layers: int, layer_s: float | Sequence[float]) -> LayerTimes:
    """Layer times from nothing but each layer's own seconds: half before its experts are known, half in them.

    Raises:
        ExpertcastError: neither one number nor one per layer, or one that is not above 0.
    """
    each = [layer_s] * layers if isinstance(layer_s, (int, float)) else list(layer_s)
    each = each * layers if len(each) == 1 else each
    if len(each) != layers or not all(seconds > 0 for seconds in each):
        raise ExpertcastError(
            f"layer times {each}: give one number of seconds above 0, or one for each of {layers} layers"
        )
    nothing, half = [0.0] * layers, [seconds / 2 for seconds in each]
    return LayerTimes(
        before_s=half, request_s=nothing, forecast_s=nothing, prefetch_s=nothing, launch_s=nothing, experts_s=half,
        tail_s=0.0,
    )  # fmt: skip
