"""`expertcast eval`: score predictors on traces, and say what executing their forecasts costs a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from expertcast.checkpoints.provenance import provenance
from expertcast.checkpoints.store import PredictorCheckpoint
from expertcast.commands.options import Count, Option
from expertcast.commands.output import Outcome, folder
from expertcast.commands.predictors import (
    EVAL_BATCH,
    QualityOptions,
    evaluated_predictors,
    forecast_quality,
    is_checkpoint,
    quality_table,
    scores,
)
from expertcast.data.plan import ALL, SPLITS
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, NextToken, Predictor
from expertcast.predictors.plain import Json, aligned
from expertcast.training.curve import learning_curve
from expertcast.training.evaluation import evaluate
from expertcast.training.report import write_report
from expertcast.training.results import recall_table


@dataclass(frozen=True, kw_only=True)
class Options(QualityOptions):
    """What `expertcast eval` takes."""

    traces: Annotated[Path, Option(positional=True, metavar="TRACES")]
    """Traces folder."""
    predictor: Annotated[tuple[str, ...], Option(metavar="NAME|CKPT")]
    """Names are fitted on the train split and scored on the test split; checkpoints are scored on all."""
    split: Annotated[str | None, Option(choices=(*SPLITS, ALL))] = None
    """Documents that score."""
    ahead: Count = 1
    """Layers ahead."""
    report: Annotated[Path | None, Option(metavar="DIR", read=folder)] = None
    """Write one HTML page, PNGs and JSON."""
    curve: tuple[Count, ...] = ()
    """Learning curve at these token counts."""


def run(options: Options) -> Outcome:
    """Predictors of layers share one table, one that looks tokens ahead has its own."""
    options.check_text()
    traces = TraceDataset.open(options.traces)
    predictors, tokens_ahead = split_by_looks(options, evaluated_predictors(options.predictor, traces, options.ahead))
    split, note = scoring_split(options, traces)
    result: Json = {"split": split}
    tables = []
    if tokens_ahead is not None:
        found, token_table = scores(tokens_ahead, traces, split)
        result |= found
        tables.append(token_table)
    if predictors:
        evaluation = evaluate(predictors, traces.batches(split, EVAL_BATCH), traces.view, ahead=options.ahead)
        result |= evaluation.as_dict()
        tables.insert(0, recall_table(evaluation))
    tables.append(f"scored on split {split!r}, {result['tokens']} tokens{note}")
    if options.model:
        result["quality"] = forecast_quality(options, options.model, predictors, result)
        tables.append(quality_table(result["quality"]))
    if options.curve:
        result["learning_curve"] = learning_curve(traces, options.curve, ahead=options.ahead)
        tables.append(curve_table(result["learning_curve"]))
    if options.report:
        tables.append(f"wrote {_write_report(options.report, result, traces)}")
    return {**result, **provenance()}, "\n\n".join(tables)


def split_by_looks(options: Options, predictors: dict[str, Predictor]) -> tuple[dict[str, Predictor], NextToken | None]:
    """Those that look layers ahead, and the one that looks tokens ahead.

    Raises:
        ExpertcastError: only the latter, with an option that needs one of the former.
    """
    ahead = next((predictor for predictor in predictors.values() if isinstance(predictor, NextToken)), None)
    layers = {name: predictor for name, predictor in predictors.items() if predictor is not ahead}
    needing = [option for option in ("model", "curve", "report") if getattr(options, option)]
    if not layers and needing:
        raise ExpertcastError(
            f"--{needing[0]} is about forecasts of layers and {', '.join(predictors)} looks tokens ahead: "
            "name another predictor beside it"
        )
    return layers, ahead


def scoring_split(options: Options, traces: TraceDataset) -> tuple[str, str]:
    """The documents that score, and a note: never documents that a predictor learned from, unless asked for."""
    if options.split:
        return options.split, ""
    if not all(map(is_checkpoint, options.predictor)):
        return "test", ""
    for given in options.predictor:
        training = PredictorCheckpoint.open(given).config.get("training", {})
        if training.get("traces") == traces.info["id"]:
            return "test", f"; {given} was trained on these traces, so their test split alone scores it (see --split)"
    return "all", ""


def curve_table(curve: dict[str, dict[str, float]]) -> str:
    """A row per predictor, a column per number of tokens that it was fitted on."""
    counts = list(next(iter(curve.values())))
    rows = [("recall@k at tokens", *counts)]
    rows += [(form, *(f"{values[count]:.3f}" for count in counts)) for form, values in curve.items()]
    return aligned(rows)


def _write_report(out: Path, result: Json, traces: TraceDataset) -> Path:
    return write_report(
        out,
        result,
        learning_curve=result.get("learning_curve"),
        quality=result.get("quality"),
        title=f"Forecasts for {traces.view.model_id}",
        provenance={key: traces.info[key] for key in ("model", "tokens", "command", "versions") if key in traces.info},
    )
