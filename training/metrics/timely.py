"""Timely recall: what a forecast is worth on a link, as a closed form over its ranks.

T tokens, K experts per token.

A decode step without a cache: when layer l's router has run, the K forecast experts of layer l + 1 are copied one after
another, the heaviest first, behind whatever layer l itself still waits for. Layer l waits for the same copies before it
computes, so the link is free for the forecast for one layer's computation, whatever came before. In that window
(layer time - the forecast's own time) / (time of a copy) copies are made; the simulator's link counts the same
(`tests/runtime/simulation/test_timely.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from expertcast.predictors.errors import ExpertcastError
from expertcast.training.comparison import RoutingComparison
from expertcast.training.metrics.routing import PerLayerMetric

RATIOS = (1.0, 2.0, 5.0)
"""Copies of a token's K experts over the computation of a layer, where nothing is said of the link."""
TIMELY, TIMELY_BYTES = "timely@", "timely_bytes@"
_ROUNDING = 1e-9

Windows = Mapping[str, float]
"""By name, how many copies are made between a forecast and its layer."""


def copies_in_time(layer_s: float, copy_s: float, forecast_s: float = 0.0) -> float:
    """Copies made between a forecast and its layer, the last one in part.

    Args:
        layer_s: seconds that a layer computes.
        copy_s: seconds that one expert's copy takes.
        forecast_s: seconds that the forecast itself takes of these.

    Raises:
        ExpertcastError: a time that is not above 0, or a negative one of the forecast.
    """
    if not (layer_s > 0 and copy_s > 0 and forecast_s >= 0):
        raise ExpertcastError(
            f"layer time {layer_s:g} s, copy {copy_s:g} s, forecast {forecast_s:g} s: give seconds above 0"
        )
    return max(0.0, layer_s - forecast_s) / copy_s


def ratio_windows(top_k: int, ratios: Sequence[float] = RATIOS, forecast_share: float = 0.0) -> dict[str, float]:
    """Windows by how many times as long as a layer's computation the copies of a token's K experts take.

    Args:
        top_k: K.
        ratios: those times.
        forecast_share: the forecast's own time as a share of the layer's.
    """
    return {f"R{ratio:g}": copies_in_time(1.0, ratio / top_k, forecast_share) for ratio in ratios}


class TimelyRecall(PerLayerMetric):
    """Share of a token's true experts that a forecast has brought when their layer's router has run.

    `whole` counts experts whose copy is finished; else a copy that is under way counts by the part that has arrived,
    which is the share of needed bytes. Wrong experts among the forecast's take their time on the link too.
    """

    def __init__(self, layers: int, copies: float, *, whole: bool = True, **kwargs: Any) -> None:
        super().__init__(layers, **kwargs)
        self.copies, self.whole = copies, whole

    def score(self, comparison: RoutingComparison) -> Tensor:
        place_TK = comparison.place_TK.float()
        arrived_TK = (self.copies + _ROUNDING - place_TK).clamp(0, 1)
        if self.whole:
            arrived_TK = arrived_TK.floor()
        return (arrived_TK * (comparison.place_TK < comparison.place_TK.shape[1])).mean(dim=1)


def timely_metrics(layers: int, windows: Windows, **kwargs: Any) -> dict[str, PerLayerMetric]:
    """Both forms of timely recall for each window, by name, fresh.

    Args:
        layers: target layers.
        windows: copies by name.
        kwargs: torchmetrics' own.
    """
    metrics: dict[str, PerLayerMetric] = {}
    for name, copies in windows.items():
        metrics[TIMELY + name] = TimelyRecall(layers, copies, **kwargs)
        metrics[TIMELY_BYTES + name] = TimelyRecall(layers, copies, whole=False, **kwargs)
    return metrics
