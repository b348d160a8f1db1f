"""What the stages of the policy study share: how much is run, on which trace and machines, and what has run already."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expertcast.data.batch import TraceBatch
from expertcast.data.trace_format import write_atomically
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, MoEView, Predictor
from expertcast.predictors.next_token import NextToken, NextTokenTracker
from expertcast.runtime.policies import EVICTION, MISS, PRESETS
from expertcast.runtime.simulation.machine import Case, Machine, constant_times
from expertcast.runtime.simulation.sweep import CAPACITIES, Workload, slots_of, sweep
from expertcast.runtime.simulation.trace import Texts, Trace, load_trace
from expertcast.runtime.storage.layout import FULL, PRECISIONS, BlockLayout
from expertcast.runtime.storage.packed import PackedLayout

LAYER_S = 1e-3
"""Seconds that a layer computes in the simulations; everything else is relative to it."""
PREFILL = 64
LEAST_TOKENS = 128
"""Tokens taken from each document at least."""
BATCH = 8
"""Texts decoded together in the replay of batches."""

LITERAL = "least_stale:order=layer"
FORECAST, EVICT_ONLY = "forecast", "forecast:idle_loads=0"
"""Eviction by forecast that also loads while the link is idle, and that only evicts."""
SHARED = "router_input"
"""The papers' own predictor: the next layer's router reads this layer's input."""
USUAL = ("top_k", "percentile")
"""Selections that every eviction policy is run with."""
ROUTINGS = ("standard", "cache_aware:strength=0.1", "cache_aware:strength=0.5")
STRENGTHS = tuple(f"cache_aware:strength={strength}" for strength in (0.02, 0.25, 1.0))
"""Routings run with fetching alone: inside and outside the range that SpecMD recommends."""
SWAPPED = ("specmd_1", "specmd_2", "specmd_3", "specmd_4")
"""SpecMD's Table 2 gives these least_stale eviction; its own configuration has it already."""

ACTIVE, BASELINES = "activeevict", ("moe_offloading", "moe_apex")
"""A system, and those that its paper compares it with."""

WHOLE, SAMPLE = "whole", "sample"

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is run."""

    capacities: Sequence[float] = CAPACITIES
    headline: Sequence[float] = (0.05, 0.10, 0.25, 0.45)
    ratios: Sequence[float] = (1.0, 5.0)
    """Copies of a token's K experts of a layer take so many times the layer's own time."""
    middle: Sequence[float] = (0.05, 0.10, 0.25)
    """Capacities of the stages after the first."""
    selections: Sequence[str] = (
        "top_k", "top_k:overfetch=1.5", "top_k:overfetch=2.0", "percentile", "percentile:over=token",
        "percentile:over=mass", "threshold", "value",
    )  # fmt: skip
    replayed: Sequence[tuple[str, int, float]] = (
        ("global", 1, 0.10), ("global", 1, 0.25), ("layer", 1, 0.25), ("layer", 1, 0.45), ("layer", BATCH, 0.45),
    )  # fmt: skip
    """(scope, texts at once, capacity) of the per-access replay."""
    misses: Sequence[str] = tuple(MISS.names())
    routings: Sequence[str] = ROUTINGS
    strengths: Sequence[str] = STRENGTHS
    presets: Sequence[str] = tuple(PRESETS)


QUICK = Scale(
    capacities=(0.10, 0.25),
    headline=(0.10, 0.25),
    ratios=(5.0,),
    middle=(0.10,),
    selections=("top_k", "percentile"),
    replayed=(("global", 1, 0.25),),
    misses=("fetch", "fetch_priority", "drop"),
    routings=ROUTINGS[:2],
    strengths=(),
    presets=("on_demand", "moe_offloading", "specmd_1", "specmd_5", "activeevict", "activeevict_fixed_top_k"),
)


@dataclass(frozen=True, kw_only=True)
class Study:
    """What all stages work with."""

    traces: TraceDataset
    scale: Scale
    whole: int | None
    """Tokens of the test split that the first stage takes; None: all."""
    tokens: int
    """Tokens of all other stages."""
    predictors: Mapping[str, Predictor]
    """`router_input` first, then a better one."""
    next_token: NextToken | None
    work: Path
    processes: int | None
    machines: list[Machine] = field(init=False)
    """One per ratio."""
    _held: dict[str, Workload] = field(init=False, default_factory=dict)
    """The last workload: stages that follow each other run on the same one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "machines", [_machine(self.traces.view, ratio) for ratio in self.scale.ratios])

    @property
    def classic(self) -> list[str]:
        """Every policy that looks at the past only, and both orders of least_stale."""
        names = [name for name in EVICTION.names() if not EVICTION.choose(name).cls.offline and name != FORECAST]
        names.insert(names.index("least_stale") + 1, LITERAL)
        return names

    @property
    def forecast(self) -> list[str]:
        """The eviction policy that looks tokens ahead, where there is something for it to look with."""
        return [] if self.next_token is None else [FORECAST]

    @property
    def evictions(self) -> list[str]:
        """Every eviction policy, and the one that looks ahead also without its loads."""
        return self.classic + ([EVICT_ONLY, FORECAST] if self.forecast else [])

    def slots(self, capacity: float) -> int:
        return slots_of(capacity, self.traces.view.shape)

    def trace(self, name: str, *, batch: int = 1) -> Trace:
        """`whole`, the test split, or `sample`, the beginnings of its documents, each a text of its own."""
        residuals = self.next_token is not None
        if name == WHOLE:
            return load_trace(self.traces, Texts(tokens=self.whole, prefill=PREFILL), residuals=residuals)
        beginnings = Beginnings.open(self.traces.folder)
        return load_trace(
            beginnings, Texts(tokens=self.tokens, prefill=PREFILL, batch=batch), residuals=residuals,
            predictors=self.predictors,
        )  # fmt: skip

    def run(self, stage: str, cases: Sequence[Case], trace: str = SAMPLE) -> dict[str, Any]:
        """Rows of a stage with its name, and what was `skipped`."""
        found: dict[str, Any] = self.kept(stage, list(map(repr, cases)), lambda: self._run(stage, cases, trace))
        return found

    def kept(self, name: str, what: Sequence[object], make: Callable[[], Any]) -> Any:
        """JSON values from the work folder, made if they are not there or are of something else."""
        path = self.work / f"{name}.json"
        predictors = [_digest(predictor) for predictor in (*self.predictors.values(), self.next_token)]
        given = [
            self.traces.info["id"],
            PREFILL,
            LEAST_TOKENS,
            self.whole,
            self.tokens,
            list(self.predictors),
            predictors,
            what,
        ]
        key = hashlib.sha256(json.dumps(given).encode()).hexdigest()
        if path.is_file() and (known := json.loads(path.read_text()))["key"] == key:
            return known["found"]
        found = make()
        write_atomically(path, json.dumps({"key": key, "found": found}).encode())
        return found

    def _run(self, stage: str, cases: Sequence[Case], trace: str) -> dict[str, Any]:
        print(f"stage {stage}: {len(cases)} simulations", flush=True)
        work = self._workload(trace)
        found = sweep(work, cases, processes=self.processes, progress=True)
        shares = {self.slots(share): share for share in (*self.scale.capacities, *self.scale.headline)}
        ratios = {machine.bandwidth: ratio for machine, ratio in zip(self.machines, self.scale.ratios, strict=True)}
        for row in found["results"] + found["skipped"]:
            row |= {"stage": stage, "share": shares[row["slots"]], "ratio": ratios[row["bandwidth"]]}
        texts = sum(forward.fresh for forward in work.trace.forwards)
        return {**found, "trace": {"stage": stage, "trace": trace, "steps": work.trace.steps, "texts": texts}}

    def _workload(self, name: str) -> Workload:
        if name not in self._held:
            self._held.clear()
            follower = None if self.next_token is None else NextTokenTracker(self.next_token)
            self._held[name] = Workload.of(self.trace(name), follower)
        return self._held[name]


class Beginnings(TraceDataset):
    """The first tokens of each document of a split, rather than all tokens of its first documents."""

    def batches(
        self, split: str, batch_size: int, *, max_tokens: int | None = None, **options: Any
    ) -> Iterator[TraceBatch]:
        left = self.token_count(split) if max_tokens is None else max_tokens
        documents = sum(document.split == split for document in self.documents)
        each = max(LEAST_TOKENS, math.ceil(left / max(1, documents)))
        for batch in super().batches(split, batch_size, **options):
            rows_T = (batch.position_T < each).nonzero().flatten()[:left]
            left -= len(rows_T)
            if len(rows_T):
                yield batch[rows_T]


def _digest(predictor: Predictor | None) -> str | None:
    """Of its weights."""
    if predictor is None:
        return None
    tensors = predictor.state_dict()
    return hashlib.sha256(b"".join(tensors[name].float().numpy().tobytes() for name in sorted(tensors))).hexdigest()


def _machine(view: MoEView, ratio: float) -> Machine:
    layout = BlockLayout.of(view)
    block_bytes = {FULL: layout.block_bytes}
    for precision in PRECISIONS:
        with contextlib.suppress(ExpertcastError):  # experts that a copy would not be smaller than
            block_bytes[precision] = PackedLayout.of(layout, precision).block_bytes
    return Machine(
        times=constant_times(view.shape.layers, LAYER_S),
        block_bytes=block_bytes,
        bandwidth=view.shape.top_k * layout.block_bytes / (ratio * LAYER_S),
    )
