"""`expertcast simulate`: policies over recorded routing, in virtual time (:mod:`expertcast.runtime.simulation`).

L MoE layers, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from expertcast.bench_target import say
from expertcast.checkpoints.provenance import provenance
from expertcast.checkpoints.store import load_predictor
from expertcast.commands import Outcome, device_of, evaluated_predictors, write_json
from expertcast.data.models import REFERENCE, load_model, load_tokenizer
from expertcast.data.text import load_documents
from expertcast.data.traces import TraceDataset
from expertcast.data.writer import write_atomically
from expertcast.predictors import ExpertcastError, MoEView, Predictor
from expertcast.predictors.next_token import NextToken
from expertcast.predictors.next_token_tracker import NextTokenTracker
from expertcast.runtime.policies import EVICTION, PRESETS, CacheShape, Policies
from expertcast.runtime.quality.forecasts import text_windows
from expertcast.runtime.quality.policies import measure_policies
from expertcast.runtime.simulation.figures import write_figures
from expertcast.runtime.simulation.load import Texts, load_trace
from expertcast.runtime.simulation.machine import Case, Machine, constant_times
from expertcast.runtime.simulation.summary import table
from expertcast.runtime.simulation.sweep import (
    BELADY,
    CAPACITIES,
    Workload,
    refusal,
    slots_of,
    sweep,
    with_bounds,
)
from expertcast.runtime.storage.layout import BlockLayout
from expertcast.runtime.storage.packed import PackedLayout
from expertcast.runtime.storage.precision import FULL
from expertcast.training.results import aligned

BANDWIDTH = 25e9
"""Bytes per second of PCIe 4 with 16 lanes, as it is reached in practice."""
CAPACITY = 0.25
COPY_OVER_COMPUTE = 5.0
"""K copies at the first bandwidth take so many layers' time, as in `expertcast bench`."""
QUALITY_WINDOW = 128
"""Tokens that are decoded one after another when quality is measured."""
_NEEDS_MORE = (BELADY, "forecast")
"""Evictions that a sweep takes only with what they need: the future, or `--next-token`."""
TABLE, RESULT = "table.txt", "results.json"

_Chosen = tuple[Policies, str | None]
"""Policies, and whose forecasts they get."""


def simulate(args: argparse.Namespace) -> Outcome:
    """`expertcast simulate`."""
    _check(args)
    chosen = list(_chosen(args))
    traces = TraceDataset.open(args.traces)
    shape = traces.view.shape
    slots = args.slots or [slots_of(share, shape) for share in args.capacity or _capacities(args)]
    predictors = _predictors(args, traces, chosen)
    names = {given: predictor.name for given, predictor in predictors.items()}
    machines = _machines(args, traces.view, [policies for policies, _ in chosen])
    cases = [
        Case(policies=policies, slots=count, machine=machine, predictor=None if given is None else names[given])
        for count, machine, (policies, given) in itertools.product(slots, machines, chosen)
    ]
    model = _measured_model(args, traces, cases)
    reasons = [refusal(case, shape) for case in cases]
    if None not in reasons:
        raise ExpertcastError(f"nothing to simulate: {reasons[0]}")
    follower = _follower(args, traces.view)
    trace = load_trace(
        traces,
        Texts(split=args.split, tokens=args.tokens, prefill=args.prefill, batch=args.batch),
        predictors={predictor.name: predictor for predictor in predictors.values()},
        ahead=args.ahead,
        residuals=follower is not None,
    )
    found = sweep(
        Workload.of(trace, follower),
        with_bounds(cases) if args.sweep else cases,
        processes=args.processes,
        quality=None if model is None else lambda wanted: _quality(args, model, wanted, predictors),
        progress=True,
    )
    result: dict[str, Any] = {
        "traces": traces.info["id"],
        "model": traces.info["model"],
        "shape": shape.as_dict(),
        "split": args.split,
        "documents": sum(forward.fresh for forward in trace.forwards) * args.batch,
        "steps": trace.steps,
        "batch": args.batch,
        "prefill": args.prefill,
        "ahead": args.ahead,
        "block_bytes": dict(machines[0].block_bytes),
        "layer_s": machines[0].times.compute_s,
        **found,
        **provenance(),
    }
    text = _text(result)
    if args.out is not None:
        text += "\n\nwrote " + ", ".join(map(str, _write(args.out, result, text)))
    return result, text


def _check(args: argparse.Namespace) -> None:
    """Before anything is read.

    Raises:
        ExpertcastError: options that rule each other out, or a folder that is missing.
    """
    if args.slots and args.capacity:
        raise ExpertcastError("--slots and --capacity both say how much fits: give one of them")
    if args.prefetch and not args.predictor and set(args.prefetch) != {"none"}:
        raise ExpertcastError(f"--prefetch {args.prefetch[0]} selects among forecasts: give --predictor")
    if args.model is not None and not args.data and args.model != REFERENCE:
        raise ExpertcastError("--model needs text to run on: give --data")
    if args.out is not None and not args.out.parent.is_dir():
        raise ExpertcastError(f"--out {args.out}: there is no folder {args.out.parent}; make it first")


def _measured_model(args: argparse.Namespace, traces: TraceDataset, cases: Sequence[Case]) -> str | None:
    """The model whose quality under lossy policies is measured; None: nobody's.

    Raises:
        ExpertcastError: lossy policies, and nothing is said of quality.
    """
    lossy = [case.policies for case in cases if case.policies.lossy]
    if args.no_quality:
        return None
    if args.model is None and lossy:
        if traces.info["model"] == REFERENCE:
            return REFERENCE
        words = lossy[0].as_dict()
        raise ExpertcastError(
            f"miss={words['miss']}, routing={words['routing']} changes what the model says: give --model and --data to "
            "measure how much, or --no-quality"
        )
    return str(args.model) if args.model is not None else None


def _capacities(args: argparse.Namespace) -> Sequence[float]:
    return CAPACITIES if args.sweep else (CAPACITY,)


def _chosen(args: argparse.Namespace) -> Iterator[_Chosen]:
    """Presets, then every combination of the policies that are named.

    Raises:
        ExpertcastError: an unknown preset, policy or option.
    """
    for name in args.preset or ():
        if name not in PRESETS:
            raise ExpertcastError(f"unknown preset {name!r}: choose from {', '.join(PRESETS)}")
        yield PRESETS[name].policies, PRESETS[name].predictor
    if args.preset and not args.policy:
        return
    evictions = args.policy or (_all_evictions(args) if args.sweep else ["lru"])
    prefetches = args.prefetch or ["top_k" if args.predictor else "none"]
    for eviction, prefetch, miss, routing, pre_eviction, scope, predictor in itertools.product(
        evictions, prefetches, args.miss, args.routing, args.pre_eviction, args.scope, args.predictor or [None]
    ):
        policies = Policies(
            eviction=eviction, prefetch=prefetch, miss=miss, routing=routing, pre_eviction=pre_eviction, scope=scope
        )
        yield policies, predictor


def _all_evictions(args: argparse.Namespace) -> list[str]:
    return [name for name in EVICTION.names() if name not in _NEEDS_MORE or (name != BELADY and args.next_token)]


def _predictors(args: argparse.Namespace, traces: TraceDataset, chosen: Sequence[_Chosen]) -> dict[str, Predictor]:
    """By the word that asked for it: checkpoints loaded, names fitted on the train split."""
    wanted = list(dict.fromkeys(given for _, given in chosen if given is not None))
    if not wanted:
        return {}
    found = evaluated_predictors(argparse.Namespace(predictor=wanted, ahead=args.ahead), traces)
    return dict(zip(wanted, found.values(), strict=True))


def _follower(args: argparse.Namespace, view: MoEView) -> NextTokenTracker | None:
    """
    Raises:
        ExpertcastError: a checkpoint of another kind of predictor.
    """
    if args.next_token is None:
        return None
    predictor = load_predictor(args.next_token, view)
    if not isinstance(predictor, NextToken):
        raise ExpertcastError(
            f"--next-token {args.next_token} is a {predictor.name}: give a checkpoint of `expertcast train --predictor "
            "next_token`, and other predictors as --predictor"
        )
    return NextTokenTracker(predictor)


def _machines(args: argparse.Namespace, view: MoEView, policies: Sequence[Policies]) -> list[Machine]:
    """One per bandwidth.

    Raises:
        ExpertcastError: copies in a precision that these experts do not get smaller by.
    """
    shape, layout = view.shape, BlockLayout.of(view)
    cache = CacheShape(
        layers=shape.layers, experts=shape.experts, top_k=shape.top_k, slots=shape.layers * shape.experts
    )
    lower = {name for each in policies for name in each.make(cache).miss.precisions}
    block_bytes = {FULL: layout.block_bytes}
    block_bytes |= {name: PackedLayout.of(layout, name).block_bytes for name in sorted(lower)}
    bandwidths = args.bandwidth or [BANDWIDTH]
    copies_s = shape.top_k * (args.latency + layout.block_bytes / bandwidths[0])
    times = constant_times(shape.layers, args.layer_time or copies_s / COPY_OVER_COMPUTE)
    return [
        Machine(
            times=times,
            block_bytes=block_bytes,
            bandwidth=bandwidth,
            latency=args.latency,
            write_back=args.write_back,
        )
        for bandwidth in bandwidths
    ]


def _quality(
    args: argparse.Namespace, model_name: str, wanted: Mapping[str, Case], predictors: Mapping[str, Predictor]
) -> dict[str, dict[str, Any]]:
    """Decode text with the policies of some cases in the real runtime, and without any (`exact`)."""
    say(f"measuring what {len(wanted)} lossy sets of policies cost {model_name}")
    model = load_model(model_name, dtype=args.dtype, device=device_of(args))
    documents = load_documents(args.data or [REFERENCE])
    windows_NW = text_windows(
        load_tokenizer(model_name),
        (document.text for document in documents),
        length=min(QUALITY_WINDOW, max(args.quality_tokens, 32)),
        count=max(1, args.quality_tokens // QUALITY_WINDOW),
    )
    by_name = {predictor.name: predictor for predictor in predictors.values()}
    runs = {
        name: {
            "policies": case.policies,
            "slots": case.slots,
            "predictor": None if case.predictor is None else by_name[case.predictor],
            "ahead": args.ahead if case.predictor is not None else 1,
            "next_token": args.next_token if case.policies.eviction.cls.reads_tokens else None,
        }
        for name, case in wanted.items()
    }
    found = measure_policies(model, windows_NW, runs)["runs"]
    return {
        name: {"perplexity": run["perplexity"], "agreement": run["top1_agreement"], "kl": run["kl"]}
        for name, run in found.items()
    }


def _text(result: Mapping[str, Any]) -> str:
    shape = ", ".join(f"{key}={value}" for key, value in result["shape"].items())
    rows = sorted(result["results"], key=lambda row: (row["slots"], row["bandwidth"]))  # bounds beside what they bound
    lines = [
        f"{result['model']} ({shape}), split {result['split']!r}: {result['documents']} documents, "
        f"{result['steps']} decode steps of {result['batch']}; an expert is {result['block_bytes'][FULL]} bytes",
        aligned(table(rows)),
    ]
    for reason, left in itertools.groupby(result["skipped"], key=lambda row: row["reason"]):
        lines.append(f"left out {len(list(left))}: {reason}")
    return "\n\n".join(lines[:2]) + "".join(f"\n{line}" for line in lines[2:])


def _write(folder: Path, result: dict[str, Any], text: str) -> list[Path]:
    folder.mkdir(exist_ok=True)
    write_json(folder / RESULT, result)
    write_atomically(folder / TABLE, (text + "\n").encode())
    return [folder / RESULT, folder / TABLE, *write_figures(result["results"], folder)]
