"""What executing forecasts and dropping experts costs a model: perplexity, agreement, KL and tasks, row by row.

    python scripts/bench_tasks.py --out benchmarks/results/tasks.json

collects traces of the bundled model (or takes those at --traces), fits what is executed (or takes the checkpoints among
--predictor), and reads texts of the traces' test split, which no predictor saw: half of each at once, at most --prefill
tokens, the rest token by token, in the offloaded runtime. Any predictor's name or checkpoint is a row. Rows that leave
out experts are read one text at a time, for what they do depends on what the cache holds.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from expertcast.checkpoints.provenance import provenance
from expertcast.checkpoints.store import load_predictor
from expertcast.commands.output import write_json
from expertcast.commands.predictors import is_checkpoint
from expertcast.data.collector import collect
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.text import load_documents
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, predictor_class
from expertcast.predictors.hybrid import PAPER, Hybrid, HybridConfig
from expertcast.predictors.plain import Json
from expertcast.runtime import OffloadConfig
from expertcast.runtime.policies import Policies
from expertcast.runtime.quality.forecasts import text_windows
from expertcast.runtime.quality.policies import measure_policies
from expertcast.runtime.quality.tasks import TaskScore, make_tasks, measure_tasks
from expertcast.runtime.quality.tasks.copying import copying
from expertcast.runtime.quality.tasks.measuring import TOGETHER
from expertcast.runtime.quality.tasks.passages import Passages
from expertcast.runtime.simulation.trace import PREFILL
from expertcast.training.fit import fit
from expertcast.training.options import FitOptions, Fitted
from expertcast.training.scoring import validation_recall

RESIDENT, CONFIDENT, CONTROL = "resident", "estimator where sure", "_control"
USUAL = {"quasi_hidden": "router", "estimator": "estimator", "hybrid": "hybrid", "hybrid_paper": "hybrid, paper's rule"}
"""What is always executed, and the row's name."""
SETTINGS = ("model", "traces", "prefill", "window", "windows", "questions", "seed", "slots")
"""Rows of a file with the same ones are kept."""
WINDOW, CHARS = 128, 600
"""Tokens of a window of the language rows, and characters that are read of each document."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way to run the model."""

    config: OffloadConfig | None
    together: int = TOGETHER
    executes: str = ""
    """Whose forecasts are executed where; rows that execute the same are measured once."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 with one line on standard error."""
    args = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            traces = _traces(args, Path(temporary) / "traces")
            Table(args, traces).measure()
    except ExpertcastError as error:
        print(f"bench_tasks: {error}", file=sys.stderr)
        return 2
    return 0


class Table:
    """Measures one row after another; the file is written after each."""

    def __init__(self, args: argparse.Namespace, traces: TraceDataset) -> None:
        self._args, self._traces = args, traces
        self._model: PreTrainedModel = load_model(args.model)
        tokenizer: PreTrainedTokenizerBase = load_tokenizer(args.model)
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
            "slots": args.slots, "rows": {},
        }  # fmt: skip
        if args.out.is_file():
            earlier = json.loads(args.out.read_text())
            same = all(earlier.get(key) == self.result[key] for key in SETTINGS)
            self.result["rows"] = earlier["rows"] if same else {}

    def measure(self) -> None:
        """All rows; each is printed and written as soon as it is known."""
        args, known = self._args, self.result["rows"]
        rows = lossy_rows(args)
        if not args.only or set(args.only) - set(rows):
            fitted = fitted_predictors(args, self._traces)
            self.result["chosen"] = {name: _chosen(each) for name, each in fitted.items() if _chosen(each)}
            rows = forecast_rows(args, self._traces, fitted) | rows
        rows = {RESIDENT: Row(config=None)} | rows
        first: dict[str, str] = {}
        same = {name: first.setdefault(row.executes or name, name) for name, row in rows.items()}
        rows = {name: row for name, row in rows.items() if name in (RESIDENT, *(args.only or rows))}
        rows = {name: row for name, row in rows.items() if name not in known}
        measured = {
            name: row for name, row in rows.items() if same[name] == name or same[name] not in {**rows, **known}
        }
        language = self._language(measured)
        print(line(["run", "perplexity", "agreement", "KL", *(task.name for task in self._tasks)]), flush=True)
        for name, row in rows.items():
            if name in measured:
                values = {**language[name], "texts_together": row.together, "tasks": self._answers(name, row)}
            else:
                values = {**known[same[name]], "same_as": same[name]}
            known[name] = values
            write_json(self._args.out, self.result)
            print(line([name, *cells(values)]), flush=True)

    def _language(self, rows: Mapping[str, Row]) -> dict[str, Json]:
        """Perplexity, agreement and KL of each row."""
        found: dict[str, Json] = {}
        for together in dict.fromkeys(row.together for row in rows.values()):
            runs = {name: row.config for name, row in rows.items() if row.together == together and row.config}
            batch = math.gcd(together, len(self._windows_NW))
            measured = measure_policies(self._model, self._windows_NW, runs, prefill=self._args.prefill, batch=batch)
            self.result["tokens"] = measured["tokens"]
            found |= {name: measured["runs"][name] for name in runs}
            found.setdefault(RESIDENT, measured["runs"]["exact"])
        return found

    def _answers(self, name: str, row: Row) -> Json:
        """A row's scores by task, compared with the resident model's."""
        exact = row.config is None
        scores = measure_tasks(
            self._model, [*self._tasks, self._control] if exact else self._tasks, row.config,
            prefill=self._args.prefill, together=row.together,
        )  # fmt: skip
        resident = scores if exact else self._resident()
        return {task: score.as_dict(None if exact else resident[task]) for task, score in scores.items()}

    def _resident(self) -> dict[str, TaskScore]:
        """What the resident model answered, here or in the file that is gone on with."""
        known = self.result["rows"][RESIDENT]["tasks"]
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
    texts = [
        documents[each.index].text for each in traces.documents if each.split == "test" and each.index in documents
    ]
    if not texts:
        raise ExpertcastError("no document of --data is in the traces' test split: give the text that they are of")
    return texts


def fitted_predictors(args: argparse.Namespace, traces: TraceDataset) -> dict[str, Fitted]:
    """Checkpoints loaded, everything else fitted on the train split; by name, `hybrid` with either rule."""
    fitted: dict[str, Fitted] = {}
    for given in args.predictor:
        if is_checkpoint(given):
            predictor = load_predictor(given, traces.view)
            fitted[predictor.name] = Fitted(predictor=predictor)
        else:
            predictor_class(given)
    others = [given for given in args.predictor if not is_checkpoint(given)]
    options = FitOptions(progress=True)
    for name in dict.fromkeys([*others, "quasi_hidden", "estimator", "hybrid"]):
        if name not in fitted:
            fitted[name] = fit(name, traces, options=options, known=fitted)
    paper = HybridConfig(rule=PAPER, low_recall=args.low_recall)
    fitted["hybrid_paper"] = fit("hybrid", traces, config=paper, options=options, known=fitted)
    return fitted


def forecast_rows(args: argparse.Namespace, traces: TraceDataset, fitted: Mapping[str, Fitted]) -> dict[str, Row]:
    """Each predictor executed at every layer, the estimator also where it is sure; by name, in the table's order."""
    rows = {}
    for name in dict.fromkeys([*USUAL, *fitted]):
        predictor = fitted[name].predictor
        config = OffloadConfig(predictor=predictor, mode="speculate", slots=args.slots)
        chosen = _chosen(fitted[name])
        executes = chosen[0]["predictor"] if len({choice["predictor"] for choice in chosen}) == 1 else name
        rows[USUAL.get(name, name)] = Row(config=config, executes=executes)
    estimator = fitted["estimator"].predictor
    recall_P = validation_recall({"estimator": estimator}, traces, 1, FitOptions())["estimator"]
    sure = tuple(layer for layer, value in enumerate(recall_P.tolist(), start=1) if value >= OffloadConfig.min_recall)
    config = OffloadConfig(predictor=estimator, mode="hybrid", layers=sure, slots=args.slots)
    return rows | {CONFIDENT: Row(config=config)}


def lossy_rows(args: argparse.Namespace) -> dict[str, Row]:
    """What leaves experts out."""
    policies = {"drop": Policies(prefetch="none", miss="drop"), "activeevict": "activeevict"}
    return {
        name: Row(config=OffloadConfig(policies=each, slots=args.slots), together=1) for name, each in policies.items()
    }


def cells(values: Json) -> list[str]:
    """A row's numbers as text."""
    tasks = [
        f"{score['score']:.3f} [{score['interval'][0]:.3f}, {score['interval'][1]:.3f}]"
        for name, score in values["tasks"].items()
        if not name.endswith(CONTROL)
    ]
    return [f"{values['perplexity']:.3f}", f"{values['top1_agreement']:.1%}", f"{values['kl']:.4f}", *tasks]


def line(texts: Sequence[str]) -> str:
    """One row of a Markdown table."""
    return "| " + " | ".join(texts) + " |"


def _chosen(fitted: Fitted) -> list[Json]:
    predictor = fitted.predictor
    return [dict(choice) for choice in predictor.config.choices] if isinstance(predictor, Hybrid) else []


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
    parser.add_argument("--seed", type=int, default=0, help="what the tasks draw (default: %(default)s)")
    parser.add_argument("--only", nargs="*", default=[], help="rows to measure beside the resident one (default: all)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write; what it has measured is kept")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
