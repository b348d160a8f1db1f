"""Tables of evaluation results for the terminal, the model card and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from expertcast.predictors.hybrid import Hybrid, member_recall
from expertcast.predictors.messages import Json, aligned

Cell = str | float | int | None
CHAINED = "_chained"
"""Suffix of metrics of chained forecasts, which follow executed forecasts instead of true routing."""
RECALL = "recall_at_k"
METRICS = {
    RECALL: "recall@k",
    "recall_at_1.5k": "recall@1.5k",
    "recall_at_2k": "recall@2k",
    "weight_covered": "weight covered",
    "exact_set": "exact set",
    "cosine": "cosine",
}
"""Metrics with one value per layer, and their headings."""
COSTS = {
    "parameters": "parameters",
    "bytes": "bytes",
    "forecast_ms": "ms per forecast",
    "training_s": "training s",
    "collection_s": "collection s",
}
"""Fields of a ledger entry, and their headings."""


def cell(value: Cell, digits: int = 3) -> str:
    """Format a float with `digits` decimals, an int with thousands separators, and None as a dash."""
    if isinstance(value, float):
        return f"{value:.{digits}f}"
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else value


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under headings; the first cell of a row is its name."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    last: Sequence[Sequence[Cell]] = ()
    """Reference rows, such as chance."""
    digits: int = 3

    def cells(self) -> list[list[str]]:
        """Return all cells as text, headings first."""
        rows = [*self.rows, *self.last]
        return [list(self.headings), *([cell(value, self.digits) for value in row] for row in rows)]

    def text(self) -> str:
        """Format as text with aligned columns."""
        return aligned(self.cells())

    def markdown(self, *, turned: bool = False) -> str:
        """Format as Markdown, transposed if `turned`; empty if the table has no rows."""
        cells = self.cells()
        return markdown_table(list(zip(*cells, strict=True)) if turned and self.rows else cells)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of equal length, the heading first, as Markdown; empty if there is only a heading."""
    if len(rows) < 2:
        return ""
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    lines.insert(1, " | ".join(["---", *["---:"] * (len(rows[0]) - 1)]))
    return "\n".join(f"| {line} |" for line in lines)


def chained_apart(evaluation: Json) -> list[str]:
    """Return the predictors whose chained recall@k differs from the teacher-forced one at any layer."""
    chained = evaluation.get(RECALL + CHAINED, {})
    return [name for name, result in chained.items() if result != evaluation[RECALL][name]]


def forms_of(evaluation: Json) -> list[tuple[str, str, list[str]]]:
    """Return the forms to show: name, metric suffix and predictors; chained only where it differs."""
    forms = [("teacher-forced", "", list(evaluation[RECALL]))]
    apart = chained_apart(evaluation)
    return [*forms, ("chained", CHAINED, apart)] if apart else forms


def layer_table(evaluation: Json, metric: str = RECALL, names: Sequence[str] | None = None, caption: str = "") -> Table:
    """Build the table of a metric: predictors as rows; mean and target layers as columns; chance as the last row."""
    results = evaluation[metric]
    rows = [[name, results[name]["mean"], *results[name]["per_layer"]] for name in names or results]
    targets = evaluation.get("targets", range(1, len(rows[0]) - 1))
    chance = evaluation.get("chance", {}).get(metric.removesuffix(CHAINED))
    last = [] if chance is None else [["chance", *[chance] * (1 + len(targets))]]
    return Table(caption=caption, headings=["predictor", "mean", *map(str, targets)], rows=rows, last=last)


def layer_tables(evaluation: Json) -> list[tuple[str, str, Table]]:
    """Build the table of every metric with one value per layer, with its heading and the form of its forecasts."""
    return [
        (heading, form, layer_table(evaluation, key + suffix, names, f"{heading} per layer, {form}"))
        for key, heading in METRICS.items()
        for form, suffix, names in forms_of(evaluation)
        if key + suffix in evaluation
    ]


def mean_tables(evaluation: Json) -> list[Table]:
    """Build the tables of means over layers, for each form."""
    tables = []
    for form, suffix, names in forms_of(evaluation):
        shown = {key: heading for key, heading in METRICS.items() if key + suffix in evaluation}
        rows = [[name, *(evaluation[key + suffix][name]["mean"] for key in shown)] for name in names]
        chance = [["chance", *(evaluation["chance"].get(key) for key in shown)]]
        headings = ["predictor", *shown.values()]
        tables.append(Table(caption=f"mean over layers, {form}", headings=headings, rows=rows, last=chance))
    return tables


CALIBRATION_LEGEND = "ECE: calibration error, likely: of probabilities above 0.05"
"""Explains the columns of :func:`calibration_table`."""


def calibration_table(evaluation: Json) -> Table:
    """Build the table of calibration errors over all pairs and over likely pairs, before and after calibration."""
    rows = [
        [name, *(each[key] for key in ("ece", "ece_likely") for each in (result["before"], result))]
        for name, result in evaluation.get("calibration", {}).items()
    ]
    headings = ["predictor", "ECE before", "ECE after", "likely before", "likely after"]
    return Table(caption="calibration error", headings=headings, rows=rows, digits=4)


def ledger_table(ledger: Mapping[str, Json]) -> Table:
    """Build the table of predictors' costs."""
    digits = {"training_s": 1, "collection_s": 1}
    rows = [[name, *(cell(entry.get(key), digits.get(key, 3)) for key in COSTS)] for name, entry in ledger.items()]
    return Table(caption="costs", headings=["predictor", *COSTS.values()], rows=rows)


def ladder_table(config: Json) -> Table:
    """Build the table of a hybrid's rungs by rising cost, with recall@k on validation.

    Args:
        config: contents of its config.json.
    """
    own = config["predictor_config"]
    recall, cost_ms = member_recall(own["choices"]), own["cost_ms"]
    names = sorted(cost_ms, key=lambda name: float(cost_ms[name]))
    several = len({choice["predictor"] for choice in own["choices"]}) > 1
    return Table(
        headings=["rung", "recall@k on validation", "ms per forecast, without early attention's block"],
        rows=[[name, recall.get(name), cost_ms.get(name)] for name in [*names, *([Hybrid.name] if several else [])]],
    )
