"""Predictors as the command line names them: settings of one, names and checkpoints of several, and their scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from expertcast.checkpoints import files
from expertcast.checkpoints.store import load_predictor
from expertcast.data.traces import TraceDataset, TraceSource
from expertcast.predictors import (
    ExpertcastError,
    MoEView,
    NextToken,
    Predictor,
    PredictorConfig,
    names,
    predictor_class,
)
from expertcast.predictors.fields import parse_settings
from expertcast.predictors.next_token_tracker import NextTokenTracker
from expertcast.predictors.plain import Json
from expertcast.training.evaluation import evaluate
from expertcast.training.fit import fit_many
from expertcast.training.options import FitOptions
from expertcast.training.results import recall_table
from expertcast.training.token_evaluation import evaluate_tokens, tokens_table

EVAL_BATCH = 4096
"""Tokens per batch of an evaluation."""


def predictor_config(name: str, ahead: Sequence[int], settings: Sequence[str] = ()) -> PredictorConfig:
    """A predictor's config from `--ahead` and `--set key=value ...`.

    Raises:
        ExpertcastError: unknown predictor, unknown field, or a value that does not fit.
    """
    cls = predictor_class(name)
    given = {"ahead": () if cls.looks == "tokens" else tuple(ahead)}
    return parse_settings(settings, cls.config_class, f"--set: predictor {name!r}", given)


def evaluated_predictors(wanted: Sequence[str], traces: TraceDataset, ahead: int = 1) -> dict[str, Predictor]:
    """Checkpoints loaded, registry names fitted on the train split; by predictor name, in the order of the words.

    Raises:
        ExpertcastError: neither a checkpoint nor a name, or two predictors of one name.
    """
    loaded = {given: load_predictor(given, traces.view) for given in wanted if is_checkpoint(given)}
    to_fit = [given for given in wanted if given not in loaded]
    known = names() + names("tokens")
    for given in to_fit:
        if given not in known:
            raise ExpertcastError(
                f"{given!r} is neither a checkpoint folder nor a predictor name: names are {', '.join(known)}"
            )
    configs = {name: predictor_config(name, [ahead]) for name in to_fit}
    fitted = fit_many(to_fit, traces, configs, options=FitOptions(progress=True))
    predictors: dict[str, Predictor] = {}
    for given in wanted:
        predictor = loaded[given] if given in loaded else fitted[given].predictor
        if predictor.name in predictors:
            raise ExpertcastError(f"two predictors named {predictor.name!r}: evaluate them one at a time")
        predictors[predictor.name] = predictor
    return predictors


def is_checkpoint(given: str) -> bool:
    """Whether a word names a checkpoint's folder."""
    return (Path(given) / files.CONFIG).is_file()


def scores(predictor: Predictor, source: TraceSource, split: str) -> tuple[Json, str]:
    """One predictor scored at its shortest distance, or tokens ahead if it looks that way: results and their table."""
    if isinstance(predictor, NextToken):
        found = evaluate_tokens(predictor, source, split)
        return found, tokens_table(found["tokens_ahead"])
    batches = source.batches(split, EVAL_BATCH)
    evaluation = evaluate({predictor.name: predictor}, batches, source.view, ahead=min(predictor.ahead))
    return evaluation.as_dict(), recall_table(evaluation)


def next_token_tracker(given: str | None, view: MoEView) -> NextTokenTracker | None:
    """What forecasts the next tokens, if anything does.

    Raises:
        ExpertcastError: a checkpoint of another kind of predictor.
    """
    if given is None:
        return None
    predictor = load_predictor(given, view)
    if not isinstance(predictor, NextToken):
        raise ExpertcastError(
            f"--next-token {given} is a {predictor.name}: give a checkpoint of `expertcast train --predictor "
            "next_token`, and other predictors as --predictor"
        )
    return NextTokenTracker(predictor)
