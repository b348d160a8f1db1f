"""What no order of reads and decodings can beat (ZipMoE, Lemma B.3; row E9)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from expertcast.runtime.pools.costs import Costs
from expertcast.runtime.pools.simulate import Task
from expertcast.runtime.pools.states import State


@dataclass(frozen=True, slots=True)
class LowerBounds:
    """Seconds; the makespan of any order is at least the largest of them."""

    disk: float
    """I: all reads, one after another."""
    threads: float
    """C / L: all decodings, shared evenly."""
    compute: float
    """P: all experts, one after another."""
    path: float
    """Z: the longest that a single tensor takes alone."""

    @property
    def largest(self) -> float:
        """The bound."""
        return max(self.disk, self.threads, self.compute, self.path)


def lower_bounds(tasks: Sequence[Task], costs: Costs) -> LowerBounds:
    """The four bounds.

    Z is mended. The paper's z = rho u + max(K c / min(K, L), u) + p has all shards read before the first is decoded;
    decoding may begin when the first of several has been read, so that for K > 1 the optimum can be below it.
    """
    read = [_read_s(task.state, costs) for task in tasks]
    decodings = sum(task.state.decodes for task in tasks) * costs.shards
    compute = {task.expert: task.compute_s for task in tasks}
    path = (
        max(seconds, _decoded_s(task.state, costs)) + task.compute_s
        for task, seconds in zip(tasks, read, strict=True)
    )  # fmt: skip
    return LowerBounds(
        disk=sum(read),
        threads=decodings * costs.decode_s / costs.threads,
        compute=sum(compute.values()),
        path=max(path, default=0.0),
    )


def _read_s(state: State, costs: Costs) -> float:
    return costs.read_s * (costs.ratio * state.reads_exponents + state.reads_mantissas)


def _decoded_s(state: State, costs: Costs) -> float:
    """Until all shards of a tensor have been decoded: after the first one was read all of them are decoded in rounds,
    and after the last one at least that one is."""
    if not state.decodes:
        return 0.0
    rounds = math.ceil(costs.shards / costs.threads) * costs.decode_s
    if not state.reads_exponents:
        return rounds
    return max(costs.shard_s + rounds, costs.shards * costs.shard_s + costs.decode_s)
