"""Rows of the benchmark on a shape that is built once, and cut to what time and memory allow."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from expertcast.cli import build_parser
from expertcast.commands.bench import Options
from expertcast.commands.bench_target import Target
from expertcast.commands.options import read_options
from expertcast.data.discovery import find_moe_layers
from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.benchmarking.lent_store import LentStore, without_experts_to
from expertcast.runtime.benchmarking.shapes import build_shape, check_shape
from gpu_steps.day import Day

SHAPE, SMALL_SHAPE = "qwen3-30b-a3b", "reference"
LAYERS, SMALL_LAYERS = (48, 40, 32, 24, 16, 8, 4), (2,)
"""What is tried, the most first."""
ROWS_S = 150
"""Of 48 layers, kept for what is measured; fewer layers take their share."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How many layers there are, and why not more."""

    layers: int
    because: str | None


def shape_of(day: Day) -> str:
    """Whose rows these are."""
    return SMALL_SHAPE if day.small else SHAPE


def options_of(day: Day, layers: int, *words: str) -> Options:
    """The options that `expertcast bench` reads from these words, for this day's shape and device."""
    command = ["bench", shape_of(day), "--layers", str(layers), "--device", day.device, *words]
    options = read_options(Options, build_parser("bench").parse_args(command))
    assert isinstance(options, Options)
    return options


def build(options: Options) -> tuple[Target, dict[str, Any]]:
    """The shape with its experts in host memory, page-locked for CUDA; and what that took."""
    device = torch.device(options.device_name)
    start = time.monotonic()
    model = build_shape(options.target, layers=options.layers, dtype=options.dtype, seed=options.seed)
    built = time.monotonic()
    view = find_moe_layers(model)
    model = without_experts_to(model, device)
    store = LentStore(view, device)
    found = {
        "layers": options.layers,
        "shape": view.shape.as_dict(),
        "expert_bytes": store.nbytes,
        "page_locked": all(store.pinned_layers),
        "build_s": built - start,
        "pack_and_lock_s": time.monotonic() - built,
    }
    return Target(options, model, view, store), found


def cut(day: Day, seconds: float, most: int | None = None) -> Cut:
    """The layers for which there are time and memory; how long a layer takes is tried with one.

    Args:
        day: which shape, on what.
        seconds: for building and measuring.
        most: layers that are wanted at most.

    Raises:
        ExpertcastError: not even the fewest fit.
    """
    choices = [count for count in (SMALL_LAYERS if day.small else LAYERS) if most is None or count <= most]
    because = None
    layer_s = _layer_seconds(day)
    for count in choices:
        try:
            check_shape(shape_of(day), layers=count)
        except ExpertcastError as error:
            because = f"memory: {error}"
            continue
        takes = count * layer_s + (0 if day.small else ROWS_S * count / LAYERS[0])
        if takes <= seconds:
            return Cut(count, because)
        because = f"clock: {count} layers take about {takes:.0f} s, {seconds:.0f} s are left"
    raise ExpertcastError(f"not even {choices[-1]} layers: {because}")


def _layer_seconds(day: Day) -> float:
    """Of building and packing one layer; what is around the layers counts as one more."""
    start = time.monotonic()
    target, _ = build(options_of(day, 1))
    target.store.give_back(torch.device("cpu"))
    return (time.monotonic() - start) / 2


def identical(prompt: dict[str, Any]) -> bool:
    """Whether every run decoded the bits that it must."""
    kept = [run["identical"] for name, run in prompt["runs"].items() if name.startswith(("on_demand", "exact"))]
    return bool(kept) and all(kept)
