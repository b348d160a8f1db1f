"""The report of an evaluation: one page that needs nothing else, its pictures as files, and its numbers as JSON.

The page is `report.html` with `report.css` and `report.js` in it.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure
from pydantic import JsonValue

from expertcast.checkpoints.provenance import provenance as running_provenance
from expertcast.predictors.artefacts import read_json
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.plain import Json
from expertcast.training import figures
from expertcast.training.inline_svg import inline_svg
from expertcast.training.report_rows import curve_rows, distance_rows, quality_rows, routing_rows
from expertcast.training.report_sources import now
from expertcast.training.report_views import band_class, views
from expertcast.training.results import Curve

PAGE = "index.html"
DATA = "report.json"
FORMAT = "expertcast-report-1"
RECALL, RANKS, CALIBRATION = "recall.png", "rank_alignment.png", "calibration.png"
COVERED, CURVE, QUALITY, EXPERTS = "weight_covered.png", "learning_curve.png", "quality.png", "experts.png"
FILES = (PAGE, DATA, RECALL, COVERED, EXPERTS, RANKS, CALIBRATION, CURVE, QUALITY)
DPI = 110
Cell = str | float | int | None


def write_report(
    folder: Path | str,
    evaluation: Json,
    *,
    chosen: str,
    learning_curve: Curve | None = None,
    quality: Json | None = None,
    examples: Json | None = None,
    title: str = "expertcast evaluation",
    provenance: Json | None = None,
) -> Path:
    """Write a report folder; one of an earlier report is overwritten.

        index.html            everything below in one page: pictures inlined, tables of all numbers
        recall.png            recall@k per layer, teacher-forced and (where it differs) chained
        weight_covered.png    share of the router's weight covered, likewise
        experts.png           recall and use of every expert
        rank_alignment.png    same expert at the same rank, per layer and rank
        calibration.png       reliability of the forecast probabilities
        learning_curve.png    recall against training tokens (when given)
        quality.png           what each way to run costs the model (when given)
        report.json           the numbers: evaluation, chosen, learning_curve, quality, examples, provenance

    Args:
        folder: where to; made if it is not there.
        evaluation: `Evaluation.as_dict()`; further keys are kept in report.json.
        chosen: name of the predictor with the highest recall@k on the validation split; the page marks it, and never
            the best of the numbers that it shows.
        learning_curve: per predictor, mean recall@k by number of training tokens.
        quality: result of the quality harness, or its `runs`.
        examples: text with what was forecast of each token (:func:`expertcast.training.example_text.example_text`).
        title: heading of the page.
        provenance: where the numbers come from (:func:`expertcast.training.report_sources.report_sources`); this
            process's command, revision and versions, and the date, if not given.

    Returns:
        Path of index.html.

    Raises:
        ExpertcastError: the folder holds something that is not an earlier report.
    """
    folder = Path(folder)
    _check(folder)
    drawn = figures_of(evaluation, chosen, learning_curve, quality)
    data = {
        "format": FORMAT,
        "title": title,
        "provenance": {"date": now(), **running_provenance()} if provenance is None else dict(provenance),
        "evaluation": dict(evaluation),
        "chosen": chosen,
        "learning_curve": learning_curve,
        "quality": quality,
        "examples": examples,
    }
    files = {DATA: _text(data).encode()} | {name: _png(figure) for name, figure in drawn.items()}
    files[PAGE] = page(data, drawn).encode()
    _write(folder, files)
    return folder / PAGE


def figures_of(
    evaluation: Json, chosen: str, learning_curve: Curve | None = None, quality: Json | None = None
) -> dict[str, Figure]:
    """The report's figures by file name; `chosen` is the predictor whose experts are drawn."""
    drawn = {
        RECALL: figures.recall_by_layer(evaluation),
        COVERED: figures.recall_by_layer(evaluation, "weight_covered"),
        RANKS: figures.rank_alignment(evaluation),
        CALIBRATION: figures.calibration(evaluation),
    }
    if "per_expert" in evaluation:
        drawn[EXPERTS] = figures.expert_recall(evaluation, chosen)
    if learning_curve:
        drawn[CURVE] = figures.learning_curve(learning_curve)
    if quality:
        drawn[QUALITY] = figures.quality_bars(quality)
    return drawn


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    figure.set_layout_engine("none")  # it is laid out: the page's SVG need not do so again
    return buffer.getvalue()


def _text(data: Json) -> str:
    """JSON with a line for each list of numbers, not for each number."""
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    return re.sub(r"\[\n([^][{}\"]*)\n *\]", lambda found: "[" + " ".join(found[1].split()) + "]", text)


def _check(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ExpertcastError(f"{folder} is a file: name a folder for the report")
    present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    foreign = sorted(present - set(FILES))
    if foreign or (present and not _is_report(folder / DATA)):
        what = f"{foreign[0]!r}" if foreign else f"files that are no report of expertcast (no {DATA} of one)"
        raise ExpertcastError(f"report folder {folder} holds {what}: name an empty or a new folder")


def _is_report(data: Path) -> bool:
    try:
        return read_json(data, dict[str, JsonValue], "name another folder").get("format") == FORMAT
    except ExpertcastError:
        return False


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Every file whole or not at all; report.json first (it marks the folder as ours), the page last."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        part = folder.parent / f".{folder.name}.{name}.part"  # beside it: a killed run leaves the folder a report
        part.write_bytes(data)
        os.replace(part, folder / name)
    for name in set(FILES) - set(files):
        (folder / name).unlink(missing_ok=True)


def page(data: Json, drawn: Mapping[str, Figure]) -> str:
    """The whole page, of the numbers that stand in report.json and the figures by file name."""
    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    shown = routing_rows(data["evaluation"]) | curve_rows(data["learning_curve"] or {})
    shown |= (
        distance_rows(data["evaluation"])
        | quality_rows(data["quality"] or {})
        | views(data["evaluation"], data["examples"], data["chosen"])
    )
    environment.globals |= {
        "band_class": band_class,
        "cell": cell,
        "picture": lambda name, description: inline_svg(drawn[name], Path(name).stem, description),
        "script": Markup((here / "report.js").read_text()),
    }
    return environment.get_template("report.html").render(**data, **shown)


def cell(value: Cell, digits: int | str = 3) -> str:
    """A number with so many digits (`bare`: three, without a zero before the point), or as it is counted; a dash for
    none."""
    if isinstance(value, float):
        if digits == "bare":
            return f"{value:.3f}".removeprefix("0")
        return f"{value:.{digits}f}"
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else value
