"""Forecasts on text of another kind than they were trained on: how far recall falls, when the monitor says so, and what
a refit while the model runs brings back.

    python scripts/bench_drift.py --out benchmarks/results/drift.json
    python scripts/bench_drift.py --data ../shared/corpus/validation.parquet ../shared/corpus/test.parquet \\
        --shift math code docs upper --out benchmarks/results/drift.json

trains `linear` and `estimator` on some domains of the text and runs them over held-out text of the same domains and
over each of the others (`upper`: the held-out text in capital letters). Every forecast is scored before anything learns
from its token. Beside the refit stand the previous token's experts. Costs are the thread's processor time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from drift_steps.streams import States, frozen_recall, joined, replay, stream, traced, warned_after
from drift_steps.streams import rows as rows_of
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from expertcast.checkpoints.provenance import provenance
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.text import load_documents
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, Predictor
from expertcast.predictors.estimator import EstimatorConfig
from expertcast.runtime import offload
from expertcast.training.fit import fit
from expertcast.training.scoring import FitOptions, validation_recall

OWN = ("prose", "drama", "scripture", "speeches")
BEFORE = 4096
"""Tokens of the own domains before the change."""
CUTS = (0, 250, 500, 1000, 2000, 4000, 8000, 16000)
"""Tokens since the change between which recall is averaged."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 with one line on standard error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference", help="local folder, hub id, or `reference`")
    parser.add_argument("--data", nargs="+", default=["reference"], help="text with a column `domain`")
    parser.add_argument("--own", nargs="+", default=OWN, help="domains to train on")
    parser.add_argument("--shift", nargs="+", default=["math", "upper"], help="domains to change to, or `upper`")
    parser.add_argument("--tokens", type=int, default=120_000, help="tokens of the own domains (default: %(default)s)")
    parser.add_argument("--stream", type=int, default=12_000, help="tokens of each stream (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=500, help="training steps of the estimator (default: %(default)s)")
    parser.add_argument("--refit", type=float, default=1.0, help="ms a token in decoding (default: %(default)s)")
    parser.add_argument("--decode", type=int, default=600, help="tokens to decode for costs (default: %(default)s)")
    parser.add_argument("--work", type=Path, help="folder that keeps the traces")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write; a picture goes beside it")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            results = benchmark(args, args.work or Path(temporary))
    except ExpertcastError as error:
        print(error, file=sys.stderr)
        return 2
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    draw(results, args.out.with_suffix(".png"))
    return 0


def benchmark(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything the result file holds."""
    model, tokenizer = load_model(args.model), load_tokenizer(args.model)
    documents = load_documents(args.data)
    texts = {
        name: [(each.text, name) for each in documents if each.domain == name] for name in [*args.own, *args.shift]
    }
    own = traced(model, tokenizer, [text for name in args.own for text in texts[name]], folder / "own", args.tokens)
    held = {document.index for document in own.documents if document.split == "test"}
    listed = [text for name in args.own for text in texts[name]]
    texts["upper"] = [(text.upper(), "upper") for index, (text, _) in enumerate(listed) if index in held]
    streams = {"own": stream(own, own, "test", args.stream)}
    for name in args.shift:
        traces = traced(model, tokenizer, texts[name], folder / name, args.stream)
        streams[name] = stream(traces, own, "all", args.stream)
    predictors = trained(own, args.steps)
    results: dict[str, Any] = {"own": list(args.own), "train_tokens": own.token_count("train"), "predictors": {}}
    previous = {
        name: cut(frozen_recall(predictors["previous_token"], states)[BEFORE if name == "own" else 0 :])
        for name, states in streams.items()
    }
    for name in ("linear", "estimator"):
        expected = dict(enumerate(validation_recall({name: predictors[name]}, own, 1, FitOptions())[name].tolist(), 1))
        rows = {}
        for shift, states in streams.items():
            before = [rows_of(state, 0, BEFORE) for state in streams["own"]]
            after = [rows_of(state, BEFORE, len(state.residual_TD)) for state in states] if shift == "own" else states
            rows[shift] = followed(predictors[name], before, after)
            rows[shift]["recall"]["previous_token"] = previous[shift]
            warned, drift = warned_after(predictors[name], expected, before, after)
            rows[shift]["monitor"] = {"warned_after_tokens": warned, "drift": drift}
            print_row(name, shift, rows[shift])
        cost = decoded(model, tokenizer, predictors[name], texts[args.shift[0]], args)
        results["predictors"][name] = {"validation_recall": sum(expected.values()) / len(expected), "streams": rows}
        results["predictors"][name]["decoding"] = cost
        print(f"{name}: {json.dumps(cost)}", flush=True)
    return {"cuts": CUTS, "tokens_before": BEFORE, **results, **provenance()}


def trained(own: TraceDataset, steps: int) -> dict[str, Predictor]:
    """What is compared, trained on the own domains."""
    config = EstimatorConfig(steps=steps)
    return {
        "linear": fit("linear", own).predictor,
        "estimator": fit("estimator", own, config=config).predictor,
        "previous_token": fit("previous_token", own).predictor,
    }


def followed(predictor: Predictor, before: States, states: States) -> dict[str, Any]:
    """Recall on a stream by every way to follow it.

    Args:
        predictor: trained.
        before: of its own domains; the refit has seen this.
        states: of the stream.
    """
    begin = time.thread_time()
    found, report = replay(predictor, joined(before, states))
    tokens = BEFORE + len(states[0].residual_TD)
    row: dict[str, Any] = {"replay_ms_per_token": (time.thread_time() - begin) * 1e3 / tokens, **report}
    found = {name: recall_T[BEFORE:] for name, recall_T in found.items()}
    return row | {"recall": {name: cut(recall_T) for name, recall_T in found.items()}}


def cut(recall_T: Tensor) -> list[float]:
    """Mean recall between two cuts, for as many as the stream reaches, and over all of it."""
    ends = [*(begin for begin in CUTS if begin < len(recall_T)), len(recall_T)]
    return [*(float(recall_T[begin:end].mean()) for begin, end in pairwise(ends)), float(recall_T.mean())]


def decoded(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    predictor: Predictor,
    texts: Sequence[tuple[str, str]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """What a refit costs in decode steps over a text that is given token by token, and whether they give the same bits.

    Args:
        model: to offload.
        tokenizer: of the model.
        predictor: what forecasts.
        texts: (text, domain).
        args: of the command.
    """
    ids = [token for text, _ in texts[:20] for token in tokenizer(text, truncation=True)["input_ids"]][: args.decode]
    costs: dict[str, Any] = {"budget_ms": args.refit, "tokens": len(ids)}
    logits = []
    for name, refit in (("frozen", 0.0), ("refit", args.refit)):
        with offload(model, predictor=predictor, refit=refit, drift=True) as offloaded, torch.no_grad():
            if offloaded.refit is not None:
                offloaded.refit.clock = time.thread_time
            past, begin, last = None, time.thread_time(), []
            for token in ids:
                output = offloaded(input_ids=torch.tensor([[token]]), past_key_values=past, use_cache=True)
                past, last = output.past_key_values, [*last, output.logits]
            costs[f"{name}_ms_per_token"] = (time.thread_time() - begin) * 1e3 / len(ids)
            logits.append(torch.cat(last))
            stats = offloaded.stats.as_dict()
            costs[f"{name}_recall"] = stats["forecast_recall"]["mean"]
            if refit:
                costs["update_ms_per_token"] = stats["refit"]["seconds"] * 1e3 / len(ids)
                costs["longest_ms"] = stats["refit"]["longest_ms"]
                costs["learned_tokens"] = [layer["tokens"] for layer in stats["refit"]["layers"].values()]
    return costs | {"identical": torch.equal(*logits)}


def print_row(name: str, shift: str, row: dict[str, Any]) -> None:
    """One stream's recall, a line for each way."""
    print(f"\n{name}, {shift}: monitor {row['monitor']}, {row['layers_used_at_end']} layers refitted at the end")
    for way, recall in row["recall"].items():
        print(f"  {way:22}" + " ".join(f"{value:.3f}" for value in recall), flush=True)


def draw(results: dict[str, Any], path: Path) -> None:
    """Recall since the change of text, a panel for each predictor and stream."""
    from matplotlib.figure import Figure

    predictors = results["predictors"]
    names = list(next(iter(predictors.values()))["streams"])
    figure = Figure(figsize=(3.2 * len(names), 5.6), layout="constrained")
    panels = figure.subplots(len(predictors), len(names), sharey=True, squeeze=False)
    for line, (name, values) in zip(panels, predictors.items(), strict=True):
        for panel, shift in zip(line, names, strict=True):
            for way in ("frozen", "used", "previous_token"):
                recall = values["streams"][shift]["recall"].get(way)
                if recall is not None:
                    panel.plot(CUTS[1 : len(recall)], recall[:-1], marker=".", label="refit" if way == "used" else way)
            panel.set_xscale("log")
            panel.set_title(f"{name}, {shift}", fontsize=9)
        line[0].set_ylabel("recall@k")
    panels[0][-1].legend(fontsize=7)
    figure.supxlabel("tokens since the change", fontsize=9)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    raise SystemExit(main())
