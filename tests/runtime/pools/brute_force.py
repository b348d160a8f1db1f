"""The optimum of a small instance, and the lower bounds of a large one (ZipMoE, Lemma B.3).

The optimum is over every order of reads and every order in which decodings start.

T tasks, K shards, R orders of reads, D orders of decodings. Shards of one task are alike, so orders are those of a
multiset. A disk that pauses gains nothing. A thread may pause: decodings start in the order given, so that a shard
which is there waits for one before it which is not. One stream computes best what is ready first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, factorial, prod

import numpy as np
import numpy.typing as npt

from expertcast.runtime.pools.schedule import Task
from expertcast.runtime.pools.states import Costs, State

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


def count_orders(counts: Sequence[int]) -> int:
    return factorial(sum(counts)) // prod(map(factorial, counts))


@cache
def orders(counts: tuple[int, ...]) -> Ids:
    """Every order of so many of 0, so many of 1, ... [number of orders, length]."""
    if not any(counts):
        return np.zeros((1, 0), dtype=np.int64)
    parts = []
    for item, count in enumerate(counts):
        if count:
            rest = orders((*counts[:item], count - 1, *counts[item + 1 :]))
            parts.append(np.concatenate([np.full((len(rest), 1), item), rest], axis=1))
    return np.concatenate(parts)


def optimum(tasks: Sequence[Task], costs: Costs, most: int) -> float | None:
    """The smallest makespan; None if more than `most` pairs of orders would be tried."""
    shards = [costs.shards * task.state.reads_exponents for task in tasks]
    reads = (*shards, *(int(task.state.reads_mantissas) for task in tasks))
    decodes = tuple(costs.shards * task.state.decodes for task in tasks)
    if count_orders(reads) * count_orders(decodes) > most:
        return None
    arrived_RTK, ready_RT = _read(orders(reads), tasks, costs)
    ready_RDT = _decoded(orders(decodes), arrived_RTK, ready_RT, costs)
    experts = sorted({task.expert for task in tasks})
    of = [[place for place, task in enumerate(tasks) if task.expert == expert] for expert in experts]
    ready_RDN = np.stack([ready_RDT[:, :, places].max(axis=2) for places in of], axis=2)
    compute_N = np.array([tasks[places[0]].compute_s for places in of])
    order = ready_RDN.argsort(axis=2)
    done = np.zeros(ready_RDN.shape[:2])
    for place in range(len(experts)):
        turn = order[:, :, place, None]
        done = np.maximum(done, np.take_along_axis(ready_RDN, turn, axis=2)[..., 0]) + compute_N[turn[..., 0]]
    return float(done.min())


def _read(orders_RX: Ids, tasks: Sequence[Task], costs: Costs) -> tuple[Floats, Floats]:
    """When each shard and each plane has been read; 0 for what is in memory."""
    count = len(tasks)
    seconds = np.array([costs.shard_s] * count + [costs.read_s] * count)
    ends_RX = np.cumsum(seconds[orders_RX], axis=1)
    arrived_RTK = np.zeros((len(orders_RX), count, costs.shards))
    ready_RT = np.zeros((len(orders_RX), count))
    for place, task in enumerate(tasks):
        if task.state.reads_exponents:
            arrived_RTK[:, place] = ends_RX[orders_RX == place].reshape(-1, costs.shards)
        if task.state.reads_mantissas:
            ready_RT[:, place] = ends_RX[orders_RX == count + place]
    return arrived_RTK, ready_RT


def _decoded(orders_DY: Ids, arrived_RTK: Floats, ready_RT: Floats, costs: Costs) -> Floats:
    """When each task has been read and decoded."""
    rows, number = np.arange(len(orders_DY)), np.zeros((len(orders_DY), ready_RT.shape[1]), dtype=np.int64)
    ready_RDT = np.repeat(ready_RT[:, None], len(orders_DY), axis=1)
    free = np.zeros((*ready_RDT.shape[:2], costs.threads))
    start = np.zeros(ready_RDT.shape[:2])
    for task_D in orders_DY.T:
        thread = free.argmin(axis=2)[..., None]
        there = np.maximum(arrived_RTK[:, task_D, number[rows, task_D]], np.take_along_axis(free, thread, 2)[..., 0])
        start = np.maximum(start, there)
        end = start + costs.decode_s
        np.put_along_axis(free, thread, end[..., None], 2)
        ready_RDT[:, rows, task_D] = np.maximum(ready_RDT[:, rows, task_D], end)
        number[rows, task_D] += 1
    return ready_RDT


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
    rounds = ceil(costs.shards / costs.threads) * costs.decode_s
    if not state.reads_exponents:
        return rounds
    return max(costs.shard_s + rounds, costs.shards * costs.shard_s + costs.decode_s)
