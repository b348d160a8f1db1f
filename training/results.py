"""What an evaluation gives back: plain numbers in one form for every metric, and a table of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.plain import Json, aligned
from expertcast.training.metrics.experts import ExpertRecall

Curve = Mapping[str, Mapping[str, float]]
"""Per predictor, recall by number of training tokens (a number, or the text that JSON makes of it)."""
CHAINED = "_chained"
"""Ending of a metric's name where forecasts were made from executed forecasts."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of :func:`evaluate`: plain numbers, ready for JSON."""

    values: Json

    def as_dict(self) -> Json:
        """`{metric: {predictor: {"mean": x, "per_layer": [..]}}}`, plus `chance`, `tokens`, `k` and so on."""
        return self.values

    def recall(self, predictor: str) -> float:
        """Mean recall@k of a predictor, teacher-forced."""
        value: float = self.values["recall_at_k"][predictor]["mean"]
        return value


def recall_table(evaluation: Evaluation, metric: str = "recall_at_k") -> str:
    """A text table for the terminal: a row per predictor, the mean first, then the target layers."""
    values = evaluation.as_dict()
    if metric not in values:
        raise ExpertcastError(f"no metric {metric!r} in this evaluation: choose from {', '.join(sorted(values))}")
    rows = [["predictor", "mean", *(str(layer) for layer in values["targets"])]]
    for name, result in values[metric].items():
        rows.append([name, _decimal(result["mean"]), *(_decimal(value) for value in result["per_layer"])])
    chance = values["chance"].get(metric.removesuffix(CHAINED))
    if chance is not None:
        rows.append(["chance", *[_decimal(chance)] * (len(rows[0]) - 1)])
    return aligned(rows)


def link_table(evaluation: Evaluation) -> str:
    """A text table for the terminal: what forecasts bring in time, and whether their probabilities mean what they say.

    A row per predictor: recall of whole experts and of bytes for each link, then the calibration error over all pairs
    and over likely ones, as the logits stand and as they were calibrated.
    """
    values = evaluation.as_dict()
    timely = [name for name in values if name.startswith("timely") and not name.endswith(CHAINED)]
    rows = [["predictor", *timely, "ECE before", "after", "likely before", "after"]]
    for name, result in values["calibration"].items():
        errors = [each[key] for key in ("ece", "ece_likely") for each in (result["before"], result)]
        means = [values[metric][name]["mean"] for metric in timely]
        rows.append([name, *map(_decimal, means), *("-" if error is None else f"{error:.4f}" for error in errors)])
    return aligned(rows)


def summary(value_L: Tensor) -> Json:
    """`mean` over the layers that have a value, and `per_layer` with None where there is none."""
    return {"mean": plain(value_L.double().nanmean(dim=0)), "per_layer": plain(value_L.double())}


def expert_counts(metrics: Mapping[str, ExpertRecall]) -> Json:
    """`used` [L][E], the tokens that needed each expert, and `found` [L][E] of them by predictor."""
    counts = {name: metric.compute() for name, metric in metrics.items()}
    used_LE = next(iter(counts.values()))["used"]
    return {"used": used_LE.tolist(), "found": {name: each["found"].tolist() for name, each in counts.items()}}


def chained_apart(evaluation: Json) -> list[str]:
    """The predictors whose chained recall@k is another than the teacher-forced one, at any layer."""
    chained = evaluation.get("recall_at_k" + CHAINED, {})
    return [name for name, result in chained.items() if result != evaluation["recall_at_k"][name]]


def reliability(result: dict[str, Tensor]) -> Json:
    """Expected calibration error over all layers, the same of likely pairs, per layer, and the bins of equal width."""
    number = len(result["count_B"])
    bins = [
        {
            "low": index / number,
            "high": (index + 1) / number,
            "count": int(result["count_B"][index]),
            "confidence": plain(result["confidence_B"][index]),
            "frequency": plain(result["frequency_B"][index]),
        }
        for index in range(number)
    ]
    errors = {name: plain(result[name]) for name in ("ece", "ece_likely")}
    return {**errors, "ece_per_layer": plain(result["ece_L"].reshape(-1)), "bins": bins}


def quality_runs(quality: Json) -> dict[str, Json]:
    """Runs by name, each with `per_domain`, from what the quality harness gives (its whole result or its `runs`)."""
    runs = quality.get("runs", quality)
    return {name: {**run, "per_domain": run.get("per_domain", run.get("domains", {}))} for name, run in runs.items()}


def plain(values: Tensor) -> object:
    """A number or nested lists of them, None for NaN."""
    array = values.cpu().numpy()
    return np.where(np.isnan(array), np.array(None), array).tolist()


def _decimal(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
