"""`expertcast eval`: score predictors on traces or a routing file, estimate the waiting of a run with their forecasts,
and measure what executing the forecasts costs a model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from expertcast.checkpoints.provenance import provenance
from expertcast.checkpoints.results import layer_table, ledger_table
from expertcast.commands.options import PREDICTOR, Count, Form, OffloadedOptions, Option, read_by
from expertcast.commands.output import Outcome, folder, new_file, show, write_json
from expertcast.commands.predictors import (
    LinkOptions,
    QualityOptions,
    best_on_validation,
    check_shape,
    evaluated,
    forecast_quality,
    is_checkpoint,
    ledger_of,
    quality_table,
    quality_windows,
    scores_ahead,
    waiting,
    waiting_table,
    with_rungs,
)
from expertcast.data.plan import ALL, SPLITS
from expertcast.data.routing_file import is_routing_file, read_routing
from expertcast.data.traces import TraceDataset
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.training.evaluation import evaluate_routing
from expertcast.training.fit import forecast_seconds
from expertcast.training.report import report_on
from expertcast.training.unseen import unseen_traces


@dataclass(frozen=True, kw_only=True)
class Options(OffloadedOptions, QualityOptions, LinkOptions):
    """Options of `expertcast eval`."""

    traces: Annotated[Path, Option(positional=True, metavar="TRACES")]
    """Traces folder, user/repo of the hub, or a routing file for predictors that read routing only."""
    predictor: Annotated[tuple[str, ...], PREDICTOR]
    """Predictors to score. Names are fitted on the train split and scored on the test split, checkpoints are scored on
    all splits; documents that a predictor learned from are left out. word=CKPT renames a checkpoint's predictor."""
    split: Annotated[str | None, Option(choices=(*SPLITS, ALL))] = None
    """Split to score on (default: test; all with checkpoints alone)."""
    ahead: tuple[Count, ...] = (1,)
    """Distances in layers between a forecast and its target; each is scored."""
    report: Annotated[Path | None, Option(metavar="DIR", read=folder)] = None
    """Write a report to this folder: one HTML page, PNGs and JSON."""
    json: Annotated[Path | None, Option(metavar="PATH", read=new_file)] = None
    """Also write the results to this file."""

    @property
    def form(self) -> Form:
        """A routing file, or traces with or without a model to measure."""
        if is_routing_file(self.traces):
            return Form("a routing file, which has expert ids only", {"traces", "predictor", "json"})
        of_model = set() if self.model else read_by(OffloadedOptions, QualityOptions) - {"device"}
        return Form("eval without --model", read_by(Options, but=of_model))


def run(options: Options) -> Outcome:
    """Score the predictors; they share one table."""
    if is_routing_file(options.traces):
        return _of_routing(options)
    options.check_text()
    options.check_link()
    traces, ahead = TraceDataset.open(options.traces, device=options.device_name), sorted(set(options.ahead))
    if options.model:
        check_shape(options, options.model, traces.view)
    fitted = evaluated(options.predictor, traces, ahead)
    predictors = {name: made.predictor for name, made in fitted.items()}
    texts = quality_windows(options, options.model, predictors, traces) if options.model else {}
    split = options.split or (ALL if all(map(is_checkpoint, options.predictor)) else "test")
    unseen, left_out = unseen_traces(traces, fitted, split)
    ways = with_rungs(predictors)
    forecast_s = forecast_seconds(ways, unseen, split, ahead[0])
    ledger = ledger_of(fitted, forecast_s)
    result: Json = {"split": split, "left_out": left_out.as_dict(), "ledger": ledger}
    if options.model or options.report:
        chosen = best_on_validation(predictors, traces, ahead[0])
    found, table = scores_ahead(predictors, unseen, split, ahead)
    result |= found
    tables = [table]
    result["waiting"] = waiting(options, ways, forecast_s, unseen, split, ahead[0])
    if result["waiting"]:
        tables.append(waiting_table(result["waiting"]))
    tables.append(ledger_table(ledger).text())
    scored = f"scored on split {split!r}, {result['tokens']} tokens"
    tables.append("; ".join(filter(None, (scored, str(left_out)))))
    if options.model or options.report:
        show("\n\n".join(tables) + "\n")  # if a later part fails, these are not lost
        tables.clear()
        if options.json is not None and os.environ.get("RANK", "0") == "0":
            write_json(options.json, {**result, **provenance()})
    if options.model:
        result["quality"] = forecast_quality(options, options.model, predictors, ahead[0], traces, chosen, texts)
        tables.append(quality_table(result["quality"]))
    if options.report:
        page = report_on(options.report, result, unseen, fitted, chosen[0], result.get("quality"))
        tables.append(f"wrote {page}")
    return {**result, **provenance()}, "\n\n".join(tables)


def _of_routing(options: Options) -> Outcome:
    """Count the first tokens of a routing file, and score the others.

    Raises:
        ExpertcastError: a damaged file, a checkpoint, or a predictor that needs more than routing.
    """
    for given in filter(is_checkpoint, options.predictor):
        raise ExpertcastError(f"{given}: a routing file has nothing that a trained predictor reads; give its traces")
    routing = read_routing(options.traces)
    result = evaluate_routing(options.predictor, routing)
    scored = f"counted {result['counted']} tokens of {routing.source}, scored the {result['tokens']} after them"
    return {"routing": routing.source, **result, **provenance()}, f"{layer_table(result).text()}\n\n{scored}"
