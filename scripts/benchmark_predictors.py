"""Recall of every predictor on a model, and recall against training tokens.

    python scripts/benchmark_predictors.py reference --data TEXT.parquet --tokens 240000 --name reference

collects traces (or takes those at --traces), fits every predictor on the train split (80% of the tokens, by document),
chooses on validation (10%), scores on test (10%), prints two tables and writes benchmarks/results/predictors-NAME.json.
The learning curve needs 1.25 times its highest token count in traces.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from expertcast.checkpoints.provenance import provenance
from expertcast.data.collect import collect
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.text import load_documents
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, Predictor, names, predictor_class
from expertcast.predictors.estimator import EstimatorConfig
from expertcast.training.evaluation import PAPER, PAPER_PARAMETERS, evaluate, learning_curve
from expertcast.training.fit import fit, fit_many

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
FAR = ("quasi_hidden", "linear", "estimator")
CURVE = (20_000, 50_000, 100_000, 200_000, 400_000)
BATCH = 4096


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 with one line on standard error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="local folder, hub id, or `reference`")
    parser.add_argument("--data", nargs="+", default=["reference"], help="text to run the model on")
    parser.add_argument("--tokens", type=int, default=240_000, help="tokens to collect (default: %(default)s)")
    parser.add_argument("--traces", type=Path, help="traces to use, collected there first if there are none")
    parser.add_argument("--ahead", type=int, nargs="*", default=[2, 4], help="further distances (default: 2 4)")
    parser.add_argument("--curve", type=int, nargs="*", default=list(CURVE), help="token counts of the learning curve")
    parser.add_argument("--skip-table", action="store_true", help="leave the table of all predictors out")
    parser.add_argument("--name", required=True, help="name of the result file")
    args = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            results = benchmark(args, args.traces or Path(temporary) / "traces")
    except ExpertcastError as error:
        print(error, file=sys.stderr)
        return 2
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"predictors-{args.name}.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    print(f"\nwrote {path.relative_to(RESULTS.parents[1])}")
    return 0


def benchmark(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything the result file holds."""
    traces = _traces(args, folder)
    results: dict[str, Any] = {"model": args.model, "splits": traces.info["splits"], **provenance()}
    if not args.skip_table:
        fitted, results["fit_seconds"] = fit_all(traces)
        results |= _scores(fitted, traces, 1)
        _print_table(results, traces)
    for ahead in args.ahead:
        configs = {name: predictor_class(name).config_class(ahead=(ahead,)) for name in FAR}
        far = {name: fit(name, traces, config=config).predictor for name, config in configs.items()}
        results[f"ahead_{ahead}"] = _scores(far, traces, ahead)
        print(f"{ahead} ahead: " + ", ".join(f"{n} {v:.3f}" for n, v in _means(results[f"ahead_{ahead}"]).items()))
    if args.curve:
        counts = [count for count in args.curve if count <= traces.token_count("train")]
        results["curve"] = learning_curve(traces, counts)
        print_curve(results["curve"])
    return results


def fit_all(traces: TraceDataset) -> tuple[dict[str, Predictor], dict[str, float]]:
    """Every registered predictor and the estimator in the paper's form, and how long each took to fit."""
    paper = EstimatorConfig(form="paper", parameters=PAPER_PARAMETERS)
    results = fit_many(names(), traces, {}) | {PAPER: fit("estimator", traces, config=paper)}
    fitted = {name: result.predictor for name, result in results.items()}
    return fitted, {name: result.report["seconds"] for name, result in results.items()}


def print_curve(curve: dict[str, dict[str, float]]) -> None:
    """The learning curve as a table."""
    counts = list(next(iter(curve.values())))
    print("\n| recall at tokens | " + " | ".join(counts) + " |\n" + "|---" * (len(counts) + 1) + "|")
    for form, values in curve.items():
        print(f"| {form} | " + " | ".join(f"{values[count]:.4f}" for count in counts) + " |")


def _traces(args: argparse.Namespace, folder: Path) -> TraceDataset:
    if folder.is_dir():
        return TraceDataset.open(folder)
    model, tokenizer = load_model(args.model), load_tokenizer(args.model)
    return collect(model, tokenizer, load_documents(args.data), folder, tokens=args.tokens)


def _scores(predictors: dict[str, Predictor], traces: TraceDataset, ahead: int) -> dict[str, Any]:
    values = evaluate(predictors, traces.batches("test", BATCH), traces.view, ahead=ahead).as_dict()
    return {key: values.get(key, {}) for key in ("recall_at_k", "recall_at_k_chained")}


def _means(scores: dict[str, Any]) -> dict[str, float]:
    return {name: float(value["mean"]) for name, value in scores["recall_at_k"].items()}


def _print_table(results: dict[str, Any], traces: TraceDataset) -> None:
    print(f"\n| predictor | recall@{traces.view.shape.top_k} | chained | first pair | fitted in |")
    print("|---|---|---|---|---|")
    for name, value in results["recall_at_k"].items():
        scored = results["recall_at_k_chained"].get(name)  # not of those that read early attention
        chained = "-" if scored is None else f"{scored['mean']:.4f}"
        seconds = results["fit_seconds"][name]
        print(f"| {name} | {value['mean']:.4f} | {chained} | {value['per_layer'][0]:.3f} | {seconds:.0f} s |")


if __name__ == "__main__":
    sys.exit(main())
