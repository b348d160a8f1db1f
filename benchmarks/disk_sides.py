"""Ways to read experts from a disk, medians of their runs, and figures of a routing.

N tokens, L MoE layers, K experts per token.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from expertcast.predictors.messages import Json

OWN, PROCESS = "own", "process"
"""Workloads: the model's own routing of a text, and routing drawn by a process, which alone can be forecast as well as
real models' is."""
DISK, DIRECT = "disk", "direct"


@dataclass(frozen=True, kw_only=True)
class Side:
    """One way to run the model; several workloads may share a name."""

    name: str
    kind: str = "ours"
    """ours, or disk: no model, but the disk's own rate."""
    workload: str = OWN
    codec: str = "raw"
    link: str = "disk"
    pools: bool = False
    """What the planner says of the memory keeps experts compressed, the rest is slots."""
    forecasts: bool = False

    def options(self, memory: int) -> Json:
        """What an :class:`OffloadConfig` takes, for so many bytes of experts."""
        options: Json = {"store": "disk", "codec": self.codec, "link": self.link, "memory": memory}
        if self.forecasts:
            options["policies"] = {"prefetch": "value"}  # a disk has no time for copies that may be wrong
        return options


SIDES = (
    Side(name=DISK, kind=DISK),
    Side(name="mapped", link="instant"),
    Side(name=DIRECT),
    Side(name="bitsplit", codec="bitsplit"),
    Side(name="pools", codec="bitsplit", pools=True),
    Side(name=DIRECT, workload=PROCESS),
    Side(name="bitsplit", workload=PROCESS, codec="bitsplit"),
    Side(name="forecasts", workload=PROCESS, forecasts=True),
    Side(name="both", workload=PROCESS, codec="bitsplit", forecasts=True),
    Side(name="pools", workload=PROCESS, codec="bitsplit", pools=True),
    Side(name="all", workload=PROCESS, codec="bitsplit", pools=True, forecasts=True),
)
"""The disk alone; the mapped store, whose pages come as they are touched; direct reads into slots; the same over
experts compressed without loss; and with a planned part of the memory for compressed experts."""


_KEYS = ("side", "workload", "memory", "throttle")
_MEDIANS = ("tpot_s", "tpot_mean_s", "ttft_s", "bytes_read", "prompt_bytes_read", "hit_rate", "waited_s", "link_busy_s",
            "rate_waiting", "rate_busy", "rate", "same_tokens", "slots")  # fmt: skip


def summaries(runs: Sequence[Json]) -> list[Json]:
    """One row per side, workload, memory and rate, in the order of the first runs."""
    groups: dict[tuple[object, ...], list[Json]] = {}
    for run in runs:
        if "failed" not in run:
            groups.setdefault(tuple(run[name] for name in _KEYS), []).append(run)
    rates = {key[3]: statistics.median(run["rate"] for run in group) for key, group in groups.items() if key[0] == DISK}
    return [_summary(dict(zip(_KEYS, key, strict=True)), group, rates) for key, group in groups.items()]


def _summary(key: Json, group: Sequence[Json], rates: Json) -> Json:
    row: Json = {**key, "disk_bandwidth": rates.get(key["throttle"], key["throttle"]), "repetitions": len(group)}
    for name in _MEDIANS:
        values = [run[name] for run in group if run.get(name) is not None]
        if values:
            row[name] = statistics.median(values)
    times = [run["tpot_s"] for run in group if "tpot_s" in run]
    if times:
        row["tpot_range_s"] = [min(times), max(times)]
    row["peak_bytes"] = max(run["peak_bytes"] for run in group)
    row["identical"] = all(run["identical"] for run in group) if "identical" in group[0] else None
    for name in ("limit_bytes", "capped", "throttled"):
        if name in group[0]:
            row[name] = group[0][name]
    return row


Ids = Sequence[Sequence[Sequence[int]]]


def described(ids_NLK: Ids, experts: int, shares: Sequence[float]) -> Json:
    """`overlap` of a token's experts with the token's before it, `distinct` experts of a layer, and `lru`: the share of
    hits of one least-recently-used cache over all layers, by its share of the experts."""
    layers, top_k = len(ids_NLK[0]), len(ids_NLK[0][0])
    pairs = pairwise(ids_NLK)
    shared = [len(set(a) & set(b)) for before, now in pairs for a, b in zip(before, now, strict=True)]
    distinct = [len({expert for ids_LK in ids_NLK for expert in ids_LK[layer]}) for layer in range(layers)]
    return {
        "tokens": len(ids_NLK),
        "overlap": statistics.fmean(shared) / top_k if shared else None,
        "distinct": statistics.fmean(distinct) / experts,
        "lru": {f"{share:g}": _lru(ids_NLK, int(share * layers * experts)) for share in shares},
    }


def _lru(ids_NLK: Ids, slots: int) -> float:
    held: OrderedDict[tuple[int, int], None] = OrderedDict()
    hits = asked = 0
    for ids_LK in ids_NLK:
        for layer, ids_K in enumerate(ids_LK):
            asked += len(ids_K)
            hits += sum((layer, expert) in held for expert in ids_K)
            for expert in ids_K:
                held[layer, expert] = None
                held.move_to_end((layer, expert))
            while len(held) > slots:
                held.popitem(last=False)
    return hits / asked
