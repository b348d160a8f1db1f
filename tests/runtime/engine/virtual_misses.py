"""Runs of `misses` in virtual time, with recorded routing.

Cache, policies, queue of copies and the choice of `auto` are the runtime's code, on the clock of the simulator. A layer
takes 1 ms: half until the routing is known, half in its K experts. The host takes so many times as long for an expert
as the device, with a jitter of a tenth, and .05 ms until it begins; it computes beside the device. `auto` knows none of
these figures: it measures them. R is the time of K copies over that of a layer. A hostile link becomes ten times
slower, and fast again, after 16 tokens each. A forecast takes .05 ms; all are made, or those that the governor chooses.

    python -m tests.runtime.engine.virtual_misses 24      # a table, over seeds 0 to 23 of the jitter
"""

from __future__ import annotations

import random
import statistics
import sys
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from benchmarks.timed.routing import recorded, routing_of
from torch import Tensor

from expertcast.predictors.view import ModelShape
from expertcast.runtime.engine.engine import LayerFlow
from expertcast.runtime.engine.host import HostExperts
from expertcast.runtime.links.base import Link
from expertcast.runtime.policies import Policies
from expertcast.runtime.policies.settings import ALWAYS, AUTO
from expertcast.runtime.simulation.link import VirtualLink
from expertcast.runtime.simulation.machine import Case, Machine, constant_times
from expertcast.runtime.simulation.simulator import VirtualRuntime
from expertcast.runtime.simulation.trace import Forward, Hints, Trace, request_order
from expertcast.runtime.storage.layout import FULL

LAYER_S, HAND_OVER_S, FORECAST_S, PHASE = 1e-3, 5e-5, 5e-5, 16
STEADY, HOSTILE = "steady", "tenfold"


class MeasuredLink(VirtualLink):
    """A link that knows its speed from its copies alone, and whose speed may change."""

    copy_s = Link.copy_s

    def take(self, seconds: float) -> None:
        """Let later copies take so long."""
        self._seconds[FULL] = seconds


class MeasuredMachine(Machine):
    """A machine with such a link."""

    def link(self) -> MeasuredLink:
        return MeasuredLink(self.block_bytes, self.bandwidth)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableHints(Hints):
    """Forecasts of the next layer's experts, by row."""

    ids_NLK: Tensor
    prompt: int

    def due(self, layer: int, forward: Forward) -> bool:
        return layer + 1 < self.ids_NLK.shape[1]

    def submit(self, layer: int, forward: Forward, flow: LayerFlow) -> None:
        assert isinstance(forward.rows, slice)
        target, link = layer + 1, flow.residency.link
        rung = flow.choose(target, 0)
        if rung is None:
            return
        assert isinstance(link, VirtualLink)
        link.spend(FORECAST_S)
        flow.prefetch(target, self.ids_NLK[forward.rows.start - self.prompt, target].tolist())
        flow.forecast(target, rung, FORECAST_S)


class GovernedFlow(LayerFlow):
    """A flow whose forwards after the prompt are decode steps."""

    def start_pass(self, fresh: bool) -> None:
        super().start_pass(fresh)
        if not fresh:
            self.start_step(1)


class VirtualSide(VirtualRuntime):
    """A simulated run whose host may compute missing experts.

    Args:
        trace, case: as for :class:`VirtualRuntime`.
        misses: copy, host or auto.
        expert_s: seconds of the host for an expert.
        forecasts: always, or auto: those that the governor chooses.
        seed: of the host's jitter.
    """

    def __init__(
        self, trace: Trace, case: Case, *, misses: str, expert_s: float, forecasts: str = ALWAYS, seed: int = 0
    ) -> None:
        super().__init__(trace, case)
        if forecasts == AUTO:
            self.flow = GovernedFlow(self.residency, self.policies, trace.shape, rungs={"forecasts": None})
        self._expert_s, self._random = expert_s, random.Random(seed)
        if misses != "copy":
            unused: Any = None
            self.flow.host = HostExperts(unused, unused, self.residency, auto=misses == "auto")

    def run(self, forward: Forward) -> float:
        seconds = super().run(forward)
        if self.flow.governor is not None:
            self.flow.governor.end()
        return seconds

    def _compute(self, layer: int, expert_s: float, chunks: list[list[int]], precision: Any) -> None:
        host, left, link = self.flow.host, self.flow.left, self.link
        start = link.now
        if chunks[0]:
            super()._compute(layer, expert_s, chunks, precision)
        if host is None or len(chunks) > 1:
            return
        if chunks[0]:
            host.computed_in_slots(len(chunks[0]), expert_s * len(chunks[0]))
        if left:
            each_s = self._expert_s * self._random.uniform(0.9, 1.1)
            host.computed_on_host(HAND_OVER_S, each_s)
            end = start + HAND_OVER_S + len(left) * each_s
            self.residency.count_wait(layer, max(0.0, end - link.now))
            link.run_until(max(link.now, end))


@cache
def recorded_trace(name: str, new_tokens: int, accuracy: float | None, layers: int | None = None) -> Trace:
    """Return the trace of a recorded prompt and its first decoded tokens, with forecasts of this accuracy."""
    routing = routing_of(name)
    shape = ModelShape(layers=layers or routing.layers, hidden=0, experts=routing.experts, top_k=routing.top_k)
    prompt = int(routing.prompt_T.sum())
    tables = recorded(
        name, layers=layers, prompt=prompt, new_tokens=new_tokens, accuracy=accuracy or 0.0, seed=1
    )  # fmt: skip
    keys_PLK = tables.ids_PLK + shape.experts * torch.arange(shape.layers)[:, None]

    def forward(rows: slice) -> Forward:
        keys = [request_order(keys_PK.flatten().tolist()) for keys_PK in keys_PLK[rows].unbind(1)]
        return Forward(fresh=not rows.start, rows=rows, keys=keys)

    spans = [slice(0, prompt), *(slice(at, at + 1) for at in range(prompt, prompt + new_tokens))]
    hints = TableHints(ahead=1, forecasts={}, ids_NLK=tables.forecast_NLK, prompt=prompt)
    return Trace(shape=shape, forwards=[*map(forward, spans)], hints={} if accuracy is None else {"forecasts": hints})


def tokens_ms(
    name: str, ratio: float, misses: str, accuracy: float | None, link: str, *, held_back: float = 2.0,
    new_tokens: int = 64, forecasts: str = ALWAYS, layers: int | None = None, seed: int = 0,
) -> list[float]:  # fmt: skip
    """Return the milliseconds of each token after the prompt, with a quarter of the experts cached."""
    trace = recorded_trace(name, new_tokens, accuracy, layers)
    shape, copy_s = trace.shape, ratio * LAYER_S / trace.shape.top_k
    machine = MeasuredMachine(
        times=constant_times(shape.layers, LAYER_S), block_bytes={FULL: 1_000_000}, bandwidth=1e6 / copy_s
    )
    case = Case(
        policies=Policies(prefetch="none" if accuracy is None else "top_k"), machine=machine,
        slots=shape.layers * shape.experts // 4, predictor=None if accuracy is None else "forecasts",
    )  # fmt: skip
    expert_s = held_back * LAYER_S / 2 / shape.top_k
    run = VirtualSide(trace, case, misses=misses, expert_s=expert_s, forecasts=forecasts, seed=seed)
    found = []
    for place, forward in enumerate(trace.forwards):
        if link == HOSTILE and isinstance(run.link, MeasuredLink):
            run.link.take(copy_s * (10.0 if place // PHASE % 2 else 1.0))
        seconds = run.run(forward)
        if not forward.fresh:
            found.append(1e3 * seconds)
    return found


def table(seeds: int) -> None:
    """Print how long tokens of four layers of Qwen3-30B-A3B take with forecasts beside `auto`, over those without."""
    accuracies = {None: "", 1.0: "always right", 0.9: "9 of 10", 0.0: "never"}
    print(f"| R | link | host | {' | '.join([*accuracies.values()][1:])} |\n| --- | --- | --- | --- | --- | --- |")
    for link, (host, held_back), ratio in product((STEADY, HOSTILE), (("half", 2.0), ("a tenth", 10.0)), (2, 5, 10)):

        def mean_ms(accuracy: float | None, ratio: int = ratio, link: str = link, held: float = held_back) -> float:
            given = {"held_back": held, "forecasts": AUTO, "layers": 4}
            runs = (
                tokens_ms("qwen3-30b-a3b", ratio, "auto", accuracy, link, **given, seed=seed)  # type: ignore[arg-type]
                for seed in range(seeds)
            )
            return statistics.fmean(statistics.fmean(run) for run in runs)

        without, *found = map(mean_ms, accuracies)
        print(f"| {ratio} | {link} | {host} | {' | '.join(f'{each / without:.3f}' for each in found)} |", flush=True)


if __name__ == "__main__":
    table(int(sys.argv[1]))
