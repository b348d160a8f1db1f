"""Sweeps: simulations of one trace with many policies, capacities and bandwidths, on all cores."""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path

import torch

from expertcast.data.machine import usable_processors
from expertcast.predictors.messages import ExpertcastError, Json, Progress
from expertcast.predictors.view import ModelShape
from expertcast.runtime.policies.base import CacheShape, check_slots
from expertcast.runtime.policies.settings import Policies
from expertcast.runtime.simulation.machine import Case, summary
from expertcast.runtime.simulation.simulator import simulate
from expertcast.runtime.simulation.trace import Trace

CAPACITIES = (0.01, 0.05, 0.10, 0.25, 0.45)
"""Shares of all experts that fit on the device."""
BELADY = "belady"
EXACT = "exact"
_CASES_PER_PROCESS = 4
"""Minimum number of cases per process."""
Quality = Callable[[Mapping[str, Case]], Mapping[str, Json]]
"""Returns `perplexity`, `agreement` and `kl` of lossy cases by name, and of the exact model as `exact`."""


def slots_of(capacity: float, shape: ModelShape) -> int:
    """Return the number of slots for a capacity, rounded down.

    Args:
        capacity: share of all experts that fit on the device, in (0, 1].
        shape: shape of the model.

    Raises:
        ExpertcastError: the capacity is out of range.
    """
    if not 0 < capacity <= 1:
        raise ExpertcastError(f"capacity={capacity:g}: give the share of all experts that fits, such as 0.25")
    return int(capacity * shape.layers * shape.experts + 1e-9)


def with_bounds(cases: Sequence[Case]) -> list[Case]:
    """Append Belady's bound for every scope, number of slots and machine."""
    bounds: list[Case] = []
    for case in cases:
        policies = Policies(eviction=BELADY, prefetch="none", scope=case.policies.scope)
        bound = Case(policies=policies, slots=case.slots, machine=case.machine)
        if bound not in bounds:
            bounds.append(bound)
    return [*cases, *bounds]


def sweep(
    trace: Trace, cases: Sequence[Case], *, processes: int | None = None, quality: Quality | None = None,
    progress: bool = False,
) -> Json:  # fmt: skip
    """Simulate all cases.

    Args:
        trace: recorded routing, with forecasts.
        cases: configurations to simulate.
        processes: number of processes; 1: this process only; None: one per core, fewer for few cases.
        quality: measures the quality of lossy cases; called once, in this process, for cases whose experts have the
            precision of the model. Cases that differ only in the machine are measured once. None: no quality.
        progress: show a progress bar on standard error.

    Returns:
        `results`: one row per case, in order (see :func:`expertcast.runtime.simulation.machine.summary`); `skipped`:
        cases that cannot run, with the `reason`.

    Raises:
        ExpertcastError: a simulation raises it, see :func:`.simulator.simulate`.
    """
    shape, runnable, skipped = trace.shape, [], []
    for case in cases:
        reason = refusal(case, shape)
        if reason is None:
            runnable.append(case)
        else:
            skipped.append({**_heading(case, shape), "reason": reason})
    count = processes or min(usable_processors(), -(-len(runnable) // _CASES_PER_PROCESS))
    rows = list(
        Progress("simulating", total=len(runnable), unit="run", steps=_rows(trace, runnable, count), shown=progress)
    )
    names = [f"{each.policies.as_dict()} {each.predictor} {each.slots}" for each in runnable]
    lossy = {name: each for name, each in zip(names, runnable, strict=True) if each.policies.lossy}
    known: Mapping[str, Json] = {} if quality is None else quality(lossy)
    unknown = {"perplexity": None, "agreement": None, "kl": None}
    results = [
        {**_heading(case, shape), **row, **unknown, **known.get(name if name in lossy else EXACT, {})}
        for case, row, name in zip(runnable, rows, names, strict=True)
    ]
    return {"results": results, "skipped": skipped}


def _rows(trace: Trace, cases: Sequence[Case], processes: int) -> Iterator[Json]:
    """Yield the row of each case in order; an error stops further cases."""
    if processes <= 1:
        yield from (summary(simulate(trace, case)) for case in cases)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        torch.save(trace, path)
        ignoring = signal.SIGINT, signal.SIG_IGN  # a terminal sends Ctrl-C to all processes; this one stops the others
        # not forked from this process, since its libraries have threads; the fork server imports them once for all
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        with ProcessPoolExecutor(processes, context, signal.signal, ignoring) as pool:
            yield from pool.map(partial(_run_saved, path), cases)


def _run_saved(path: Path, case: Case) -> Json:
    return summary(simulate(_saved(path), case))


@cache
def _saved(path: Path) -> Trace:
    """Load the trace once per process; all processes share the memory of its tensors."""
    torch.set_num_threads(1)
    trace: Trace = torch.load(path, mmap=True, weights_only=False)
    return trace


def refusal(case: Case, shape: ModelShape) -> str | None:
    """Return why a case cannot run, or None if it can."""
    if case.policies.eviction.name == BELADY and case.policies.lossy:
        return "belady needs the experts in advance, but lossy policies change them: choose another eviction policy"
    try:
        check_slots(case.slots, shape.top_k)
        case.policies.make(CacheShape(layers=shape.layers, experts=shape.experts, top_k=shape.top_k, slots=case.slots))
    except ExpertcastError as error:
        return str(error)
    return None


def _heading(case: Case, shape: ModelShape) -> Json:
    """Return the configuration of a case, with the names of the command line."""
    words = case.policies.as_dict()
    return {
        **words,
        "prefetch": "none" if case.predictor is None else words["prefetch"],
        "predictor": case.predictor,
        "slots": case.slots,
        "capacity": case.slots / (shape.layers * shape.experts),
        "bandwidth": case.machine.bandwidth,
        "latency": case.machine.latency,
    }
