"""Which share of the gap between the best classic policy and Belady a forecast of next uses closes, from routing alone.

    python scripts/bench_routing.py --out benchmarks/results/routing.json

Decode hits of the eviction policies that need nothing but routing, over all experts and with equal shares per layer, on
the two recorded real models in benchmarks/routing, and on the routing of a traces folder (`--traces`, its test split)
beside them. `gap_closed` is (hits - best classic) / (belady - best classic), the best classic policy being whichever
of the others has most hits at that size, in either scope, chosen afterwards. `without` leaves a part of `next_use` out.
`us_per_layer` is what one layer of one decode step costs in this process, the cache's own books included (median).
`shuffled` has the same decoded tokens in another order, which leaves every frequency as it is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from expertcast.checkpoints.provenance import provenance
from expertcast.data.routing_file import Routing, read_routing
from expertcast.data.traces import TraceDataset
from expertcast.predictors.messages import Json
from expertcast.runtime.benchmarking.bench import hardware
from expertcast.runtime.policies import EVICTION, CacheShape, Eviction
from expertcast.runtime.simulation.byte_cache import ByteCache, Event, ReplayCounts, forwards_of, replay
from expertcast.runtime.simulation.trace import Texts, load_trace

ROUTING = Path(__file__).resolve().parents[1] / "benchmarks" / "routing"
REAL = ("gpt-oss-120b-k2", "qwen3-30b-a3b-k6")
CLASSIC = ("lru", "lfu", "lfru", "fld", "least_stale", "importance")
LEARNED = "next_use"
WITHOUT = {
    "hedge": "next_use:hedge=false",
    "horizon": "next_use:horizon=1",
    "lead": "next_use:lead=0.0",
}
CAPACITIES = (0.1, 0.2, 0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--traces", type=Path, help="traces folder, whose test split is replayed too")
    parser.add_argument("--tokens", type=int, default=3000, help="of the traces folder")
    args = parser.parse_args()
    start = time.perf_counter()
    workloads = {name: read_routing(ROUTING / f"{name}.parquet") for name in REAL}
    if args.traces is not None:
        workloads["traces"] = of_traces(args.traces, args.tokens)
    result: Json = {"capacities": CAPACITIES, "workloads": {}}
    for name, routing in workloads.items():
        result["workloads"][name] = measured(name, routing)
    result |= {"seconds": time.perf_counter() - start, "hardware": hardware(), **provenance()}
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(table(result))


def of_traces(folder: Path, tokens: int) -> Routing:
    """The test split's documents, each with the prompt that `simulate` prefills."""
    traces = TraceDataset.open(folder)
    trace = load_trace(traces, Texts(tokens=tokens))
    ids_TLK = np.stack([ids_TK.numpy() for ids_TK in trace.known_routes().ids], axis=1).astype(np.int64)
    order, prompt = [], []
    for forward in trace.forwards:
        rows = np.arange(len(ids_TLK))[forward.rows if isinstance(forward.rows, slice) else forward.rows.numpy()]
        order += rows.tolist()
        prompt += [forward.fresh] * len(rows)
    experts = traces.view.shape.experts
    return Routing(
        source="traces", ids_TLK=ids_TLK[order], prompt_T=np.array(prompt), experts=experts,
        bytes_LE=np.ones((ids_TLK.shape[1], experts), dtype=np.int64),
    )  # fmt: skip


def measured(name: str, routing: Routing) -> Json:
    """All policies at all sizes, and their cost."""
    forwards = forwards_of(routing)
    sizes = []
    for capacity in CAPACITIES:
        hits = {
            f"{policy} ({scope})": hits_of(routing, forwards, policy, capacity, scope)
            for policy in CLASSIC
            for scope in ("global", "layer")
        }
        best = max(hits, key=hits.__getitem__)
        belady = hits_of(routing, forwards, "belady", capacity)
        learned = hits_of(routing, forwards, LEARNED, capacity)
        sizes.append(
            {
                "capacity": capacity,
                "classic": hits,
                "best_classic": best,
                "belady": belady,
                LEARNED: learned,
                "gap_closed": (learned - hits[best]) / (belady - hits[best]),
                "without": {part: hits_of(routing, forwards, text, capacity) for part, text in WITHOUT.items()},
            }
        )
        print(name, f"{capacity:.0%}", f"{learned:.3f}", f"{sizes[-1]['gap_closed']:.1%}", file=sys.stderr, flush=True)
    shuffled = forwards_of(reordered(routing))
    return {
        "shape": {"L": routing.layers, "E": routing.experts, "K": routing.top_k},
        "decoded_tokens": int((~routing.prompt_T).sum()),
        "sizes": sizes,
        "shuffled": {policy: hits_of(routing, shuffled, policy, 0.2) for policy in ("lru", "lfru", LEARNED, "belady")},
        "us_per_layer": {
            policy: microseconds(routing, forwards, policy) for policy in ("lru", "lfru", WITHOUT["hedge"], LEARNED)
        },
    }


def hits_of(
    routing: Routing, forwards: Sequence[Sequence[Event]], policy: str, capacity: float, scope: str = "global"
) -> float:
    """Decode hits with that share of all experts' bytes."""
    sizes_LE = routing.sized(None)
    memory = int(capacity * int(sizes_LE.sum()))
    choice = EVICTION.choose(policy)
    done = replay(forwards, choice, bytes_LE=sizes_LE, top_k=routing.top_k, memory=memory, scope=scope)
    return done.decode.hits


def reordered(routing: Routing) -> Routing:
    """The same decoded tokens in another order."""
    decoded = np.flatnonzero(~routing.prompt_T)
    order = np.arange(len(routing.prompt_T))
    order[decoded] = np.random.default_rng(0).permutation(decoded)
    return replace(routing, ids_TLK=routing.ids_TLK[order])


def microseconds(routing: Routing, forwards: Sequence[Sequence[Event]], policy: str) -> float:
    """Median per layer of a decode step, at a fifth of the experts."""
    sizes_LE = routing.sized(None)
    slots = int(0.2 * sizes_LE.size)
    shape = CacheShape(layers=routing.layers, experts=routing.experts, top_k=routing.top_k, slots=slots)
    eviction = Eviction(EVICTION.choose(policy), shape)
    cache = ByteCache(eviction, sizes_LE, int(0.2 * int(sizes_LE.sum())))
    counts = ReplayCounts(requests_L=[0] * routing.layers, misses_L=[0] * routing.layers)
    each = []
    for forward in forwards:
        eviction.start_pass(forward[0].fresh)
        for event in forward:
            begin = time.perf_counter()
            cache.run(event, counts)
            if not event.fresh:
                each.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(each)


def table(result: Json) -> str:
    """Rows of Markdown."""
    lines = [
        "| routing | experts | best classic | its hits | `next_use` | belady | gap closed |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in result["workloads"].items():
        for row in found["sizes"]:
            best = row["best_classic"]
            lines.append(
                f"| {name} | {row['capacity']:.0%} | {best} | {row['classic'][best]:.1%} | {row[LEARNED]:.1%} | "
                f"{row['belady']:.1%} | {row['gap_closed']:.1%} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
