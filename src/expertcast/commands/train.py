"""`expertcast train`: fit a predictor, score it on the validation and test splits, save it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from expertcast.checkpoints.checkpoint import PredictorCheckpoint, holds_predictor, save_predictor
from expertcast.checkpoints.hub import HubName, NotOnHubError
from expertcast.checkpoints.results import ledger_table
from expertcast.commands.options import (
    COUNT,
    SEED,
    Count,
    Data,
    Fields,
    Form,
    OffloadedOptions,
    Option,
    Text,
    TextColumn,
    own_code,
    read_by,
)
from expertcast.commands.output import Outcome, folder, say
from expertcast.commands.predictors import (
    LinkOptions,
    checkpoint_metrics,
    ledger_of,
    predictor_config,
    waiting,
    waiting_table,
    with_rungs,
)
from expertcast.data.online import OnlineTraces
from expertcast.data.plan import SPLITS
from expertcast.data.processes import exclusive, training_share
from expertcast.data.text import TEXT_COLUMN, load_documents
from expertcast.data.trace_format import TRACE_FILE
from expertcast.data.traces import DEFAULTS_NOTE, TraceDataset, TraceSource, with_default_vectors
from expertcast.predictors import ExpertcastError, Predictor, predictor_class
from expertcast.predictors.base import PredictorConfig
from expertcast.predictors.early_attention import EarlyAttention, EarlyConfig
from expertcast.predictors.hybrid import Hybrid, HybridConfig
from expertcast.predictors.messages import Json
from expertcast.predictors.options import settable
from expertcast.training.evaluation import baseline_recall
from expertcast.training.fit import fit, fit_early_attention, forecast_seconds
from expertcast.training.loop import resume_folder
from expertcast.training.scoring import FitOptions, device_of

_FIT = Fields(tokens=COUNT, seed=SEED, log_folder=Option(flag="--log", metavar="DIR", read=Path))


@dataclass(frozen=True, kw_only=True)
class Options(OffloadedOptions, LinkOptions):
    """Options of `expertcast train`."""

    source: Annotated[str, Option(positional=True, metavar="TRACES|MODEL")]
    """Traces folder, user/repo of traces on the hub, or with --data a model to train on online."""
    predictor: Annotated[tuple[str, ...], Option(metavar="NAME", read=own_code)]
    """Name of the predictor, or MODULE:CLASS of your own. Several become one `hybrid` checkpoint: the best one
    forecasts at each layer, and a run switches to a cheaper one if that saves time."""
    out: Annotated[Path, Option(metavar="CKPT", read=folder)]
    """Checkpoint folder to write."""
    ahead: tuple[Count, ...] = (1,)
    """Distances in layers between a forecast and its target; each is fitted and scored."""
    settings: Annotated[tuple[str, ...], Option(flag="--set", metavar="KEY=VALUE")] = ()
    """Fields of the predictor's config; with several predictors, every one that has the field gets it."""
    data: Data = ()
    """Text to train on, with MODEL."""
    text_column: TextColumn = TEXT_COLUMN
    """Column of --data that holds the text."""
    default_vectors: Annotated[str | None, Option(metavar="TRACES")] = None
    """Other traces of the model, for the experts' mean outputs, which quasi_hidden, linear and estimator read. Needed
    for traces of a server, which have none (default: TRACES)."""
    text: Text
    """Windows and batches of the text, with MODEL."""
    fit: Annotated[FitOptions, _FIT]
    """Fitting."""

    @property
    def form(self) -> Form:
        """Training on traces, or online."""
        if self.data:
            return Form("training on a model", read_by(Options))
        of_text = read_by(OffloadedOptions, "data", "text_column", "window", "batch_size", "early_rank")
        return Form("training on traces", read_by(Options, but=of_text - {"device"}))


def run(options: Options) -> Outcome:
    """Train, score and save; under torchrun every rank fits and scores the same predictor, and the first one saves."""
    name, config = _wanted(options)
    with exclusive(resume_folder(options.out)):
        return _train(options, name, config)


def _wanted(options: Options) -> tuple[str, PredictorConfig]:
    """Return name and config of the predictor to train, a hybrid of several names.

    Raises:
        ExpertcastError: as :func:`predictor_config`; or a predictor that a hybrid cannot hold.
    """
    names = list(dict.fromkeys(options.predictor))
    if len(names) == 1:
        return names[0], predictor_config(names[0], options.ahead, options.settings)
    known = {name: settable(predictor_class(name).config_class) for name in names}
    word_of = {word: word.partition("=")[0] for word in options.settings}
    for word, key in word_of.items():
        if not any(key in fields for fields in known.values()):
            raise ExpertcastError(f"--set {word}: none of {', '.join(names)} has this option")
    configs = {
        name: predictor_config(name, options.ahead, [word for word, key in word_of.items() if key in fields]).as_dict()
        for name, fields in known.items()
    }
    return Hybrid.name, HybridConfig(ahead=options.ahead, candidates=names, member_configs=configs)


def _train(options: Options, name: str, config: PredictorConfig) -> Outcome:
    options.check_link()
    source = training_source(options)
    _check_out(options.out, source)
    if options.default_vectors is not None:
        source = with_default_vectors(source, options.default_vectors)
    settings = replace(options.fit, resume_folder=resume_folder(options.out))
    fitted = fit(name, source, config=config, options=settings)
    if options.default_vectors is not None and DEFAULTS_NOTE not in fitted.report:
        say(f"{name} with these settings reads no default vectors: --default-vectors has no effect")
    predictor, ahead = fitted.predictor, min(fitted.predictor.ahead, default=1)
    ways = with_rungs(untrained(source, ahead, options.fit) | {predictor.name: predictor})
    forecast_s = forecast_seconds(ways, source, "test", ahead)
    ledger = ledger_of({predictor.name: fitted}, forecast_s)
    metrics, table = checkpoint_metrics(predictor, source, ledger)
    metrics["data"] = described(source)
    if "recall_at_k" in metrics:
        metrics["baselines"] = baseline_recall(source, "test", ahead)
    if training_share().rank == 0:
        save_predictor(predictor, options.out, view=source.view, metrics=metrics, training=fitted.report)
        shutil.rmtree(resume_folder(options.out), ignore_errors=True)
    times = _use(options, predictor.name, waiting(options, ways, forecast_s, source, "test", ahead))
    scored = f"scored on split {metrics['split']!r}, {metrics['tokens']} tokens"
    fitted_in = f"fitted in {fitted.report['seconds']:.0f} s; wrote {options.out}"
    text = "\n\n".join([table, ledger_table(ledger).text(), *times, scored, fitted_in])
    return {"checkpoint": str(options.out), "training": fitted.report, **metrics}, text


UNTRAINED = ("router_input", "next_norm")
"""Forecasts that need no training; early attention is a third."""


def untrained(source: TraceSource, ahead: int, options: FitOptions) -> dict[str, Predictor]:
    """Return the forecasts without training that a source has, bound to its view."""
    ways = {name: predictor_class(name)(PredictorConfig(ahead=(ahead,)), source.view.shape) for name in UNTRAINED}
    if source.stand_in is not None:
        ways[EarlyAttention.name] = fit_early_attention(source, EarlyConfig(ahead=(ahead,)), options).predictor
    return {name: way.to(device_of(source.view)).bind(source.view) for name, way in ways.items()}


def _use(options: Options, name: str, found: Json) -> Iterator[str]:
    """Yield the table of expected times per token, then the fastest of a predictor's rungs and of the others."""
    if found:
        yield waiting_table(found)
        own = next(way for way in found if way.partition("/")[0] == name)
        other = next(way for way in found if way.partition("/")[0] != name)
        gain_ms = found[other]["token_ms"] - found[own]["token_ms"]
        yield (
            f"use {options.out}: with {own} {gain_ms:.2f} ms per token less than with {other}"
            if gain_ms > 0
            else f"use {other}: training gains nothing here, with {own} {-gain_ms:.2f} ms per token more"
        )


def _check_out(out: Path, source: TraceSource) -> None:
    """Raise ExpertcastError if `out` is a complete checkpoint of other traces."""
    before = None
    if holds_predictor(out):
        with suppress(ExpertcastError):  # a damaged checkpoint may be replaced
            before = PredictorCheckpoint.open(out).config.get("training", {}).get("traces")
    if before not in (None, source.info.get("id")):
        raise ExpertcastError(
            f"{out} is a checkpoint of other traces ({before}): give another --out, or remove that folder first"
        )


def described(source: TraceSource) -> Json:
    """Describe the text of training and scoring, for the checkpoint's card."""
    info = source.info
    text = source.plan.digest if isinstance(source, OnlineTraces) else info["settings"]["text"]
    return {"command": info["command"], "text": text, "documents": len(source.documents), "splits": info["splits"]}


def training_source(options: Options) -> TraceSource:
    """Open traces from a folder or the hub; with --data, load a model to train on online.

    Raises:
        ExpertcastError: neither traces nor a model, a model without --data, or no or damaged traces on the hub.
    """
    if (Path(options.source) / TRACE_FILE).is_file():
        if options.data:
            raise ExpertcastError(f"{options.source} is a traces folder: leave out --data, which is for a MODEL")
        return TraceDataset.open(Path(options.source), device=options.device_name)
    if not options.data:
        if HubName.of(options.source) is None:
            raise ExpertcastError(f"{options.source} is no traces folder: give --data to train on a model online")
        try:
            return TraceDataset.open(options.source, device=options.device_name)
        except NotOnHubError as error:
            raise ExpertcastError(f"{error}; to train online on a model of that name, give --data") from error
    documents = load_documents(options.data, column=options.text_column, tokens=options.fit.tokens)
    model, tokenizer = options.load(options.source, part=0.5)  # sums, rows and steps take what is left
    source = OnlineTraces(model, tokenizer, documents, options.text, seed=options.fit.seed, tokens=options.fit.tokens)
    counts = ", ".join(f"{source.token_count(split):,} {split}" for split in SPLITS)
    say(f"{options.source} runs over {source.token_count():,} tokens of text ({counts})")
    return source
