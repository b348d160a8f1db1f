"""What the commands of the command line do; each returns (result for --json, text to print)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from expertcast.checkpoints import files
from expertcast.checkpoints.provenance import provenance
from expertcast.checkpoints.store import PredictorCheckpoint, load_predictor, save_predictor
from expertcast.data.collector import collect as collect_traces
from expertcast.data.datamodule import OnlineDataModule
from expertcast.data.discovery import find_moe_layers
from expertcast.data.distributed import current_share
from expertcast.data.inspection import inspect_model
from expertcast.data.layout import TRACE_FILE
from expertcast.data.models import REFERENCE, load_model, load_tokenizer
from expertcast.data.text import Document, load_documents
from expertcast.data.traces import TraceDataset, TraceSource
from expertcast.data.writer import write_atomically
from expertcast.predictors import ExpertcastError, Predictor, PredictorConfig, names, predictor_class
from expertcast.predictors.fields import parse_settings
from expertcast.runtime.loading import load_offloaded
from expertcast.runtime.policies import Policies
from expertcast.runtime.quality.forecasts import QualityRun, measure_quality, text_windows
from expertcast.token_commands import save_token_predictor, split_by_looks, token_scores
from expertcast.training.curve import learning_curve
from expertcast.training.evaluation import evaluate as evaluate_predictors
from expertcast.training.fit import fit, fit_many
from expertcast.training.options import FitOptions
from expertcast.training.report import log_figures, write_report
from expertcast.training.results import aligned, recall_table

Outcome = tuple[dict[str, Any], str]
EVAL_BATCH = 4096  # tokens
QUALITY_WINDOW = 256  # tokens


def collect(args: argparse.Namespace) -> Outcome:
    """`expertcast collect`."""
    documents = load_documents(args.data)
    model = load_model(args.model, dtype=args.dtype, device=device_of(args))
    traces = collect_traces(
        model,
        load_tokenizer(args.model),
        documents,
        args.out,
        tokens=args.tokens,
        window=args.window,
        batch_size=args.batch_size,
    )
    return dict(traces.info), describe_traces(traces)


def train(args: argparse.Namespace) -> Outcome:
    """`expertcast train`: fit, score on the validation and test splits, save."""
    if predictor_class(args.predictor).looks == "tokens" and args.ahead != [1]:
        raise ExpertcastError(f"--ahead counts layers and {args.predictor} looks tokens ahead: give --set tokens=N")
    config = predictor_config(args.predictor, args.ahead, args.set)
    source = training_source(args)
    options = FitOptions(tokens=args.tokens, seed=args.seed, log_folder=args.log, progress=True)
    fitted = fit(args.predictor, source, config=config, options=options)
    if fitted.predictor.looks == "tokens":
        return save_token_predictor(args, fitted, source)
    validation, evaluation = (
        evaluate_predictors(
            {args.predictor: fitted.predictor}, source.batches(split, EVAL_BATCH), source.view, ahead=min(config.ahead)
        )
        for split in ("validation", "test")
    )
    # hybrid execution chooses its layers by the validation split: the test split must stay untouched by choices
    metrics = {
        "split": "test",
        "traces": source.info.get("id"),
        **evaluation.as_dict(),
        "validation": validation.as_dict(),
    }
    if current_share().rank == 0:  # every rank has fitted and scored the same
        save_predictor(fitted.predictor, args.out, view=source.view, metrics=metrics, extra={"training": fitted.report})
    if args.log and current_share().rank == 0:
        log_figures(args.log / "evaluation", evaluation.as_dict())
    text = f"{recall_table(evaluation)}\n\nfitted in {fitted.report['seconds']:.0f} s; wrote {args.out}"
    return {"checkpoint": str(args.out), "training": fitted.report, **metrics}, text


def evaluate(args: argparse.Namespace) -> Outcome:
    """`expertcast eval`."""
    if args.model and not args.data and args.model != REFERENCE:
        raise ExpertcastError("--model needs text to run on: give --data")
    traces = TraceDataset.open(args.traces)
    predictors, tokens_ahead = split_by_looks(args, evaluated_predictors(args, traces))
    split, note = scoring_split(args, traces)
    result: dict[str, Any] = {"split": split}
    tables = []
    if tokens_ahead is not None:
        found, token_table = token_scores(tokens_ahead, traces, split)
        result |= found
        tables.append(token_table)
    if predictors:
        evaluation = evaluate_predictors(predictors, traces.batches(split, EVAL_BATCH), traces.view, ahead=args.ahead)
        result |= evaluation.as_dict()
        tables.insert(0, recall_table(evaluation))
    text = "\n\n".join([*tables, f"scored on split {split!r}, {result['tokens']} tokens{note}"])
    if args.model:
        model = load_model(args.model, dtype=args.dtype, device=device_of(args))
        documents = load_documents(args.data or REFERENCE)
        result["quality"] = quality(
            model, load_tokenizer(args.model), documents, predictors, result, tokens=args.quality_tokens
        )
        text += "\n\n" + quality_table(result["quality"])
    if args.curve:
        result["learning_curve"] = learning_curve(traces, args.curve, ahead=args.ahead)
        text += "\n\n" + curve_table(result["learning_curve"])
    if args.report:
        title = f"Forecasts for {traces.view.model_id}"
        made_from: dict[str, Any] = {
            key: traces.info[key] for key in ("model", "tokens", "command", "versions") if key in traces.info
        }
        page = write_report(
            args.report,
            result,
            learning_curve=result.get("learning_curve"),
            quality=result.get("quality"),
            title=title,
            provenance=made_from,
        )
        text += f"\n\nwrote {page}"
    return {**result, **provenance()}, text


def generate(args: argparse.Namespace) -> Outcome:
    """`expertcast generate`."""
    tokenizer = load_tokenizer(args.model)
    inputs = tokenizer(args.prompt, return_tensors="pt").to(device_of(args))
    if not inputs["input_ids"].shape[1]:
        raise ExpertcastError("--prompt holds no token: give some text")
    with load_offloaded(
        args.model,
        device=device_of(args),
        dtype=args.dtype,
        store="memory" if args.store_folder is None else "disk",
        store_folder=args.store_folder,
        predictor=args.predictor,
        policies=_policies(args.policies),
        next_token=args.next_token,
        mode=args.mode,
        slots=args.slots,
        memory=args.memory,
        bandwidth=args.bandwidth,
    ) as offloaded:
        output = offloaded.generate(**inputs, max_new_tokens=args.new_tokens, do_sample=False)
        stats = offloaded.stats.as_dict()
    text = tokenizer.decode(output[0], skip_special_tokens=True)
    totals = {key: value for key, value in stats.items() if isinstance(value, (int, float))}
    return {"text": text, "tokens": output[0].tolist(), "stats": stats}, f"{text}\n\n{table(totals)}"


def _policies(words: Sequence[str] | None) -> Policies | str | None:
    """`kind=policy` for each kind that is not the default, or a preset's name.

    Raises:
        ExpertcastError: an unknown kind or policy.
    """
    if not words:
        return None
    if len(words) == 1 and "=" not in words[0]:
        return words[0]
    kinds = list(Policies().as_dict())
    given = dict(word.partition("=")[::2] for word in words)
    for kind in given:
        if kind not in kinds:
            raise ExpertcastError(f"--policies {kind}: give a preset alone, or KIND=POLICY of {', '.join(kinds)}")
    return Policies(**given)


def inspect(args: argparse.Namespace) -> Outcome:
    """`expertcast inspect`."""
    folder = Path(args.target)
    if (folder / TRACE_FILE).is_file():
        traces = TraceDataset.open(folder)
        return dict(traces.info), describe_traces(traces)
    config = folder / files.CONFIG
    if config.is_file() and "predictor" in json.loads(config.read_text()):
        checkpoint = PredictorCheckpoint.open(folder)
        recall = checkpoint.metrics.get("recall_at_k", {}).get(checkpoint.name)
        return checkpoint.config, table({**checkpoint.config, "recall_at_k": recall})
    report = inspect_model(args.target).as_dict()
    return report, table({key: value for key, value in report.items() if value != ""})


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write a result file atomically.

    Raises:
        ExpertcastError: the folder does not exist or cannot be written.
    """
    content = (json.dumps(result, indent=2, allow_nan=False) + "\n").encode()
    try:
        write_atomically(path, content)
    except OSError as error:
        raise ExpertcastError(
            f"cannot write {path}: {error.strerror}; give --json a path in a folder that exists"
        ) from error


def device_of(args: argparse.Namespace) -> str:
    """`--device`, with `auto` resolved."""
    if args.device != "auto":
        return str(args.device)
    return "cuda" if torch.cuda.is_available() else "cpu"


def predictor_config(name: str, ahead: list[int], settings: list[str]) -> PredictorConfig:
    """The predictor's config from `--ahead` and `--set key=value ...`.

    Raises:
        ExpertcastError: unknown predictor, unknown field, or a value of the wrong type.
    """
    cls = predictor_class(name)
    given = {"ahead": () if cls.looks == "tokens" else tuple(ahead)}
    return parse_settings(settings, cls.config_class, f"--set: predictor {name!r}", given)


def training_source(args: argparse.Namespace) -> TraceSource:
    """Traces when `source` is a traces folder, else a model to train on online.

    Raises:
        ExpertcastError: neither; or a model without --data.
    """
    if (Path(args.source) / TRACE_FILE).is_file():
        if args.data:
            raise ExpertcastError(f"{args.source} is a traces folder: leave --data out")
        return TraceDataset.open(Path(args.source))
    if not args.data:
        raise ExpertcastError(f"{args.source} is no traces folder: give --data to train online on that model")
    documents = load_documents(args.data)
    model = load_model(args.source, dtype=args.dtype, device=device_of(args))
    return OnlineDataModule(
        model, load_tokenizer(args.source), documents, window=args.window, batch_size=args.batch_size, seed=args.seed
    )


def evaluated_predictors(args: argparse.Namespace, traces: TraceDataset) -> dict[str, Predictor]:
    """Checkpoints loaded, registry names fitted on the train split; by predictor name.

    Raises:
        ExpertcastError: neither a checkpoint nor a name, or two predictors of one name.
    """
    loaded = {given: load_predictor(given, traces.view) for given in args.predictor if is_checkpoint(given)}
    wanted = [given for given in args.predictor if given not in loaded]
    known = names() + names("tokens")
    for given in wanted:
        if given not in known:
            raise ExpertcastError(
                f"{given!r} is neither a checkpoint folder nor a predictor name: names are {', '.join(known)}"
            )
    predictors: dict[str, Predictor] = {}
    configs = {name: predictor_config(name, [args.ahead], []) for name in wanted}
    fitted = fit_many(wanted, traces, configs, options=FitOptions(progress=True))
    for given in args.predictor:
        predictor = loaded[given] if given in loaded else fitted[given].predictor
        if predictor.name in predictors:
            raise ExpertcastError(f"two predictors named {predictor.name!r}: evaluate them one at a time")
        predictors[predictor.name] = predictor
    return predictors


def is_checkpoint(given: str) -> bool:
    return (Path(given) / files.CONFIG).is_file()


def scoring_split(args: argparse.Namespace, traces: TraceDataset) -> tuple[str, str]:
    """The documents that score, and a note: never documents that a predictor learned from, unless asked for."""
    if args.split:
        return args.split, ""
    if not all(is_checkpoint(given) for given in args.predictor):
        return "test", ""
    for given in args.predictor:
        training = PredictorCheckpoint.open(given).config.get("training", {})
        if training.get("traces") == traces.info["id"]:
            return "test", f"; {given} was trained on these traces, so their test split alone scores it (see --split)"
    return "all", ""


def quality(
    model: PreTrainedModel,
    tokenizer: Any,
    documents: Sequence[Document],
    predictors: dict[str, Predictor],
    evaluation: dict[str, Any],
    *,
    tokens: int,
) -> dict[str, Any]:
    """What executing forecasts costs the model, per domain: see :func:`expertcast.runtime.measure_quality`.

    Each predictor is executed at all layers, and the best one also at the layers where it is right often (`hybrid`).
    """
    domains = sorted({document.domain for document in documents})
    count = max(1, tokens // QUALITY_WINDOW // len(domains))
    windows = {}
    for domain in domains:
        texts = [document.text for document in documents if document.domain == domain]
        windows[domain or "text"] = text_windows(tokenizer, texts, length=QUALITY_WINDOW, count=count)
    ahead = int(evaluation["ahead"])
    runs = {f"speculate {name}": QualityRun(predictor=p, ahead=ahead) for name, p in predictors.items()}
    best = max(predictors, key=lambda name: evaluation["recall_at_k"][name]["mean"])
    layers = confident_layers(evaluation, best)
    runs[f"hybrid execution of {best}"] = QualityRun(predictor=predictors[best], layers=layers, ahead=ahead)
    return measure_quality(model, find_moe_layers(model), windows, runs)


def confident_layers(evaluation: dict[str, Any], name: str, least: float = 0.9) -> list[int]:
    """Target layers at which a predictor's recall@k is at least `least`: where hybrid mode executes its forecast."""
    recall = evaluation["recall_at_k"][name]["per_layer"]
    return [layer for layer, value in zip(evaluation["targets"], recall, strict=True) if value >= least]


def quality_table(result: dict[str, Any]) -> str:
    rows = [("run", "perplexity", "top-1 agreement", "KL", "executed recall")]
    for name, run in result["runs"].items():
        numbers = (run["perplexity"], run["top1_agreement"], run["kl"], run["executed_recall"]["mean"])
        rows.append((name, *(f"{number:.4g}" for number in numbers)))
    return aligned(rows)


def curve_table(curve: dict[str, dict[str, float]]) -> str:
    counts = list(next(iter(curve.values())))
    rows = [("recall@k at tokens", *counts)]
    rows += [(form, *(f"{values[count]:.3f}" for count in counts)) for form, values in curve.items()]
    return aligned(rows)


def describe_traces(traces: TraceDataset) -> str:
    keys = (
        "model",
        "fingerprint",
        "shape",
        "tokens",
        "splits",
        "window",
        "columns",
        "command",
        "git_revision",
        "versions",
    )
    values = {key: traces.info[key] for key in keys if key in traces.info}
    return table({**values, "documents": len(traces.info["documents"])})


def table(values: dict[str, Any]) -> str:
    """Two aligned columns; nested values as compact JSON."""
    width = max(len(key) for key in values)
    rows = []
    for key, value in values.items():
        shown = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
        rows.append(f"{key:<{width}}  {shown if len(shown) <= 100 else shown[:97] + '...'}")
    return "\n".join(rows)
