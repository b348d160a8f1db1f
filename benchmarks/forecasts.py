"""Time per token on demand, with each way to forecast always, and with `forecasts="auto"`, over a grid of settings.

    python -m benchmarks.forecasts --out benchmarks/results/forecasts.json
    python -m benchmarks.forecasts --shape olmoe-1b-7b --layers 4 --prompt-tokens 8 --new-tokens 16 \
        --links 1 2 5 10 disk disk:5e8 --accuracies .8 .9 .95 --out benchmarks/results/forecasts-large.json

The bundled model decodes its own text with predictors trained here; a shape has random weights and drawn routing
(persistence .3), with forecasts of set accuracy. A link is R, how many times as long K copies take as one layer
computes, or the disk, as it is or at so many bytes per second. Sides run in alternation and are compared by the median
step over all repetitions. Every side must decode the same tokens. The file is written behind every setting; given
again, the command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from benchmarks.results import ResultFile
from expertcast.checkpoints.bundled import REFERENCE
from expertcast.checkpoints.checkpoint import save_predictor
from expertcast.commands.numbers import positive
from expertcast.commands.output import new_file, say
from expertcast.commands.predictors import learned_documents
from expertcast.data.collect import collect
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.plan import TextOptions
from expertcast.data.text import bundled_ids, load_documents
from expertcast.predictors import ExpertcastError, MoEView
from expertcast.predictors.hybrid import HybridConfig
from expertcast.predictors.messages import Json
from expertcast.runtime.benchmarking.bench import decode_resident
from expertcast.runtime.benchmarking.routing import RoutingOptions, RoutingProcess, drawn
from expertcast.runtime.benchmarking.runs import BorrowedStore, balanced_bandwidth
from expertcast.runtime.benchmarking.shapes import build_shape
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.offloading import offload
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.training.fit import fit_many

RUNGS = ("quasi_hidden", "linear", "early_attention", "estimator")
LADDER = "hybrid"
"""The checkpoint that `auto` runs with: all of them."""
ON_DEMAND, AUTO = "on_demand", "auto"
DISK = "disk"
KEPT = ("shape", "layers", "prompt_tokens", "new_tokens", "repetitions", "train_tokens", "threads")
"""Runs of a file with the same ones are kept."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One cell of the grid."""

    link: str
    """R of an emulated link; `disk`, or `disk:` and bytes per second."""
    capacity: float
    """Share of all experts that has slots; 0: no cache."""
    batch: int
    accuracy: float | None
    """Recall of a shape's forecasts."""


class LentFile(DiskStore):
    """A file of experts that one model's offloads use in turn; the model's own experts are views of it.

    Args:
        view: of the model, whose experts are written.
        folder: for the file.
    """

    def __init__(self, view: MoEView, folder: Path) -> None:
        super().__init__(view, folder)
        super().pack(view)
        for layer in view:
            for name, tensor in self.views(layer.index).items():
                layer.experts._parameters[name] = nn.Parameter(tensor, requires_grad=False)

    def pack(self, view: MoEView) -> None:
        """The file is there already."""

    def unpack(self) -> None:
        """The next offload finds it as it is."""

    def close(self) -> None:
        """It stays as long as the process."""


class Grid:
    """Measures the settings that are not known yet.

    Args:
        args: of the command line.
        folder: for traces and checkpoints.
    """

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args, self._folder = args, folder
        self._file = ResultFile(args.out, {name: getattr(args, name) for name in KEPT})
        torch.set_num_threads(args.threads)
        if args.shape == REFERENCE:
            self._model = load_model(REFERENCE)
            self._sides: dict[str, Any] = self._trained()
        else:
            self._model = build_shape(args.shape, layers=args.layers)
            self._sides = {}
        self._view = find_moe_layers(self._model)

    @cached_property
    def _memory(self) -> BorrowedStore:
        return BorrowedStore(self._view, torch.device("cpu"))

    @cached_property
    def _disk(self) -> LentFile:
        return LentFile(self._view, self._folder / "store")

    def measure(self) -> None:
        """All settings, each written when it is done."""
        runs: list[Json] = self._file.values["runs"]
        known = [{name: run[name] for name in Setting.__slots__} for run in runs]
        args = self._args
        accuracies = [None] if self._sides else args.accuracies
        for values in itertools.product(args.links, args.capacities, args.batches, accuracies):
            setting = Setting(*values)
            if asdict(setting) not in known:
                say(f"{setting}")
                runs.append(self._row(setting))
                self._file.write()

    def _trained(self) -> dict[str, Any]:
        """Checkpoints by name, fitted on the bundled text where they do not lie in `--checkpoints`."""
        folder = self._args.checkpoints or self._folder
        if not all((folder / name).is_dir() for name in (*RUNGS, LADDER)):
            options = TextOptions(tokens=self._args.train_tokens)
            documents, tokenizer = load_documents(REFERENCE), load_tokenizer(REFERENCE)
            source = collect(self._model, tokenizer, documents, self._folder / "traces", options)
            fitted = fit_many([*RUNGS, LADDER], source, {LADDER: HybridConfig(candidates=RUNGS)})
            for name, own in fitted.items():
                save_predictor(own.predictor, folder / name, view=source.view)
        return {name: str(folder / name) for name in (*RUNGS, LADDER)}

    def _prompt(self, batch: int) -> Tensor:
        """[B, T]"""
        if self._args.shape != REFERENCE:
            generator = torch.Generator().manual_seed(0)
            return torch.randint(self._model.config.vocab_size, (batch, self._args.prompt_tokens), generator=generator)
        known = learned_documents(list(self._sides.values()))
        ids = torch.tensor(bundled_ids(load_tokenizer(REFERENCE), batch * self._args.prompt_tokens, known))
        return ids.view(batch, -1)

    def _row(self, setting: Setting) -> Json:
        args, prompt_BS = self._args, self._prompt(setting.batch)
        process, sides = None, dict(self._sides)
        if not sides:
            options = RoutingOptions(accuracy=setting.accuracy)
            tables = drawn(self._view.shape, prompt=args.prompt_tokens, new_tokens=args.new_tokens, options=options)
            process = RoutingProcess(self._model, self._view, tables)
            sides = {"always": process.predictor((1,))}
        with process if process is not None else nullcontext():
            common = self._link(setting.link, prompt_BS[:1]) | {"cache": setting.capacity > 0}
            if setting.capacity:
                common["slots"] = round(setting.capacity * self._view.shape.layers * self._view.shape.experts)
            best = list(sides.values())[-1]
            sides.pop(LADDER, None)
            runs = {ON_DEMAND: OffloadConfig(**common)}
            runs |= {name: OffloadConfig(**common, predictor=own, forecasts="always") for name, own in sides.items()}
            runs[AUTO] = OffloadConfig(**common, predictor=best)
            return self._compared(setting, runs, prompt_BS)

    def _link(self, link: str, prompt_1S: Tensor) -> Json:
        """The fields of a configuration that stand for it."""
        name, _, rate = link.partition(":")
        if name == DISK:
            return {"store": self._disk, "bandwidth": float(rate) if rate else None}
        memory = self._memory
        resident = decode_resident(self._model, prompt_1S, self._args.new_tokens)
        return {"store": memory, "bandwidth": balanced_bandwidth(self._model, resident) / float(link)}

    def _compared(self, setting: Setting, runs: dict[str, OffloadConfig], prompt: Tensor) -> Json:
        steps: dict[str, list[list[float]]] = {name: [] for name in runs}
        texts: dict[str, Tensor] = {}
        stats: dict[str, Json] = {}
        for _ in range(self._args.repetitions):
            for name, config in runs.items():
                with offload(self._model, config) as offloaded:
                    seconds, texts[name] = decode(self._model, prompt, self._args.new_tokens, offloaded)
                    steps[name].append(seconds)
                    stats[name] = offloaded.stats.as_dict()
        median = {name: statistics.median([s for own in found for s in own]) for name, found in steps.items()}
        count = self._args.new_tokens - 1
        computing = median[ON_DEMAND] - stats[ON_DEMAND]["waited_s"] / count
        bandwidth = runs[ON_DEMAND].bandwidth
        least = min(own["bytes_moved"] for own in stats.values()) / count
        fixed = min(value for name, value in median.items() if name != AUTO)
        return {
            **asdict(setting), "bandwidth": bandwidth,
            "ms": {name: 1e3 * value for name, value in median.items()},
            "repetitions_ms": {name: [1e3 * statistics.median(own) for own in each] for name, each in steps.items()},
            "bound_ms": 1e3 * max(computing, least / bandwidth if bandwidth else 0.0),
            "auto_over_on_demand": median[AUTO] / median[ON_DEMAND],
            "auto_over_best_fixed": median[AUTO] / fixed,
            "identical": all(torch.equal(text, texts[ON_DEMAND]) for text in texts.values()),
            "hit_rate": {name: own["hit_rate"] for name, own in stats.items()},
            "chosen": stats[AUTO]["forecasts"],
        }  # fmt: skip


@torch.no_grad()
def decode(model: PreTrainedModel, prompt_BS: Tensor, new_tokens: int, offloaded: Any) -> tuple[list[float], Tensor]:
    """Greedy decoding: seconds of every step after the prompt's, and the tokens [B, new_tokens]."""
    cache, inputs, seconds, tokens = DynamicCache(config=model.config), prompt_BS, [], []
    for step in range(new_tokens):
        start = time.perf_counter()
        inputs = model(input_ids=inputs, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
        seconds.append(time.perf_counter() - start)
        tokens.append(inputs)
        if not step:
            offloaded.reset_stats()
    return seconds[1:], torch.cat(tokens, dim=1)


def table(values: Json) -> str:
    """Markdown: a row per setting."""
    names = list(values["runs"][0]["ms"])
    columns = ["link", "cached", "batch", "accuracy", *names, "bound", "auto / on demand", "auto / best fixed"]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for run in values["runs"]:
        cells = [run["link"], f"{run['capacity']:.0%}", str(run["batch"]), str(run["accuracy"] or "")]
        cells += [f"{run['ms'][name]:.1f}" for name in names] + [f"{run['bound_ms']:.1f}"]
        cells += [f"{run[key]:.3f}" for key in ("auto_over_on_demand", "auto_over_best_fixed")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=new_file, required=True, help="JSON; gone on with where it stopped")
    parser.add_argument("--shape", default=REFERENCE)
    parser.add_argument("--layers", type=positive, help="MoE layers of a shape")
    parser.add_argument("--links", nargs="+", default=["1", "2", "5", "10"], help="R, disk, or disk:BYTES_PER_SECOND")
    parser.add_argument("--capacities", type=float, nargs="+", default=[0.0, 0.1, 0.25, 0.5])
    parser.add_argument("--batches", type=positive, nargs="+", default=[1])
    parser.add_argument("--accuracies", type=float, nargs="+", default=[0.9], help="of a shape's forecasts")
    parser.add_argument("--prompt-tokens", type=positive, default=64)
    parser.add_argument("--new-tokens", type=positive, default=64)
    parser.add_argument("--repetitions", type=positive, default=3)
    parser.add_argument("--train-tokens", type=positive, default=100_000)
    parser.add_argument("--checkpoints", type=Path, help="folder of checkpoints by predictor name; others are trained")
    parser.add_argument("--threads", type=positive, default=1)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 with one line on standard error."""
    args = read_arguments(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-forecasts-") as folder:
            grid = Grid(args, Path(folder))
            grid.measure()
            print(table(grid._file.values))
    except ExpertcastError as error:
        print(f"benchmarks.forecasts: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
