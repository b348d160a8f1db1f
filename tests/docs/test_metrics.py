"""The pages as a reader of Markdown sees them; metrics and dashboard as Grafana and Prometheus read them."""

from __future__ import annotations

import json
import re
import tomllib
import types
import typing
from collections.abc import Iterator
from enum import Enum
from itertools import combinations
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import prometheus, stat, table, timeseries
from grafana_foundation_sdk.models.dashboard import Dashboard, Panel
from markdown_it import MarkdownIt
from markdown_it.token import Token

from expertcast.runtime.serving.metrics import FAMILIES, PREFIX

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "metrics.md").read_text()
DASHBOARD: dict[str, Any] = json.loads((DOCS / "grafana" / "expertcast.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
SHOWN = {spec.query_name for spec in FAMILIES}
SERIES = SHOWN | {
    spec.query_name + suffix
    for spec in FAMILIES
    if spec.kind == "histogram"
    for suffix in ("_bucket", "_sum", "_count")
}


def _names(query: str) -> set[str]:
    return set(re.findall(rf"\b{PREFIX}\w+", query))


def _expressions() -> list[str]:
    return [target["expr"] for panel in PANELS for target in panel.get("targets", [])]


def test_the_table_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `(expertcast_\w+)` \| (\w+) \| (.*?) ?\| (.*) \|$", PAGE, flags=re.MULTILINE)
    assert [(name, kind, tuple(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in rows] == [
        (spec.query_name, spec.kind, spec.labels, spec.help) for spec in FAMILIES
    ]


def test_queries_of_the_page_name_what_there_is() -> None:
    assert _names(PAGE) <= SERIES


def test_the_pages_example_imports_what_there_is() -> None:
    code = PAGE.partition("```python\n")[2].partition("```")[0]
    exec("\n".join(line for line in code.splitlines() if line.startswith(("import ", "from "))), {})


def test_the_dashboard_shows_most_of_what_there_is() -> None:
    used = {name.removesuffix("_bucket") for expression in _expressions() for name in _names(expression)}
    assert SHOWN - used == {
        "expertcast_experts", "expertcast_layer_steps_total", "expertcast_layer_chunks_total",
        "expertcast_link_copies_total", "expertcast_disk_read_seconds_total", "expertcast_draft_cycles_total",
    }  # fmt: skip


def test_what_the_importer_needs() -> None:
    assert DASHBOARD["id"] is None
    assert re.fullmatch(r"[\w-]{1,40}", DASHBOARD["uid"])
    assert DASHBOARD["schemaVersion"] >= 39
    assert DASHBOARD["title"]
    assert DASHBOARD["__inputs"] == []
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    assert _names(variables["instance"]["definition"]) <= SHOWN
    kinds = {entry["id"] for entry in DASHBOARD["__requires"] if entry["type"] == "panel"}
    assert {panel["type"] for panel in PANELS} - {"row"} == kinds
    for name in re.findall(r"\$\{?(\w+)", json.dumps(PANELS)):
        assert name in {*variables, "__rate_interval"}


def test_panels_have_a_source_a_title_and_a_place_of_their_own() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    places = []
    for panel in PANELS:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        assert place["h"] > 0
        places.append(place)
        if panel["type"] == "row":
            continue
        assert panel["title"]
        assert panel["description"]
        for holder in [panel, *panel["targets"]]:
            assert holder["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0
    for one, other in combinations(places, 2):
        apart = (
            one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        )  # fmt: skip
        assert apart, (one, other)


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]


def tokens(text: str) -> Iterator[Token]:
    """All tokens of a page, those within paragraphs too."""
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        yield token
        yield from token.children or []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_is_code(page: Path) -> None:
    text = page.read_text()
    fences = [token for token in tokens(text) if token.type == "fence"]
    assert 2 * len(fences) == len(re.findall(r"^ {0,3}```", text, flags=re.MULTILINE))
    for fence in fences:
        if fence.info == "python":
            compile(fence.content, f"{page.name}:{fence.map}", "exec")
    assert not any("```" in token.content for token in tokens(text) if token.type == "text")


def test_links_of_the_readme_work_where_there_is_no_checkout() -> None:
    """On a package index: they are absolute, to what the checkout holds."""
    text = (ROOT / "README.md").read_text()
    url = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    raw = url.replace("https://github.com", "https://raw.githubusercontent.com")
    links = [
        token.attrGet("href") or token.attrGet("src") for token in tokens(text) if token.type in ("link_open", "image")
    ]
    assert len(links) > 10
    for link in map(str, links):
        assert link.startswith("https://"), link
        if link.startswith((url, raw)):
            path, _, anchor = re.sub(rf"^({url}/blob|{raw})/main/", "", link).partition("#")
            assert (ROOT / path).is_file(), link
            headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), flags=re.MULTILINE) if anchor else []
            assert not anchor or anchor in [re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in headings]
    left = [
        token.content for token in tokens(text) if token.type == "text" and re.search(r"\[[^\]]+\.md\]", token.content)
    ]
    assert left == []  # a reference without its address


ONLY_FILES = {"__inputs", "__elements", "__requires", "id"}
"""What an exported file has beside its dashboard."""
ONLY_SHOWN = ("definition",)
"""What Grafana writes for its own editor and its models do not have."""
OPTIONS = {"stat": stat.Options, "table": table.Options, "timeseries": timeseries.Options}
KINDS = {spec.query_name: spec for spec in FAMILIES}
RATES = {"rate", "increase", "irate"}


@pytest.fixture(scope="module")
def dashboard() -> Dashboard:
    register_default_plugins()
    return Dashboard.from_json(DASHBOARD)


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
    filled = [each.replace("$__rate_interval", "1m").replace("$instance", "a:1") for each in _expressions()]
    table = PAGE.partition("Useful queries:")[2].partition("##")[0]
    of_page = re.findall(r"^\| [^|`]+ \| `([^`]+)`", table, flags=re.MULTILINE)
    assert len(of_page) >= 5
    return [*filled, *of_page]


def _nodes(query: str) -> list[promql.Expr]:
    nodes = list[promql.Expr]()
    promql.walk(promql.parse(query), lambda node: nodes.append(node))
    return nodes


def test_grafanas_models_keep_all_of_it(dashboard: Dashboard) -> None:
    kept = json.loads(JSONEncoder().encode(dashboard))
    given = {name: value for name, value in DASHBOARD.items() if name not in ONLY_FILES}
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
        assert _misfits(Dashboard.from_json({**DASHBOARD, name: value})), name
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
        spec = KINDS[re.sub("_(bucket|sum|count)$", "", selector.name)]
        known |= {*spec.labels}
        rated = str(selector) in asked
        assert rated == (spec.kind in ("counter", "histogram")), selector
        assert {matcher.name for matcher in selector.matchers.matchers} <= {*spec.labels, "instance"}
    assert grouped <= known
