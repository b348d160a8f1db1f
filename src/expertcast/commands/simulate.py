"""`expertcast simulate`: policies over recorded routing, in virtual time (:mod:`expertcast.runtime.simulation`)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from expertcast.checkpoints.bundled import REFERENCE
from expertcast.checkpoints.provenance import provenance
from expertcast.commands.numbers import BANDWIDTHS, positive_number
from expertcast.commands.options import COUNT, Count, Fields, Option
from expertcast.commands.output import Outcome, folder, say, write_json
from expertcast.commands.predictors import QualityOptions, check_shape, evaluated, loaded_next_token, policy_quality
from expertcast.commands.routing_file import described, heading, memories, open_routing, replayed_rows, routing_policies
from expertcast.commands.simulate_options import (
    CAPACITY,
    Chosen,
    MachineOptions,
    PolicyOptions,
    cases_of,
    swept_evictions,
)
from expertcast.data.plan import ALL, SPLITS
from expertcast.data.routing_file import is_routing_file
from expertcast.data.trace_format import write_atomically
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, Predictor
from expertcast.predictors.messages import Json, aligned
from expertcast.predictors.next_token import NextTokenTracker
from expertcast.runtime.config import OffloadConfig, size_bytes
from expertcast.runtime.policies.eviction import SCOPES
from expertcast.runtime.simulation.figures import write_figures
from expertcast.runtime.simulation.machine import Case, table
from expertcast.runtime.simulation.sweep import BELADY, CAPACITIES, refusal, sweep, with_bounds
from expertcast.runtime.simulation.trace import Texts, load_trace
from expertcast.runtime.storage.layout import FULL, BlockLayout
from expertcast.training.scoring import Fitted
from expertcast.training.unseen import unseen_traces

TABLE, RESULT = "table.txt", "results.json"


@dataclass(frozen=True, kw_only=True)
class Options(QualityOptions):
    """What `expertcast simulate` takes."""

    traces: Annotated[Path, Option(positional=True, metavar="TRACES")]
    """Traces folder, user/repo of the hub, or a routing file (.parquet, .csv, .npy, .npz)."""
    sweep: bool = False
    """Every eviction policy at 1, 5, 10, 25 and 45%, with Belady's bounds."""
    policies: Annotated[PolicyOptions, Fields()]
    """NAME, or NAME:OPTION=VALUE,...; several of a kind are all combined."""
    predictor: Annotated[tuple[str, ...], Option(metavar="NAME|CKPT")] = ()
    """Names are fitted on the train split; their forecasts prefetch."""
    ahead: Count = 1
    """Layers ahead."""
    next_token: Annotated[str | None, Option(metavar="CKPT")] = None
    """next_token checkpoint, for the eviction policy `forecast`."""
    slots: Annotated[tuple[Count, ...], Option(metavar="S")] = ()
    """Experts that fit on the device."""
    capacity: Annotated[tuple[float, ...], Option(metavar="C", read=positive_number)] = ()
    """The same as shares of all (default: 0.25)."""
    memory: Annotated[tuple[str, ...], Option(metavar="BYTES")] = ()
    """The same in bytes, such as 3000MiB."""
    experts: Count | None = None
    """Of a routing file: experts per layer (default: the largest id and one)."""
    expert_bytes: Annotated[str | None, Option(metavar="BYTES")] = None
    """Of a routing file that does not say: size of an expert."""
    machine: Annotated[MachineOptions, Fields()]
    """Link and computation."""
    texts: Annotated[Texts, Fields(split=Option(choices=(*SPLITS, ALL)), prefill=COUNT, batch=COUNT)]
    """Which documents are run."""
    tokens: Count = 10_000
    """Only the first so many tokens of the split."""
    model: Annotated[str | None, Option(metavar="MODEL")] = None
    """Measure what lossy policies cost this model (default: the bundled one, if the traces are its)."""
    no_quality: bool = False
    """Do not measure what lossy policies cost."""
    quality_tokens: Count = 512
    """Tokens for --model."""
    processes: Count | None = None
    """Simulations at a time (default: one per core)."""
    out: Annotated[Path | None, Option(metavar="DIR", read=folder)] = None
    """Write the results, a table and PNGs there."""


def run(options: Options) -> Outcome:
    """Every case that can run, as a row of results; those that cannot are left out and named."""
    _check(options)
    if is_routing_file(options.traces):
        return _simulate_routing(options)
    evictions = swept_evictions(options.next_token is not None) if options.sweep else ["lru"]
    chosen = list(options.policies.chosen(options.predictor, evictions))
    if options.next_token is not None and not any(each.policies.eviction.cls.reads_tokens for each in chosen):
        raise ExpertcastError("--next-token is followed by --policy forecast only, here: add that, or leave it out")
    traces = TraceDataset.open(options.traces)
    if options.model:
        check_shape(options, options.model, traces.view)
    shape = traces.view.shape
    block = BlockLayout.of(traces.view).block_bytes
    fitted = _fitted(options, traces, chosen)
    predictors = {given: made.predictor for given, made in fitted.items()}
    cases = cases_of(
        chosen,
        traces.view,
        options.machine,
        slots=options.slots or [size_bytes(each) // block for each in options.memory],
        shares=options.capacity or (CAPACITIES if options.sweep else ()),
        names={given: predictor.name for given, predictor in predictors.items()},
    )
    machine = cases[0].machine
    model = _measured_model(options, traces, cases)
    reasons = [refusal(case, shape) for case in cases]
    if None not in reasons:
        raise ExpertcastError(f"nothing to simulate: {reasons[0]}")
    follower = None
    if options.next_token is not None:
        next_token, fitted["--next-token"] = loaded_next_token(options.next_token, traces.view)
        follower = NextTokenTracker(next_token)
    unseen, left_out = unseen_traces(traces, fitted, options.texts.split)
    if left_out.documents:
        say(str(left_out))
    trace = load_trace(
        unseen,
        replace(options.texts, tokens=options.tokens),
        predictors={predictor.name: predictor for predictor in predictors.values()},
        ahead=options.ahead,
        residuals=follower is not None,
    )

    def measured(wanted: Mapping[str, Case]) -> dict[str, Json]:
        runs, texts = _runs(options, wanted, predictors), options.texts
        return policy_quality(options, str(model), runs, prefill=texts.prefill, batch=texts.batch, fitted=fitted)

    found = sweep(
        trace if follower is None else trace.looking_ahead(follower, progress=True),
        with_bounds(cases) if options.sweep else cases,
        processes=options.processes,
        quality=None if model is None else measured,
        progress=True,
    )
    result: Json = {
        "traces": traces.info["id"],
        "model": traces.info["model"],
        "shape": shape.as_dict(),
        "split": options.texts.split,
        "left_out": left_out.as_dict(),
        "documents": sum(forward.fresh for forward in trace.forwards) * options.texts.batch,
        "steps": trace.steps,
        "batch": options.texts.batch,
        "prefill": options.texts.prefill,
        "ahead": options.ahead,
        "block_bytes": dict(machine.block_bytes),
        "layer_s": machine.times.compute_s,
        **found,
        **provenance(),
    }
    text = _describe(result)
    if options.out is not None:
        paths = [*_write_results(options.out, result, text), *write_figures(result["results"], options.out)]
        text += "\n\nwrote " + ", ".join(map(str, paths))
    return result, text


def _check(options: Options) -> None:
    """
    Raises:
        ExpertcastError: options that rule each other out; before anything is read.
    """
    if sum(map(bool, (options.slots, options.capacity, options.memory))) > 1:
        raise ExpertcastError("--slots, --capacity and --memory all say how much fits: give one of them")
    if not is_routing_file(options.traces) and (options.experts or options.expert_bytes):
        raise ExpertcastError("--experts and --expert-bytes are for routing files: a traces folder knows both")
    if options.policies.prefetch and not options.predictor and set(options.policies.prefetch) != {"none"}:
        raise ExpertcastError(f"--prefetch {options.policies.prefetch[0]} selects among forecasts: give --predictor")
    options.check_text()
    if options.out is not None and not options.out.parent.is_dir():
        raise ExpertcastError(f"--out {options.out}: there is no folder {options.out.parent}; make it first")


def _measured_model(options: Options, traces: TraceDataset, cases: Sequence[Case]) -> str | None:
    """The model whose quality under lossy policies is measured; None: nobody's.

    Raises:
        ExpertcastError: lossy policies, and nothing is said of quality.
    """
    lossy = [case.policies for case in cases if case.policies.lossy]
    if options.no_quality:
        return None
    if options.model is None and lossy:
        if traces.info["model"] == REFERENCE:
            return REFERENCE
        words = lossy[0].as_dict()
        raise ExpertcastError(
            f"miss={words['miss']}, routing={words['routing']} changes what the model says: give --model and --data to "
            "measure how much, or --no-quality"
        )
    return options.model


def _fitted(options: Options, traces: TraceDataset, chosen: Sequence[Chosen]) -> dict[str, Fitted]:
    """By the word that asked for it: checkpoints loaded, names fitted on the train split."""
    wanted = list(dict.fromkeys(each.predictor for each in chosen if each.predictor is not None))
    if not wanted:
        return {}
    found = evaluated(wanted, traces, [options.ahead])
    return dict(zip(wanted, found.values(), strict=True))


def _runs(
    options: Options, wanted: Mapping[str, Case], predictors: Mapping[str, Predictor]
) -> dict[str, OffloadConfig]:
    """Cases as the real runtime runs them."""
    by_name = {predictor.name: predictor for predictor in predictors.values()}
    return {
        name: OffloadConfig(
            policies=case.policies,
            slots=case.slots,
            predictor=None if case.predictor is None else by_name[case.predictor],
            ahead=1 if case.predictor is None else options.ahead,
            next_token=options.next_token if case.policies.eviction.cls.reads_tokens else None,
        )
        for name, case in wanted.items()
    }


def _describe(result: Json) -> str:
    """What was simulated, a table of the cases, and what was left out and why."""
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


def _write_results(out: Path, result: Json, text: str) -> list[Path]:
    """Write the result and the text to a folder, which is made; returns the paths."""
    out.mkdir(exist_ok=True)
    write_json(out / RESULT, result)
    write_atomically(out / TABLE, (text + "\n").encode())
    return [out / RESULT, out / TABLE]


# A routing file in place of a traces folder.

_TAKEN = {
    "traces", "sweep", "slots", "capacity", "memory", "experts", "expert_bytes", "processes", "out", "policy", "scope",
    "bandwidth", "latency",
}  # fmt: skip
"""Options that apply to a routing file."""


def _simulate_routing(options: Options) -> Outcome:
    """Every policy, scope, size of the cache and link as a row of results.

    Raises:
        ExpertcastError: options that need a traces folder, a damaged file, or what a replay refuses.
    """
    _check_routing(options)
    routing, total = open_routing(options.traces, options.experts, options.expert_bytes)
    shares: Sequence[float] = options.capacity
    if not (options.capacity or options.memory or options.slots):
        shares = CAPACITIES if options.sweep else (CAPACITY,)
    sizes = memories(routing, total, options.memory, shares, options.slots)
    policies = options.policies.policy or ([*routing_policies(), BELADY] if options.sweep else ["lru"])
    cases = list(itertools.product(policies, options.policies.scope))
    rows = []
    for bandwidth in options.machine.bandwidth or (BANDWIDTHS["pcie4"],):
        rows += replayed_rows(routing, total, cases, sizes, bandwidth=bandwidth, latency=options.machine.latency)
    result = {**heading(routing, total), "results": rows}
    text = described(result)
    if options.out is not None:
        text += "\n\nwrote " + ", ".join(map(str, _write_results(options.out, result, text)))
    return result, text


def _check_routing(options: Options) -> None:
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
