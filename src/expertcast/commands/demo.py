"""`expertcast demo`: collect, train, evaluate and deploy on the bundled reference model, in a few minutes."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from expertcast.checkpoints.store import save_predictor
from expertcast.commands.demo_deployment import SLOTS, deploy, layer_work, runs_table
from expertcast.commands.ledger import ledger_of
from expertcast.commands.options import Count, Option, positive_number
from expertcast.commands.output import Outcome, folder, say, write_json
from expertcast.commands.pace import Allowance, part, threads_that_help
from expertcast.commands.predictors import EVAL_BATCH, best_on_validation, predictor_config
from expertcast.commands.scoring import scores
from expertcast.data.collector import collect
from expertcast.data.exclusive import exclusive
from expertcast.data.models import REFERENCE, load_model, load_tokenizer
from expertcast.data.text import load_documents
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, names
from expertcast.predictors.plain import Json
from expertcast.training.evaluation import evaluate
from expertcast.training.example_text import example_text
from expertcast.training.fit import fit_many
from expertcast.training.options import Fitted
from expertcast.training.report import PAGE, write_report
from expertcast.training.report_sources import report_sources
from expertcast.training.results import Evaluation, recall_table
from expertcast.training.scoring import scored_batches

RESULT, TRACES, CHECKPOINT, REPORT = "demo.json", "traces", "checkpoint", "report"
WEIGHTS = {"collect": 220.0, "train": 200.0, "evaluate": 30.0, "deploy": 160.0}
"""Of each stage in forwards over `PROBE_TOKENS`, somewhat less than measured on two quiet cores: there nothing may be
left out."""
PROBE_TOKENS, LAYER_TOKENS = 2048, 256
FEWEST_TOKENS = 6000
"""Fewer do not give documents for every split."""
NEXT = (
    'expertcast generate reference --prompt "It is a truth" --predictor {checkpoint} --slots 96',
    "expertcast eval {traces} --predictor {checkpoint} linear quasi_hidden",
    "expertcast advise reference --predictor {checkpoint} --slots 96",
    "expertcast simulate {traces} --sweep --out {sweep}",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What `expertcast demo` takes."""

    tokens: Count = 60_000
    """Tokens to collect."""
    steps: Count = 300
    """Steps of the estimator."""
    minutes: Annotated[float, Option(metavar="M", read=positive_number)] = 3.0
    """Do less of everything, a tenth of it at least, where it would take longer."""
    out: Annotated[Path, Option(metavar="DIR", read=folder)] = Path("expertcast-demo")
    """Folder for traces, checkpoint, report and demo.json; that of an earlier demo is replaced."""


def run(options: Options) -> Outcome:
    """The whole path, in the folder."""
    begin = time.perf_counter()
    with exclusive(options.out):
        _clear(options.out)
        model, tokenizer = load_model(REFERENCE), load_tokenizer(REFERENCE)
        ids_BW = torch.arange(PROBE_TOKENS).view(8, -1) % model.config.vocab_size

        @torch.no_grad()
        def forward() -> None:
            model(input_ids=ids_BW, use_cache=False, logits_to_keep=1)

        with threads_that_help(layer_work(model, LAYER_TOKENS)) as threads:
            allowance = Allowance(options.minutes * 60, WEIGHTS, forward)
            evaluation, result = _stages(options, model, tokenizer, allowance)
        result |= {"threads": threads, "seconds": time.perf_counter() - begin, "finished": True}
        write_json(options.out / RESULT, result)
    return result, _text(options.out, evaluation, result)


def _clear(out: Path) -> None:
    """
    Raises:
        ExpertcastError: the folder holds something, and nothing of an earlier demo.
    """
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()) and not (out / RESULT).is_file():
        raise ExpertcastError(f"{out} is not empty and holds no earlier demo: give a new or an empty folder as --out")
    write_json(out / RESULT, {"finished": False})  # the mark, for whoever comes after a kill
    for name in (TRACES, CHECKPOINT, REPORT):
        shutil.rmtree(out / name, ignore_errors=True)


def _stages(
    options: Options, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, allowance: Allowance
) -> tuple[Evaluation, Json]:
    """Four stages, each as much of its work as fits."""
    documents = load_documents(REFERENCE)
    say("1/4 collect: run the bundled model over text")
    tokens = min(options.tokens, max(FEWEST_TOKENS, part(options.tokens, allowance.share("collect"))))
    _say_less("tokens", tokens, options.tokens)
    traces = collect(model, tokenizer, documents, options.out / TRACES, tokens=tokens)
    say("2/4 train: every predictor, on the train split")
    steps = part(options.steps, allowance.share("train"))
    _say_less("steps of the estimator", steps, options.steps)
    fitted = fit_many(names(), traces, {"estimator": predictor_config("estimator", [1], [f"steps={steps}"])})
    say("3/4 evaluate: recall@k on the test split, documents that no predictor has seen")
    predictors = {name: made.predictor for name, made in fitted.items()}
    evaluation = evaluate(predictors, scored_batches(traces, "test", EVAL_BATCH), traces.view)
    best, layers = best_on_validation(predictors, traces, 1)
    ledger = ledger_of(fitted, traces, "test", 1)
    _save(options.out / CHECKPOINT, fitted[best], traces, ledger[best])
    say("4/4 deploy: an eighth of the experts on the device, the others behind an emulated link")
    unseen = {entry["index"] for entry in traces.info["documents"] if entry["split"] == "test"}
    texts = [document.text for document in documents if document.index in unseen]
    deployed = deploy(model, tokenizer, texts, predictors[best], layers, allowance)
    scored = {**evaluation.as_dict(), "split": "test", "ledger": ledger}
    write_report(
        options.out / REPORT,
        scored,
        chosen=best,
        quality=deployed["quality"],
        examples=example_text(predictors, traces, "test"),
        title=f"Forecasts for {REFERENCE}",
        provenance=report_sources(traces, fitted),
    )
    return evaluation, {**scored, **deployed, "deployed_predictor": best, "collected_tokens": tokens, "steps": steps}


def _say_less(what: str, count: int, asked: int) -> None:
    if count < asked:
        say(f"    {count:,} {what}, not {asked:,}: this machine is slow or busy, and --minutes are few")


def _save(out: Path, fitted: Fitted, traces: TraceDataset, costs: Json) -> None:
    """A checkpoint as `expertcast train` writes it."""
    predictor = fitted.predictor
    validation, _ = scores(predictor, traces, "validation")
    test, _ = scores(predictor, traces, "test")
    metrics = {"split": "test", "traces": traces.info["id"], **test, "ledger": {predictor.name: costs}}
    metrics["validation"] = validation
    save_predictor(predictor, out, view=traces.view, metrics=metrics, extra={"training": fitted.report})


def _text(out: Path, evaluation: Evaluation, result: Json) -> str:
    """Both tables, what was written, and what to do with it."""
    paths = {"traces": out / TRACES, "checkpoint": out / CHECKPOINT, "sweep": out / "sweep"}
    wrote = [out / RESULT, out / TRACES, out / CHECKPOINT, out / REPORT / PAGE]
    return "\n\n".join(
        [
            f"\nrecall@k per target layer, {result['tokens']} test tokens",
            recall_table(evaluation),
            f"decoding with forecasts by {result['deployed_predictor']}, {SLOTS} of "
            f"{result['experts'] * result['layers']} experts on the device, "
            f"link of {result['bandwidth'] / 1e6:.1f} MB/s",
            runs_table(result["runs"]),
            f"{result['seconds']:.0f} seconds; wrote {', '.join(map(str, wrote))}",
            "next:" + "".join(f"\n    {command.format(**paths)}" for command in NEXT),
        ]
    )
