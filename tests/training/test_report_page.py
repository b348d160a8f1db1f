"""The report's page without a browser: well-formed, from nowhere else, with headers, and with the numbers given."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from expertcast.training.report import BANDS, band_class, band_colours, write_report
from tests.training.reports import CURVE, PROVENANCE, QUALITY, evaluated, examples_of

VOID = {"meta", "wbr"}


@dataclass
class Table:
    """A table as it stands in the page."""

    attributes: dict[str, str | None]
    caption: str = ""
    rows: list[list[tuple[str, dict[str, str | None], str]]] = field(default_factory=list)
    """Of each cell its tag, attributes and text."""


class Page(HTMLParser):
    """Collects tables, texts by tag, ids and whatever could fetch something; checks that tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[Table] = []
        self.texts: list[tuple[str, dict[str, str | None], str]] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.links += [value or "" for key, value in attrs if key in ("src", "href", "xlink:href", "srcset", "action")]
        self.ids += [found["id"] or ""] if "id" in found else []
        if tag == "table":
            self.tables.append(Table(found))
        elif tag == "tr":
            self.tables[-1].rows.append([])
        elif tag in ("td", "th"):
            self.tables[-1].rows[-1].append((tag, found, ""))
        if tag not in VOID:
            self.open.append((tag, found))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if not self.open:
            return
        self.texts.append((*self.open[-1], data))
        inside = [tag for tag, _ in self.open]
        if "caption" in inside:
            self.tables[-1].caption += data
        elif "td" in inside or "th" in inside:
            tag, found, text = self.tables[-1].rows[-1][-1]
            self.tables[-1].rows[-1][-1] = (tag, found, text + data)


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    return evaluated()


@pytest.fixture(scope="module")
def text(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = write_report(
        tmp_path_factory.mktemp("page") / "report", values, chosen="same", learning_curve=CURVE, quality=QUALITY,
        examples=examples_of(values), title="tiny & <random>", provenance=PROVENANCE,
    )  # fmt: skip
    assert json.loads((path.parent / "report.json").read_text())["evaluation"] == values
    return path.read_text()


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def cells(page: Page) -> set[str]:
    return {cell for table in page.tables for row in table.rows for _, _, cell in row}


def test_nothing_comes_from_elsewhere(text: str, page: Page) -> None:
    assert not re.search(r"https?:|//www|@import|url\((?!#)|\bfetch\(|XMLHttpRequest|\bimport\b", text)
    assert page.links
    for link in page.links:
        assert link.startswith(("#", "data:image/png;base64,")), link
    inside = {link[1:] for link in page.links if link.startswith("#")} | set(re.findall(r"url\(#([^)]+)\)", text))
    assert inside <= set(page.ids)
    assert len(set(page.ids)) == len(page.ids)
    assert "<random>" not in text
    assert "<traces>" not in text
    assert "<b>" not in text


def test_what_validation_chose_is_marked_and_not_the_best_on_test(values: dict[str, Any], page: Page) -> None:
    recall = values["recall_at_k"]
    assert max(recall, key=lambda name: recall[name]["mean"]) == "oracle"
    marked = [
        (table.caption, row[0][2])
        for table in page.tables
        for row in table.rows
        if {found.get("class") for _, found, _ in row[1:]} & {"best", "chosen"}
    ]
    assert {name for _, name in marked} == {"same"}
    captions = {"mean over layers, chained", "recall@k per layer, teacher-forced", "calibration error"}
    assert captions <= {caption for caption, _ in marked}
    for said in ("same, which had the highest recall@k on the validation split, is marked", "forecast: here by same,"):
        assert any(said in text for _, _, text in page.texts), said


def test_every_table_has_a_caption_headers_and_rows_of_one_length(page: Page) -> None:
    assert len(page.tables) > 20
    for table in page.tables:
        assert table.attributes["class"] == "sortable"
        assert table.caption
        heading, *rows = table.rows
        assert [(tag, found["scope"]) for tag, found, _ in heading] == [("th", "col")] * len(heading)
        assert all(name for _, _, name in heading), table.caption
        assert rows
        for row in rows:
            assert len(row) == len(heading), table.caption
            assert (row[0][0], row[0][1]["scope"]) == ("th", "row")
            for _, found, shown in row[1:]:  # downloads and sorting take the exact number
                if found.get("data-v") is not None:
                    assert float(found["data-v"]) == pytest.approx(float(shown), abs=6e-4)


def test_heat_map_comes_first_and_holds_the_recall_of_report_json(values: dict[str, Any], page: Page) -> None:
    heat = page.tables[0]
    assert heat.attributes["id"] == "heat"
    heading, mean, *layers, chance = heat.rows
    assert [name for _, _, name in heading] == ["layer", *values["recall_at_k"]]
    for column, result in enumerate(values["recall_at_k"].values(), start=1):
        shown = [row[column][1] for row in (mean, *layers)]
        exact = [result["mean"], *result["per_layer"]]
        assert [float(found["data-v"] or "") for found in shown] == pytest.approx(exact, rel=1e-6)
        assert [found["class"] for found in shown] == [band_class(value) for value in exact]
    assert [row[0][2] for row in layers] == [str(layer) for layer in values["targets"]]
    assert float(chance[1][1]["data-v"] or "") == pytest.approx(values["chance"]["recall_at_k"])


def test_scripts_read_the_numbers_of_report_json(values: dict[str, Any], page: Page) -> None:
    (given,) = (text for tag, found, text in page.texts if tag == "script" and found.get("id") == "data")
    data = json.loads(given)
    assert next(iter(data["heat"])) == "recall@k"
    for name, result in values["recall_at_2k"].items():
        assert data["heat"]["recall@2k"]["values"][name] == [result["mean"], *result["per_layer"]]
    assert data["experts"] == values["per_expert"]
    assert data["passages"] == [passage["found"] for passage in examples_of(values)["passages"]]
    (script,) = (text for tag, found, text in page.texts if tag == "script" and not found)
    for wanted in re.findall(r'getElementById\("(\w+)"\)', script):
        assert wanted in page.ids


def test_further_distances_stand_beside_the_first(values: dict[str, Any], page: Page) -> None:
    table = next(table for table in page.tables if table.caption.startswith("recall@k by layers ahead"))
    further = values["further"]["2"]["recall_at_k"]["router_input"]
    assert [name for _, _, name in table.rows[0]] == ["predictor", "1 ahead", "2 ahead"]
    assert table.rows[1][0][2] == "router_input"
    assert float(table.rows[1][2][1]["data-v"] or "") == pytest.approx(further["mean"], rel=1e-6)
    assert table.rows[2][2][2] == "-"
    (given,) = (text for tag, found, text in page.texts if tag == "script" and found.get("id") == "data")
    shown = json.loads(given)["heat"]["recall@k, 2 layers ahead"]["values"]["router_input"]
    assert shown == [further["mean"], None, *further["per_layer"]]


def test_all_numbers_are_in_the_tables(values: dict[str, Any], page: Page) -> None:
    found = cells(page)
    for metric in ("recall_at_k", "recall_at_1.5k", "weight_covered", "cosine"):
        for value in values[metric]["router_input"]["per_layer"]:
            assert f"{value:.3f}" in found, metric
    assert {"20.1250", "0.9300", "400,000"} <= found
    assert {"expertcast eval <traces>", "2.13.0"} <= {text for tag, _, text in page.texts if tag == "code"}


def test_chained_scores_stand_only_where_they_are_different(values: dict[str, Any], page: Page) -> None:
    chained = [table for table in page.tables if table.caption.endswith("chained")]
    assert chained
    for table in chained:
        assert [row[0][2] for row in table.rows[1:] if row[0][2] != "chance"] == ["same"], table.caption
    said = next(text for _, _, text in page.texts if "not shown again" in text)
    assert "Chained, router_input, before, oracle score as they do teacher-forced" in said
    assert values["recall_at_k"]["same"] != values["recall_at_k_chained"]["same"]


def test_tokens_are_coloured_by_their_share_of_experts(values: dict[str, Any], page: Page) -> None:
    spans = [(found, text) for tag, found, text in page.texts if tag == "span" and "title" in found]
    assert [text for _, text in spans] == ["if ", "<b>", "&\n", "5 ", "6 ", "7 "]
    layers = values["targets"]
    share = sum(layer % 2 for layer in layers) / len(layers) / values["k"]
    assert [found["class"] for found, _ in spans[:3]] == [
        band_class(share),
        band_class(2 / values["k"]),
        band_class(0.0),
    ]
    assert spans[1][0]["title"] == f"2.0 of {values['k']}"
    assert any("no tokenizer" in text for _, _, text in page.texts)


def test_experts_found_least_often_come_first(values: dict[str, Any], page: Page) -> None:
    table = next(table for table in page.tables if table.caption.startswith("experts found least often"))
    used, found = (values["per_expert"][key] for key in ("used", "found"))
    assert table.rows[0][3][2] == "same"
    for row in table.rows[1:]:
        layer, expert = map(int, re.findall(r"\d+", row[0][2]))
        index = values["targets"].index(layer)
        count = used[index][expert]
        assert row[1][2] == str(count)
        assert count >= 0.25 * values["tokens"] * values["k"] / values["experts"]
        named = table.rows[0].index(next(cell for cell in table.rows[0] if cell[2] == "same"))
        assert float(row[named][1]["data-v"] or "") == pytest.approx(found["same"][index][expert] / count, rel=1e-6)


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG 2)."""

    def luminance(colour: str) -> float:
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(colour)]
        return float(np.dot((0.2126, 0.7152, 0.0722), linear))

    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def test_every_colour_can_be_read_on() -> None:
    """WCAG's 4.5 to 1 for text, and the ratio itself by its two ends."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)
    assert len(band_colours()) == len(BANDS)
    assert min(contrast(*colours) for colours in band_colours()) >= 4.5
    style = (Path(__file__).resolve().parents[2] / "training" / "report.css").read_text()
    schemes = [dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in re.findall(r":root {([^}]*)}", style)]
    assert len(schemes) == 2
    for scheme in schemes:
        for ink in ("ink", "soft", "link"):
            assert contrast(scheme[ink], scheme["paper"]) >= 4.5, ink
        assert contrast(scheme["ink"], scheme["chosen"]) >= 4.5


def test_bands_begin_at_their_bounds() -> None:
    assert [band_class(share) for share in (0.0, 0.0999, 0.1, 0.85, 0.95 - 1e-12, 1.0)] == [
        "b0", "b0", "b1", "b9", "b11", f"b{len(BANDS) - 1}"
    ]  # fmt: skip
    assert band_class(None) == ""
