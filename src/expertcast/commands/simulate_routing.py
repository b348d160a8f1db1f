"""`expertcast simulate` with a routing file in place of a traces folder."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from expertcast.commands.options import BANDWIDTHS
from expertcast.commands.output import Outcome, write_json
from expertcast.commands.routing_file import described, heading, memories, open_routing, replayed_rows, routing_policies
from expertcast.commands.simulate_cases import CAPACITY, MachineOptions, PolicyOptions
from expertcast.data.writer import write_atomically
from expertcast.predictors import ExpertcastError
from expertcast.runtime.policies.scope import SCOPES
from expertcast.runtime.simulation.sweep import BELADY, CAPACITIES

_TAKEN = {
    "traces", "sweep", "slots", "capacity", "memory", "experts", "expert_bytes", "processes", "out", "policy", "scope",
    "bandwidth", "latency",
}  # fmt: skip


class RoutingOptions(Protocol):
    """What is read of the command's options."""

    @property
    def traces(self) -> Path: ...
    @property
    def sweep(self) -> bool: ...
    @property
    def policies(self) -> PolicyOptions: ...
    @property
    def machine(self) -> MachineOptions: ...
    @property
    def memory(self) -> tuple[str, ...]: ...
    @property
    def slots(self) -> tuple[int, ...]: ...
    @property
    def capacity(self) -> tuple[float, ...]: ...
    @property
    def experts(self) -> int | None: ...
    @property
    def expert_bytes(self) -> str | None: ...
    @property
    def out(self) -> Path | None: ...


def simulate_routing(options: RoutingOptions) -> Outcome:
    """Every policy, scope, size of the cache and link as a row of results.

    Raises:
        ExpertcastError: options that need a traces folder, a damaged file, or what a replay refuses.
    """
    _check(options)
    routing, total = open_routing(options.traces, options.experts, options.expert_bytes)
    shares = options.capacity or ((CAPACITIES if options.sweep else (CAPACITY,)) if not _sized(options) else ())
    sizes = memories(routing, total, options.memory, shares, options.slots)
    policies = options.policies.policy or ([*routing_policies(), BELADY] if options.sweep else ["lru"])
    cases = list(itertools.product(policies, options.policies.scope))
    rows = []
    for bandwidth in options.machine.bandwidth or (BANDWIDTHS["pcie4"],):
        rows += replayed_rows(routing, total, cases, sizes, bandwidth=bandwidth, latency=options.machine.latency)
    result = {**heading(routing, total), "results": rows}
    text = described(result)
    if options.out is not None:
        options.out.mkdir(exist_ok=True)
        write_json(options.out / "results.json", result)
        write_atomically(options.out / "table.txt", (text + "\n").encode())
        text += f"\n\nwrote {options.out / 'results.json'}, {options.out / 'table.txt'}"
    return result, text


def _sized(options: RoutingOptions) -> bool:
    return bool(options.memory or options.slots)


def _check(options: RoutingOptions) -> None:
    for scope in options.policies.scope:
        if scope not in SCOPES:
            raise ExpertcastError(f"unknown scope {scope!r}: choose from {', '.join(SCOPES)}")
    given = _given(options)
    if given:
        raise ExpertcastError(
            f"{', '.join(given)}: of a traces folder; {options.traces} holds which experts were chosen and nothing "
            "else: leave out what is not about policy, scope, memory and link"
        )


def _given(options: Any) -> Sequence[str]:
    """Flags of options that were given and say nothing about a routing file."""
    flags: list[str] = []
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            flags += _given(value)
        elif field.name not in _TAKEN and value != field.default:
            flags.append("--" + field.name.replace("_", "-"))
    return flags
