"""Misses copied, computed on the host, or either (`misses="auto"`), in virtual time.

    python -m benchmarks misses

No time is measured. Cache, policies, queue of copies and the choice of `auto` are the runtime's code, on the clock of
the simulator; the routing is that of `benchmarks/routing`. A layer takes 1 ms: half until the routing is known, half in
its K experts. The host takes --held-back times as long for an expert as the device, with a jitter of a tenth, and
--hand-over ms until it begins; it computes beside the device. `auto` knows none of these figures: it measures them. R
is the time of K copies over that of a layer. A link of `tenfold` speed becomes ten times slower, and fast again, after
--phase tokens each. All forecasts are made: the governor that leaves out bad ones needs measured steps.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.results import ResultFile, markdown, result_parser
from benchmarks.timed.routing import RECORDINGS, recorded, routing_of
from expertcast.commands.numbers import positive, positive_number
from expertcast.predictors.messages import Json
from expertcast.predictors.view import ModelShape
from expertcast.runtime.engine.engine import LayerFlow
from expertcast.runtime.engine.host import HostExperts
from expertcast.runtime.links.base import Link
from expertcast.runtime.policies import Policies
from expertcast.runtime.simulation.link import VirtualLink
from expertcast.runtime.simulation.machine import Case, Machine, constant_times
from expertcast.runtime.simulation.simulator import VirtualRuntime
from expertcast.runtime.simulation.trace import Forward, Hints, Trace, request_order
from expertcast.runtime.storage.layout import FULL

LAYER_S = 1e-3
SIDES = ("copy", "host", "auto")
ACCURACY = 0.9
RANDOM = 0.0
"""Accuracies of forecasts."""
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
        flow.prefetch(layer + 1, self.ids_NLK[forward.rows.start - self.prompt, layer + 1].tolist())


class Run(VirtualRuntime):
    """A simulated run whose host may compute missing experts.

    Args:
        trace, case: as for :class:`VirtualRuntime`.
        misses: copy, host or auto.
        expert_s: seconds of the host for an expert.
        hand_over_s: seconds until it begins.
    """

    def __init__(self, trace: Trace, case: Case, *, misses: str, expert_s: float, hand_over_s: float) -> None:
        super().__init__(trace, case)
        self._expert_s, self._hand_over_s, self._random = expert_s, hand_over_s, random.Random(0)
        if misses != "copy":
            unused: Any = None
            self.flow.host = HostExperts(unused, unused, self.residency, auto=misses == "auto")

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
            host.computed_on_host(self._hand_over_s, each_s)
            end = start + self._hand_over_s + len(left) * each_s
            self.residency.count_wait(layer, max(0.0, end - link.now))
            link.run_until(max(link.now, end))


def recorded_trace(name: str, new_tokens: int, accuracy: float | None, seed: int) -> Trace:
    """Return the trace of a recorded prompt and its first decoded tokens, with forecasts of this accuracy."""
    routing = routing_of(name)
    shape = ModelShape(layers=routing.layers, hidden=0, experts=routing.experts, top_k=routing.top_k)
    prompt = int(routing.prompt_T.sum())
    tables = recorded(name, prompt=prompt, new_tokens=new_tokens, accuracy=accuracy or 0.0, seed=seed)
    keys_PLK = tables.ids_PLK + shape.experts * torch.arange(shape.layers)[:, None]

    def forward(rows: slice) -> Forward:
        keys = [request_order(keys_PK.flatten().tolist()) for keys_PK in keys_PLK[rows].unbind(1)]
        return Forward(fresh=not rows.start, rows=rows, keys=keys)

    spans = [slice(0, prompt), *(slice(at, at + 1) for at in range(prompt, prompt + new_tokens))]
    hints = TableHints(ahead=1, forecasts={}, ids_NLK=tables.forecast_NLK, prompt=prompt)
    return Trace(shape=shape, forwards=[*map(forward, spans)], hints={} if accuracy is None else {"forecasts": hints})


def tokens_ms(
    args: argparse.Namespace, name: str, ratio: float, cached: float, misses: str, accuracy: float | None, link: str
) -> list[float]:
    """Return the milliseconds of each token after the prompt."""
    trace = recorded_trace(name, args.new_tokens, accuracy, args.seed)
    shape, copy_s = trace.shape, ratio * LAYER_S / trace.shape.top_k
    machine = MeasuredMachine(
        times=constant_times(shape.layers, LAYER_S), block_bytes={FULL: 1_000_000}, bandwidth=1e6 / copy_s
    )
    case = Case(
        policies=Policies(prefetch="none" if accuracy is None else "top_k"), machine=machine,
        slots=round(cached * shape.layers * shape.experts), predictor=None if accuracy is None else "forecasts",
    )  # fmt: skip
    host_s = args.held_back * LAYER_S / 2 / shape.top_k
    run = Run(trace, case, misses=misses, expert_s=host_s, hand_over_s=args.hand_over * 1e-3)
    found = []
    for place, forward in enumerate(trace.forwards):
        if link == HOSTILE and isinstance(run.link, MeasuredLink):
            run.link.take(copy_s * (10.0 if place // args.phase % 2 else 1.0))
        seconds = run.run(forward)
        if not forward.fresh:
            found.append(1e3 * seconds)
    return found


def measure(args: argparse.Namespace) -> ResultFile:
    """Simulate all settings."""
    unset = ("out", "page", "allow_dirty")
    file = ResultFile(args, {name: value for name, value in vars(args).items() if name not in unset})
    runs: list[Json] = []
    file.values["runs"] = runs
    torch.set_num_threads(1)
    for name, ratio, cached, link in itertools.product(args.shapes, args.links, args.cached, (STEADY, HOSTILE)):
        for accuracy, misses in itertools.product((None, ACCURACY, RANDOM), SIDES):
            ms = tokens_ms(args, name, ratio, cached, misses, accuracy, link)
            found = {"mean_ms": statistics.fmean(ms), "last_half_ms": statistics.fmean(ms[len(ms) // 2 :])}
            runs.append({
                "shape": name, "link": ratio, "cached": cached, "speed": link, "accuracy": accuracy, "misses": misses,
                **found,
            })  # fmt: skip
    file.write()
    return file


def page(values: Json) -> str:
    """Return the table: ms per token of each side, and the ratios of `auto`."""
    ms = {tuple(run[name] for name in ("shape", "link", "cached", "speed", "accuracy", "misses")): run["mean_ms"]
          for run in values["runs"]}  # fmt: skip
    rows = []
    for setting in dict.fromkeys(key[:4] for key in ms):
        copy, host, auto = (ms[*setting, None, side] for side in SIDES)
        forecast, guessed = (ms[*setting, accuracy, "auto"] for accuracy in (ACCURACY, RANDOM))
        shape, link, cached, speed = setting
        rows.append([
            shape, f"{link:g}", f"{cached:.0%}", speed, *(f"{each:.1f}" for each in (copy, host, auto)),
            f"{auto / copy:.2f}", f"{auto / min(copy, host):.3f}", f"{ms[*setting, ACCURACY, 'copy']:.1f}",
            f"{forecast:.1f}", f"{forecast / auto:.2f}", f"{guessed / auto:.2f}",
        ])  # fmt: skip
    head = ["shape", "R", "cached", "link", "copy", "host", "auto", "auto / copy", "auto / better", "copy, forecasts",
            "auto, forecasts", "/ auto", "random forecasts / auto"]  # fmt: skip
    return markdown(head, rows)


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = result_parser("misses", __doc__)
    parser.add_argument("--shapes", nargs="+", choices=RECORDINGS, default=list(RECORDINGS))
    parser.add_argument("--links", nargs="+", type=positive_number, default=[2.0, 5.0, 10.0], help="R")
    parser.add_argument("--cached", nargs="+", type=positive_number, default=[0.25], help="share of experts with slots")
    parser.add_argument("--held-back", type=positive_number, default=2.0, help="host's time of an expert / device's")
    parser.add_argument("--hand-over", type=positive_number, default=0.05, help="ms")
    parser.add_argument("--new-tokens", type=positive, default=64, help="decoded tokens (default: %(default)s)")
    parser.add_argument("--phase", type=positive, default=16, help="tokens between changes of a tenfold link's speed")
    parser.add_argument("--seed", type=positive, default=1)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, write the result and print the table."""
    file = measure(read_arguments(arguments))
    file.publish("Milliseconds per token", page(file.values))
    return 0
