"""Misses copied, computed on the host, or either (`misses="auto"`), by the runtime over an emulated link.

    python -m benchmarks misses --page benchmarks/misses.md

A model decodes with four layers of Qwen3-30B-A3B, narrower experts, random weights in bf16 and the recorded routing of
`benchmarks/routing`. One thread is the device. Another one is the host: it sleeps until an expert has taken twice as
long as on the device. R is the time of K copies over that of a layer. A link of `tenfold` speed becomes ten
times slower, and fast again, after 16 tokens each. `auto` knows none of these figures: it measures them. The governor
chooses the forecasts, which are right nine times in ten or never.

All sides of a setting are open at once, on copies of the model that share its weights and the experts' store, and take
turns of 16 tokens. Every repetition opens them anew: all learning is part of the figures. All sides must have the same
logits, bit for bit.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from benchmarks.forecasts import shared_store, sharing_copy, turn_order
from benchmarks.results import ResultFile, markdown, result_parser, shown, spread
from benchmarks.shapes import random_model
from benchmarks.timed.routing import PrescribedRouting, recorded, recorded_config
from expertcast.commands.numbers import positive, positive_number
from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors.messages import Json
from expertcast.runtime.benchmarking.bench import BorrowedStore, layer_seconds
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.engine.host import HostExperts
from expertcast.runtime.engine.kernels import SlotKernel, kernel_of
from expertcast.runtime.links.base import Link
from expertcast.runtime.links.emulated import EmulatedLink
from expertcast.runtime.offloading import OffloadedModel, offload

SHAPE, LAYERS, SEED = "qwen3-30b-a3b", 4, 1
SIZES = {"moe_intermediate_size": 384, "num_attention_heads": 16, "vocab_size": 256}
"""Sizes that differ from the shape's: an expert has 4.7 MB."""
PROMPT = 24
"""Tokens before those that are timed. They fill the slots: more than the host would compute."""
TURN = 16
"""Tokens of a turn, and between changes of a tenfold link's speed. It changes within a turn. A turn's first token finds
copies that arrived in other sides' turns, and is left out of the means."""
HELD_BACK = 2.0
"""Time of an expert on the host over that on the device."""
SPEEDS = {"steady": 1.0, "tenfold": 10.0}
RIGHT, RANDOM = 0.9, 0.0
"""Accuracies of forecasts."""
SIDES: dict[str, tuple[str, float | None]] = {
    **{misses: (misses, None) for misses in ("copy", "host", "auto")},
    "copy, forecasts": ("copy", RIGHT), "auto, forecasts": ("auto", RIGHT),
    "copy, random": ("copy", RANDOM), "auto, random": ("auto", RANDOM),
}  # fmt: skip
"""`misses` and accuracy by name."""
RATIOS = {
    "auto / copy": ("auto", ["copy"]), "auto / better": ("auto", ["copy", "host"]),
    "copy: forecasts": ("copy, forecasts", ["copy"]), "auto: forecasts": ("auto, forecasts", ["auto"]),
    "copy: random": ("copy, random", ["copy"]), "auto: random": ("auto, random", ["auto"]),
}  # fmt: skip
"""A side, and those of which the fastest one divides its time, by heading."""


class MeasuredLink(EmulatedLink):
    """A link that knows its speed from its copies alone."""

    copy_s = Link.copy_s


class Side:
    """One way to run a setting, opened once.

    Args:
        offloaded: the model.
    """

    def __init__(self, offloaded: OffloadedModel) -> None:
        self.offloaded, self._cache = offloaded, DynamicCache(config=offloaded.model.config)
        self.tokens_ms, self.logits = list[float](), list[Tensor]()

    @torch.no_grad()
    def step(self, ids_BT: Tensor, bandwidth: float) -> None:
        """Run one forward over a link of this speed."""
        offloaded, start = self.offloaded, time.perf_counter()
        assert isinstance(offloaded.link, MeasuredLink)
        offloaded.link.bandwidth = bandwidth
        output = offloaded(input_ids=ids_BT, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self.tokens_ms.append(round(1e3 * (time.perf_counter() - start), 3))
        self.logits.append(output.logits)


class Settings:
    """Runs the sides of a setting on copies of one model, which share its weights.

    Args:
        args: arguments of the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        config = recorded_config(SHAPE, LAYERS)
        for name, value in SIZES.items():
            setattr(config, name, value)
        self._model = random_model(config, dtype=torch.bfloat16, device="cpu", seed=SEED)
        self._view = find_moe_layers(self._model)
        self._store = BorrowedStore(self._view, torch.device("cpu"))
        self._ids = torch.randint(config.vocab_size, (1, PROMPT + args.turns * TURN))
        self.layer_s = layer_seconds(self._model, self._ids[:, :PROMPT], TURN, self._store)
        """Seconds of a layer with all experts present."""
        kernel, shape, seconds = SlotKernel(kernel_of(self._model)), self._view.shape, []
        hidden_TD, pairs = torch.randn(1, shape.hidden, dtype=torch.bfloat16), torch.arange(shape.top_k)
        for layer, first in itertools.product(self._view, range(0, shape.experts - shape.top_k, shape.top_k)):
            start = time.perf_counter()
            kernel.run_pairs(layer.experts, hidden_TD, shape.top_k, pairs, first + pairs)
            seconds.append((time.perf_counter() - start) / shape.top_k)
        self._expert_s = statistics.median(seconds)
        """Seconds of an expert on the device."""

    def run(self, ratio: float, speed: str, number: int) -> dict[str, list[float]]:
        """Return each side's milliseconds of each token after the prompt."""
        shape = self._view.shape
        fast = shape.top_k * self._store.layout.block_bytes / (ratio * self.layer_s)
        first, *turns = self._ids.split([PROMPT, *[TURN] * self._args.turns], dim=1)
        with ExitStack() as stack:
            sides = {name: self._opened(stack, *SIDES[name], fast) for name in SIDES}
            for side in sides.values():
                side.step(first, fast)
            for turn, ids_BT in enumerate(turns):
                for name, place in itertools.product(turn_order(list(sides), turn + number), range(TURN)):
                    slow = (turn * TURN + place + TURN // 2) // TURN % 2
                    sides[name].step(ids_BT[:, place : place + 1], fast / SPEEDS[speed] if slow else fast)
            logits = [torch.stack(side.logits) for side in sides.values()]
            assert all(torch.equal(own, logits[0]) for own in logits), "the sides have different logits"
            return {name: side.tokens_ms[1:] for name, side in sides.items()}

    def _opened(self, stack: ExitStack, misses: str, accuracy: float | None, bandwidth: float) -> Side:
        model, args, shape = sharing_copy(self._model), self._args, self._view.shape
        tables = recorded(
            SHAPE, layers=LAYERS, prompt=PROMPT, new_tokens=args.turns * TURN, accuracy=accuracy or 0.0, seed=SEED
        )
        routing = stack.enter_context(PrescribedRouting(model, find_moe_layers(model), tables))
        config = OffloadConfig(
            link=MeasuredLink(bandwidth), store=shared_store(self._store, model), misses=misses,
            slots=shape.layers * shape.experts // 4, predictor=None if accuracy is None else routing,
        )  # fmt: skip
        offloaded = stack.enter_context(offload(model, config))
        if offloaded.flow.host is not None:
            hold_back(offloaded.flow.host, HELD_BACK * self._expert_s)
        return Side(offloaded)


def hold_back(host: HostExperts, expert_s: float) -> None:
    """Make the host take so many seconds for an expert."""
    run_pairs = host.run_pairs

    def slowly(module: nn.Module, hidden_TD: Tensor, top_k: int, pairs: Tensor, experts: Tensor) -> Tensor:
        end = time.perf_counter() + expert_s * len(experts.unique())
        output = run_pairs(module, hidden_TD, top_k, pairs, experts)
        time.sleep(max(0.0, end - time.perf_counter()))
        return output

    host.run_pairs = slowly


def measure(args: argparse.Namespace) -> ResultFile:
    """Run what the result lacks."""
    file = ResultFile(args, {"turns": args.turns})
    torch.set_num_threads(1)
    runs, settings, keys = file.values["runs"], Settings(args), ("repetition", "link", "speed")
    known = {tuple(run[key] for key in keys) for run in runs}
    for values in itertools.product(range(args.repetitions), args.links, args.speeds):
        if values not in known:
            number, ratio, speed = values
            sides = settings.run(ratio, speed, number)
            runs.append({**dict(zip(keys, values, strict=True)), "layer_s": settings.layer_s, "tokens_ms": sides})
            file.write()
    return file


def page(values: Json) -> str:
    """Return the tables: ms per token of each side, and ratios of sides in the same repetition."""
    times, ratios = [], []
    for link, speed in sorted({(run["link"], run["speed"]) for run in values["runs"]}):
        own = [
            {side: statistics.fmean(ms for place, ms in enumerate(tokens) if place % TURN)
             for side, tokens in run["tokens_ms"].items()}
            for run in values["runs"] if (run["link"], run["speed"]) == (link, speed)
        ]  # fmt: skip
        times.append([f"{link:g}", speed, *(shown(spread(ms.get(side) for ms in own)) for side in SIDES)])
        found = [spread(ms[side] / min(map(ms.__getitem__, others)) for ms in own) for side, others in RATIOS.values()]
        ratios.append([f"{link:g}", speed, *(shown(each, digits=2) for each in found)])
    return "\n\n".join((markdown(["R", "link", *SIDES], times), markdown(["R", "link", *RATIOS], ratios)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the result lacks, and print the tables."""
    parser = result_parser("misses", __doc__)
    parser.add_argument("--links", nargs="+", type=positive_number, default=[2.0, 5.0, 10.0], help="R")
    parser.add_argument("--speeds", nargs="+", choices=SPEEDS, default=list(SPEEDS))
    parser.add_argument("--turns", type=positive, default=4, help=f"of {TURN} decoded tokens (default: %(default)s)")
    parser.add_argument("--repetitions", type=positive, default=5)
    file = measure(parser.parse_args(arguments))
    file.publish("Milliseconds per token", page(file.values))
    return 0
