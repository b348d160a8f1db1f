"""The simulator: layer-events per second, and how its counts and times agree with the runtime's.

    python scripts/bench_simulator.py --out benchmarks/results/simulator.json

Speed: drawn routing of 16 layers with 64 experts, 8 per token, on one core; a layer-event is one layer of one decode
step. Agreement: a model decodes over the emulated link, and the same routing is simulated with the same policies, slots
and link. Layer times are those of the run itself, waits for copies left out; of the repetitions the fastest counts, the
one that was disturbed least. Without prefetches no decision depends on time, and counts must be the same; with them a
copy may start a moment earlier or later than it does in the simulation, as between two runs. `tpot_error_elsewhere` is
the error with the layer times of the first run of all, of other policies over another link. `next_token_s` is what
following a text with next_token costs per token. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from simulator_agreement import compare, measure
from torch import Tensor

from expertcast.checkpoints.provenance import provenance
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.text import load_documents
from expertcast.predictors import ModelShape, NextToken
from expertcast.predictors.messages import Json
from expertcast.predictors.next_token import NextTokenTracker
from expertcast.runtime.benchmarking.bench import hardware
from expertcast.runtime.benchmarking.routing import RoutingOptions, drawn
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.policies import EVICTION, Policies
from expertcast.runtime.recording.recorder import LayerTimes
from expertcast.runtime.simulation.machine import Case, Machine, constant_times
from expertcast.runtime.simulation.simulator import simulate
from expertcast.runtime.simulation.trace import Routes, TokenTable, Trace, trace_of

SHAPE = ModelShape(layers=16, experts=64, top_k=8, hidden=1)
CAPACITIES = (0.25, 0.5)
PROMPT = 32
EVICTING = "forecast:idle_loads=0"
"""Loads while the link is idle depend on time."""


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="decode steps per speed measurement")
    parser.add_argument("--rounds", type=int, default=3, help="of each speed measurement, the fastest counts")
    parser.add_argument("--part", nargs="+", choices=("speed", "agreement"), default=["speed", "agreement"])
    parser.add_argument("--model", default="reference")
    parser.add_argument("--policy", nargs="+", default=["lru", "lfu", "least_stale", "score"])
    parser.add_argument("--miss", nargs="+", default=["drop", "fetch_lowest"], help="run with the first --policy")
    parser.add_argument("--next-token", type=Path, help="checkpoint, for the eviction policy `forecast`")
    parser.add_argument("--capacity", nargs="+", type=float, default=[0.1, 0.25])
    parser.add_argument("--bandwidth", nargs="+", type=float, default=[2e7, 1e8, 5e8])
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=3, help="of each decoding, the fastest counts")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result: Json = {}
    if "speed" in args.part:
        result["speed"] = {"shape": SHAPE.as_dict(), "steps": args.steps, "runs": speed(args.steps, args.rounds)}
    if "agreement" in args.part:
        result["agreement"] = agreement(args)
    result |= {"hardware": hardware(), **provenance()}
    text = json.dumps(result, indent=2) + "\n"
    print(text, end="")
    if args.out:
        args.out.write_text(text)


def speed(steps: int, rounds: int) -> list[Json]:
    """Layer-events per second of every eviction policy, processor time."""
    trace = drawn_trace(steps)
    machine = Machine(times=constant_times(SHAPE.layers, 1e-4), block_bytes={"full": 100_000}, bandwidth=1e10)
    found = []
    for name, capacity in itertools.product(EVICTION.names(), CAPACITIES):
        slots, best_s, hit_rate = int(capacity * SHAPE.layers * SHAPE.experts), float("inf"), 0.0
        case = Case(policies=Policies(eviction=name), slots=slots, machine=machine)
        for _ in range(rounds):
            start = time.process_time()
            hit_rate = simulate(trace, case).decode.hit_rate
            best_s = min(best_s, time.process_time() - start)
        rate = trace.steps * SHAPE.layers / best_s
        found.append({"eviction": name, "slots": slots, "hit_rate": hit_rate, "layer_events_per_s": rate})
    return found


def drawn_trace(steps: int) -> Trace:
    """A text of one prompt token and `steps` decode steps."""
    options = RoutingOptions(persistence=0.4, skew=0.8)
    tables = drawn(SHAPE, prompt=1, new_tokens=steps, options=options)
    count = len(tables.ids_PLK)
    logits_PLE = torch.zeros(count, SHAPE.layers, SHAPE.experts)
    logits_PLE.scatter_(2, tables.ids_PLK, tables.weights_PLK.log() + 9.0)
    routes = Routes(
        logits=list(logits_PLE.unbind(1)),
        ids=list(tables.ids_PLK.unbind(1)),
        weights=list(tables.weights_PLK.unbind(1)),
        residual=[torch.zeros(count, 0)] * SHAPE.layers,
    )
    return trace_of(SHAPE, routes, torch.zeros(count, dtype=torch.long), prefill=1)


def agreement(args: argparse.Namespace) -> Json:
    """Every policy on demand, lossy ones, and lru with prefetches, at every capacity and bandwidth."""
    model = load_model(args.model)
    view = find_moe_layers(model)
    prompt_ids = prompt_of(args.model)
    evictions = [Policies(eviction=name, prefetch="none") for name in args.policy]
    misses = [Policies(eviction=args.policy[0], prefetch="none", miss=name) for name in args.miss]
    ways = [OffloadConfig(policies=policies) for policies in (*evictions, *misses)]
    if args.next_token is not None:
        policies = Policies(eviction=EVICTING, prefetch="none")
        ways.append(OffloadConfig(policies=policies, next_token=args.next_token))
    ways.append(OffloadConfig(policies=Policies(), predictor="next_norm"))
    runs: list[Json] = []
    elsewhere: LayerTimes | None = None
    forecasts_s: list[float] = []
    for bandwidth, capacity, way in itertools.product(args.bandwidth, args.capacity, ways):
        slots = int(capacity * len(view) * view.shape.experts)
        config = replace(way, slots=slots, bandwidth=bandwidth)
        found = [measure(model, prompt_ids, config, new_tokens=args.new_tokens) for _ in range(args.repetitions)]
        fastest = min(found, key=lambda measured: measured.tpot_s)
        elsewhere = elsewhere or fastest.case.machine.times
        if fastest.next_token is not None:
            forecasts_s.append(following_s(fastest.trace, fastest.next_token))
        run = compare(fastest)
        runs.append({**run, "tpot_error_elsewhere": compare(fastest, elsewhere)["tpot_error"]})
        say(runs[-1])
    errors = [abs(run["tpot_error"]) for run in runs]
    plain = [run for run in runs if run["predictor"] is None]
    return {
        "model": args.model,
        "prompt_tokens": PROMPT,
        "new_tokens": args.new_tokens,
        "repetitions": args.repetitions,
        "same_counts_on_demand": sum(run["same_counts"] for run in plain),
        "runs_on_demand": len(plain),
        "tpot_error_median": statistics.median(errors),
        "tpot_error_largest": max(errors),
        "next_token_s": statistics.median(forecasts_s) if forecasts_s else None,
        "runs": runs,
    }


def following_s(trace: Trace, next_token: NextToken) -> float:
    """Seconds per token that the forecasts of all coming tokens take."""
    start = time.perf_counter()
    TokenTable.of(trace, NextTokenTracker(next_token))
    return (time.perf_counter() - start) / trace.steps


def prompt_of(model: str) -> Tensor:
    """The first tokens of the bundled text [1, PROMPT]."""
    text = load_documents(["reference"])[0].text[: 20 * PROMPT]
    return torch.tensor([load_tokenizer(model)(text)["input_ids"][:PROMPT]])


def say(run: Json) -> None:
    measured, simulated = run["measured"], run["simulated"]
    print(
        f"{run['eviction']} {run['miss']} {run['predictor'] or 'on demand'}, {run['slots']} slots, "
        f"{run['bandwidth'] / 1e6:g} MB/s: "
        f"misses {measured['misses']} and {simulated['misses']}, TPOT {measured['tpot_s'] * 1e3:.2f} ms, "
        f"simulated {run['tpot_error']:+.1%}, by other layer times {run['tpot_error_elsewhere']:+.1%}",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    main()
