"""Write the report of an evaluation: a self-contained HTML page, figures as PNG files, and the numbers as JSON.

`report.html` is the Jinja2 template, with `report.css` and `report.js` inlined.
"""

from __future__ import annotations

import base64
import io
import json
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

import matplotlib
import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from pydantic import JsonValue
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from expertcast.checkpoints.provenance import provenance as running_provenance
from expertcast.checkpoints.results import (
    CHAINED,
    Cell,
    Table,
    calibration_table,
    cell,
    chained_apart,
    layer_table,
    layer_tables,
    ledger_table,
    mean_tables,
)  # fmt: skip
from expertcast.data.batch import TraceBatch
from expertcast.data.models import load_tokenizer
from expertcast.data.plan import PlannedDocument
from expertcast.data.traces import TraceSource
from expertcast.predictors.artefacts import final_name, read_json, remove_left_over, write_atomically
from expertcast.predictors.base import Predictor
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.training import figures
from expertcast.training.metrics import compare, rank_routing
from expertcast.training.scoring import Fitted, batch_tokens, states_of

# Provenance: command, date, traces, and the predictors' configurations and fits

_OF_TRACES = (
    "model", "id", "tokens", "splits", "window", "seed", "shape", "settings", "collection_s", "command",
    "expertcast_version", "git_revision", "python_version", "versions",
)  # fmt: skip


def now() -> str:
    """Return the date and time in UTC, to the minute."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def report_sources(source: TraceSource, fitted: Mapping[str, Fitted]) -> Json:
    """Return the provenance of an evaluation as JSON values.

    Args:
        source: traces used for fitting and scoring.
        fitted: fitted predictors by name.

    Returns:
        `date`, command, revision and versions of this process; `traces`, with tokens by domain; `predictors`, with the
        config and fit of each.
    """
    domains: dict[str, int] = {}
    for document in source.documents:
        domain = document.domain or "(unnamed)"
        domains[domain] = domains.get(domain, 0) + document.tokens
    traces = {key: source.info[key] for key in _OF_TRACES if key in source.info}
    return {
        "date": now(),
        **running_provenance(),
        "traces": {**traces, "documents": len(source.documents), "tokens by domain": domains},
        "predictors": {
            name: {"config": each.predictor.config.as_dict(), "training": dict(each.report)}
            for name, each in fitted.items()
        },
    }


# Example text: the number of correctly forecast experts of each token. T tokens, K experts per token, L target layers

PASSAGES, TOKENS = 4, 400
"""Number of passages of an example, and maximum number of their tokens in total."""
_HALF = "\ufffd"
"""Replacement character: a tokenizer's output for a part of a character."""


@torch.no_grad()
def example_text(
    predictors: Mapping[str, Predictor], source: TraceSource, split: str, *, ahead: int = 1,
    passages: int = PASSAGES, tokens: int = TOKENS,
) -> Json:  # fmt: skip
    """Return the beginnings of documents from different domains, with the number of correct forecasts per token.

    Args:
        predictors: predictors by name, bound to the source's model.
        source: traces.
        split: split of the documents.
        ahead: distance in layers.
        passages: number of documents.
        tokens: maximum number of tokens in total.

    Returns:
        `passages`, each with `document` (index), `domain`, `token_ids` (None if unknown), `text` (a string per token;
        None without a tokenizer) and `found`: by predictor, [L][T], how many of the token's K experts are among the
        forecast's K. `note` is the reason for missing text, else None.
    """
    chosen = _choose(source.chosen(split), passages)
    rows = _beginnings(source, split, [document.index for document in chosen], tokens // len(chosen))
    found = _found(predictors, source, TraceBatch.cat(rows), ahead)
    known = all(batch.token_T is not None for batch in rows)
    tokenizer, note = _tokenizer(source) if known else (None, "the traces have no token ids")
    shown, begin = [], 0
    for document, batch in zip(chosen, rows, strict=True):
        ids = None if batch.token_T is None else batch.token_T.tolist()
        end = begin + len(batch)
        shown.append(
            {
                "document": document.index,
                "domain": document.domain,
                "token_ids": ids,
                "text": None if tokenizer is None or ids is None else pieces(tokenizer, ids),
                "found": {name: found_LT[:, begin:end].tolist() for name, found_LT in found.items()},
            }
        )
        begin = end
    return {"passages": shown, "note": note}


def pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Decode each token; the strings concatenate to the text. A character of several tokens belongs to the last one."""
    found, done = [], ""
    for end in range(1, len(ids) + 1):
        text = str(tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False))
        whole = text if end == len(ids) else text.rstrip(_HALF)
        found.append(whole[len(done) :])
        done = whole if len(whole) > len(done) else done
    return found


def _choose(documents: Sequence[PlannedDocument], count: int) -> list[PlannedDocument]:
    """Choose the first document of each domain, then others, in the order of the source."""
    first: dict[str, PlannedDocument] = {}
    for document in documents:
        first.setdefault(document.domain, document)
    rest = [document for document in documents if first[document.domain] is not document]
    return sorted([*first.values(), *rest][:count], key=documents.index)


def _beginnings(source: TraceSource, split: str, wanted: Sequence[int], tokens: int) -> list[TraceBatch]:
    """Return the first tokens of the wanted documents."""
    parts: dict[int, list[TraceBatch]] = {index: [] for index in wanted}
    for batch in source.batches(split, batch_tokens(source)):
        for index, own in parts.items():
            row_T = (batch.document_T == index).nonzero().flatten()[: tokens - sum(map(len, own))]
            if len(row_T):
                own.append(batch[row_T])
    return [TraceBatch.cat(own) for own in parts.values()]


def _found(
    predictors: Mapping[str, Predictor], source: TraceSource, batch: TraceBatch, ahead: int
) -> dict[str, Tensor]:
    """Count correctly forecast experts, [L, T] by predictor."""
    states = states_of(source.view, batch)
    truths = [rank_routing(state) for state in states]
    found: dict[str, Tensor] = {}
    for name, predictor in predictors.items():
        places = [
            compare(predictor.forecast(state, ahead), truths[state.layer + ahead]).place_TK
            for state in states[: len(states) - ahead]
        ]
        found[name] = torch.stack([(place_TK < place_TK.shape[1]).sum(dim=1) for place_TK in places]).cpu()
    return found


def _tokenizer(source: TraceSource) -> tuple[PreTrainedTokenizerBase | None, str | None]:
    """Load the tokenizer of the source's model from local files, or return the reason why it is missing."""
    name = str(source.info["model"])
    try:
        return load_tokenizer(name, local_files_only=True, trust_remote_code=False), None
    except ExpertcastError as error:
        if Path(name).exists():
            return None, str(error)
        return None, f"no tokenizer for {name!r} on this machine: download it with the model or on its own"


# Tables of the page

SCORES = {"perplexity": "perplexity", "top1_agreement": "top-1 agreement", "kl": "KL"}


def chained_words(evaluation: Json) -> str:
    """Return a sentence that lists the predictors without chained scores, or an empty string."""
    chained, apart = evaluation.get("recall_at_k" + CHAINED, {}), chained_apart(evaluation)
    same = [name for name in chained if name not in apart]
    return f"Chained and teacher-forced scores of {', '.join(same)} are equal and shown once." if same else ""


def routing_tables(evaluation: Json) -> Json:
    """Build the tables of forecasts, by their place on the page."""
    targets = [str(layer) for layer in evaluation["targets"]]
    calibration, ranks = evaluation["calibration"].items(), evaluation["rank_alignment"].items()
    rank_headings = [f"rank {rank + 1}" for rank in range(evaluation["k"])]
    return {
        "means": [*mean_tables(evaluation), *distance_tables(evaluation)],
        "layers": [
            (heading, [table for *_, table in group])
            for heading, group in groupby(layer_tables(evaluation), key=lambda each: each[0])
        ],
        "costs": ledger_table(evaluation.get("ledger", {})),
        "rank_means": Table(
            caption="rank alignment, mean over layers",
            headings=["predictor", *rank_headings],
            rows=[[name, *result["mean"]] for name, result in ranks],
        ),
        "rank_layers": Table(
            caption="rank alignment per layer",
            headings=["predictor, layer", *rank_headings],
            rows=[
                [f"{name}, layer {layer}", *row]
                for name, result in ranks
                for layer, row in zip(targets, result["per_layer"], strict=True)
            ],
        ),
        "errors": calibration_table(evaluation),
        "layer_errors": Table(
            caption="calibration error per layer",
            headings=["predictor", *targets],
            rows=[[name, *result["ece_per_layer"]] for name, result in calibration],
            digits=4,
        ),
        "bins": Table(
            caption="bins",
            headings=["predictor, probability", "pairs", "mean probability", "frequency"],
            rows=[
                [f"{name}, {b['low']:.1f} to {b['high']:.1f}", b["count"], b["confidence"], b["frequency"]]
                for name, result in calibration
                for b in result["bins"]
            ],
        ),
    }  # fmt: skip


def distance_tables(evaluation: Json) -> list[Table]:
    """Build the table of mean recall@k by distance, if several distances were scored."""
    scored = {str(evaluation["ahead"]): evaluation} | evaluation.get("further", {})
    names = evaluation["recall_at_k"]
    rows = [[name, *(each["recall_at_k"].get(name, {}).get("mean") for each in scored.values())] for name in names]
    headings = ["predictor", *(f"{distance} ahead" for distance in scored)]
    table = Table(caption="recall@k by layers ahead, mean over layers", headings=headings, rows=rows)
    return [table] if len(scored) > 1 else []


def quality_tables(quality: Json) -> Json:
    """Build the tables of output quality of each run, overall and by domain."""
    runs = quality.get("runs", {})
    domains = {f"{name}, {key}": values for name, run in runs.items() for key, values in run["domains"].items()}

    def table(caption: str, first: str, found: Mapping[str, Json]) -> Table:
        rows = [[name, *(values.get(key) for key in SCORES)] for name, values in found.items()]
        return Table(caption=caption, headings=[first, *SCORES.values()], rows=rows, digits=4)

    return {"runs": table("quality", "run", runs), "domains": table("quality per domain", "run, domain", domains)}


# Heat map, example text, single experts, and data of the page's script

BANDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
"""Lower bounds of the colour bands of the heat map: narrower where good forecasts differ."""
RARE = 20
"""Number of rows in the table of the experts with the lowest recall."""
LEAST_USE = 0.25
"""The table omits experts used by fewer tokens than this share of an even distribution: their recall is noisy."""


def band_class(share: float | None) -> str:
    """Return the CSS class of the colour band of a share in 0..1; empty for None."""
    # same tolerance as the page's script: rounding must not put a mean of exact counts below its bound
    return "" if share is None else f"b{bisect_right(BANDS, share + 1e-9) - 1}"


def band_colours() -> list[tuple[str, str]]:
    """Return background and text colour of each band: matplotlib's viridis with black or white text.

    Colour-blind readers see the bands in the same order.
    """
    dark = 6
    scale = matplotlib.colormaps["viridis"]
    backgrounds = [to_hex(scale(index / (len(BANDS) - 1))) for index in range(len(BANDS))]
    return [(colour, "#ffffff" if index < dark else "#000000") for index, colour in enumerate(backgrounds)]


def views(evaluation: Json, examples: Json | None, chosen: str) -> Json:
    """Return the template's variables besides tables; the `chosen` predictor is shown first."""
    recall = layer_table(evaluation)
    return {
        "predictors": [row[0] for row in recall.rows],
        "bands": BANDS,
        "band_colours": band_colours(),
        "heat": list(zip(*(row[1:] for row in recall.rows), strict=True)),
        "chance_row": [recall.last[0][1]] * len(recall.rows),
        "passages": []
        if examples is None
        else [_passage(each, chosen, evaluation["k"]) for each in examples["passages"]],
        "note": None if examples is None else examples["note"],
        "rare": _rare_experts(evaluation, chosen),
        "script_data": _script_data(evaluation, examples, chosen),
    }


def _passage(passage: Json, name: str, top_k: int) -> Json:
    """Return each token's text, the share of its experts that were forecast (mean over layers), and its label."""
    texts = passage["text"] or [f"{token} " for token in passage["token_ids"] or ["?"] * len(passage["found"][name][0])]
    means = [sum(column) / len(column) for column in zip(*passage["found"][name], strict=True)]
    tokens = [(text, mean / top_k, f"{mean:.1f} of {top_k}") for text, mean in zip(texts, means, strict=True)]
    return {"document": passage["document"], "domain": passage["domain"], "tokens": tokens}


def _rare_experts(evaluation: Json, chosen: str) -> Table:
    """Build the table of the experts with the lowest recall by the chosen predictor."""
    caption = f"experts with the lowest recall by {chosen}, among those with a quarter of an even share of tokens"
    counts = evaluation.get("per_expert", {"used": [], "found": {}})
    names = [chosen, *(name for name in counts["found"] if name != chosen)]
    least = LEAST_USE * evaluation["tokens"] * evaluation["k"] / evaluation["experts"]
    rows = [
        [f"layer {layer}, expert {expert}", count, count / evaluation["tokens"]]
        + [counts["found"][name][index][expert] / count for name in names]
        for index, (layer, used) in enumerate(zip(evaluation["targets"], counts["used"], strict=False))
        for expert, count in enumerate(used)
        if count and count >= least
    ]
    rows = sorted(rows, key=lambda row: (row[3], -row[1]))[:RARE]
    return Table(caption=caption, headings=["expert", "tokens", "share of tokens", *names], rows=rows)


def _script_data(evaluation: Json, examples: Json | None, chosen: str) -> Json:
    chained = {"teacher-forced": "", "chained": ", chained"}
    heat = {heading + chained[form]: _heat(table) for heading, form, table in layer_tables(evaluation)}
    for distance, further in evaluation.get("further", {}).items():  # no forecasts for the first target layers
        missing = [None] * (further["ahead"] - evaluation["ahead"])
        heat[f"recall@k, {distance} layers ahead"] = _heat(layer_table(further), missing)
    return {
        "bands": BANDS,
        "chosen": chosen,
        "predictors": list(evaluation["recall_at_k"]),
        "targets": [str(layer) for layer in evaluation["targets"]],
        "k": evaluation["k"],
        "tokens": evaluation["tokens"],
        "heat": heat,
        "experts": evaluation.get("per_expert"),
        "passages": [] if examples is None else [each["found"] for each in examples["passages"]],
    }


def _heat(table: Table, missing: Sequence[None] = ()) -> Json:
    """Return the numbers of a table by layer, with `missing` values inserted after the mean."""
    values = {name: [mean, *missing, *layers] for name, mean, *layers in table.rows}
    return {"values": values, "chance": table.last[0][1] if table.last else None}


PAGE = "index.html"
DATA = "report.json"
FORMAT = "expertcast-report-1"
RECALL, RANKS, CALIBRATION = "recall.png", "rank_alignment.png", "calibration.png"
COVERED, QUALITY, EXPERTS = "weight_covered.png", "quality.png", "experts.png"
FILES = (PAGE, DATA, RECALL, COVERED, EXPERTS, RANKS, CALIBRATION, QUALITY)
DPI = 150


def write_report(
    folder: Path | str,
    evaluation: Json,
    *,
    chosen: str,
    quality: Json | None = None,
    examples: Json | None = None,
    title: str = "expertcast evaluation",
    provenance: Json | None = None,
) -> Path:
    """Write a report folder; an earlier report in it is overwritten.

        index.html            self-contained page with figures and tables of all numbers
        recall.png            recall@k per layer, teacher-forced and (where different) chained
        weight_covered.png    share of the router's combine weight on the forecast experts, likewise
        experts.png           recall and use of every expert
        rank_alignment.png    same expert at the same rank, per layer and rank
        calibration.png       reliability of the forecast probabilities
        quality.png           output quality of each way to run (optional)
        report.json           the numbers: evaluation, chosen, quality, examples, provenance

    Args:
        folder: destination, created if missing.
        evaluation: `Evaluation.as_dict()`; other keys are kept in report.json.
        chosen: predictor with the highest recall@k on validation; the page marks this one, not the best on the test
            split.
        quality: result of the quality harness.
        examples: result of :func:`example_text`.
        title: heading of the page.
        provenance: result of :func:`report_sources`; default: date, command, revision and versions of this process.

    Returns:
        Path of index.html.

    Raises:
        ExpertcastError: the folder contains other files.
    """
    folder = Path(folder)
    _check(folder)
    drawn = figures_of(evaluation, chosen, quality)
    data = {
        "format": FORMAT,
        "title": title,
        "provenance": {"date": now(), **running_provenance()} if provenance is None else dict(provenance),
        "evaluation": dict(evaluation),
        "chosen": chosen,
        "quality": quality,
        "examples": examples,
    }
    pictures = {name: _png(figure) for name, figure in drawn.items()}
    files = {DATA: _text(data).encode(), **pictures, PAGE: page(data, pictures).encode()}
    _write(folder, files)
    return folder / PAGE


def report_on(
    folder: Path, evaluation: Json, source: TraceSource, fitted: Mapping[str, Fitted], chosen: str, quality: Json | None
) -> Path:
    """Write the report of fitted predictors that were scored on traces, with examples of their text.

    Args:
        folder: see :func:`write_report`.
        evaluation: the scores, with the `split`.
        source: traces.
        fitted: predictors by name.
        chosen, quality: see :func:`write_report`.
    """
    predictors = {name: fitted[name].predictor for name in evaluation["recall_at_k"]}
    return write_report(
        folder,
        evaluation,
        chosen=chosen,
        quality=quality,
        examples=example_text(predictors, source, evaluation["split"], ahead=evaluation["ahead"]),
        title=f"Forecasts for {source.view.model_id}",
        provenance=report_sources(source, fitted),
    )


def figures_of(evaluation: Json, chosen: str, quality: Json | None = None) -> dict[str, Figure]:
    """Draw the report's figures, by file name; `chosen` is the predictor of the figure of experts."""
    drawn = {
        RECALL: figures.recall_by_layer(evaluation),
        COVERED: figures.recall_by_layer(evaluation, "weight_covered"),
        RANKS: figures.rank_alignment(evaluation),
        CALIBRATION: figures.calibration(evaluation),
    }
    if "per_expert" in evaluation:
        drawn[EXPERTS] = figures.expert_recall(evaluation, chosen)
    if quality:
        drawn[QUALITY] = figures.quality_bars(quality)
    return drawn


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def _text(data: Json) -> str:
    """Format as JSON with each list of numbers on one line."""
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    return re.sub(r"\[\n([^][{}\"]*)\n *\]", lambda found: "[" + " ".join(found[1].split()) + "]", text)


def _check(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ExpertcastError(f"{folder} is a file: use a folder for the report")
    present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    present -= {name for name in present if name != final_name(name) in FILES}  # of a killed process
    foreign = sorted(present - set(FILES))
    if foreign or (present and not _is_report(folder / DATA)):
        what = f"{foreign[0]!r}" if foreign else f"files of something else (no {DATA} of a report)"
        raise ExpertcastError(f"report folder {folder} contains {what}: use an empty or a new folder")


def _is_report(data: Path) -> bool:
    try:
        return read_json(data, dict[str, JsonValue], "use another folder").get("format") == FORMAT
    except ExpertcastError:
        return False


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write each file atomically: report.json first, as it identifies the folder, and the page last."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        write_atomically(folder / name, data)
    for name in set(FILES) - set(files):
        (folder / name).unlink(missing_ok=True)
        remove_left_over(folder / name)


def page(data: Json, pictures: Mapping[str, bytes]) -> str:
    """Render the page from the contents of report.json and the PNGs by file name."""
    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    evaluation = data["evaluation"]
    shown = routing_tables(evaluation) | quality_tables(data["quality"] or {})
    shown |= {"chained_words": chained_words(evaluation), **views(evaluation, data["examples"], data["chosen"])}
    environment.globals |= {
        "band_class": band_class,
        "cell": cell,
        "short_cell": short_cell,
        "pictures": {name: base64.b64encode(data).decode() for name, data in pictures.items()},
        "script": Markup((here / "report.js").read_text()),
    }
    return environment.get_template("report.html").render(**data, **shown)


def short_cell(value: Cell) -> str:
    """Format a share with three decimals and no leading zero."""
    return cell(value).removeprefix("0") if isinstance(value, float) else cell(value)
