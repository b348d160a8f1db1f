"""All metrics, and their names in queries."""

from __future__ import annotations

from expertcast.runtime.serving import metrics
from expertcast.runtime.serving.metrics import LAYER, MetricSpec

FAMILIES = [*LAYER.values(), *(spec for spec in vars(metrics).values() if isinstance(spec, MetricSpec))]
"""In the order of the module."""


def query_name(spec: MetricSpec) -> str:
    """The metric's name in queries."""
    return spec.family + {"counter": "_total", "info": "_info"}.get(spec.kind, "")
