"""Replay of a routing file for `simulate`: no model, a cache in bytes, the runtime's eviction policies."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from expertcast.checkpoints.provenance import provenance
from expertcast.data.routing_file import Routing, read_routing
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json, aligned

CAPACITY = 0.25
"""Default cache size as a share of all experts."""
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
    ("policy_s", "policy ms/token", "{:.2f}", 1e-3),
)


def routing_policies() -> list[str]:
    """Return the eviction policies that need only the routing so far."""
    from expertcast.runtime.policies import EVICTION

    return [cls.name for cls in EVICTION.classes() if not (cls.offline or cls.reads_scores)]


def open_routing(path: Path | str, experts: int | None, expert_bytes: str | int | None) -> tuple[Routing, int]:
    """Read a routing file; return the routing, and the bytes of all experts.

    Args:
        path: the file.
        experts: E; None: largest id + 1.
        expert_bytes: bytes of one expert, for a file without a column expert_bytes.

    Raises:
        ExpertcastError: a damaged file, or the size of an expert is unknown.
    """
    from expertcast.runtime.config import size_bytes

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
    """Return the cache sizes in bytes.

    Args:
        routing: the routing to replay.
        total: bytes of all experts.
        memory: sizes as text.
        capacity: sizes as shares of `total`.
        slots: sizes in experts of the largest size.

    Raises:
        ExpertcastError: a malformed size, or a share outside (0, 1].
    """
    from expertcast.runtime.config import size_bytes

    for share in capacity:
        if not 0 < share <= 1:
            raise ExpertcastError(f"--capacity {share:g}: give a share of all experts' bytes, above 0 and up to 1")
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
    """Replay each case at each cache size; return a row of counts for each.

    Args:
        routing: the routing to replay.
        total: bytes of all experts.
        cases: eviction policy and scope.
        sizes: cache sizes in bytes.
        bandwidth: bytes per second of the link.
        latency: seconds per copy.

    Raises:
        ExpertcastError: as :func:`expertcast.runtime.simulation.byte_cache.replay`.
    """
    from expertcast.runtime.policies import Policies
    from expertcast.runtime.simulation.byte_cache import forwards_of, replay

    forwards = forwards_of(routing)
    bytes_LE = routing.sized(total // (routing.layers * routing.experts))
    rows = []
    for memory, (policy, scope) in itertools.product(sizes, cases):
        choice = Policies(eviction=policy, scope=scope).eviction
        done = replay(forwards, choice, bytes_LE=bytes_LE, top_k=routing.top_k, memory=memory, scope=scope)
        prompt, moved = done.prompt, done.decode.bytes_moved / done.decode.steps
        rows.append(
            {
                "policy": str(choice),
                "scope": scope,
                "memory_bytes": memory,
                "capacity": memory / total,
                **{name: getattr(done.decode, name) for name in ("hits", "requests", "misses", "bytes_moved", "steps")},
                "bytes_per_step": moved,
                "copy_s": moved / bandwidth + latency * done.decode.misses / done.decode.steps,
                "policy_s": done.policy_s,
                "bandwidth": bandwidth,
                "latency": latency,
                "per_layer": {"requests": done.decode.requests_L, "misses": done.decode.misses_L},
                "prompt": {name: getattr(prompt, name) for name in ("steps", "requests", "misses", "bytes_moved")},
            }
        )
    return rows


def heading(routing: Routing, total: int) -> Json:
    """Describe the replayed routing."""
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
    """Return a line about the file, and a table of the rows."""
    from expertcast.runtime.simulation.sweep import BELADY

    shape, tokens = result["shape"], result["tokens"]
    cells = [tuple(title for _, title, _, _ in COLUMNS)]
    for row in result["results"]:
        cells.append(tuple(form.format(row[key] if unit == 1 else row[key] / unit) for key, _, form, unit in COLUMNS))
    sizes = " or ".join(f"{size / _MIB:.2f}" for size in result["expert_bytes"])
    bound = ""
    if len(result["expert_bytes"]) > 1 and any(row["policy"] == BELADY for row in result["results"]):
        bound = "\n\nbelady considers only the next use: with experts of several sizes it is a reference, not a bound"
    return (
        f"{result['routing']}: {shape['L']} layers x {shape['E']} experts, {shape['K']} per token; "
        f"{tokens['prompt']} prompt and {tokens['decoded']} decoded tokens; an expert is {sizes} MiB, all "
        f"{result['experts_bytes'] / _MIB:.0f} MiB\n\n"
        f"{aligned(cells, left=2)}{bound}"
    )
