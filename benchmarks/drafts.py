"""Time per token with drafts: who drafts, how far ahead, over which link, in which cache, against exact decoding.

    python -m benchmarks.drafts --out benchmarks/results/drafts.json

decodes continuations of bundled texts greedily with the bundled model, and with the same model made wide (experts of
real size, written below --keep), over emulated links and the real disk. Sides run in turns. In the main setting (copies
5 times computing, 25% of the experts) all of them run; `draft_sides.py` has the lists. The file is written after
every run; given again, the command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

import torch
import transformers

from benchmarks.draft_runs import Learnt, Models, Runner
from benchmarks.draft_sides import AUTO, INT4, Setting, Side, grouped, row, same_tokens, settings
from benchmarks.draft_sides import sides as sides_of
from benchmarks.results import ResultFile
from expertcast.commands.output import say
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json

SETTINGS = ("small", "prompt", "new_tokens", "wide_tokens", "expert_bytes", "threads")
"""Runs of a file with the same ones are kept."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 with one line on standard error."""
    args = _parser().parse_args(arguments)
    if args.small:
        args.prompt, args.new_tokens, args.wide_tokens, args.expert_bytes = 24, 8, 6, 150_000
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    try:
        with ExitStack() as stack:
            if args.keep is None:
                args.keep = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-drafts-")))
            args.keep.mkdir(parents=True, exist_ok=True)
            bench = Bench(args)
            bench.measure()
    except ExpertcastError as error:
        print(f"benchmarks.drafts: {error}", file=sys.stderr)
        return 2
    return 0


class Bench:
    """Measures what is not known yet.

    Args:
        args: of the command line.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._begun = args, time.monotonic()
        self._learnt: dict[tuple[str, str], Learnt] = {}
        settings = {name: getattr(args, name) for name in SETTINGS}
        self._file = ResultFile(args.out, settings, models={}, results=[], left_out=[])
        self.result = self._file.values
        self._known = {(own["setting"], own["side"], own["prompt"], own["round"]) for own in self.result["runs"]}
        self._models = Models(args, self.result["models"])

    def measure(self) -> None:
        """All settings, one after another."""
        self.result["left_out"] = []
        for setting in settings(self._args.small):
            if not self._args.settings or any(part in setting.name for part in self._args.settings):
                self._measure(setting)
        self._write()

    def _measure(self, setting: Setting) -> None:
        rounds, texts = self._size(setting)
        wanted = sides_of(setting, self._args.only)
        for number in range(rounds):
            for _, own in groupby(grouped(wanted), key=lambda side: side.group):
                sides = list(own)
                due = [each for each in sides if self._due(setting, each, number, texts)]
                if due and self._spent():
                    self.result["left_out"] += [f"{setting.name}: {each.name}, round {number + 1}" for each in due]
                elif due:
                    self._run_group(setting, sides, number, texts)

    def _run_group(self, setting: Setting, sides: Sequence[Side], number: int, texts: int) -> None:
        """One offload, all its sides and prompts, in turns."""
        model = self._models.get(setting.model)
        first, kept = sides[0], model.kept
        slots = model.slots(setting.capacity, same_memory=first.same_memory)
        options: Json = {**model.link_options(setting), "predictor": first.forecasts}
        options |= {"slots": slots, "cache": setting.capacity > 0 or first.same_memory}
        with Runner(model.path, options) as runner:
            if "int4_bytes" not in kept:
                kept["int4_bytes"] = runner.int4_bytes()
            ratio = runner.layer_copy_s / kept["layer_s"] if setting.ratio is None else setting.ratio
            for prompt in range(texts):
                turn = (number + prompt) % len(sides)
                for side in (*sides[turn:], *sides[:turn]):
                    key = (setting.name, side.name, prompt, number)
                    if key in self._known or self._spent():
                        continue
                    learnt = self._learnt.setdefault((setting.name, side.name), Learnt())
                    runner.learn(side, learnt, self._models.warm, model.new_tokens)
                    found = runner.run(side, learnt, self._models.prompts[prompt], model.new_tokens)
                    ids, truth = found.pop("ids"), kept["ids"][prompt]
                    found |= {
                        "tokens": len(ids),
                        "distinct": len(set(ids)),
                        "same": same_tokens(ids, truth[: len(ids)]),
                    }
                    self._keep(setting, side, ratio, slots, learnt, {
                        **dict(zip(("setting", "side", "prompt", "round"), key, strict=True)), **found
                    })  # fmt: skip

    def _keep(self, setting: Setting, side: Side, ratio: float, slots: int, learnt: Learnt, run: Json) -> None:
        """Store a run, make the row anew, write."""
        name = (setting.name, side.name)
        self._known.add((*name, run["prompt"], run["round"]))
        self.result["runs"].append(run)
        own = [each for each in self.result["runs"] if (each["setting"], each["side"]) == name]
        made: Json = {"setting": setting.name, "side": side.name}
        made |= row(setting, side, ratio, slots, learnt.memory_bytes, own)
        if side.governed and side.draft in (INT4, AUTO):
            made["governor"] = learnt.report
        rows = self.result["results"]
        self.result["results"] = [each for each in rows if (each["setting"], each["side"]) != name] + [made]
        say(f"{setting.name}: {side.name}, text {run['prompt'] + 1}: {1e3 * run['tpot_s']:.1f} ms per token")
        self._write()

    def _size(self, setting: Setting) -> tuple[int, int]:
        """Rounds and texts."""
        args = self._args
        return (args.rounds, args.prompts) if setting.main else (args.other_rounds, args.other_prompts)

    def _due(self, setting: Setting, side: Side, number: int, texts: int) -> bool:
        return any((setting.name, side.name, prompt, number) not in self._known for prompt in range(texts))

    def _spent(self) -> bool:
        return self._args.budget is not None and time.monotonic() - self._begun > self._args.budget

    def _write(self) -> None:
        self._file.write()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="drafts to run beside the baselines (default: all)")
    parser.add_argument("--settings", nargs="*", default=[], help="parts of the names of settings (default: all)")
    parser.add_argument("--prompts", type=int, default=3, help="texts of the main setting (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each there (default: %(default)s)")
    parser.add_argument("--warm", type=int, default=3, help="texts that auto learns on (default: %(default)s)")
    parser.add_argument("--other-prompts", type=int, default=2, help="texts elsewhere (default: %(default)s)")
    parser.add_argument("--other-rounds", type=int, default=1, help="runs of each there (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a text (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=96, help="behind the first (default: %(default)s)")
    parser.add_argument("--wide-tokens", type=int, default=32, help="the same of the wide model (default: %(default)s)")
    parser.add_argument("--expert-bytes", type=int, default=4_000_000, help="of the wide model (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: %(default)s)")
    parser.add_argument("--budget", type=float, help="seconds after which nothing more is begun (default: none)")
    parser.add_argument("--keep", type=Path, help="folder for the wide model and its store (default: a temporary one)")
    parser.add_argument("--small", action="store_true", help="few tokens, narrow experts, two settings")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
