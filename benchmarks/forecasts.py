"""Time per token on demand, with each way to forecast always, and with `forecasts="auto"`, over a grid of settings.

    python -m benchmarks forecasts --checkpoints FOLDER

The bundled model reads text that its predictors have not seen. A link is R, how many times as long K copies take as one
layer computes.

All sides of a setting are open at once, on copies of the model that share every weight and the experts' store, and take
turns of 11 decode steps over the same tokens. The first step of a turn has cold caches and an idle link: it runs, and
is left out of the figures of every side. All sides must predict the same tokens. Every repetition opens the sides anew,
so that each gets other memory: where it lies makes a side several percent faster or slower. Ratios are medians of the
repetitions, with the least and the most; the best fixed side of a repetition is chosen on the others. The file is
written after every setting, and the same command resumes it; once every setting is measured, the command only prints
the table.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from benchmarks.results import ResultFile, markdown, result_parser, shown, spread
from expertcast.checkpoints.bundled import REFERENCE
from expertcast.checkpoints.checkpoint import save_predictor
from expertcast.commands.numbers import positive, positive_number
from expertcast.commands.output import say
from expertcast.commands.predictors import learned_documents
from expertcast.data.collect import collect
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.plan import TextOptions
from expertcast.data.text import bundled_ids, load_documents
from expertcast.predictors import MoEView
from expertcast.predictors.hybrid import HybridConfig
from expertcast.predictors.linear import LinearConfig, default_inputs
from expertcast.predictors.messages import Json
from expertcast.runtime.benchmarking.bench import BorrowedStore, decode_resident
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.offloading import OffloadedModel, offload
from expertcast.runtime.storage.layout import BlockLayout
from expertcast.training.fit import fit_many

ON_DEMAND, AUTO = "on_demand", "auto"
TURN = 11
"""Decode steps of a turn; the first one is left out. No multiple of 8: the governor of forecasts tries other kinds of
steps after 8, 16, 32 ... steps, which would then all have cold caches."""
UNTRAINED = (ON_DEMAND, "quasi_hidden", "early_attention")
"""Sides whose forecasts need no training."""
RUNGS = ("quasi_hidden", "linear", "early_attention", "estimator")
LADDER = "hybrid"
"""Checkpoint for `auto`: all rungs in one predictor."""
KEPT = ("prompt_tokens", "new_tokens", "repetitions", "train_tokens", "threads")
"""Options that a resumed file must share."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One cell of the grid."""

    link: float
    """R."""
    capacity: float
    """Share of all experts that has slots; 0: no cache."""
    batch: int


@dataclass
class Times:
    """Times and tokens of one side of a setting, over all repetitions."""

    tokens: list[Tensor] = field(default_factory=list)
    """Predicted tokens [B] of each step."""
    turns: dict[str, list[float]] = field(default_factory=lambda: {"seconds": [], "waited_s": []})
    """By turn: seconds and seconds of waiting of all steps but the first."""
    hits: int = 0
    requests: int = 0
    bytes_moved: int = 0

    def figures(self, steps: int) -> Json:
        """Return the turns, the hit rate, and the bytes moved per step of `steps`."""
        hit_rate = self.hits / self.requests if self.requests else 0.0
        return {**self.turns, "hit_rate": hit_rate, "bytes": self.bytes_moved / steps}


@dataclass
class Side:
    """One way to run a setting, opened once."""

    offloaded: OffloadedModel
    cache: DynamicCache
    times: Times

    @torch.no_grad()
    def step(self, ids_BT: Tensor) -> float:
        """Run one forward; return its seconds."""
        start = time.perf_counter()
        logits = self.offloaded.model(input_ids=ids_BT, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        predicted_B = logits.logits[:, -1].argmax(-1)
        seconds = time.perf_counter() - start
        self.times.tokens.append(predicted_B)
        return seconds

    def turn(self, ids_BT: Tensor) -> None:
        """Run one step for each of the T tokens."""
        first, *others = ids_BT.split(1, dim=1)
        self.step(first)
        before = self.offloaded.stats.total
        seconds = sum(self.step(ids_B1) for ids_B1 in others)
        after, times = self.offloaded.stats.total, self.times
        values = {"seconds": seconds, "waited_s": after.waited_s - before.waited_s}
        for name, value in values.items():
            times.turns[name].append(round(value, 7))
        times.hits += after.hits - before.hits
        times.requests += after.requests - before.requests


class Grid:
    """Measures the settings that the file does not hold yet.

    Args:
        args: arguments of the command line.
        folder: temporary folder for traces and checkpoints.
    """

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args, self._folder = args, folder
        self._file = ResultFile(args, {name: getattr(args, name) for name in KEPT})
        torch.set_num_threads(args.threads)

    def measure(self) -> ResultFile:
        """Measure all settings, writing the file after each."""
        runs: list[Json] = self._file.values["runs"]
        known = [{name: run[name] for name in Setting.__slots__} for run in runs]
        args = self._args
        for values in itertools.product(args.links, args.capacities, args.batches):
            setting = Setting(*values)
            if asdict(setting) not in known:
                say(f"{setting}")
                runs.append(self._row(setting))
                self._file.write()
        return self._file

    @cached_property
    def _model(self) -> PreTrainedModel:
        return load_model(REFERENCE)

    @cached_property
    def _view(self) -> MoEView:
        return find_moe_layers(self._model)

    @cached_property
    def _store(self) -> BorrowedStore:
        return BorrowedStore(self._view, torch.device("cpu"))

    @cached_property
    def _checkpoints(self) -> dict[str, str]:
        """Folders by predictor name; predictors that `--checkpoints` lacks are trained on the bundled text."""
        folder = self._args.checkpoints or self._folder
        if not all((folder / name).is_dir() for name in (*RUNGS, LADDER)):
            options = TextOptions(tokens=self._args.train_tokens)
            documents, tokenizer = load_documents(REFERENCE), load_tokenizer(REFERENCE)
            source = collect(self._model, tokenizer, documents, self._folder / "traces", options)
            late = LinearConfig(inputs=default_inputs(source.view.shape, ["early"]))  # as in a hybrid with an estimator
            fitted = fit_many([*RUNGS, LADDER], source, {LADDER: HybridConfig(candidates=RUNGS), "linear": late})
            for name, own in fitted.items():
                save_predictor(own.predictor, folder / name, view=source.view)
        return {name: str(folder / name) for name in (*RUNGS, LADDER)}

    @cached_property
    def _balanced(self) -> float:
        """Bytes per second of R = 1, the same for all settings of a file."""
        for run in self._file.values["runs"]:
            return float(run["link"] * run["bandwidth"])
        prompt, steps = self._args.prompt_tokens, min(64, self._args.new_tokens)
        resident = decode_resident(self._model, self._ids(1)[:, :prompt], steps)
        layer_s = statistics.median(resident.steps_s) / len(self._view)
        return self._layer_bytes / layer_s

    @cached_property
    def _layer_bytes(self) -> int:
        """Bytes of K experts."""
        return self._view.shape.top_k * BlockLayout.of(self._view).block_bytes

    def _ids(self, batch: int) -> Tensor:
        """Return the tokens of the prompt and of all steps, [B, T], of unseen text."""
        length = self._args.prompt_tokens + self._args.new_tokens
        known = learned_documents(list(self._checkpoints.values()))
        return torch.tensor(bundled_ids(load_tokenizer(REFERENCE), batch * length, known)).view(batch, length)

    def _row(self, setting: Setting) -> Json:
        times = {name: Times() for name in (ON_DEMAND, *RUNGS, AUTO)}
        repetitions = self._args.repetitions
        ids_BT = self._ids(setting.batch)
        chosen = [self._repetition(setting, ids_BT, times, number) for number in range(repetitions)]
        texts = [torch.stack(own.tokens) for own in times.values()]
        return {
            **asdict(setting),
            "bandwidth": self._balanced / setting.link,
            "layers": len(self._view),
            "layer_bytes": self._layer_bytes,
            "repetitions": repetitions,
            "identical": all(torch.equal(text, texts[0]) for text in texts),
            "chosen": chosen,
            "sides": {name: own.figures(repetitions * self._args.new_tokens) for name, own in times.items()},
        }

    def _repetition(self, setting: Setting, ids_BT: Tensor, times: dict[str, Times], number: int) -> Json:
        """Run the prompt and all turns with sides that are opened anew; return which forecasts `auto` made, and why."""
        prompt = self._args.prompt_tokens
        turns_BT = ids_BT[:, prompt:].split(TURN, dim=1)
        with self._opened(setting, times) as sides:
            for side in sides.values():
                side.step(ids_BT[:, :prompt])
                side.offloaded.reset_stats()
            for turn, turn_BT in enumerate(turns_BT, start=number * len(turns_BT)):
                for name in turn_order(list(sides), turn):
                    sides[name].turn(turn_BT)
            for side in sides.values():
                side.times.bytes_moved += side.offloaded.stats.total.bytes_moved
            chosen: Json = sides[AUTO].offloaded.stats.as_dict()["forecasts"]
        return chosen

    @contextmanager
    def _opened(self, setting: Setting, times: dict[str, Times]) -> Iterator[dict[str, Side]]:
        """Open all sides of a setting by name; their times are added to `times`."""
        slots = round(setting.capacity * self._view.shape.layers * self._view.shape.experts) or None
        bandwidth, store = self._balanced / setting.link, self._store
        with ExitStack() as stack:
            sides = {}
            for name, own_times in times.items():
                model = sharing_copy(self._model)
                options: Json = {} if name in (ON_DEMAND, AUTO) else {"forecasts": "always"}
                if name != ON_DEMAND:
                    options["predictor"] = self._checkpoints[LADDER if name == AUTO else name]
                own = shared_store(store, model)
                config = OffloadConfig(store=own, bandwidth=bandwidth, cache=slots is not None, slots=slots, **options)
                offloaded = stack.enter_context(offload(model, config))
                sides[name] = Side(offloaded, DynamicCache(config=model.config), own_times)
            gc.collect()
            gc.freeze()  # a run has one model: the objects of several are left out of later collections
            stack.callback(gc.unfreeze)
            yield sides


def sharing_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model with modules of its own and the same parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def shared_store(store: BorrowedStore, model: PreTrainedModel) -> BorrowedStore:
    """Return a store of the same blocks for the offload of a copy of the model."""
    own = copy.copy(store)
    own._view = find_moe_layers(model)  # its experts become views of the store again at the end
    return own


def turn_order(names: Sequence[str], turn: int) -> list[str]:
    """Return the order of a turn: rotated by one every second turn, and reversed in odd turns.

    Over 2n turns of n sides, every side has each place twice, once in an even and once in an odd turn, and follows
    different sides.
    """
    shift = turn // 2 % len(names)
    order = [*names[shift:], *names[:shift]]
    return order[::-1] if turn % 2 else order


def page(values: Json) -> str:
    """Return the table of a result file: milliseconds per step of each side, the best fixed one bold, the bound (the
    larger of computing, and of the time that the fewest bytes of a side take over the link), and the time of `auto`
    over on demand, over the best fixed side, and over the best one whose forecasts need no training.

    R is the copy time of K experts over the computing of a layer on demand, as measured in the run.
    """
    rows, untrained = [], []
    for run in sorted(values["runs"], key=lambda run: (float(run["link"]), run["capacity"], run["batch"])):
        sides, count = run["sides"], run["repetitions"]
        ms = {name: 1e3 * statistics.fmean(side["seconds"]) / (TURN - 1) for name, side in sides.items()}
        waited_ms = 1e3 * statistics.fmean(sides[ON_DEMAND]["waited_s"]) / (TURN - 1)
        computing_ms, fixed = ms[ON_DEMAND] - waited_ms, [name for name in sides if name != AUTO]
        parts = {name: torch.tensor(side["seconds"]).view(count, -1).sum(1).tolist() for name, side in sides.items()}
        ratios = []
        for names in ([ON_DEMAND], fixed, UNTRAINED):
            chosen = [min(names, key=lambda name: (sum(parts[name]) - parts[name][at], parts[name][at]))
                      for at in range(count)]  # fmt: skip
            ratios.append(spread(parts[AUTO][at] / parts[name][at] for at, name in enumerate(chosen)))
        untrained.append(ratios[-1]["median"])
        cells = {name: f"{each:.1f}" for name, each in ms.items()}
        best = min(fixed, key=ms.__getitem__)
        cells[best] = f"**{cells[best]}**"
        bound_ms = max(computing_ms, 1e3 * min(side["bytes"] for side in sides.values()) / run["bandwidth"])
        ratio = 1e3 * run["layer_bytes"] / run["bandwidth"] / (computing_ms / run["layers"])
        setting = [f"{float(run['link']):g}", f"{ratio:.1f}", f"{run['capacity']:.0%}", str(run["batch"])]
        rows.append([*setting, *cells.values(), f"{bound_ms:.1f}", *(shown(each, digits=2) for each in ratios)])
    head = ["R set", "R", "cached", "batch", ON_DEMAND, *RUNGS, AUTO, "bound", "auto / on demand", "auto / best fixed",
            "auto / best untrained"]  # fmt: skip
    differ = sum(not run["identical"] for run in values["runs"])
    median = f"Median of auto / best untrained: {statistics.median(untrained):.3f}."
    return f"{markdown(head, rows)}\n\n{median} Tokens differ in {differ} of {len(rows)} settings."


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what the result lacks, and print the tables."""
    parser = result_parser("forecasts", __doc__)
    parser.add_argument("--links", nargs="+", type=positive_number, default=[1.0, 2.0, 5.0], help="R")
    parser.add_argument("--capacities", type=float, nargs="+", default=[0.0, 0.1, 0.25, 0.5])
    parser.add_argument("--batches", type=positive, nargs="+", default=[1])
    parser.add_argument("--prompt-tokens", type=positive, default=64)
    parser.add_argument("--turns", type=positive, default=10, help=f"of {TURN} decode steps each")
    parser.add_argument("--repetitions", type=positive, default=3, help="each opens all sides anew")
    parser.add_argument("--train-tokens", type=positive, default=100_000)
    parser.add_argument("--checkpoints", type=Path, help="folder of checkpoints by predictor name; trained if missing")
    parser.add_argument("--threads", type=positive, default=1)
    args = parser.parse_args(arguments)
    args.new_tokens = args.turns * TURN
    with tempfile.TemporaryDirectory(prefix="bench-forecasts-") as folder:
        file = Grid(args, Path(folder)).measure()
        file.publish("Grid", page(file.values))
    return 0
