"""The simulated stages of the policy study (SpecMD's staged evaluation, row A27): the case lists they are made of."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from benchmarks.study.replay import replays
from benchmarks.study.study import ACTIVE, BASELINES, FORECAST, SAMPLE, SHARED, SWAPPED, USUAL, WHOLE, Rows, Study
from expertcast.predictors import ExpertcastError
from expertcast.runtime.policies import PRESETS, CacheShape, Policies
from expertcast.runtime.simulation.machine import Case, Machine
from expertcast.runtime.simulation.sweep import refusal, with_bounds
from expertcast.runtime.simulation.trace import Trace

REPLAYED = ("lru", "lfu", "least_stale", "importance")
_DECIDED_BY_THE_LINK = ("threshold", "value")
"""Selections that are not tried with lossy policies: what they choose depends on when they are asked."""


def headline(study: Study) -> dict[str, Any]:
    """Every eviction policy over the whole test split, nothing prefetched by a layer's forecast, and the bounds."""
    cases = [_on_demand(study, name, capacity) for capacity in study.scale.headline for name in study.evictions]
    return study.run("headline", with_bounds(cases), WHOLE)


def eviction(study: Study) -> dict[str, Any]:
    """The same at more capacities and in both scopes, over the sample."""
    scopes, capacities = ("global", "layer"), study.scale.capacities
    cases = [
        _on_demand(study, name, capacity, scope)
        for scope, capacity, name in itertools.product(scopes, capacities, study.evictions)
    ]
    return study.run("eviction", with_bounds(cases))


def prefetch(study: Study) -> dict[str, Any]:
    """Next-layer forecasts: every selection with the evictions that matter, the usual two with all others too."""
    scale, names, few = study.scale, study.classic + study.forecast, ["lru", "least_stale", *study.forecast]
    better = [name for name in study.predictors if name != SHARED]
    usual = [name for name in scale.selections if name in USUAL]
    plain = [name for name in scale.selections if ":" not in name]
    rest = [capacity for capacity in scale.capacities if capacity not in scale.middle]
    first, last = study.machines[0], study.machines[-1]
    pairs = [
        (name, selection)
        for name, selection in itertools.product(names, scale.selections)
        if name in few or selection in usual
    ]
    product = itertools.product
    chosen = [
        *((m, c, SHARED, name, selection) for m, c, (name, selection) in product(study.machines, scale.middle, pairs)),
        *((last, c, other, name, selection) for c, other, name, selection in product(scale.middle, better, few, plain)),
        *((first, c, SHARED, *pair) for c, pair in product(rest, list(product(names, usual)))),
        *((m, c, None, name, "none") for m, c, name in product(study.machines, scale.middle, few)),
    ]
    cases = [
        _case(study, machine, capacity, predictor, eviction=name, prefetch=selection)
        for machine, capacity, predictor, name, selection in chosen
    ]
    return study.run("prefetch", cases)


def best_prefetching(rows: Rows) -> tuple[Policies, str | None]:
    """Eviction and prefetching that the lossy stage keeps: the least mean time per token on the slowest link, over all
    capacities, of those that need neither a next_token nor the link's pace."""
    times: dict[tuple[str, str, str | None], list[float]] = {}
    for row in rows:
        if row["ratio"] == max(row["ratio"] for row in rows) and row["prefetch"] not in _DECIDED_BY_THE_LINK:
            key = (row["eviction"], row["prefetch"], row["predictor"])
            if key[0] != FORECAST and key[2] in (None, SHARED):
                times.setdefault(key, []).append(row["tpot_mean_s"])
    most = max(map(len, times.values()))
    name, selection, predictor = min((key for key in times if len(times[key]) == most), key=lambda key: sum(times[key]))
    return Policies(eviction=name, prefetch=selection), predictor


def lossy(study: Study, policies: Policies, predictor: str | None) -> dict[str, Any]:
    """Every way to handle misses with every routing, eviction and prefetching fixed before."""
    scale, fixed = study.scale, policies.as_dict()
    cases = [
        _case(study, study.machines[-1], capacity, predictor, **{**fixed, "miss": miss, "routing": routing})
        for capacity in scale.middle
        for miss, routing in [
            *itertools.product(scale.misses, scale.routings),
            *(("fetch", routing) for routing in scale.strengths),
        ]
    ]
    return study.run("lossy", [case for case in cases if _packable(case)])


def presets(study: Study) -> dict[str, Any]:
    """Published systems, and SpecMD's with least_stale in place of their own eviction."""
    scale = study.scale
    chosen = {name: (PRESETS[name].policies, PRESETS[name].predictor) for name in scale.presets}
    for name in SWAPPED:
        if name in chosen:
            policies, predictor = chosen[name]
            swapped = Policies(**{**policies.as_dict(), "eviction": "least_stale"})
            chosen[f"{name}+least_stale"] = (swapped, predictor)
    named = [
        (name, Case(policies=policies, slots=study.slots(capacity), machine=machine, predictor=predictor))
        for machine, capacity, (name, (policies, predictor)) in itertools.product(
            study.machines, scale.middle, chosen.items()
        )
    ]
    named = [(name, case) for name, case in named if _packable(case)]
    found = study.run("presets", [case for _, case in named])
    shape = study.traces.view.shape
    for part, left_out in (("results", False), ("skipped", True)):
        names = [name for name, case in named if (refusal(case, shape) is not None) == left_out]
        for row, name in zip(found[part], names, strict=True):
            row["preset"] = name
    return found


def write_back(study: Study) -> dict[str, Any]:
    """ActiveEvict and what it is compared with, on a host that keeps no weights of what the device holds."""
    machine = replace(study.machines[-1], write_back=1.0)
    names = [name for name in (ACTIVE, *BASELINES) if name in study.scale.presets]
    cases = [
        Case(
            policies=PRESETS[name].policies,
            slots=study.slots(capacity),
            machine=machine,
            predictor=PRESETS[name].predictor,
        )
        for capacity, name in itertools.product(study.scale.middle, names)
    ]
    found = study.run("write_back", cases)
    named = itertools.product(study.scale.middle, names)
    runnable = [
        name for (_, name), case in zip(named, cases, strict=True) if not refusal(case, study.traces.view.shape)
    ]
    for row, name in zip(found["results"], runnable, strict=True):
        row["preset"] = name
    return found


def replay(study: Study) -> Rows:
    """Misses when each expert is an event of its own, against a layer's experts together."""
    rows: Rows = study.kept("replay", [REPLAYED, study.scale.replayed], lambda: _replay(study))
    return rows


def _replay(study: Study) -> Rows:
    traces: dict[int, Trace] = {}
    rows: Rows = []
    for scope, batch, capacity in tqdm(study.scale.replayed, unit="replay"):
        if batch not in traces:
            with contextlib.suppress(ExpertcastError):  # fewer documents than are decoded together
                traces[batch] = study.trace(SAMPLE, batch=batch)
        if batch in traces:
            found = replays(traces[batch], REPLAYED, study.slots(capacity), scope)
            rows += [{"stage": "replay", "share": capacity, "batch": batch, **row} for row in found]
    return rows


def _on_demand(study: Study, name: str, capacity: float, scope: str = "global") -> Case:
    return _case(study, study.machines[0], capacity, None, eviction=name, prefetch="none", scope=scope)


def _case(study: Study, machine: Machine, capacity: float, predictor: str | None, **policies: Any) -> Case:
    return Case(policies=Policies(**policies), slots=study.slots(capacity), machine=machine, predictor=predictor)


def _packable(case: Case) -> bool:
    """Whether there are copies in the precisions that its misses are loaded in."""
    slots = CacheShape(layers=1, experts=1, top_k=1, slots=case.slots)
    return set(case.policies.miss.make(slots).precisions) <= set(case.machine.block_bytes)
