"""The metrics' page and its dashboard name what the code shows, and Grafana's importer finds what it needs."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from expertcast.runtime.serving.metrics import FAMILIES, PREFIX

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "metrics.md").read_text()
DASHBOARD: dict[str, Any] = json.loads((DOCS / "grafana" / "expertcast.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
SHOWN = {described.shown for described in FAMILIES}
SERIES = SHOWN | {
    described.shown + suffix
    for described in FAMILIES
    if described.kind == "histogram"
    for suffix in ("_bucket", "_sum", "_count")
}


def _names(query: str) -> set[str]:
    return set(re.findall(rf"\b{PREFIX}\w+", query))


def _expressions() -> list[str]:
    return [target["expr"] for panel in PANELS for target in panel.get("targets", [])]


def test_the_table_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| `(expertcast_\w+)` \| (\w+) \| (.*?) ?\| (.*) \|$", PAGE, flags=re.MULTILINE)
    assert [(name, kind, tuple(re.findall(r"`(\w+)`", labels)), text) for name, kind, labels, text in rows] == [
        (described.shown, described.kind, described.labels, described.help) for described in FAMILIES
    ]


def test_queries_of_the_page_name_what_there_is() -> None:
    assert _names(PAGE) <= SERIES


@pytest.mark.parametrize("expression", _expressions())
def test_every_expression_of_the_dashboard_names_what_there_is(expression: str) -> None:
    assert _names(expression)
    assert _names(expression) <= SERIES


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
