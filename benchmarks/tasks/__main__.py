"""What executing forecasts and leaving out experts costs a model: perplexity, agreement, KL and tasks, row by row.

    python -m benchmarks.tasks --out benchmarks/results/tasks.json

collects traces of the bundled model (or takes those at --traces), fits what is executed (or takes the checkpoints among
--predictor), and reads texts of the traces' test split, which no predictor saw: half of each at once, at most --prefill
tokens, the rest token by token, in the offloaded runtime. Any predictor's name or checkpoint is a row. Rows that leave
out experts are read one text at a time, for what they do depends on what the cache holds.

The file is written after every row; given again, the command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.tasks.rows import RESIDENT, Row, choices, fitted_predictors, forecast_rows, lossy_rows
from benchmarks.tasks.suite import Passages, TaskScore, copying, make_tasks, measure_tasks
from expertcast.checkpoints.provenance import provenance
from expertcast.commands.output import write_json
from expertcast.data.collect import collect
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.text import load_documents
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError
from expertcast.predictors.hybrid import HybridConfig
from expertcast.predictors.messages import Json
from expertcast.runtime.quality.forecasts import text_windows
from expertcast.runtime.quality.policies import measure_policies
from expertcast.runtime.simulation.trace import PREFILL

CONTROL = "_control"
SETTINGS = ("model", "traces", "prefill", "window", "windows", "questions", "seed", "slots", "together")
"""Rows of a file with the same ones are kept."""
WINDOW, CHARS = 128, 600
"""Tokens of a window of the language columns, and characters that are read of each document."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 with one line on standard error."""
    args = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            Table(args, _traces(args, Path(temporary) / "traces")).measure()
    except ExpertcastError as error:
        print(f"benchmarks.tasks: {error}", file=sys.stderr)
        return 2
    return 0


class Table:
    """Measures one row after another."""

    def __init__(self, args: argparse.Namespace, traces: TraceDataset) -> None:
        self._args, self._traces = args, traces
        self._model, tokenizer = load_model(args.model), load_tokenizer(args.model)
        texts = held_out(args.data, traces)
        self._tasks = make_tasks(tokenizer, texts, count=args.count, seed=args.seed)
        passages = Passages(tokenizer=tokenizer, texts=texts)
        self._control = copying(passages, args.count, random.Random(f"{args.seed} copying"), repeated=False)
        beginnings = [text[:CHARS] for text in texts]
        self._windows_NW = text_windows(tokenizer, beginnings, length=WINDOW, count=args.windows)
        self.result: Json = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"), **provenance(), "model": args.model,
            "traces": traces.info["id"], "split_tokens": traces.info["splits"], "prefill": args.prefill,
            "window": WINDOW, "windows": len(self._windows_NW), "questions": args.count, "seed": args.seed,
            "slots": args.slots, "together": args.together, "rows": {},
        }  # fmt: skip
        if args.out.is_file():
            earlier = json.loads(args.out.read_text())
            same = all(earlier.get(key) == self.result[key] for key in SETTINGS)
            self.result = {**earlier, **self.result, "rows": earlier["rows"]} if same else self.result

    def measure(self) -> None:
        """All rows that are not known yet; each is written as soon as it is, and all are printed at the end."""
        args, known = self._args, self.result["rows"]
        rows = {RESIDENT: Row(config=None)}
        lossy = lossy_rows(args.slots)
        if not args.only or set(args.only) - set(lossy):
            fitted = fitted_predictors(args.predictor, self._traces, args.low_recall)
            self.result["chosen"] = {name: choices(each) for name, each in fitted.items() if choices(each)}
            rows |= forecast_rows(args.slots, self._traces, fitted)
        rows |= lossy
        for name, row in rows.items():
            if name in known or (args.only and name not in (RESIDENT, *args.only)):
                continue
            alike = [other for other, each in rows.items() if row.executes and each.executes == row.executes]
            twin = next((other for other in alike if other in known), None)
            known[name] = self._row(row) if twin is None else {**known[twin], "same_as": twin}
            write_json(args.out, self.result)
            print(f"{name}: done", file=sys.stderr, flush=True)
        self.result["rows"] = {name: known[name] for name in (*rows, *known) if name in known}
        write_json(args.out, self.result)
        print("\n".join(table(self.result)))

    def _row(self, row: Row) -> Json:
        together = 1 if row.alone else self._args.together
        batch = math.gcd(together, len(self._windows_NW))
        runs = {} if row.config is None else {"run": row.config}
        found = measure_policies(self._model, self._windows_NW, runs, prefill=self._args.prefill, batch=batch)
        values = found["runs"]["run" if runs else "exact"]
        return {**values, "tokens": found["tokens"], "texts_together": together, "tasks": self._answers(row, together)}

    def _answers(self, row: Row, together: int) -> Json:
        """A row's scores by task, compared with the resident model's."""
        exact = row.config is None
        scores = measure_tasks(
            self._model, [*self._tasks, self._control] if exact else self._tasks, row.config,
            prefill=self._args.prefill, together=together,
        )  # fmt: skip
        resident = {} if exact else self._resident()
        return {task: score.as_dict(resident.get(task)) for task, score in scores.items()}

    def _resident(self) -> dict[str, TaskScore]:
        """What the resident model answered, here or before the command was given again."""
        known: Mapping[str, Json] = self.result["rows"][RESIDENT]["tasks"]
        return {
            name: TaskScore(outcomes=tuple(mark == "1" for mark in each["answers"]), chance=each["chance"], choice=True)
            for name, each in known.items()
        }


def held_out(data: Sequence[str], traces: TraceDataset) -> list[str]:
    """The documents of the traces' test split.

    Raises:
        ExpertcastError: the traces are of other text.
    """
    documents = {document.index: document for document in load_documents(list(data))}
    chosen = [each.index for each in traces.documents if each.split == "test" and each.index in documents]
    if not chosen:
        raise ExpertcastError("no document of --data is in the traces' test split: give the text that they are of")
    return [documents[index].text for index in chosen]


def table(result: Json) -> list[str]:
    """The lines of a Markdown table; scores with their 95% intervals."""
    first: Json = next(iter(result["rows"].values()))
    tasks = [name for name in first["tasks"] if not name.endswith(CONTROL)]
    lines = [["run", "perplexity", "agreement", "KL", *tasks], ["---"] * (4 + len(tasks))]
    for name, row in result["rows"].items():
        scores = [row["tasks"][task] for task in tasks]
        shown = [f"{score['score']:.3f} [{score['interval'][0]:.3f}, {score['interval'][1]:.3f}]" for score in scores]
        lines.append([name, f"{row['perplexity']:.3f}", f"{row['top1_agreement']:.1%}", f"{row['kl']:.4f}", *shown])
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def _traces(args: argparse.Namespace, folder: Path) -> TraceDataset:
    folder = args.traces or folder
    if folder.is_dir():
        return TraceDataset.open(folder)
    model, tokenizer = load_model(args.model), load_tokenizer(args.model)
    return collect(model, tokenizer, load_documents(args.data), folder, tokens=args.tokens)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference", help="local folder, hub id (default: %(default)s)")
    parser.add_argument("--data", nargs="+", default=["reference"], help="text of the traces (default: the bundled)")
    parser.add_argument("--tokens", type=int, default=510_000, help="tokens to collect (default: %(default)s)")
    parser.add_argument("--traces", type=Path, help="traces to use, collected there first if there are none")
    parser.add_argument("--predictor", nargs="*", default=[], help="checkpoints to use, and further predictors as rows")
    parser.add_argument("--low-recall", type=float, default=HybridConfig.low_recall, help="of hybrid with rule=paper")
    parser.add_argument("--count", type=int, default=200, help="questions of each task (default: %(default)s)")
    parser.add_argument("--windows", type=int, default=40, help="texts of the language columns (default: %(default)s)")
    parser.add_argument("--prefill", type=int, default=PREFILL, help="tokens read at once (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=192, help="experts that fit (default: %(default)s)")
    parser.add_argument("--together", type=int, default=40, help="texts read together (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="what the tasks draw (default: %(default)s)")
    parser.add_argument("--only", nargs="*", default=[], help="rows to measure beside the resident one (default: all)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
