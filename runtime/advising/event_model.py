"""What a recorded decoding takes in a setting of the runtime: a simulation of it, calibrated to what a run took."""

from __future__ import annotations

from dataclasses import replace

from expertcast.runtime.recording.layer_times import LayerTimes
from expertcast.runtime.simulation.machine import Case, Simulation, no_times
from expertcast.runtime.simulation.simulator import simulate
from expertcast.runtime.simulation.trace import Asked, Trace

_ASKED = "asked"


def replay(trace: Trace, case: Case, asked: Asked | None = None) -> Simulation:
    """Run a recorded decoding in virtual time; its prefill leaves the cache as the decode steps find it.

    Args:
        trace: what each layer of each forward needs.
        case: how the runtime is set up, with the cost of a forecast at layers that make one.
        asked: what forecasts ask for; None loads on demand.
    """
    machine = replace(case.machine, prefill=no_times(trace.shape.layers))
    hints = {} if asked is None else {_ASKED: asked}
    case = replace(case, machine=machine, predictor=next(iter(hints), None))
    return simulate(replace(trace, hints=hints), case, waits=True)


def calibrated(tpot_s: float, trace: Trace, case: Case, asked: Asked | None = None) -> LayerTimes:
    """The case's layer times, with what a run took beyond a replay of it as `late_s`.

    Args:
        tpot_s: what the run took per token.
        trace, case, asked: of that run, as :func:`replay` takes them.
    """
    return replace(case.machine.times, late_s=tpot_s - replay(trace, case, asked).tpot_s)
