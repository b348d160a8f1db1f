"""The scheduler against the optimum, and the paper's lower bounds against it too (rows E7 to E10)."""

from __future__ import annotations

import random
from typing import Any

from tests.runtime.pools.brute_force import lower_bounds, optimum
from tests.runtime.pools.test_schedule import one_by_one, small

from expertcast.runtime.pools.schedule import Task, schedule, simulate
from expertcast.runtime.pools.states import Costs

INSTANCES, MOST = 3000, 4000
_CLOSE = 1e-9


def orders(instances: int = INSTANCES) -> dict[str, Any]:
    """Counts and ratios over small instances whose optimum is found by trying every order."""
    choose = random.Random(5)
    ratios, plain, shares = [], [], []
    above: dict[str, int] = {"one shard": 0, "several shards": 0}
    seen = dict(above)
    ours = 0
    while len(ratios) < instances:
        tasks, costs = small(choose)
        best = optimum(tasks, costs, MOST)
        if not best:
            continue
        made = simulate(tasks, schedule(tasks, costs), costs).makespan
        ratios.append(made / best)
        shares.append(made / ((3 - 1 / costs.threads) * best))
        plain.append(simulate(tasks, one_by_one(tasks, costs), costs).makespan / best)
        kind = "one shard" if costs.shards == 1 else "several shards"
        seen[kind] += 1
        above[kind] += max(_paper_path(task, costs) for task in tasks) > best + _CLOSE
        ours += lower_bounds(tasks, costs).largest > best + _CLOSE
    return {
        "instances": len(ratios),
        "above_bound": sum(share > 1 + _CLOSE for share in shares),
        "largest": max(ratios),
        "mean": sum(ratios) / len(ratios),
        "optimal": sum(ratio < 1 + _CLOSE for ratio in ratios) / len(ratios),
        "one_by_one_largest": max(plain),
        "one_by_one_mean": sum(plain) / len(plain),
        "path_above_optimum": above,
        "path_instances": seen,
        "mended_above_optimum": ours,
    }


def _paper_path(task: Task, costs: Costs) -> float:
    """z of Lemma B.3: rho u 1{M,S} + max(K c / min(K, L), u 1{M,E}) + p."""
    decoded = costs.shards * costs.decode_s / min(costs.shards, costs.threads) * task.state.decodes
    read = costs.ratio * costs.read_s * task.state.reads_exponents
    return read + max(decoded, costs.read_s * task.state.reads_mantissas) + task.compute_s
