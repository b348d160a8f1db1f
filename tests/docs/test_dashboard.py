"""The dashboard as Grafana's own models read it, and its queries and the page's as Prometheus' grammar does."""

from __future__ import annotations

import json
import re
import types
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import prometheus, stat, table, timeseries
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel

from expertcast.runtime.serving.metrics import FAMILIES

DOCS = Path(__file__).resolve().parents[2] / "docs"
FILE: dict[str, Any] = json.loads((DOCS / "grafana" / "expertcast.json").read_text())
ONLY_FILES = {"__inputs", "__elements", "__requires", "id"}
"""What an exported file has beside its dashboard."""
ONLY_SHOWN = ("definition",)
"""What Grafana writes for its own editor and its models do not have."""
OPTIONS = {"stat": stat.Options, "table": table.Options, "timeseries": timeseries.Options}
KINDS = {described.shown: described for described in FAMILIES}
RATES = {"rate", "increase", "irate"}


@pytest.fixture(scope="module")
def dashboard() -> Dashboard:
    register_default_plugins()
    return Dashboard.from_json(FILE)


def _panels(dashboard: Dashboard) -> list[Panel]:
    assert dashboard.panels is not None
    return [panel for panel in dashboard.panels if isinstance(panel, Panel)]


def _lost(given: Any, kept: Any, where: str = "") -> list[str]:
    """Where what a model kept is not what it was given."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [place for name in given for place in _lost(given[name], kept.get(name, ...), f"{where}.{name}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = zip(given, kept, strict=True)
        return [place for at, (one, other) in enumerate(pairs) for place in _lost(one, other, f"{where}[{at}]")]
    return [] if given == kept else [where]


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type, down to the members of what the models are made of."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in inner)
    if origin is typing.Literal:
        return value in inner
    if origin is list:
        return isinstance(value, list) and all(_fits(each, inner[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    if hint in (Any, object):
        return True
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return value in [each.value for each in hint]
    if isinstance(value, bool) and hint is not bool:
        return False
    if isinstance(value, dict) and hasattr(hint, "from_json"):
        value = hint.from_json(value)  # some members stay as they are in the file
    return isinstance(value, hint) and not _misfits(value)


def _misfits(model: Any) -> list[str]:
    if not type(model).__module__.startswith("grafana_foundation_sdk"):
        return []
    hints = typing.get_type_hints(type(model))
    return [name for name, hint in hints.items() if not _fits(getattr(model, name), hint)]


def _queries() -> list[str]:
    """Of the dashboard, with its variables filled in, and of the page's table."""
    shown = [target["expr"] for panel in FILE["panels"] for target in panel.get("targets", [])]
    filled = [each.replace("$__rate_interval", "1m").replace("$instance", "a:1") for each in shown]
    page = (DOCS / "metrics.md").read_text()
    table = page.partition("The same as queries:")[2].partition("##")[0]
    return [*filled, *re.findall(r"^\| [^|`]+ \| `([^`]+)`", table, flags=re.MULTILINE)]


def _nodes(query: str) -> list[promql.Expr]:
    nodes = list[promql.Expr]()
    promql.walk(promql.parse(query), lambda node: nodes.append(node))
    return nodes


def test_grafanas_models_keep_all_of_it(dashboard: Dashboard) -> None:
    kept = json.loads(JSONEncoder().encode(dashboard))
    given = {name: value for name, value in FILE.items() if name not in ONLY_FILES}
    assert [place for place in _lost(given, kept) if not place.endswith(ONLY_SHOWN)] == []


def test_every_value_is_of_the_models_types(dashboard: Dashboard) -> None:
    assert _misfits(dashboard) == []
    for panel in _panels(dashboard):
        assert _misfits(panel) == []
        assert panel.type_val in {*OPTIONS, "row"}
        if panel.type_val != "row":
            assert isinstance(panel.options, OPTIONS[panel.type_val])
            assert _misfits(panel.options) == []
        for target in panel.targets or []:
            assert isinstance(target, prometheus.Dataquery)
            assert _misfits(target) == []


def test_types_that_do_not_fit_are_seen() -> None:
    register_default_plugins()
    for name, value in (("title", 5), ("refresh", True), ("editable", "yes"), ("tags", "a"), ("schemaVersion", "39")):
        assert _misfits(Dashboard.from_json({**FILE, name: value})), name
    assert _lost({"a": [{"b": 1}]}, {"a": [{}]}) == [".a[0].b"]


@pytest.mark.parametrize("query", _queries())
def test_queries_are_prometheus(query: str) -> None:
    """By its grammar: counters are asked for by rates, and grouped and chosen by labels that they have."""
    nodes = _nodes(query)
    selectors = [node for node in nodes if isinstance(node, promql.VectorSelector)]
    ranges = [call.args[0] for call in nodes if isinstance(call, promql.Call) and call.func.name in RATES]
    asked = {str(each.vector_selector) for each in ranges if isinstance(each, promql.MatrixSelector)}
    assert selectors
    aggregated = [node.modifier for node in nodes if isinstance(node, promql.AggregateExpr) and node.modifier]
    grouped = {label for modifier in aggregated for label in modifier.labels}
    known = {"instance", "le"}
    for selector in selectors:
        described = KINDS[re.sub("_(bucket|sum|count)$", "", selector.name)]
        known |= {*described.labels}
        rated = str(selector) in asked
        assert rated == (described.kind in ("counter", "histogram")), selector
        assert {matcher.name for matcher in selector.matchers.matchers} <= {*described.labels, "instance"}
    assert grouped <= known


@pytest.mark.parametrize(
    "wrong", ["sum(rate(a_total[1m])", "rate(a_total)", "sum by (layer) rate(a_total[1m])", "a{b=c}"]
)
def test_what_is_no_query_is_seen(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        promql.parse(wrong)
