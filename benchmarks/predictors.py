"""Recall of the predictors by number of training tokens, and what a forecast costs, on the bundled model.

    expertcast collect reference --data reference --tokens 64000 --out traces
    python -m benchmarks predictors --traces traces --page benchmarks/predictors.md

A point with N training tokens chooses on N / 8 tokens of the validation split, and is scored on the whole test split.
A seed is one of the order of tokens and of first weights. Runs that the result file has are not repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.results import ResultFile, markdown, result_parser, spread
from expertcast.commands.predictors import ledger_of
from expertcast.data.traces import TraceDataset
from expertcast.predictors.messages import Json
from expertcast.training.evaluation import evaluate
from expertcast.training.fit import fit, forecast_seconds
from expertcast.training.scoring import BATCH, FitOptions, Fitted

UNTRAINED = ("router_input", "next_norm", "early_attention")
TRAINED = ("linear", "estimator")
VALIDATION_SHARE = 8
"""Training tokens for each validation token, the ratio of the splits."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit every predictor on every number of tokens with every seed, and write the page."""
    parser = result_parser("predictors", __doc__)
    parser.add_argument("--traces", type=Path, required=True, help="traces of the bundled model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[300, 1000, 3000, 10_000, 50_000], metavar="N")
    parser.add_argument("--seeds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--predictors", nargs="+", choices=TRAINED, default=TRAINED, help="(default: all)")
    args = parser.parse_args(arguments)
    traces = TraceDataset.open(args.traces)
    file = ResultFile(args, {"traces": traces.info["id"]})
    runs: list[Json] = file.values["runs"]
    for name, tokens, seed in [
        *((name, max(args.tokens), 0) for name in UNTRAINED),
        *((name, tokens, seed) for seed in range(args.seeds) for name in args.predictors for tokens in args.tokens),
    ]:
        if not any((run["predictor"], run["tokens"], run["seed"]) == (name, tokens, seed) for run in runs):
            runs.append(_measured(name, traces, tokens, seed))
            print(f"{name}, {tokens:,} tokens, seed {seed}: recall {runs[-1]['recall']:.4f}", flush=True)
            file.write()
    file.publish("Recall by training tokens, the bundled model", page(runs, args.tokens, traces))
    return 0


def _measured(name: str, traces: TraceDataset, tokens: int, seed: int) -> Json:
    options = FitOptions(tokens=tokens, validation_tokens=max(1, tokens // VALIDATION_SHARE), seed=seed, progress=False)
    fitted: Fitted = fit(name, traces, options=options)
    scored = evaluate({name: fitted.predictor}, traces.batches("test", BATCH), traces.view, chained=False)
    costs = ledger_of({name: fitted}, forecast_seconds({name: fitted.predictor}, traces, "test", 1))[name]
    calibration = scored.as_dict()["calibration"][name]
    errors = {key: calibration[key] for key in ("ece", "ece_likely")}
    run = {"predictor": name, "tokens": tokens, "seed": seed, "recall": scored.recall(name)}
    return run | errors | {key: costs[key] for key in ("forecast_ms", "bytes", "training_s")}


def page(runs: Sequence[Json], tokens: Sequence[int], traces: TraceDataset) -> str:
    """Return the section: recall by tokens, then costs and calibration at the most tokens."""
    names = list(dict.fromkeys(run["predictor"] for run in runs))

    def of(name: str, count: int, key: str, digits: int, factor: float = 1.0) -> str:
        found = spread(run[key] for run in runs if (run["predictor"], run["tokens"]) == (name, count))
        if found is None:
            return ""
        low, high = (f"{factor * found[end]:.{digits}f}".removeprefix("0") for end in ("low", "high"))
        return low if low == high else f"{low} to {high}"

    recall = [[f"`{name}`", *(of(name, count, "recall", 4) for count in tokens)] for name in names]
    most = max(tokens)
    costs = [
        [f"`{name}`", of(name, most, "forecast_ms", 3), of(name, most, "bytes", 2, 1e-6),
         of(name, most, "training_s", 0), of(name, most, "ece", 4), of(name, most, "ece_likely", 4)]
        for name in names
    ]  # fmt: skip
    return "\n".join(
        [
            f"Recall@{traces.view.shape.top_k} one layer ahead, mean over layers, "
            f"{traces.token_count('test'):,} test tokens; least and most of the seeds.\n",
            markdown(["predictor", *(f"{count:,} tokens" for count in tokens)], recall),
            f"\nCosts and calibration error at {most:,} tokens, on one thread:\n",
            markdown(["predictor", "ms per forecast", "MB", "s of training", "ECE, all", "ECE, p > .05"], costs),
        ]
    )
