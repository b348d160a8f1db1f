"""The settings that `advise` compares, and what a recorded decoding takes in each: a simulation of its decode steps.

Forecasts are the keys that a run asked for. L MoE layers, E routed experts per layer, K experts per token. An expert's
key is layer * E + expert.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from expertcast.runtime.policies import Policies
from expertcast.runtime.recording.layer_times import LayerTimes
from expertcast.runtime.simulation.machine import Case, Machine, Simulation, no_times
from expertcast.runtime.simulation.simulator import simulate
from expertcast.runtime.simulation.trace import Asked, Trace
from expertcast.runtime.storage.precision import FULL

_ASKED = "asked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the runtime is set up; fields that are not explained are those of the simulation's machine and case."""

    slots: int
    copy_s: float
    """Seconds of one expert's copy."""
    cache: bool = True
    window: int = 1
    blocking: bool = False
    carry: bool = True

    def case(self, times: LayerTimes, predictor: str | None) -> Case:
        """The simulation of this setting: a block is a byte, and a prefill leaves the cache as decode steps find it."""
        machine = Machine(
            times=times,
            prefill=no_times(len(times.before_s)),
            block_bytes={FULL: 1},
            bandwidth=1 / self.copy_s,
            window=self.window,
            blocking=self.blocking,
        )
        return Case(
            policies=Policies(), slots=self.slots, machine=machine, predictor=predictor, cache=self.cache,
            carry=self.carry,
        )  # fmt: skip


def replay(trace: Trace, times: LayerTimes, setting: Setting, asked: Asked | None = None) -> Simulation:
    """Run a recorded decoding in virtual time.

    Args:
        trace: what each layer of each forward needs.
        times: of the layers, with the cost of a forecast at layers that make one.
        setting: how the runtime is set up.
        asked: what forecasts ask for; None loads on demand.
    """
    hints = {} if asked is None else {_ASKED: asked}
    return simulate(replace(trace, hints=hints), setting.case(times, next(iter(hints), None)), waits=True)


def calibrated(
    tpot_s: float, trace: Trace, times: LayerTimes, setting: Setting, asked: Asked | None = None
) -> LayerTimes:
    """Times such that a replay of the run they come from takes what the run took: `late_s` makes up for the rest.

    Args:
        tpot_s: what the run took per token.
        trace, times, setting, asked: of the run, as :func:`replay` takes them.
    """
    return replace(times, late_s=tpot_s - replay(trace, times, setting, asked).tpot_s)
