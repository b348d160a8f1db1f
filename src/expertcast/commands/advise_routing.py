"""`expertcast advise` with a routing file: which policy hits most of a memory, and what the misses take on a link."""

from __future__ import annotations

from pathlib import Path

from expertcast.commands.options import BANDWIDTHS
from expertcast.commands.output import Outcome
from expertcast.commands.routing_file import described, heading, memories, open_routing, replayed_rows, routing_policies
from expertcast.commands.simulate_cases import CAPACITY
from expertcast.predictors import ExpertcastError
from expertcast.predictors.plain import Json
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.policies import Policies
from expertcast.runtime.simulation.sweep import BELADY

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
