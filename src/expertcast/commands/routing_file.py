"""What `simulate` and `advise` make of a routing file: no model, a cache in bytes, the runtime's eviction policies."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from expertcast.checkpoints.provenance import provenance
from expertcast.commands.numbers import BANDWIDTHS
from expertcast.commands.output import Outcome, write_json
from expertcast.commands.simulate_options import CAPACITY, MachineOptions, PolicyOptions
from expertcast.data.routing_file import Routing, read_routing
from expertcast.data.trace_format import write_atomically
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json, aligned
from expertcast.runtime.config import OffloadConfig, size_bytes
from expertcast.runtime.policies import EVICTION, Policies
from expertcast.runtime.policies.eviction import SCOPES
from expertcast.runtime.simulation.byte_cache import Replayed, forwards_of, replay
from expertcast.runtime.simulation.sweep import BELADY, CAPACITIES

_MIB = 2**20
COLUMNS = (
    ("policy", "policy", "{}", 1),
    ("scope", "scope", "{}", 1),
    ("memory_bytes", "MiB", "{:.0f}", _MIB),
    ("capacity", "capacity", "{:.1%}", 1),
    ("hits", "hits", "{:.1%}", 1),
    ("misses", "misses", "{}", 1),
    ("bytes_per_step", "MB/token", "{:.2f}", 1e6),
    ("copy_s", "copies ms/token", "{:.2f}", 1e-3),
)


def routing_policies() -> list[str]:
    """The eviction policies that need nothing but routing, those that need the future left out."""
    found = [EVICTION.choose(name) for name in EVICTION.names()]
    return [
        each.name for each in found if not (each.cls.offline or each.cls.reads_scores or each.cls.reads_tokens)
    ]  # fmt: skip


def open_routing(path: Path | str, experts: int | None, expert_bytes: str | int | None) -> tuple[Routing, int]:
    """Routing from a file whose experts' sizes are known, and the bytes of all experts.

    Args:
        path: of the file.
        experts: E; None: as many as ids say.
        expert_bytes: of one expert, where the file does not say.

    Raises:
        ExpertcastError: a damaged file, or nothing says how large an expert is.
    """
    routing = read_routing(path, experts=experts)
    if expert_bytes is not None and routing.bytes_LE is not None:
        raise ExpertcastError(f"{path} has a column expert_bytes: leave --expert-bytes out")
    given = None if expert_bytes is None else size_bytes(expert_bytes)
    if given is not None and given < 1:
        raise ExpertcastError(f"--expert-bytes {expert_bytes}: give 1 byte or more")
    return routing, int(routing.sized(given).sum())


def memories(
    routing: Routing, total: int, memory: Sequence[str], capacity: Sequence[float], slots: Sequence[int]
) -> list[int]:
    """Bytes of each cache that is asked for.

    Args:
        routing: what is replayed.
        total: bytes of all experts.
        memory: sizes.
        capacity: shares of `total`.
        slots: numbers of the largest experts.

    Raises:
        ExpertcastError: a size that is none, or a share over 1.
    """
    for share in capacity:
        if not 0 < share <= 1:
            raise ExpertcastError(f"capacity={share:g}: give the share of all experts' bytes that fits, such as 0.25")
    largest = total if routing.bytes_LE is None else int(routing.bytes_LE.max()) * routing.layers * routing.experts
    each = largest // (routing.layers * routing.experts)
    return [
        *map(size_bytes, memory), *(int(share * total) for share in capacity), *(count * each for count in slots)
    ]  # fmt: skip


def replayed_rows(
    routing: Routing,
    total: int,
    cases: Sequence[tuple[str, str]],
    sizes: Sequence[int],
    *,
    bandwidth: float,
    latency: float,
) -> list[Json]:
    """A row of counts for each case and size.

    Args:
        routing: what is replayed.
        total: bytes of all experts.
        cases: eviction policy and scope.
        sizes: bytes of the cache.
        bandwidth: of the link, bytes per second.
        latency: of the link, seconds per copy.

    Raises:
        ExpertcastError: what :func:`expertcast.runtime.simulation.byte_cache.replay` refuses.
    """
    forwards = forwards_of(routing)
    bytes_LE = routing.sized(total // (routing.layers * routing.experts))
    rows = []
    for memory, (policy, scope) in itertools.product(sizes, cases):
        choice = Policies(eviction=policy, scope=scope).eviction
        done = replay(forwards, choice, bytes_LE=bytes_LE, top_k=routing.top_k, memory=memory, scope=scope)
        rows.append(_row(str(choice), scope, memory, total, done, bandwidth=bandwidth, latency=latency))
    return rows


def _row(
    policy: str, scope: str, memory: int, total: int, done: Replayed, *, bandwidth: float, latency: float
) -> Json:  # fmt: skip
    decode, prompt = done.decode, done.prompt
    moved = decode.bytes_moved / decode.steps
    return {
        "policy": policy,
        "scope": scope,
        "memory_bytes": memory,
        "capacity": memory / total,
        "hits": decode.hits,
        "requests": decode.requests,
        "misses": decode.misses,
        "bytes_moved": decode.bytes_moved,
        "steps": decode.steps,
        "bytes_per_step": moved,
        "copy_s": moved / bandwidth + latency * decode.misses / decode.steps,
        "bandwidth": bandwidth,
        "latency": latency,
        "per_layer": {"requests": decode.requests_L, "misses": decode.misses_L},
        "prompt": {
            "steps": prompt.steps,
            "requests": prompt.requests,
            "misses": prompt.misses,
            "bytes_moved": prompt.bytes_moved,
        },
    }


def heading(routing: Routing, total: int) -> Json:
    """What was replayed."""
    sizes = routing.sized(total // (routing.layers * routing.experts))
    return {
        "routing": routing.source,
        "shape": {"L": routing.layers, "E": routing.experts, "K": routing.top_k},
        "tokens": {"prompt": int(routing.prompt_T.sum()), "decoded": int((~routing.prompt_T).sum())},
        "experts_bytes": total,
        "expert_bytes": sorted(map(int, set(sizes.ravel().tolist()))),
        **provenance(),
    }


def described(result: Json) -> str:
    """A line about the file, and a table of the rows."""
    shape, tokens = result["shape"], result["tokens"]
    cells = [tuple(title for _, title, _, _ in COLUMNS)]
    for row in result["results"]:
        cells.append(tuple(form.format(row[key] if unit == 1 else row[key] / unit) for key, _, form, unit in COLUMNS))
    sizes = " or ".join(f"{size / _MIB:.2f}" for size in result["expert_bytes"])
    bound = ""
    if len(result["expert_bytes"]) > 1 and any(row["policy"] == BELADY for row in result["results"]):
        bound = "\n\nbelady goes by the next use alone: experts differ in size, so it is a yardstick and no bound"
    return (
        f"{result['routing']}: {shape['L']} layers x {shape['E']} experts, {shape['K']} per token; "
        f"{tokens['prompt']} prompt and {tokens['decoded']} decoded tokens; an expert is {sizes} MiB, all "
        f"{result['experts_bytes'] / _MIB:.0f} MiB\n\n"
        f"{aligned(cells, left=2)}{bound}"
    )


# `expertcast advise` with a routing file: which policy hits most of a memory, and what the misses take on a link.

_WORTH = 0.02
"""Share of the bytes that a policy other than the simplest must save to be advised."""
_SIMPLE = ("lru", "global")
_ADVISED = ("policy", "scope", "memory_bytes", "hits", "bytes_per_step", "copy_s")


def advise_routing(
    path: str, *, memory: str | int | None, slots: int | None, capacity: float | None, bandwidth: float | None,
    latency: float, experts: int | None, expert_bytes: str | None, save: Path | None,
) -> Outcome:  # fmt: skip
    """Replay every policy that needs no forecast, over all experts and with equal shares.

    Args:
        path: of the routing file.
        memory, slots, capacity: how much fits, in one of three ways; `CAPACITY` of all bytes when none is given.
        bandwidth: of the link, bytes per second; pcie4's when not given.
        latency: of the link, seconds per copy.
        experts: E; None: as many as ids say.
        expert_bytes: of one expert, where the file does not say.
        save: write a configuration of what is advised there.

    Raises:
        ExpertcastError: more than one size, a damaged file, or too little memory.
    """
    given = [memory is not None, slots is not None, capacity is not None]
    if sum(given) > 1:
        raise ExpertcastError("--capacity, --slots and --memory all say how many experts fit: give one of them")
    routing, total = open_routing(path, experts, expert_bytes)
    shares = [capacity] if capacity is not None else [] if any(given) else [CAPACITY]
    (size,) = memories(
        routing, total, [] if memory is None else [str(memory)], shares, [] if slots is None else [slots]
    )
    link = BANDWIDTHS["pcie4"] if bandwidth is None else bandwidth
    names = routing_policies()
    cases = [(name, "global") for name in names]
    if size // routing.layers >= routing.top_k * int(routing.sized(total // (routing.layers * routing.experts)).max()):
        cases += [(name, "layer") for name in names]
    rows = replayed_rows(routing, total, [*cases, (BELADY, "global")], [size], bandwidth=link, latency=latency)
    *found, bound = rows
    chosen = _chosen(found)
    found.sort(key=lambda row: row["copy_s"])
    result: Json = {
        **heading(routing, total),
        "advised": {key: chosen[key] for key in _ADVISED},
        "reasons": _reasons(chosen, found, bound),
        "results": [*found, bound],
    }
    policies = Policies(eviction=chosen["policy"], scope=chosen["scope"])
    text = f"{described(result)}\n\n" + "\n".join(f"- {reason}" for reason in result["reasons"])
    text += f"\n\nadvised: eviction={chosen['policy']}, scope={chosen['scope']}"
    if save is not None:
        OffloadConfig(policies=policies, memory=str(size)).save(save)
        text += f"\nwrote {save}"
    return result, text


def _chosen(rows: list[Json]) -> Json:
    """The one with the least copying; lru over all slots unless that copies more by a margin."""
    best, simple = min(rows, key=lambda row: row["copy_s"]), _simplest(rows)
    return simple if best["copy_s"] >= (1 - _WORTH) * simple["copy_s"] else best


def _simplest(rows: list[Json]) -> Json:
    return next(row for row in rows if (row["policy"], row["scope"]) == _SIMPLE)


def _reasons(chosen: Json, rows: list[Json], bound: Json) -> list[str]:
    simple = _simplest(rows)
    reasons = [
        f"{chosen['policy']} ({chosen['scope']}) hits {chosen['hits']:.1%} and leaves "
        f"{chosen['bytes_per_step'] / 1e6:.1f} MB per token, "
        f"{1e3 * chosen['copy_s']:.2f} ms on a link of {chosen['bandwidth'] / 1e9:.3g} GB/s",
        f"belady, who knows the future, hits {bound['hits']:.1%}: {1e3 * bound['copy_s']:.2f} ms per token",
    ]
    if chosen is not simple and simple["copy_s"]:
        saved = 1 - chosen["copy_s"] / simple["copy_s"]
        reasons.insert(1, f"lru hits {simple['hits']:.1%}: {saved:.0%} of its copies are saved")
    return [*reasons, "prompts are left out of these figures; what a forecast by hidden states adds needs the model"]


# `expertcast simulate` with a routing file in place of a traces folder.

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
