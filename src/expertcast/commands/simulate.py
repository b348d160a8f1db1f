"""`expertcast simulate`: policies over recorded routing, in virtual time (:mod:`expertcast.runtime.simulation`).

L MoE layers, E routed experts per layer, K experts per token.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from expertcast.checkpoints.bundled import REFERENCE
from expertcast.checkpoints.provenance import provenance
from expertcast.commands.numbers import BANDWIDTHS, not_negative, positive_number
from expertcast.commands.options import (
    BANDWIDTH,
    COUNT,
    PREDICTOR,
    Count,
    Fields,
    Form,
    ModelOptions,
    Option,
    own_policy,
    read_by,
)
from expertcast.commands.output import Outcome, folder, say, write_json
from expertcast.commands.predictors import QualityOptions, check_shape, evaluated, policy_quality
from expertcast.data.inspection import OpenModel
from expertcast.data.packed_experts import Forms, forms_in, make_packed
from expertcast.data.plan import ALL, SPLITS
from expertcast.data.routing_file import Ids, Routing, is_routing_file, read_routing
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, MoEView, Predictor
from expertcast.predictors.artefacts import write_atomically
from expertcast.predictors.messages import Json, aligned
from expertcast.training.unseen import unseen_traces

if TYPE_CHECKING:
    from expertcast.runtime.config import OffloadConfig
    from expertcast.runtime.policies import Policies
    from expertcast.runtime.simulation.machine import Case, Machine
    from expertcast.runtime.simulation.trace import SequenceSelection

TABLE, RESULT = "table.txt", "results.json"
CAPACITY = 0.25
"""Default share of all experts that fit the cache."""


class Chosen(NamedTuple):
    """Policies, and the predictor of their forecasts."""

    policies: Policies
    predictor: str | None


_Named = Annotated[tuple[str, ...], Option(metavar="P")]


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """Policies; several of a kind are all combined."""

    policy: _Named = ()
    """Eviction: choice of the expert that loses its slot (default: lrfu)."""
    prefetch: _Named = ()
    """Prefetches: choice among the experts of a forecast (default: top_k with --predictor)."""
    miss: _Named = ("fetch",)
    """Treatment of missing experts."""
    routing: _Named = ("standard",)
    """Choice of the experts that a layer executes."""
    pre_eviction: _Named = ("none",)
    """Eviction before a layer's routing is known: none, or gap (makes room for its forecast)."""
    scope: _Named = ("global",)
    """Competition for slots: global (all experts), or layer (equal shares per layer)."""
    preset: _Named = ()
    """Policies of published systems, by name."""

    def chosen(self, predictors: tuple[str, ...], otherwise: Sequence[str]) -> Iterator[Chosen]:
        """Yield presets, then every combination of policies and predictors.

        Args:
            predictors: values of --predictor; without them nothing is forecast.
            otherwise: eviction policies without --policy and --preset.

        Raises:
            ExpertcastError: an unknown preset, policy or option.
        """
        from expertcast.runtime.policies import Policies
        from expertcast.runtime.policies.settings import KINDS, preset

        own = {kind: tuple(map(own_policy, getattr(self, "policy" if kind == "eviction" else kind))) for kind in KINDS}
        for name in self.preset:
            made = preset(name)
            yield Chosen(made.policies, made.predictor)
        if self.preset and not self.policy:
            return
        kinds = own | {
            "eviction": own["eviction"] or tuple(otherwise),
            "prefetch": own["prefetch"] or ("top_k" if predictors else "none",),
            "scope": self.scope,
        }
        for *words, predictor in itertools.product(*kinds.values(), predictors or (None,)):
            yield Chosen(Policies(**{kind: str(word) for kind, word in zip(kinds, words, strict=True)}), predictor)


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """Options of the link and of computing."""

    bandwidth: Annotated[tuple[float, ...], BANDWIDTH] = ()
    """Speed of the link in bytes per second (default: pcie4)."""
    latency: Annotated[float, Option(metavar="S", read=not_negative)] = 0.0
    """Latency of the link per copy, in seconds."""
    layer_time: Annotated[tuple[float, ...], Option(metavar="S", read=positive_number)] = ()
    """Seconds of computing of every layer, or of each layer in order."""

    def machines(self, view: MoEView, policies: Sequence[Policies]) -> list[Machine]:
        """Return a machine for each bandwidth.

        Args:
            view: the model's layers.
            policies: all simulated policies; they name the precisions of copies.

        Raises:
            ExpertcastError: copies in a precision that does not shrink these experts.
        """
        from expertcast.runtime.benchmarking.bench import COPY_OVER_COMPUTE
        from expertcast.runtime.policies import CacheShape
        from expertcast.runtime.simulation.machine import Machine, constant_times
        from expertcast.runtime.storage.layout import FULL, BlockLayout
        from expertcast.runtime.storage.packed import PackedLayout

        shape, layout = view.shape, BlockLayout.of(view)
        slots = shape.layers * shape.experts
        cache = CacheShape(layers=shape.layers, experts=shape.experts, top_k=shape.top_k, slots=slots)
        lower = {name for each in policies for name in each.make(cache).miss.precisions}
        block_bytes = {FULL: layout.block_bytes}
        block_bytes |= {name: PackedLayout.of(layout, name).block_bytes for name in sorted(lower)}
        bandwidths = self.bandwidth or (BANDWIDTHS["pcie4"],)
        copies_s = shape.top_k * (self.latency + layout.block_bytes / bandwidths[0])
        times = constant_times(shape.layers, self.layer_time or copies_s / COPY_OVER_COMPUTE)
        return [
            Machine(times=times, block_bytes=block_bytes, bandwidth=speed, latency=self.latency) for speed in bandwidths
        ]


def cases_of(
    chosen: Sequence[Chosen], view: MoEView, options: MachineOptions, *, slots: Sequence[int],
    shares: Sequence[float], names: Mapping[str, str],
) -> list[Case]:  # fmt: skip
    """Return the cases of a simulation: every choice at every number of slots on every machine.

    Args:
        chosen: policies with their predictors.
        view: the model's layers.
        options: link and computing.
        slots: numbers of slots; empty: by `shares`.
        shares: slots as shares of all experts; empty: `CAPACITY`.
        names: names of predictors by their words on the command line.
    """
    from expertcast.runtime.simulation.machine import Case
    from expertcast.runtime.simulation.sweep import slots_of

    shape, policies = view.shape, [each.policies for each in chosen]
    counts = list(slots) or [slots_of(share, shape) for share in shares or (CAPACITY,)]
    machines = options.machines(view, policies)
    return [
        Case(
            policies=each.policies, slots=count, machine=machine,
            predictor=None if each.predictor is None else names[each.predictor],
        )
        for count, machine, each in itertools.product(counts, machines, chosen)
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options(QualityOptions):
    """Options of `expertcast simulate`."""

    traces: Annotated[Path, Option(positional=True, metavar="TRACES")]
    """Traces folder, user/repo of the hub, or a routing file (.parquet, .csv, .jsonl, .npy, .npz)."""
    sweep: bool = False
    """Run every eviction policy with slots for 1, 5, 10, 25 and 45% of the experts, with Belady's bounds."""
    policies: Annotated[PolicyOptions, Fields()]
    """NAME or NAME:OPTION=VALUE,...; several of a kind are all combined."""
    predictor: Annotated[tuple[str, ...], PREDICTOR] = ()
    """Predictors whose forecasts are prefetched; a predictor given by name is fitted on the train split."""
    ahead: Count = 1
    """Distance in layers between a forecast and its target."""
    slots: Annotated[tuple[Count, ...], Option(metavar="S")] = ()
    """Number of slots, places for one expert each."""
    capacity: Annotated[tuple[float, ...], Option(metavar="C", read=positive_number)] = ()
    """Slots as shares of all experts (default: 0.25)."""
    memory: Annotated[tuple[str, ...], Option(metavar="BYTES")] = ()
    """Bytes of all slots together, such as 3000MiB."""
    experts_per_layer: Count | None = None
    """For a routing file, experts per layer (default: largest id + 1)."""
    expert_bytes: Annotated[str | None, Option(metavar="BYTES")] = None
    """For a routing file without a column expert_bytes, the size of an expert."""
    machine: Annotated[MachineOptions, Fields()]
    """Link and computing; a routing file reads no --layer-time."""
    texts: Annotated[SequenceSelection, Fields(split=Option(choices=(*SPLITS, ALL)), prefill=COUNT, batch=COUNT)]
    """Documents to simulate."""
    tokens: Count = 10_000
    """Largest number of tokens of the split."""
    model: Annotated[str | None, Option(metavar="MODEL")] = None
    """Measure the effect of lossy policies on this model's output (default: the bundled model, for its own traces)."""
    no_quality: bool = False
    """Skip the measurement of lossy policies."""
    quality_tokens: Count = 512
    """Number of tokens for --model."""
    processes: Count | None = None
    """Parallel simulations (default: one per core)."""
    out: Annotated[Path | None, Option(metavar="DIR", read=folder)] = None
    """Write the results, a table and PNGs to this folder."""

    @property
    def form(self) -> Form:
        """A routing file, or traces with or without a measurement of quality."""
        of_file = {"experts_per_layer", "expert_bytes"}
        sizes = {"traces", "sweep", "slots", "capacity", "memory", "out"}
        if is_routing_file(self.traces):
            return Form("a routing file", sizes | of_file | {"policy", "scope", "bandwidth", "latency"})
        chosen = self.policies.chosen(self.predictor, ("lru",))
        if not self.no_quality and (self.model is not None or any(each.policies.lossy for each in chosen)):
            return Form("a traces folder", read_by(Options, but=of_file))
        of_model = {"dtype", "device", "store_folder", "in_place", "data", "text_column", "quality_tokens"}
        if not self.model:
            of_model |= read_by(ModelOptions)
        return Form("a simulation that measures no quality", read_by(Options, but=of_file | of_model))


def _pack(options: Options, traces: TraceDataset) -> None:
    """Give the traces' experts, which have no weights, the shapes of --experts, by default those that they had.

    Raises:
        ExpertcastError: experts that cannot be packed, or --experts packed without --model.
    """
    from expertcast.runtime.benchmarking.forms import checkpoint_forms
    from expertcast.runtime.config import EXPERTS_BITS
    from expertcast.runtime.loading import rounded_forms

    by_layer: Sequence[Forms]
    view = traces.view
    if options.experts == Options.experts:
        by_layer = forms_in(traces.info["experts"])
    elif options.experts in EXPERTS_BITS:
        by_layer = rounded_forms(options.experts, view)
    elif options.model is None:
        raise ExpertcastError(f"--experts {options.experts} needs the checkpoint of the traces: give --model")
    else:
        with OpenModel(options.source_of(options.model)) as opened:
            by_layer = checkpoint_forms(opened, options.experts)
    for layer, forms in zip(view, by_layer, strict=True):
        make_packed(layer.experts, layer.num_experts, forms)


def run(options: Options) -> Outcome:
    """Simulate every case that can run; the result names the others with a reason."""
    from expertcast.runtime.config import size_bytes
    from expertcast.runtime.policies import EVICTION, Policies
    from expertcast.runtime.simulation.figures import write_figures
    from expertcast.runtime.simulation.sweep import BELADY, CAPACITIES, refusal, sweep, with_bounds
    from expertcast.runtime.simulation.trace import load_trace
    from expertcast.runtime.storage.layout import BlockLayout

    _check(options)
    if is_routing_file(options.traces):
        return _simulate_routing(options)
    online = [name for name in EVICTION.names() if name != BELADY]  # the bound of a sweep comes beside them
    evictions = online if options.sweep else [Policies.eviction]
    chosen = list(options.policies.chosen(options.predictor, evictions))
    traces = TraceDataset.open(options.traces)
    if options.model:
        check_shape(options, options.model, traces.view)
    _pack(options, traces)
    shape = traces.view.shape
    block = BlockLayout.of(traces.view).block_bytes
    words = list(dict.fromkeys(each.predictor for each in chosen if each.predictor is not None))
    fitted = dict(zip(words, evaluated(words, traces, [options.ahead]).values(), strict=True))
    predictors = {made.predictor.name: made.predictor for made in fitted.values()}
    cases = cases_of(
        chosen,
        traces.view,
        options.machine,
        slots=options.slots or [size_bytes(each) // block for each in options.memory],
        shares=options.capacity or (CAPACITIES if options.sweep else ()),
        names={given: made.predictor.name for given, made in fitted.items()},
    )
    machine = cases[0].machine
    model = _measured_model(options, traces, cases)
    reasons = [refusal(case, shape) for case in cases]
    if None not in reasons:
        raise ExpertcastError(f"no case can be simulated: {reasons[0]}")
    unseen, left_out = unseen_traces(traces, fitted, options.texts.split)
    if left_out.documents:
        say(str(left_out))
    trace = load_trace(
        unseen,
        replace(options.texts, tokens=options.tokens),
        predictors=predictors,
        ahead=options.ahead,
    )

    def measured(wanted: Mapping[str, Case]) -> dict[str, Json]:
        runs, texts = _runs(options, wanted, predictors), options.texts
        return policy_quality(options, str(model), runs, prefill=texts.prefill, batch=texts.batch, fitted=fitted)

    found = sweep(
        trace,
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
        "layer_s": [sum(parts) for parts in zip(machine.times.before_s, machine.times.experts_s, strict=True)],
        **found,
        **provenance(),
    }
    text = _describe(result)
    if options.out is not None:
        paths = [*_write_results(options.out, result, text), *write_figures(result["results"], options.out)]
        text += "\n\nwrote " + ", ".join(map(str, paths))
    return result, text


def _check(options: Options) -> None:
    """Raise ExpertcastError for options that contradict each other, before a file is read."""
    if sum(map(bool, (options.slots, options.capacity, options.memory))) > 1:
        raise ExpertcastError("--slots, --capacity and --memory exclude each other: give one of them")
    if options.policies.prefetch and not options.predictor and set(options.policies.prefetch) != {"none"}:
        raise ExpertcastError(f"--prefetch {options.policies.prefetch[0]} needs forecasts: give --predictor too")
    options.check_text()
    if options.out is not None and not options.out.parent.is_dir():
        raise ExpertcastError(f"--out {options.out}: there is no folder {options.out.parent}; make it first")


def _measured_model(options: Options, traces: TraceDataset, cases: Sequence[Case]) -> str | None:
    """Return the model whose quality under lossy policies is measured; None: no measurement.

    Raises:
        ExpertcastError: lossy policies without --model or --no-quality.
    """
    lossy = [case.policies for case in cases if case.policies.lossy]
    if options.no_quality:
        return None
    if options.model is None and lossy:
        if traces.info["model"] == REFERENCE:
            return REFERENCE
        words = lossy[0].as_dict()
        raise ExpertcastError(
            f"miss={words['miss']}, routing={words['routing']} changes the model's output: give --model and --data to "
            "measure the change, or --no-quality"
        )
    return options.model


def _runs(
    options: Options, wanted: Mapping[str, Case], predictors: Mapping[str, Predictor]
) -> dict[str, OffloadConfig]:
    """Return the configurations of the runtime for some cases."""
    from expertcast.runtime.config import OffloadConfig

    return {
        name: OffloadConfig(
            policies=case.policies,
            slots=case.slots,
            predictor=None if case.predictor is None else predictors[case.predictor],
            ahead=1 if case.predictor is None else options.ahead,
        )
        for name, case in wanted.items()
    }


def _describe(result: Json) -> str:
    """Return the result as text: a heading, a table of the cases, and the cases left out with reasons."""
    from expertcast.runtime.simulation.machine import table
    from expertcast.runtime.storage.layout import FULL

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
    """Write the result and the text to a folder, created if needed; return the paths."""
    out.mkdir(exist_ok=True)
    write_json(out / RESULT, result)
    write_atomically(out / TABLE, (text + "\n").encode())
    return [out / RESULT, out / TABLE]


# A routing file in place of a traces folder: no model, a cache in bytes, the runtime's eviction policies

_MIB = 2**20
ROUTING_COLUMNS = (
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


def _simulate_routing(options: Options) -> Outcome:
    """Replay every policy, scope, cache size and link.

    Raises:
        ExpertcastError: options that need a traces folder, a damaged file, or what a replay refuses.
    """
    from expertcast.runtime.policies import EVICTION, Policies
    from expertcast.runtime.simulation.byte_cache import forwards_of, replay
    from expertcast.runtime.simulation.figures import write_hits
    from expertcast.runtime.simulation.sweep import BELADY

    routing, bytes_LE = _sized_routing(options)
    total, forwards, rows = int(bytes_LE.sum()), forwards_of(routing), []
    policies = list(map(own_policy, options.policies.policy)) or [Policies.eviction]
    if options.sweep and not options.policies.policy:
        online = (cls for cls in EVICTION.classes() if not (cls.offline or cls.reads_scores))
        policies = [*(cls.name for cls in online), BELADY]
    bandwidths, latency = options.machine.bandwidth or (BANDWIDTHS["pcie4"],), options.machine.latency
    cases = itertools.product(bandwidths, _cache_sizes(options, bytes_LE), policies, options.policies.scope)
    for bandwidth, memory, policy, scope in cases:
        choice = Policies(eviction=policy, scope=scope).eviction
        done = replay(forwards, choice, bytes_LE=bytes_LE, top_k=routing.top_k, memory=memory, scope=scope)
        decode, prompt = done.decode, done.prompt
        moved = decode.bytes_moved / decode.steps
        rows.append(
            {
                "policy": str(choice),
                "scope": scope,
                "memory_bytes": memory,
                "capacity": memory / total,
                **{name: getattr(decode, name) for name in ("hits", "requests", "misses", "bytes_moved", "steps")},
                "bytes_per_step": moved,
                "copy_s": moved / bandwidth + latency * decode.misses / decode.steps,
                "policy_s": done.policy_s,
                "bandwidth": bandwidth,
                "latency": latency,
                "per_layer": {"requests": decode.requests_L, "misses": decode.misses_L},
                "prompt": {name: getattr(prompt, name) for name in ("steps", "requests", "misses", "bytes_moved")},
            }
        )
    result = {
        "routing": routing.source,
        "shape": {"L": routing.layers, "E": routing.experts, "K": routing.top_k},
        "tokens": {"prompt": int(routing.prompt_T.sum()), "decoded": int((~routing.prompt_T).sum())},
        "experts_bytes": total,
        "expert_bytes": sorted(map(int, set(bytes_LE.ravel().tolist()))),
        **provenance(),
        "results": rows,
    }
    text = _describe_routing(result)
    if options.out is not None:
        paths = [*_write_results(options.out, result, text), write_hits(rows, options.out)]
        text += "\n\nwrote " + ", ".join(map(str, paths))
    return result, text


def _sized_routing(options: Options) -> tuple[Routing, Ids]:
    """Read the routing file; return the routing, and the bytes of each expert [L, E].

    Raises:
        ExpertcastError: a damaged file, or the size of an expert is unknown.
    """
    from expertcast.runtime.config import size_bytes

    path, text = options.traces, options.expert_bytes
    routing = read_routing(path, experts=options.experts_per_layer)
    if text is not None and routing.bytes_LE is not None:
        raise ExpertcastError(f"{path} has a column expert_bytes: leave --expert-bytes out")
    given = None if text is None else size_bytes(text)
    if given is not None and given < 1:
        raise ExpertcastError(f"--expert-bytes {text}: give 1 byte or more")
    return routing, routing.sized(given)


def _cache_sizes(options: Options, bytes_LE: Ids) -> list[int]:
    """Return the cache sizes in bytes; one slot has the size of the largest expert.

    Raises:
        ExpertcastError: a malformed size, or a share outside (0, 1].
    """
    from expertcast.runtime.config import size_bytes
    from expertcast.runtime.simulation.sweep import CAPACITIES

    if options.slots or options.memory:
        return [*map(size_bytes, options.memory), *(count * int(bytes_LE.max()) for count in options.slots)]
    shares = options.capacity or (CAPACITIES if options.sweep else (CAPACITY,))
    for share in shares:
        if not 0 < share <= 1:
            raise ExpertcastError(f"--capacity {share:g}: give a share of all experts' bytes, above 0 and up to 1")
    return [int(share * int(bytes_LE.sum())) for share in shares]


def _describe_routing(result: Json) -> str:
    """Return a line about the file, and a table of the rows."""
    from expertcast.runtime.simulation.sweep import BELADY

    shape, tokens, sizes = result["shape"], result["tokens"], result["expert_bytes"]
    cells = [tuple(title for _, title, _, _ in ROUTING_COLUMNS)]
    for row in result["results"]:
        cells.append(
            tuple(form.format(row[key] if unit == 1 else row[key] / unit) for key, _, form, unit in ROUTING_COLUMNS)
        )
    bound = ""
    if len(sizes) > 1 and any(row["policy"] == BELADY for row in result["results"]):
        bound = "\n\nbelady considers only the next use: with experts of several sizes it is a reference, not a bound"
    shown = " or ".join(f"{size / _MIB:.2f}" for size in sizes)
    return (
        f"{result['routing']}: {shape['L']} layers x {shape['E']} experts, {shape['K']} per token; "
        f"{tokens['prompt']} prompt and {tokens['decoded']} decoded tokens; an expert is {shown} MiB, all "
        f"{result['experts_bytes'] / _MIB:.0f} MiB\n\n"
        f"{aligned(cells, left=2)}{bound}"
    )
