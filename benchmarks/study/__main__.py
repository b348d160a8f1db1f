"""The policy study: eviction, prefetching, miss handling, routing and published systems on one trace, in one command.

    python -m benchmarks.study TRACES --out benchmarks

writes policies.md, results/policies.json (every row) and results/policies-*.png. Without TRACES they are collected from
--model running over --data; a next_token checkpoint is trained unless --next-token names one. What has been done lies
in --work, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.study import stages
from benchmarks.study.claims import claims
from benchmarks.study.figures import colliding, write_figures
from benchmarks.study.page import page
from benchmarks.study.quality import Decoding, add_quality, split_windows
from benchmarks.study.study import LEAST_TOKENS, QUICK, SHARED, Scale, Study
from expertcast.checkpoints.bundled import REFERENCE
from expertcast.checkpoints.checkpoint import load_predictor, save_predictor
from expertcast.checkpoints.provenance import provenance
from expertcast.commands.predictors import evaluated, is_checkpoint
from expertcast.data.collect import collect
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.text import load_documents
from expertcast.data.trace_format import write_atomically
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError
from expertcast.predictors.next_token import NextToken, NextTokenConfig
from expertcast.training.fit import fit
from expertcast.training.scoring import FitOptions

PAGE, RESULTS, JSON = "policies.md", "results", "policies.json"
COLLECTED, QUICK_COLLECTED = 510_000, 12_000
"""Tokens that are collected where no traces are given."""
TOKENS, QUICK_TOKENS = 1_024, 160
QUALITY_TOKENS, QUICK_QUALITY_TOKENS = 512, 32
WINDOW = LEAST_TOKENS
"""Tokens of a text that quality is measured on: as many as are simulated, prefilled alike."""
QUICK_STEPS = 20
"""Optimiser steps of a next_token that --quick trains."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 with one line on standard error."""
    args = _parser().parse_args(arguments)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    try:
        if args.work is not None:
            args.work.mkdir(parents=True, exist_ok=True)
            result = study(args, args.work)
        else:
            with tempfile.TemporaryDirectory() as folder:
                result = study(args, Path(folder))
        written = write(result, args.out)
    except ExpertcastError as error:
        print(error, file=sys.stderr)
        return 2
    print("wrote " + ", ".join(map(str, written)))
    return 0


def study(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Everything that the page says, from the stages' rows to the claims."""
    begin = time.monotonic()
    given = _study(args, work)
    found = [stages.headline(given), stages.eviction(given), stages.prefetch(given)]
    policies, predictor = stages.best_prefetching(found[-1]["results"])
    found += [stages.lossy(given, policies, predictor), stages.presets(given), stages.write_back(given)]
    rows = [row for part in found for row in part["results"]]
    decoding = _decoding(args, given)
    decoded = [row for row in rows if row["stage"] in ("lossy", "presets", "write_back")]
    add_quality(decoded, decoding, work, args.processes)
    traces, machines = given.traces, zip(given.scale.ratios, given.machines, strict=True)
    result: dict[str, Any] = {
        "traces": traces.info["id"],
        "model": traces.info["model"],
        "shape": traces.view.shape.as_dict(),
        "quick": args.quick,
        "test_tokens": traces.token_count("test"),
        "tokens": given.tokens,
        "quality_tokens": 0 if decoding is None else decoding.scored,
        "predictors": list(given.predictors),
        "next_token": given.next_token is not None,
        "block_bytes": dict(given.machines[0].block_bytes),
        "machines": [{"ratio": ratio, "bandwidth": machine.bandwidth} for ratio, machine in machines],
        "stages": [part["trace"] for part in found],
        "fixed": {**policies.as_dict(), "predictor": predictor},
        "results": rows,
        "replay": stages.replay(given),
        "skipped": [row for part in found for row in part["skipped"]],
        "seconds": round(time.monotonic() - begin),
        **provenance(" ".join(["benchmarks.study", *sys.argv[1:]])),
    }
    return {**result, "claims": claims(result)}


def write(result: dict[str, Any], out: Path) -> list[Path]:
    """The page, the JSON with a line per row, and the figures."""
    folder = out / RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {id(row) for row in colliding(result["results"])}
    rows = [row if id(row) in drawn else {**row, "per_layer": None} for row in result["results"]]
    lists = {name: value for name, value in result.items() if name in ("replay", "skipped", "claims")}
    lists = {"results": rows, **lists}
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in result.items() if name not in lists]
    for name, rows in lists.items():
        each = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
        lines.append(f"{json.dumps(name)}: [\n{each}\n]")
    write_atomically(folder / JSON, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
    write_atomically(out / PAGE, page(result).encode())
    return [out / PAGE, folder / JSON, *write_figures(result, folder)]


def _study(args: argparse.Namespace, work: Path) -> Study:
    traces = _traces(args, work)
    return Study(
        traces=traces,
        scale=QUICK if args.quick else Scale(),
        whole=args.test_tokens or (QUICK_TOKENS if args.quick else None),
        tokens=args.tokens or (QUICK_TOKENS if args.quick else TOKENS),
        predictors={name: made.predictor for name, made in evaluated([SHARED, *args.predictor], traces).items()},
        next_token=_next_token(args, traces, work),
        work=work,
        processes=args.processes,
    )


def _traces(args: argparse.Namespace, work: Path) -> TraceDataset:
    """Those that are given, or collected into the work folder, going on where that was cut short."""
    if args.traces is not None:
        return TraceDataset.open(args.traces)
    model = args.model or REFERENCE
    tokens = args.collect or (QUICK_COLLECTED if args.quick else COLLECTED)
    documents = load_documents(_data(args, model))
    return collect(load_model(model), load_tokenizer(model), documents, work / "traces", tokens=tokens)


def _next_token(args: argparse.Namespace, traces: TraceDataset, work: Path) -> NextToken:
    """That of a checkpoint, or trained on the train split and kept in the work folder.

    Raises:
        ExpertcastError: a checkpoint of another kind of predictor.
    """
    folder = args.next_token or work / f"next_token-{traces.info['id']}{'-quick' if args.quick else ''}"
    if args.next_token is None and not is_checkpoint(str(folder)):
        config = NextTokenConfig(steps=QUICK_STEPS) if args.quick else NextTokenConfig()
        print("training next_token", flush=True)
        fitted = fit(NextToken.name, traces, config=config, options=FitOptions(progress=True))
        save_predictor(fitted.predictor, folder, view=traces.view, extra={"training": fitted.report})
    predictor = load_predictor(folder, traces.view)
    if not isinstance(predictor, NextToken):
        raise ExpertcastError(
            f"--next-token {folder} is a {predictor.name}: give a next_token, and others as --predictor"
        )
    return predictor


def _decoding(args: argparse.Namespace, given: Study) -> Decoding | None:
    """What quality is measured with; None where nobody says which model the traces are of."""
    made_here = args.traces is None or given.traces.info["model"] == REFERENCE
    model = args.model or (REFERENCE if made_here else None)
    if model is None:
        return None
    tokens = args.quality_tokens or (QUICK_QUALITY_TOKENS if args.quick else QUALITY_TOKENS)
    windows_NW = split_windows(model, _data(args, model), given.traces, tokens=tokens, length=min(WINDOW, tokens))
    return Decoding(model=model, windows_NW=windows_NW, predictors=given.predictors)


def _data(args: argparse.Namespace, model: str) -> list[str]:
    """
    Raises:
        ExpertcastError: no text for a model that brings none.
    """
    if not args.data and model != REFERENCE:
        raise ExpertcastError(f"--model {model} needs text to run on: give --data")
    return args.data or [REFERENCE]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="benchmarks.study", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("traces", type=Path, nargs="?", help="folder of `expertcast collect`")
    parser.add_argument("--out", type=Path, required=True, help="folder of the page, with results/ in it")
    parser.add_argument("--work", type=Path, help="folder to keep what has been done in, and to go on from")
    parser.add_argument("--model", help="that the traces are of: local folder, hub id, or `reference`")
    parser.add_argument("--data", nargs="+", help="text that the traces are of, to measure quality on")
    parser.add_argument(
        "--predictor", nargs="*", default=[], help="forecasts beside router_input: checkpoints or names"
    )
    parser.add_argument("--next-token", type=Path, help="checkpoint of a next_token; trained here if there is none")
    parser.add_argument("--collect", type=_count, help=f"tokens to collect without TRACES (default: {COLLECTED})")
    parser.add_argument("--test-tokens", type=_count, help="of the first stage (default: the whole test split)")
    parser.add_argument("--tokens", type=_count, help=f"of the stages after the first (default: {TOKENS})")
    parser.add_argument("--quality-tokens", type=_count, help=f"decoded to measure quality (default: {QUALITY_TOKENS})")
    parser.add_argument("--processes", type=_count, help="default: one per core")
    parser.add_argument("--quick", action="store_true", help="a small part of everything, to see that it runs")
    return parser


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text}: give 1 or more")
    return count


if __name__ == "__main__":
    sys.exit(main())
