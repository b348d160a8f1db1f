"""Predictors by their names on the command line, their scores, costs and effect on a model."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from torch import Tensor

from expertcast.checkpoints import checkpoint as files
from expertcast.checkpoints.bundled import REFERENCE
from expertcast.checkpoints.checkpoint import PredictorCheckpoint, is_name
from expertcast.checkpoints.hub import HubName
from expertcast.checkpoints.results import CALIBRATION_LEGEND, Table, calibration_table, layer_table
from expertcast.commands.numbers import positive_number
from expertcast.commands.options import BANDWIDTH, COUNT, Count, Data, ModelOptions, Option, StoredOptions, TextColumn
from expertcast.commands.output import say
from expertcast.data.experts import experts_of
from expertcast.data.models import load_tokenizer, meta_model
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.text import TEXT_COLUMN, Document, load_documents
from expertcast.data.trace_format import is_live
from expertcast.data.traces import TraceDataset, TraceSource
from expertcast.predictors import (
    ExpertcastError,
    MoEView,
    Predictor,
    PredictorConfig,
    names,
    predictor_class,
)
from expertcast.predictors.messages import Json, aligned
from expertcast.predictors.options import parse_settings
from expertcast.training.evaluation import evaluate, ledger_entry
from expertcast.training.fit import fit_many
from expertcast.training.metrics import Recall
from expertcast.training.scoring import (
    NO_VALIDATION,
    FitOptions,
    Fitted,
    check_stand_in,
    scored_batches,
    validation_recall,
)
from expertcast.training.unseen import unseen_documents

if TYPE_CHECKING:
    from expertcast.runtime.config import OffloadConfig
    from expertcast.runtime.simulation.machine import Machine
    from expertcast.runtime.simulation.trace import Trace

# Comparison of --model with the model of the traces

_REMEDY = "give the model that they were collected from"


def check_shape(options: ModelOptions, name: str, traced: MoEView) -> None:
    """Compare the shape of a model with that of the traces; no weight is read.

    Args:
        options: options of loading the model.
        name: the model.
        traced: the layers of the traces.

    Raises:
        ExpertcastError: no such model, or one of another shape.
    """
    shape = find_moe_layers(meta_model(options.source_of(name))).shape
    if shape != traced.shape:
        sizes = " and ".join(
            ", ".join(f"{key}={size}" for key, size in each.as_dict().items()) for each in (shape, traced.shape)
        )
        raise ExpertcastError(f"{name!r} is not the model of these traces, {traced.model_id!r} ({sizes}): {_REMEDY}")


def check_routers(view: MoEView, info: Json) -> None:
    """Compare a loaded model with the model of the traces.

    Args:
        view: the layers of the loaded model.
        info: `trace.json` of the traces.

    Raises:
        ExpertcastError: its routers or norms have other weights.
    """
    if info["fingerprint"] != view.fingerprint():
        raise ExpertcastError(
            f"these traces are of {info['model']!r}, whose routers or norms are not those of {view.model_id!r}: "
            f"{_REMEDY}"
        )


FORECAST_WINDOW = 256
"""Tokens per window when forecasts are executed: a window is one forward."""
POLICY_WINDOW = 128
"""Tokens per window with lossy policies, or twice the prefill if that is more; the rest is decoded token by token."""


def predictor_config(name: str, ahead: Sequence[int], settings: Sequence[str] = ()) -> PredictorConfig:
    """Return a predictor's config from `--ahead` and `--set key=value ...`.

    Raises:
        ExpertcastError: unknown predictor, unknown field, or a value that does not fit.
    """
    cls = predictor_class(name)
    given = {"ahead": tuple(ahead)}
    return parse_settings(settings, cls.config_class, f"--set: predictor {name!r}", given)


def evaluated(wanted: Sequence[str], traces: TraceDataset, ahead: Sequence[int] = (1,)) -> dict[str, Fitted]:
    """Load checkpoints, and fit registered predictors on the train split; by predictor name, in the order of `wanted`.

    Args:
        wanted: checkpoints and names; `word=checkpoint` renames a predictor.
        traces: traces to fit on.
        ahead: distances in layers of the fitted predictors.

    Raises:
        ExpertcastError: neither a checkpoint nor a name, two predictors of one name, or a checkpoint that reads early
            attention of another kind than these traces have.
    """
    found = {given: loaded(_folder(given), traces.view) for given in wanted if is_checkpoint(given)}
    for given, made in found.items():
        check_stand_in(made.predictor, traces, given)
    known = names()
    for given in wanted:
        if given not in found and given not in known:
            raise ExpertcastError(
                f"unknown predictor {given!r}: give a checkpoint folder, user/repo of the hub, or one of "
                f"{', '.join(known)}"
            )
    named: dict[str, str] = {}
    for given in wanted:
        own = found[given].predictor.name if given in found else given
        name = given.removesuffix(_folder(given)).rstrip("=") or own
        if name in named:
            both = [each for each in (given, named[name]) if each in found]
            remedy = f"rename one, as in --predictor other={both[0]}" if both else "give it once"
            raise ExpertcastError(f"two predictors named {name!r}: {remedy}")
        named[name] = given
    configs = {given: predictor_config(given, ahead) for given in wanted if given not in found}
    found |= fit_many(list(configs), traces, configs, options=FitOptions())
    return {name: found[given] for name, given in named.items()}


def loaded(folder: str, view: MoEView) -> Fitted:
    """Return a checkpoint's predictor, bound to the model, with the report of its fit.

    Raises:
        ExpertcastError: no checkpoint, a damaged one, or one of another model.
    """
    checkpoint = PredictorCheckpoint.open(folder)
    made = {"checkpoint": folder, "command": checkpoint.config["command"]}
    return Fitted(predictor=checkpoint.load(view), report={**made, **checkpoint.config.get("training", {})})


def learned_documents(given: Iterable[str | None]) -> frozenset[str]:
    """Return hashes of the documents that checkpoints learned from; other names are ignored.

    Raises:
        ExpertcastError: a damaged checkpoint.
    """
    folders = [each for each in given if each is not None and is_checkpoint(each)]
    return frozenset().union(*(PredictorCheckpoint.open(folder).learned_from or () for folder in folders))


def is_checkpoint(given: str) -> bool:
    """Return whether a word names a checkpoint: a folder, or possibly a repository of the hub.

    Raises:
        ExpertcastError: it is also the name of a predictor.
    """
    if is_name(given):
        return False
    folder = _folder(given)
    if os.path.lexists(folder):
        return any((Path(folder) / name).is_file() for name in (files.CONFIG, files.METRICS))
    return HubName.of(folder) is not None


def _folder(given: str) -> str:
    """Return the checkpoint of `word=checkpoint`, or `given` if that is a path itself."""
    return given if os.path.lexists(given) else given.rpartition("=")[2]


def unseen_text(
    documents: Sequence[Document], predictors: Mapping[str, Predictor], chosen_by: frozenset[str] = frozenset()
) -> list[Document]:
    """Return :func:`unseen_documents`, and print which are left out."""
    rest, left_out = unseen_documents(documents, predictors, chosen_by)
    if left_out.documents:
        say(f"text: {left_out}")
    return rest


@dataclass(frozen=True, kw_only=True)
class QualityOptions(StoredOptions):
    """Options of the model whose quality is measured, and of the text."""

    model: Annotated[str | None, Option(metavar="MODEL")] = None
    """Also measure the effect of speculative execution on this model's output."""
    data: Data = ()
    """Text for --model."""
    text_column: TextColumn = TEXT_COLUMN
    """Column of --data that holds the text."""
    quality_tokens: Count = 8192
    """Number of tokens for --model."""
    window: Annotated[int | None, COUNT] = None
    """Tokens per window of that text (default: 256, and 128 or twice the prefill under lossy policies)."""

    def check_text(self) -> None:
        """Raise ExpertcastError for a model without text; the bundled one has its own."""
        if self.model and not self.data and self.model != REFERENCE:
            raise ExpertcastError("--model needs text to run on: give --data")

    def documents(self) -> list[Document]:
        """Return the text for the model."""
        return load_documents(self.data or REFERENCE, column=self.text_column, tokens=self.quality_tokens)


def quality_windows(
    options: QualityOptions, name: str, predictors: Mapping[str, Predictor], traces: TraceDataset
) -> dict[str, Tensor]:
    """Return windows of unseen text by domain for :func:`forecast_quality`.

    Args:
        options: the text and its length.
        name: the model, whose tokenizer is loaded.
        predictors: evaluated predictors, by name; documents that they learned from are left out.
        traces: documents of their validation split are left out.

    Raises:
        ExpertcastError: no document is left, or all are shorter than a window.
    """
    from expertcast.runtime.quality import text_windows

    texts: dict[str, list[str]] = {}
    chosen_by = frozenset(each.hash for each in traces.chosen("validation") if each.hash)
    documents = unseen_text(options.documents(), predictors, chosen_by)
    for document in sorted(documents, key=lambda document: document.domain):
        texts.setdefault(document.domain or "text", []).append(document.text)
    tokenizer, length = load_tokenizer(name, **options.passed_on(name)), options.window or FORECAST_WINDOW
    count = max(1, options.quality_tokens // length // len(texts))
    return {domain: text_windows(tokenizer, its, length=length, count=count) for domain, its in texts.items()}


def forecast_quality(
    options: QualityOptions,
    name: str,
    predictors: dict[str, Predictor],
    ahead: int,
    traces: TraceDataset,
    chosen: tuple[str, list[int]],
    windows: Mapping[str, Tensor],
) -> Json:
    """Measure what executing forecasts costs a model, per domain (:func:`measure_quality`), on unseen documents.

    Each predictor is executed at all layers, and the chosen one also at the chosen layers (`hybrid`).

    Args:
        options: options of loading the model.
        name: the model.
        predictors: evaluated predictors, by name.
        ahead: distance in layers of their evaluation.
        traces: traces of the model.
        chosen: predictor and layers of :func:`best_on_validation`.
        windows: result of :func:`quality_windows`.

    Raises:
        ExpertcastError: the traces are of another model.
    """
    from expertcast.runtime.quality import QualityRun, measure_quality

    model, _ = options.load(name)
    check_routers(view := experts_of(model).view, traces.info)
    runs = {f"speculate {name}": QualityRun(predictor=p, ahead=ahead) for name, p in predictors.items()}
    best, layers = chosen
    runs[f"hybrid execution of {best}"] = QualityRun(predictor=predictors[best], layers=layers, ahead=ahead)
    return measure_quality(model, view, windows, runs)


def best_on_validation(predictors: Mapping[str, Predictor], traces: TraceDataset, ahead: int) -> tuple[str, list[int]]:
    """Return the predictor with the highest recall@k on the validation split, and the target layers at which hybrid
    mode executes its forecasts.

    Args:
        predictors: by name; the first of equals is chosen.
        traces: traces with a validation split.
        ahead: distance in layers.

    Raises:
        ExpertcastError: several predictors, and the validation split is empty.
    """
    from expertcast.runtime.config import OffloadConfig

    if not traces.token_count("validation"):
        if len(predictors) > 1:
            raise ExpertcastError(NO_VALIDATION)
        return next(iter(predictors)), []
    recall = validation_recall(predictors, traces, ahead, FitOptions())
    best = max(recall, key=lambda name: float(recall[name].mean()))
    return best, [
        layer for layer, value in enumerate(recall[best].tolist(), start=ahead) if value >= OffloadConfig.min_recall
    ]


def policy_quality(
    options: QualityOptions,
    name: str,
    runs: Mapping[str, OffloadConfig],
    *,
    prefill: int,
    batch: int,
    fitted: Mapping[str, Fitted] | None = None,
) -> dict[str, Json]:
    """Measure what lossy policies cost a model that decodes in the runtime, compared with exact decoding (`exact`).

    Args:
        options: the text and its length.
        name: the model.
        runs: configurations by name.
        prefill: tokens of each sequence in the first forward, as in the simulation.
        batch: sequences decoded together, as in the simulation.
        fitted: predictors by name; documents that they learned from are left out.
    """
    from expertcast.runtime.quality import measure_policies, text_windows

    length = options.window or min(max(POLICY_WINDOW, 2 * prefill), max(options.quality_tokens, 32))
    say(f"measuring the quality of {name} under {len(runs)} lossy sets of policies")
    predictors = {given: made.predictor for given, made in (fitted or {}).items()}
    documents = unseen_text(options.documents(), predictors)
    opener = options.opener(name)
    given = options.passed_on(name)
    model, tokenizer = options.load(name) if opener is None else (opener, load_tokenizer(name, **given))
    windows_NW = text_windows(
        tokenizer,
        (document.text for document in documents),
        length=length,
        count=max(batch, options.quality_tokens // length),
    )
    found = measure_policies(model, windows_NW, runs, prefill=prefill, batch=batch)["runs"]
    return {
        run: {"perplexity": values["perplexity"], "agreement": values["top1_agreement"], "kl": values["kl"]}
        for run, values in found.items()
    }


def quality_table(result: Json) -> str:
    """Return a table with a row per run of :func:`forecast_quality`."""
    rows = [("run", "perplexity", "top-1 agreement", "KL", "executed recall")]
    for name, run in result["runs"].items():
        numbers = (run["perplexity"], run["top1_agreement"], run["kl"], run["executed_recall"]["mean"])
        rows.append((name, *(f"{number:.4g}" for number in numbers)))
    return aligned(rows)


# Scores and their tables


def ledger_of(fitted: Mapping[str, Fitted], forecast_s: Mapping[str, float]) -> dict[str, Json]:
    """Return the costs of each predictor (:func:`expertcast.training.evaluation.ledger_entry`), by name.

    Args:
        fitted: predictors with the reports of their fits.
        forecast_s: result of :func:`expertcast.training.fit.forecast_seconds`.
    """
    return {name: ledger_entry(made.predictor, made.report, forecast_s.get(name)) for name, made in fitted.items()}


SHARED = (
    "traffic of a server is split by conversation: tokens of a shared system prompt or template are in every split and "
    "count in these scores"
)


def checkpoint_metrics(predictor: Predictor, source: TraceSource, ledger: Json) -> tuple[Json, str]:
    """Return the scores for a checkpoint's metrics.json, and the tables of the test split.

    The scores are those on the test split, with those on the validation split as `validation`. Hybrid execution chooses
    its layers by the latter, so that the test split stays unused by choices.
    """
    validation, _ = scores_ahead({predictor.name: predictor}, source, "validation", predictor.ahead)
    test, table = scores_ahead({predictor.name: predictor}, source, "test", predictor.ahead)
    metrics = {"split": "test", "traces": source.info.get("id"), **test, "ledger": ledger, "validation": validation}
    return metrics, table


def scores_ahead(
    predictors: Mapping[str, Predictor],
    source: TraceSource,
    split: str,
    ahead: Sequence[int],
) -> tuple[Json, str]:
    """Score predictors at each distance, all on the same tokens.

    Args:
        predictors: by name.
        source: tokens to score on.
        split: the split of the source.
        ahead: distances in layers, the shortest first.

    Returns:
        The result at the shortest distance, with those at other distances in `further`, by distance; and tables.

    Raises:
        ExpertcastError: as :func:`evaluate`.
    """
    result: Json = {}
    tables = []
    for distance in ahead:
        batches = scored_batches(source, split)
        evaluation = evaluate(predictors, batches, source.view, ahead=distance)
        if len(ahead) > 1:
            tables.append(f"{distance} layer{'s' * (distance > 1)} ahead")
        shown = evaluation.as_dict()
        tables += [layer_table(shown).text(), f"{calibration_table(shown).text()}\n{CALIBRATION_LEGEND}"]
        if result:
            result.setdefault("further", {})[str(distance)] = shown
        else:
            result = dict(shown)
    return result, "\n\n".join([*tables, *([SHARED] if is_live(source.info) else [])])


# Expected time per token: short simulations of decoding with each predictor and each of its rungs.

CACHED = 0.25
"""Slots as a share of the experts."""
SIMULATED = 512
"""Most tokens to simulate."""
LAYER_S = 1e-3
"""Seconds of computing per layer, without --layer-time."""
ON_DEMAND = "on demand"


@dataclass(frozen=True, kw_only=True)
class LinkOptions:
    """Options of the link over which experts are copied."""

    bandwidth: Annotated[float | None, BANDWIDTH] = None
    """Link speed in bytes per second, with --layer-time, for the time per token (default: K copies take one layer's
    time)."""
    layer_time: Annotated[float | None, Option(metavar="S", read=positive_number)] = None
    """Seconds of computing per layer, for the time per token (default: 1 ms)."""
    expert_bytes: Count | None = None
    """Bytes of one expert, with --bandwidth (default: as in the model)."""

    def check_link(self) -> None:
        """Raise ExpertcastError if the options of the link are incomplete."""
        if self.bandwidth is not None and self.layer_time is None:
            raise ExpertcastError("--bandwidth needs the computing time of a layer: give --layer-time too")
        if self.expert_bytes is not None and self.bandwidth is None:
            raise ExpertcastError("--expert-bytes needs a link speed: give --bandwidth too")


def waiting(
    options: LinkOptions, ways: Mapping[str, Predictor], forecast_s: Mapping[str, float], source: TraceSource,
    split: str, ahead: int,
) -> dict[str, Json]:  # fmt: skip
    """Simulate decoding with a quarter of the experts cached: recall@k and time per token.

    Args:
        options: the link.
        ways: result of :func:`with_rungs`, bound to the source's view.
        forecast_s: seconds of a forecast of each.
        source: routing of the model.
        split: the split of the source.
        ahead: layers between forecasts and their targets.

    Returns:
        By predictor, with rungs as `predictor/rung`: `recall_at_k` on the simulated tokens and `forecast_ms` (both None
        on demand), and `token_ms` with computing, forecasts and waiting; fastest first. Empty if all documents are too
        short to decode.
    """
    from expertcast.runtime.policies.settings import Policies
    from expertcast.runtime.simulation.machine import Case
    from expertcast.runtime.simulation.simulator import simulate
    from expertcast.runtime.simulation.sweep import slots_of
    from expertcast.runtime.simulation.trace import SequenceSelection, load_trace

    if all(document.tokens < 2 for document in source.chosen(split)):
        return {}
    trace = load_trace(source, SequenceSelection(split=split, tokens=SIMULATED), predictors=ways, ahead=ahead)
    found: dict[str, Json] = {}
    for name in (ON_DEMAND, *ways):
        done = simulate(
            trace,
            Case(
                policies=Policies(prefetch="none" if name == ON_DEMAND else "top_k"),
                slots=max(source.view.shape.top_k, slots_of(CACHED, source.view.shape)),
                machine=_machine(options, source.view, forecast_s.get(name, 0.0)),
                predictor=None if name == ON_DEMAND else name,
            ),
        )
        found[name] = {
            "recall_at_k": None if name == ON_DEMAND else _recall(trace, name),
            "forecast_ms": None if name == ON_DEMAND else 1e3 * forecast_s[name],
            "token_ms": 1e3 * statistics.fmean(done.steps_s),
        }
    return dict(sorted(found.items(), key=lambda item: float(item[1]["token_ms"])))


def with_rungs(predictors: Mapping[str, Predictor]) -> dict[str, Predictor]:
    """Return the predictors, each followed by its cheaper rungs."""
    found: dict[str, Predictor] = {}
    for name, predictor in predictors.items():
        *cheaper, _ = predictor.rungs().items()
        found |= {name: predictor, **{f"{name}/{rung}": way for rung, way in cheaper}}
    return found


def _machine(options: LinkOptions, view: MoEView, forecast_s: float) -> Machine:
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
    recall = Recall(1)
    for layer, forecast in trace.hints[name].forecasts.items():
        recall.update(0, forecast.topk_ids_TK, trace.require_routes().ids[layer])
    return float(recall.per_row())


def waiting_table(found: Mapping[str, Json]) -> str:
    """Return a table with a row per predictor and rung of :func:`waiting`."""
    rows = [[name, *values.values()] for name, values in found.items()]
    headings = ["forecasts by", "recall@k", "ms per forecast", "ms per token"]
    caption = f"expected with {CACHED:.0%} of the experts in slots"
    return Table(caption=caption, headings=headings, rows=rows).text() + (
        f"\n{RUNG_LEGEND}" if any("/" in name for name in found) else ""
    )


RUNG_LEGEND = "predictor/forecaster: cheaper forecaster inside a predictor, which a run uses where that saves more"
