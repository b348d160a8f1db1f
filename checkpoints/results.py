"""Results of an evaluation as tables: for the terminal, for a predictor's card and for the page of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from expertcast.predictors.hybrid import Hybrid, member_recall
from expertcast.predictors.messages import Json, aligned

Cell = str | float | int | None
CHAINED = "_chained"
"""Ending of a metric's name where forecasts were made from executed forecasts."""
RECALL = "recall_at_k"
METRICS = {
    RECALL: "recall@k",
    "recall_at_1.5k": "recall@1.5k",
    "recall_at_2k": "recall@2k",
    "weight_covered": "weight covered",
    "exact_set": "exact set",
    "hard_match": "hard match",
    "soft_match": "soft match",
    "mismatch": "mismatch",
    "cosine": "cosine",
}
"""Metrics with one number per layer, and their headings; those of timely recall go by their links."""
COSTS = {
    "parameters": "parameters",
    "bytes": "bytes",
    "forecast_ms": "ms per forecast",
    "training_s": "training s",
    "collection_s": "collection s",
}
"""Members of a ledger's entry, with their headings."""


def cell(value: Cell, digits: int = 3) -> str:
    """A number with so many digits after the point, or as it is counted; a dash for None."""
    if isinstance(value, float):
        return f"{value:.{digits}f}"
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else value


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows under headings; the first cell names its row."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    last: Sequence[Sequence[Cell]] = ()
    """Rows to compare with, such as chance."""
    digits: int = 3

    def cells(self) -> list[list[str]]:
        """Everything as text, the headings first."""
        rows = [*self.rows, *self.last]
        return [list(self.headings), *([cell(value, self.digits) for value in row] for row in rows)]

    def text(self) -> str:
        """Aligned columns for the terminal."""
        return aligned(self.cells())

    def markdown(self, *, turned: bool = False) -> str:
        """For a card, with rows and columns exchanged if `turned`; nothing without rows."""
        cells = self.cells()
        return markdown_table(list(zip(*cells, strict=True)) if turned and self.rows else cells)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equally many cells, the heading first; nothing where there is no more than a heading."""
    if len(rows) < 2:
        return ""
    lines = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    lines.insert(1, " | ".join(["---", *["---:"] * (len(rows[0]) - 1)]))
    return "\n".join(f"| {line} |" for line in lines)


def chained_apart(evaluation: Json) -> list[str]:
    """The predictors whose chained recall@k is another than the teacher-forced one, at any layer."""
    chained = evaluation.get(RECALL + CHAINED, {})
    return [name for name, result in chained.items() if result != evaluation[RECALL][name]]


def forms_of(evaluation: Json) -> list[tuple[str, str, list[str]]]:
    """The forms that are shown: name, ending of their metrics, and predictors; chained, only those that differ."""
    forms = [("teacher-forced", "", list(evaluation[RECALL]))]
    apart = chained_apart(evaluation)
    return [*forms, ("chained", CHAINED, apart)] if apart else forms


def timely_metrics(evaluation: Json) -> dict[str, str]:
    """The metrics of timely recall, with their headings."""
    names = [key for key in evaluation if key.startswith("timely") and not key.endswith(CHAINED)]
    return {name: name.replace("_", " ") for name in names}


def layer_table(evaluation: Json, metric: str = RECALL, names: Sequence[str] | None = None, caption: str = "") -> Table:
    """A metric by predictor (all, or those of some `names`): the mean first, then the target layers, chance last."""
    results = evaluation[metric]
    rows = [[name, results[name]["mean"], *results[name]["per_layer"]] for name in names or results]
    targets = evaluation.get("targets", range(1, len(rows[0]) - 1))
    chance = evaluation.get("chance", {}).get(metric.removesuffix(CHAINED))
    last = [] if chance is None else [["chance", *[chance] * (1 + len(targets))]]
    return Table(caption=caption, headings=["predictor", "mean", *map(str, targets)], rows=rows, last=last)


def layer_tables(evaluation: Json) -> list[tuple[str, str, Table]]:
    """Every metric of one number per layer: its heading, the form of the forecasts, and the table."""
    return [
        (heading, form, layer_table(evaluation, key + suffix, names, f"{heading} per layer, {form}"))
        for key, heading in (METRICS | timely_metrics(evaluation)).items()
        for form, suffix, names in forms_of(evaluation)
        if key + suffix in evaluation
    ]


def link_table(evaluation: Json) -> Table:
    """What forecasts bring in time, and whether their probabilities mean what they say.

    A row per predictor: recall of whole experts and of bytes for each link, then the calibration error over all pairs
    and over likely ones, as the logits stand and as they were calibrated.
    """
    timely, errors = timely_metrics(evaluation), calibration_table(evaluation)
    rows: list[list[Cell]] = []
    for name, *values in errors.rows:
        means = [cell(evaluation[metric][name]["mean"]) for metric in timely]
        rows.append([name, *means, *(cell(value, errors.digits) for value in values)])
    return Table(headings=["predictor", *timely, "ECE before", "after", "likely before", "after"], rows=rows)


def calibration_table(evaluation: Json) -> Table:
    """Calibration error over all pairs and over likely ones, before calibration and after it."""
    rows = [
        [name, *(each[key] for key in ("ece", "ece_likely") for each in (result["before"], result))]
        for name, result in evaluation.get("calibration", {}).items()
    ]
    headings = ["predictor", "before", "ECE", "likely, before", "ECE of likely"]
    return Table(caption="calibration error", headings=headings, rows=rows, digits=4)


def tokens_table(tokens_ahead: Mapping[str, Json], recalls: Sequence[str] | None = None) -> Table:
    """Recall of forecasts of tokens: a row per forecast and recall (with its name where all are shown), a column per
    token ahead."""
    found = next(iter(tokens_ahead.values()), {})
    rows = [
        [name if recalls else f"{name} {recall}", *values[recall]["mean"]]
        for recall in recalls or found
        for name, values in tokens_ahead.items()
    ]
    return Table(
        headings=["tokens ahead", *(str(step) for step in range(1, max(map(len, rows), default=1)))], rows=rows
    )


def ledger_table(ledger: Mapping[str, Json]) -> Table:
    """Costs of predictors."""
    digits = {"training_s": 1, "collection_s": 1}
    rows = [[name, *(cell(entry.get(key), digits.get(key, 3)) for key in COSTS)] for name, entry in ledger.items()]
    return Table(caption="costs", headings=["predictor", *COSTS.values()], rows=rows)


def ladder_table(config: Json) -> Table:
    """Ways to forecast that a hybrid holds, by rising cost, with recall@k on validation; no rows for other predictors.

    Args:
        config: the contents of config.json.
    """
    own = config["predictor_config"] if config["predictor"] == Hybrid.name else {"choices": [], "cost_ms": {}}
    recall, cost_ms = member_recall(own["choices"]), own["cost_ms"]
    names = sorted(cost_ms, key=lambda name: float(cost_ms[name]))
    several = len({choice["predictor"] for choice in own["choices"]}) > 1
    return Table(
        headings=["rung", "recall@k on validation", "ms per forecast, without early attention's block"],
        rows=[[name, recall.get(name), cost_ms.get(name)] for name in [*names, *([Hybrid.name] if several else [])]],
    )
