"""`expertcast eval`: score predictors on traces, estimate the waiting of a run with their forecasts, and measure what
executing the forecasts costs a model."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch

from expertcast.checkpoints.provenance import provenance
from expertcast.checkpoints.results import Table, ledger_table
from expertcast.commands.numbers import positive_number
from expertcast.commands.options import BANDWIDTH, PREDICTOR, Count, Form, OffloadedOptions, Option, read_by
from expertcast.commands.output import Outcome, folder, new_file, say, show, write_json
from expertcast.commands.predictors import (
    QualityOptions,
    best_on_validation,
    check_shape,
    evaluated,
    forecast_quality,
    forecast_seconds,
    is_checkpoint,
    ledger_of,
    quality_table,
    quality_windows,
    scores_ahead,
)
from expertcast.data.plan import ALL, SPLITS
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, MoEView, Predictor
from expertcast.predictors.messages import Json, aligned
from expertcast.training.evaluation import Curve, learning_curve
from expertcast.training.metrics import Windows, copies_in_time, ratio_windows
from expertcast.training.report import example_text, report_sources, write_report
from expertcast.training.scoring import Fitted
from expertcast.training.unseen import unseen_traces

if TYPE_CHECKING:
    from expertcast.runtime.simulation.machine import Machine
    from expertcast.runtime.simulation.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Options(OffloadedOptions, QualityOptions):
    """Options of `expertcast eval`."""

    traces: Annotated[Path, Option(positional=True, metavar="TRACES")]
    """Traces folder, or user/repo of the hub."""
    predictor: Annotated[tuple[str, ...], PREDICTOR]
    """Predictors to score. Names are fitted on the train split and scored on the test split, checkpoints are scored on
    all splits; documents that a predictor learned from are left out."""
    split: Annotated[str | None, Option(choices=(*SPLITS, ALL))] = None
    """Split to score on."""
    ahead: tuple[Count, ...] = (1,)
    """Distances in layers between a forecast and its target; each is scored."""
    report: Annotated[Path | None, Option(metavar="DIR", read=folder)] = None
    """Write a report to this folder: one HTML page, PNGs and JSON."""
    curve: tuple[Count, ...] = ()
    """Also print a learning curve at these numbers of tokens."""
    bandwidth: Annotated[float | None, BANDWIDTH] = None
    """Link speed in bytes per second, with --layer-time. Timely recall and waiting use it (default: K copies take 1, 2
    and 5 layers' time for timely recall, one layer's time for waiting)."""
    layer_time: Annotated[float | None, Option(metavar="S", read=positive_number)] = None
    """Seconds of computing per layer; a forecast's time then counts in timely recall and waiting (default: 1 ms per
    layer for waiting, and forecasts take no time)."""
    expert_bytes: Count | None = None
    """Bytes of one expert, with --bandwidth (default: as in the model)."""
    json: Annotated[Path | None, Option(metavar="PATH", read=new_file)] = None
    """Also write the results to this file, with --curve after each fit."""

    @property
    def form(self) -> Form:
        """With or without a model to measure."""
        of_model = () if self.model else read_by(OffloadedOptions, QualityOptions)
        return Form("eval without --model", read_by(Options, but=of_model))


def run(options: Options) -> Outcome:
    """Score the predictors; they share one table."""
    options.check_text()
    _check_link(options)
    traces, ahead = TraceDataset.open(options.traces), sorted(set(options.ahead))
    if options.model:
        check_shape(options, options.model, traces.view)
    fitted = evaluated(options.predictor, traces, ahead)
    predictors = {name: made.predictor for name, made in fitted.items()}
    texts = quality_windows(options, options.model, predictors, traces) if options.model else {}
    split = options.split or (ALL if all(map(is_checkpoint, options.predictor)) else "test")
    unseen, left_out = unseen_traces(traces, fitted, split)
    ledger = ledger_of(fitted, unseen, split, ahead[0])
    result: Json = {"split": split, "left_out": left_out.as_dict(), "ledger": ledger}
    if options.model or options.report:
        chosen = best_on_validation(predictors, traces, ahead[0])
    windows = {name: _windows(options, traces.view, ledger[name]) for name in predictors}
    found, table = scores_ahead(predictors, unseen, split, ahead, windows)
    result |= found
    tables = [table]
    result["waiting"] = waiting(options, predictors, unseen, split, ahead[0])
    if result["waiting"]:
        legend = f"\n{RUNG_LEGEND}" if any("/" in name for name in result["waiting"]) else ""
        tables.append(waiting_table(result["waiting"]).text() + legend)
    tables.append(ledger_table(ledger).text())
    scored = f"scored on split {split!r}, {result['tokens']} tokens"
    tables.append("; ".join(filter(None, (scored, str(left_out)))))
    if options.model or options.curve or options.report:
        show("\n\n".join(tables) + "\n")  # if a later part fails, these are not lost
        tables.clear()
        _save(options, result)
    if options.model:
        result["quality"] = forecast_quality(options, options.model, predictors, ahead[0], traces, chosen, texts)
        tables.append(quality_table(result["quality"]))
    if options.curve:
        save: Callable[[Curve], None] = lambda curve: _save(options, {**result, "learning_curve": curve})  # noqa: E731
        result["learning_curve"] = learning_curve(traces, options.curve, ahead=ahead[0], say=say, save=save)
        tables.append(curve_table(result["learning_curve"]))
    if options.report:
        tables.append(f"wrote {_write_report(options.report, result, unseen, fitted, chosen[0])}")
    return {**result, **provenance()}, "\n\n".join(tables)


def _save(options: Options, result: Json) -> None:
    """Write the results so far."""
    if options.json is not None and os.environ.get("RANK", "0") == "0":
        write_json(options.json, {**result, **provenance()})


def _check_link(options: Options) -> None:
    """Raise ExpertcastError if the options of the link are incomplete."""
    if options.bandwidth is not None and options.layer_time is None:
        raise ExpertcastError("--bandwidth needs the computing time of a layer: give --layer-time too")
    if options.expert_bytes is not None and options.bandwidth is None:
        raise ExpertcastError("--expert-bytes needs a link speed: give --bandwidth too")


def _windows(options: Options, view: MoEView, costs: Json) -> Windows:
    """Return the links of timely recall for a predictor with these costs (:func:`ledger_entry`)."""
    top_k, layer_s, forecast_s = view.shape.top_k, options.layer_time, (costs["forecast_ms"] or 0.0) / 1e3
    if layer_s is None:
        return ratio_windows(top_k)
    if options.bandwidth is None:
        return ratio_windows(top_k, forecast_share=forecast_s / layer_s)
    from expertcast.runtime.storage.layout import BlockLayout

    copy_s = (options.expert_bytes or BlockLayout.of(view).block_bytes) / options.bandwidth
    return {"link": copies_in_time(layer_s, copy_s, forecast_s)}


# Expected waiting: short simulations of decoding with each predictor and each of its rungs.

CACHED = 0.25
"""Slots as a share of the experts."""
TOKENS = 512
"""Most tokens to simulate."""
LAYER_S = 1e-3
"""Seconds of computing per layer, without --layer-time."""
ON_DEMAND = "on demand"


def waiting(
    options: Options, predictors: Mapping[str, Predictor], traces: TraceDataset, split: str, ahead: int
) -> dict[str, Json]:
    """Simulate decoding with a quarter of the experts cached: recall@k and waiting per token.

    Args:
        options: the link.
        predictors: by name, bound to the traces' view; their rungs are simulated too.
        traces: recorded routing.
        split: the split of the traces.
        ahead: layers between forecasts and their targets.

    Returns:
        By predictor, with rungs as `predictor/rung`: `recall_at_k` (None on demand) on the simulated tokens, and
        `wait_s`, seconds per token beyond computing; shortest first. Empty if all documents are too short to decode.
    """
    from expertcast.runtime.policies.settings import Policies
    from expertcast.runtime.simulation.machine import Case
    from expertcast.runtime.simulation.simulator import simulate
    from expertcast.runtime.simulation.sweep import slots_of
    from expertcast.runtime.simulation.trace import SequenceSelection, load_trace

    if all(document.tokens < 2 for document in traces.chosen(split)):
        return {}
    ways = _with_rungs(predictors)
    trace = load_trace(traces, SequenceSelection(split=split, tokens=TOKENS), predictors=ways, ahead=ahead)
    forecast_s: Mapping[str, float] = {}
    if options.layer_time is not None:
        forecast_s = forecast_seconds({name: Fitted(predictor=way) for name, way in ways.items()}, traces, split, ahead)
    found: dict[str, Json] = {}
    for name in (ON_DEMAND, *ways):
        done = simulate(
            trace,
            Case(
                policies=Policies(prefetch="none" if name == ON_DEMAND else "top_k"),
                slots=max(traces.view.shape.top_k, slots_of(CACHED, traces.view.shape)),
                machine=_machine(options, traces.view, forecast_s.get(name, 0.0)),
                predictor=None if name == ON_DEMAND else name,
            ),
        )
        computing_s = len(traces.view) * (options.layer_time or LAYER_S)
        recall = None if name == ON_DEMAND else _recall(trace, name)
        found[name] = {"recall_at_k": recall, "wait_s": statistics.fmean(done.steps_s) - computing_s}
    return dict(sorted(found.items(), key=lambda item: float(item[1]["wait_s"])))


def _with_rungs(predictors: Mapping[str, Predictor]) -> dict[str, Predictor]:
    """Return the predictors, each followed by its cheaper rungs."""
    found: dict[str, Predictor] = {}
    for name, predictor in predictors.items():
        *cheaper, _ = predictor.rungs().items()
        found |= {name: predictor, **{f"{name}/{rung}": way for rung, way in cheaper}}
    return found


def _machine(options: Options, view: MoEView, forecast_s: float) -> Machine:
    """Return the machine of the options: the link, and the computing time of layers."""
    from expertcast.runtime.simulation.machine import Machine, constant_times
    from expertcast.runtime.storage.layout import FULL, BlockLayout

    layer_s, layers = options.layer_time or LAYER_S, len(view)
    size = 1 if options.bandwidth is None else options.expert_bytes or BlockLayout.of(view).block_bytes
    times = replace(constant_times(layers, layer_s), forecast_s=[forecast_s] * layers)
    bandwidth = options.bandwidth or size * view.shape.top_k / layer_s
    return Machine(times=times, block_bytes={FULL: size}, bandwidth=bandwidth)


def _recall(trace: Trace, name: str) -> float:
    """Return the mean recall@k of a trace's hints over their target layers."""
    from expertcast.runtime.simulation.trace import Hints

    hints, routes = trace.hints[name], trace.require_routes()
    assert isinstance(hints, Hints)
    hits = [
        (routes.ids[layer][:, :, None] == forecast.topk_ids_TK[:, None]).any(dim=2).float().mean()
        for layer, forecast in hints.forecasts.items()
    ]
    return float(torch.stack(hits).mean())


def waiting_table(found: Mapping[str, Json]) -> Table:
    """Return a table with a row per predictor and rung of :func:`waiting`."""
    rows = [[name, values["recall_at_k"], 1e3 * values["wait_s"]] for name, values in found.items()]
    return Table(headings=["forecasts by", "recall@k", "ms waited per token"], rows=rows)


RUNG_LEGEND = "predictor/forecaster: cheaper forecaster inside a predictor, which a run uses where that saves more"


def curve_table(curve: Curve) -> str:
    """Return a table with a row per predictor and a column per number of training tokens."""
    counts = list(next(iter(curve.values())))
    rows = [("recall@k at tokens", *counts)]
    rows += [(form, *(f"{values[count]:.3f}" for count in counts)) for form, values in curve.items()]
    return aligned(rows)


def _write_report(out: Path, result: Json, traces: TraceDataset, fitted: Mapping[str, Fitted], chosen: str) -> Path:
    predictors = {name: fitted[name].predictor for name in result["recall_at_k"]}
    return write_report(
        out,
        result,
        chosen=chosen,
        learning_curve=result.get("learning_curve"),
        quality=result.get("quality"),
        examples=example_text(predictors, traces, result["split"], ahead=result["ahead"]),
        title=f"Forecasts for {traces.view.model_id}",
        provenance=report_sources(traces, fitted),
    )
