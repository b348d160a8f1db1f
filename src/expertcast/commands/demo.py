"""`expertcast demo`: collect, train, evaluate and deploy on the bundled reference model, in a few minutes."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from expertcast.checkpoints.bundled import REFERENCE
from expertcast.checkpoints.checkpoint import save_predictor
from expertcast.checkpoints.results import layer_table
from expertcast.commands.options import Count, Option
from expertcast.commands.output import Outcome, folder, forecast_lines, runs_table, say, write_json
from expertcast.commands.predictors import (
    best_on_validation,
    checkpoint_metrics,
    ledger_of,
    predictor_config,
    quality_table,
)
from expertcast.data.collect import collect
from expertcast.data.models import load_model, load_tokenizer
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.processes import exclusive
from expertcast.data.text import load_documents
from expertcast.predictors import ExpertcastError, Predictor, names
from expertcast.predictors.hybrid import Hybrid
from expertcast.predictors.linear import LinearConfig, default_inputs
from expertcast.predictors.messages import Json
from expertcast.training.evaluation import Evaluation, evaluate
from expertcast.training.fit import fit_many, forecast_seconds
from expertcast.training.report import PAGE, report_on
from expertcast.training.scoring import scored_batches

# Last stage: a model decodes with its experts behind a slow link, in every mode

SLOTS = 96
"""An eighth of the reference model's 768 experts: two tokens' worth."""
PROMPT_TOKENS = 64
NEW_TOKENS = 48
QUALITY_TOKENS = 6144
WINDOW = 256
BANDWIDTH = 45e6
"""Bytes per second of the emulated link: a token's 48 experts take 39 ms, several times as long as its computation."""


def deploy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    predictor: Predictor,
    layers: list[int],
) -> Json:
    """Measure time, bytes, hits and perplexity of a model on unseen texts, on demand and in each mode with a predictor.

    Args:
        model, tokenizer: the model and its tokenizer.
        texts: documents that no predictor learned from.
        predictor: forecasts in all modes but `on_demand`.
        layers: layers that execute their forecast in mode `hybrid`.
    """
    from expertcast.runtime.benchmarking.bench import BenchSettings, BorrowedStore, decode_resident, measure, usual_runs
    from expertcast.runtime.config import OffloadConfig
    from expertcast.runtime.quality import QualityRun, measure_quality, text_windows

    windows_NW = text_windows(tokenizer, texts, length=WINDOW, count=QUALITY_TOKENS // WINDOW)
    executed = {"speculate": QualityRun(predictor=predictor), "hybrid": QualityRun(predictor=predictor, layers=layers)}
    quality = measure_quality(model, find_moe_layers(model), {"test": windows_NW}, executed)
    prompt_ids = tokenizer(texts[0], return_tensors="pt")["input_ids"][:, :PROMPT_TOKENS]
    resident, settings = decode_resident(model, prompt_ids, NEW_TOKENS), BenchSettings(new_tokens=NEW_TOKENS)
    store = BorrowedStore(find_moe_layers(model), prompt_ids.device)
    try:
        ways = usual_runs(OffloadConfig(slots=SLOTS, bandwidth=BANDWIDTH, store=store), predictor, layers)
        runs = measure(model, prompt_ids, ways, settings, resident=resident).reports
    finally:
        store.give_back()
    return {"bandwidth": BANDWIDTH, "new_tokens": NEW_TOKENS, "runs": runs, "quality": quality}


RESULT, TRACES, CHECKPOINT, REPORT = "demo.json", "traces", "checkpoint", "report"
NEXT = (
    'expertcast generate reference --prompt "It is a truth" --predictor {checkpoint} --slots 96 '
    "--bandwidth {bandwidth:.3g}",
    "expertcast eval {traces} --predictor {checkpoint} linear quasi_hidden",
    "expertcast advise reference --predictor {checkpoint} --slots 96 --bandwidth {bandwidth:.3g}",
    "expertcast simulate {traces} --sweep --out {sweep}",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `expertcast demo`."""

    tokens: Count = 60_000
    """Number of tokens to collect."""
    steps: Count = 300
    """Training steps of the estimator."""
    out: Annotated[Path, Option(metavar="DIR", read=folder)] = Path("expertcast-demo")
    """Folder for traces, checkpoint, report and demo.json; an earlier demo in it is replaced."""


def run(options: Options) -> Outcome:
    """Run all stages, and write the results to the folder."""
    begin = time.perf_counter()
    with exclusive(options.out):
        _clear(options.out)
        model, tokenizer = load_model(REFERENCE), load_tokenizer(REFERENCE)
        evaluation, result = _stages(options, model, tokenizer)
        result |= {"threads": torch.get_num_threads(), "seconds": time.perf_counter() - begin, "finished": True}
        write_json(options.out / RESULT, result)
    return result, _text(options.out, evaluation, result)


def _clear(out: Path) -> None:
    """Delete an earlier demo.

    Raises:
        ExpertcastError: the folder has other files.
    """
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()) and not (out / RESULT).is_file():
        raise ExpertcastError(f"--out {out} is neither empty nor an earlier demo: give a new or an empty folder")
    write_json(out / RESULT, {"finished": False})  # marks the folder as a demo's, also after a kill
    for name in (TRACES, CHECKPOINT, REPORT):
        shutil.rmtree(out / name, ignore_errors=True)


def _stages(options: Options, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[Evaluation, Json]:
    """Run the four stages."""
    documents = load_documents(REFERENCE)
    say("1/4 collect: run the bundled model over text")
    traces = collect(model, tokenizer, documents, options.out / TRACES, tokens=options.tokens)
    say("2/4 train: every predictor, on the train split")
    configs = {
        "estimator": predictor_config("estimator", [1], [f"steps={options.steps}"]),
        "linear": LinearConfig(inputs=default_inputs(traces.view.shape, ["early"])),  # as in a hybrid with an estimator
    }
    fitted = fit_many(names(), traces, configs)
    say("3/4 evaluate: recall@k on the test split, documents that no predictor has seen")
    predictors = {name: made.predictor for name, made in fitted.items()}
    evaluation = evaluate(predictors, scored_batches(traces, "test"), traces.view)
    best, layers = best_on_validation({Hybrid.name: predictors[Hybrid.name], **predictors}, traces, 1)
    ledger = ledger_of(fitted, forecast_seconds(predictors, traces, "test", 1))
    metrics, _ = checkpoint_metrics(predictors[best], traces, {best: ledger[best]})
    save_predictor(
        predictors[best], options.out / CHECKPOINT, view=traces.view, metrics=metrics, training=fitted[best].report
    )
    say("4/4 deploy: an eighth of the experts on the device, the others behind an emulated link")
    unseen = {entry["index"] for entry in traces.info["documents"] if entry["split"] == "test"}
    texts = [document.text for document in documents if document.index in unseen]
    deployed = deploy(model, tokenizer, texts, predictors[best], layers)
    scored = {**evaluation.as_dict(), "split": "test", "ledger": ledger}
    report_on(options.out / REPORT, scored, traces, fitted, best, deployed["quality"])
    return evaluation, {
        **scored,
        **deployed,
        "deployed_predictor": best,
        "collected_tokens": options.tokens,
        "steps": options.steps,
    }


def _text(out: Path, evaluation: Evaluation, result: Json) -> str:
    """Return the tables, the written files, and commands to continue with."""
    paths = {"traces": out / TRACES, "checkpoint": out / CHECKPOINT, "sweep": out / "sweep"}
    wrote = [out / RESULT, out / TRACES, out / CHECKPOINT, out / REPORT / PAGE]
    return "\n\n".join(
        [
            f"\nrecall@k per target layer, {result['tokens']} test tokens",
            layer_table(evaluation.as_dict()).text(),
            f"decoding with forecasts by {result['deployed_predictor']}, {SLOTS} of "
            f"{result['experts'] * result['layers']} experts on the device, "
            f"link of {result['bandwidth'] / 1e6:.1f} MB/s",
            "\n".join([runs_table(result["runs"]), *forecast_lines(result["runs"])]),
            quality_table(result["quality"]),
            f"{result['seconds']:.0f} seconds; wrote {', '.join(map(str, wrote))}",
            "next:" + "".join(f"\n    {command.format(**paths, bandwidth=result['bandwidth'])}" for command in NEXT),
        ]
    )
