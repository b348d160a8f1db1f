"""`expertcast train`: fit a predictor, score it on the validation and test splits, save it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from expertcast.checkpoints.checkpoint import save_predictor
from expertcast.checkpoints.hub import HubName, NotOnHubError
from expertcast.checkpoints.results import ledger_table
from expertcast.commands.options import COUNT, Count, Data, Fields, OffloadedOptions, Option, Text, TextColumn
from expertcast.commands.output import Outcome, folder, say
from expertcast.commands.predictors import checkpoint_metrics, ledger_of, predictor_config, registered
from expertcast.data.live import NOTE, with_default_vectors
from expertcast.data.online import OnlineTraces
from expertcast.data.plan import SPLITS
from expertcast.data.processes import exclusive, training_share
from expertcast.data.text import TEXT_COLUMN, load_documents
from expertcast.data.trace_format import TRACE_FILE
from expertcast.data.traces import TraceDataset, TraceSource
from expertcast.predictors import ExpertcastError, predictor_class
from expertcast.predictors.base import PredictorConfig
from expertcast.predictors.hybrid import Hybrid, HybridConfig
from expertcast.predictors.messages import Json
from expertcast.predictors.options import settable
from expertcast.training.evaluation import baseline_recall
from expertcast.training.fit import fit
from expertcast.training.loop import forget, resume_folder
from expertcast.training.report import log_evaluation
from expertcast.training.scoring import FitOptions

_FIT = Fields(tokens=COUNT, seed=Option(), log_folder=Option(flag="--log", metavar="DIR", read=Path))


@dataclass(frozen=True, kw_only=True)
class Options(OffloadedOptions):
    """What `expertcast train` takes."""

    source: Annotated[str, Option(positional=True, metavar="TRACES|MODEL")]
    """Traces folder, or user/repo of the hub; with --data a model to train on online."""
    predictor: Annotated[tuple[str, ...], Option(metavar="NAME")]
    """Name of the predictor, or module:Class of your own; several are trained into one checkpoint, `hybrid`: per layer
    the best one forecasts, and a run takes cheaper ones where they save more time."""
    out: Annotated[Path, Option(metavar="CKPT", read=folder)]
    """Checkpoint folder to write."""
    ahead: tuple[Count, ...] = (1,)
    """Layers ahead; each distance is fitted and scored."""
    settings: Annotated[tuple[str, ...], Option(flag="--set", metavar="KEY=VALUE")] = ()
    """Fields of the predictor's config; of several predictors, of each that has such a field."""
    data: Data = ()
    """With MODEL only."""
    text_column: TextColumn = TEXT_COLUMN
    """Column of --data that holds the text."""
    default_vectors: Annotated[str | None, Option(metavar="TRACES|CKPT")] = None
    """What experts put out on average, which quasi_hidden, linear and estimator read, is taken from other traces of the
    same model, by `expertcast collect`, or from a checkpoint of one of these: for a server's traffic, which has none
    (default: from what is trained on)."""
    text: Text
    """In which portions the text is run, with MODEL."""
    fit: Annotated[FitOptions, _FIT]
    """How it is fitted."""


def run(options: Options) -> Outcome:
    """Under torchrun every rank fits and scores the same, and the first one saves."""
    options = replace(options, predictor=registered(options.predictor))
    for name in options.predictor:
        if predictor_class(name).looks == "tokens" and options.ahead != (1,):
            raise ExpertcastError(f"--ahead counts layers and {name} looks tokens ahead: give --set tokens=N")
    name, config = _wanted(options)
    with exclusive(resume_folder(options.out)):
        return _train(options, name, config)


def _wanted(options: Options) -> tuple[str, PredictorConfig]:
    """Name and config of what is trained: the predictor, or a hybrid of several.

    Raises:
        ExpertcastError: as :func:`predictor_config`; or several, and one that a hybrid cannot hold.
    """
    names = list(dict.fromkeys(options.predictor))
    if len(names) == 1:
        return names[0], predictor_config(names[0], options.ahead, options.settings)
    known = {name: settable(predictor_class(name).config_class) for name in names}
    word_of = {word: word.partition("=")[0] for word in options.settings}
    for word, key in word_of.items():
        if not any(key in fields for fields in known.values()):
            raise ExpertcastError(f"--set: none of {', '.join(names)} has an option {word!r}")
    configs = {
        name: predictor_config(name, options.ahead, [word for word, key in word_of.items() if key in fields]).as_dict()
        for name, fields in known.items()
    }
    return Hybrid.name, HybridConfig(ahead=options.ahead, candidates=names, member_configs=configs)


def _train(options: Options, name: str, config: PredictorConfig) -> Outcome:
    source = training_source(options)
    if options.default_vectors is not None:
        source = with_default_vectors(source, options.default_vectors)
    settings = replace(options.fit, resume_folder=resume_folder(options.out))
    fitted = fit(name, source, config=config, options=settings)
    if options.default_vectors is not None and NOTE not in fitted.report:
        say(f"{name} reads no default vectors as it is: --default-vectors changed nothing of it")
    predictor, ahead = fitted.predictor, min(fitted.predictor.ahead, default=1)
    ledger = ledger_of({predictor.name: fitted}, source, "test", ahead)
    metrics, table = checkpoint_metrics(predictor, source, ledger)
    metrics["data"] = described(source)
    if "recall_at_k" in metrics:
        metrics["baselines"] = baseline_recall(source, "test", ahead)
    if training_share().rank == 0:
        save_predictor(predictor, options.out, view=source.view, metrics=metrics, training=fitted.report)
        forget(options.out)
        if options.fit.log_folder and "recall_at_k" in metrics:
            used = {"predictor": name, "seed": options.fit.seed, "tokens": fitted.report["tokens"]}
            settings_used = {**used, **predictor.config.as_dict()}
            log_evaluation(options.fit.log_folder, name, metrics, settings_used)
    text = (
        f"{table}\n\n{ledger_table(ledger).text()}\n\nfitted in {fitted.report['seconds']:.0f} s; wrote {options.out}"
    )
    return {"checkpoint": str(options.out), "training": fitted.report, **metrics}, text


def described(source: TraceSource) -> Json:
    """The text that a predictor learned from and was scored on, for its card."""
    info = source.info
    text = source.plan.digest if isinstance(source, OnlineTraces) else info["settings"]["text"]
    return {"command": info["command"], "text": text, "documents": len(source.documents), "splits": info["splits"]}


def training_source(options: Options) -> TraceSource:
    """Traces when `source` is a traces folder, or without --data one of the hub; else a model to train on online.

    Raises:
        ExpertcastError: neither; or a model without --data.
    """
    if (Path(options.source) / TRACE_FILE).is_file():
        if options.data:
            raise ExpertcastError(f"{options.source} is a traces folder: leave --data out")
        return TraceDataset.open(Path(options.source))
    if not options.data:
        if HubName.of(options.source) is None:
            raise ExpertcastError(f"{options.source} is no traces folder: give --data to train online on that model")
        return _hub_traces(options.source)
    documents = load_documents(options.data, column=options.text_column, tokens=options.fit.tokens)
    model, tokenizer = options.load(options.source)
    source = OnlineTraces(model, tokenizer, documents, options.text, seed=options.fit.seed, tokens=options.fit.tokens)
    counts = ", ".join(f"{source.token_count(split):,} {split}" for split in SPLITS)
    say(f"{options.source} is run over {source.token_count():,} tokens of text in each pass ({counts})")
    return source


def _hub_traces(name: str) -> TraceDataset:
    """Traces of the hub.

    Raises:
        ExpertcastError: no such data set, and a model may be meant; or it is not right.
    """
    try:
        return TraceDataset.open(name)
    except NotOnHubError as error:
        raise ExpertcastError(f"{error}; to train online on a model of that name, give --data") from error
