"""The report folder and its figures."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
from copy import deepcopy
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from expertcast.predictors.base import PredictorConfig
from expertcast.predictors.baselines import RouterInput
from expertcast.predictors.messages import ExpertcastError
from expertcast.training import figures
from expertcast.training.evaluation import evaluate
from expertcast.training.figures import STYLES, run_colour, style
from expertcast.training.report import BANDS, FILES, FORMAT, band_class, band_colours, write_report
from tests.training.synthetic import Before, Oracle, Same, random_batch, tiny_view

QUALITY: dict[str, Any] = {
    "runs": {
        "exact": {"perplexity": 20.125, "top1_agreement": 1.0, "kl": 0.0, "domains": {"code": {"perplexity": 9.0}}},
        "speculate estimator": {"perplexity": 21.0, "top1_agreement": 0.93, "kl": 0.02, "domains": {}},
    }
}
PROVENANCE = {"command": "expertcast eval <traces>", "versions": {"torch": "2.13.0"}}


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    return evaluated()


@pytest.fixture(scope="module")
def report(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report with everything in it."""
    folder = tmp_path_factory.mktemp("page") / "report"
    write_report(
        folder, values, chosen="same", quality=QUALITY, examples=examples_of(values),
        title="tiny & <random>", provenance=PROVENANCE,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def text(report: Path) -> str:
    return (report / "index.html").read_text()


def test_report_json_holds_what_was_given(values: dict[str, Any], report: Path) -> None:
    assert {path.name for path in report.iterdir()} == set(FILES)
    assert [path.name for path in report.parent.iterdir()] == [report.name]
    data = json.loads((report / "report.json").read_text())
    assert data["evaluation"] == values
    assert (data["chosen"], data["quality"], data["provenance"]) == ("same", QUALITY, PROVENANCE)


def test_own_report_is_replaced_and_its_old_pictures_go(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps({"format": FORMAT}))
    (tmp_path / "quality.png").write_bytes(b"of an earlier one")
    write_report(tmp_path, values, chosen="same", title="second")
    assert {path.name for path in tmp_path.iterdir()} == set(FILES) - {"quality.png"}
    assert "second" in (tmp_path / "index.html").read_text()
    provenance = json.loads((tmp_path / "report.json").read_text())["provenance"]
    assert provenance["versions"]["torch"]
    assert provenance["date"].endswith("UTC")


@pytest.mark.parametrize("name", ["notes.txt", "index.html", "report.json"])
def test_folder_with_other_things_is_refused_and_left_alone(values: dict[str, Any], tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ExpertcastError, match="use an empty or a new folder"):
        write_report(tmp_path, values, chosen="same")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


def test_a_folder_on_another_file_system(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount point may hold a report, also one of which a killed process left a part."""
    move = os.replace

    def within_a_folder(source: Path, target: Path) -> None:
        if source.parent != target.parent:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        move(source, target)

    monkeypatch.setattr(os, "replace", within_a_folder)
    (tmp_path / "report.json.00000001.partial").write_text("{")
    write_report(tmp_path, values, chosen="same")
    assert not list(tmp_path.glob("*.partial"))


def test_what_is_in_the_way_is_named(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps({"format": FORMAT}))
    (tmp_path / "thesis.tex").write_text("mine")
    for folder, message in ((tmp_path, r"thesis\.tex"), (tmp_path / "thesis.tex", "is a file")):
        with pytest.raises(ExpertcastError, match=message):
            write_report(folder, values, chosen="same")


def lines_of(figure: Figure, panel: int) -> dict[str, list[float]]:
    lines = figure.axes[panel].get_lines()
    return {line.get_label(): list(line.get_ydata()) for line in lines if not line.get_label().startswith("_")}


def test_recall_figure_shows_the_numbers_and_the_chance_level(values: dict[str, Any]) -> None:
    figure = figures.recall_by_layer(values)
    shown = {"recall_at_k": set(values["recall_at_k"]), "recall_at_k_chained": {"same"}}  # the others are blind to it
    for panel, (key, names) in enumerate(shown.items()):
        assert lines_of(figure, panel) == {name: values[key][name]["per_layer"] for name in names}
        texts = {text.get_text().strip() for text in figure.axes[panel].texts}
        assert names <= {text.get_text() for text in figure.legends[0].get_texts()}
        assert f"chance {values['chance']['recall_at_k']:.3f}" in texts
        low, high = figure.axes[panel].get_ylim()
        assert all(low <= value <= high for series in lines_of(figure, panel).values() for value in series)


def test_chained_scores_that_are_the_same_are_drawn_once(values: dict[str, Any]) -> None:
    figure = figures.recall_by_layer(values | {"recall_at_k_chained": values["recall_at_k"]})
    assert [axis.get_title() for axis in figure.axes if "close up" not in axis.get_title()] == [
        "recall@k, teacher-forced"
    ]


def test_expert_figure_is_found_over_used(values: dict[str, Any]) -> None:
    used, found = deepcopy(values["per_expert"]["used"]), deepcopy(values["per_expert"]["found"]["same"])
    used[1][2] = found[1][2] = 0
    figure = figures.expert_recall(values | {"per_expert": {"used": used, "found": {"same": found}}}, "same")
    recall, use = (np.ma.filled(axis.get_images()[0].get_array(), np.nan) for axis in figure.axes[:2])
    for layer, expert in itertools.product(range(len(used)), range(values["experts"])):
        count = used[layer][expert]
        assert use[layer, expert] * values["tokens"] * values["k"] == pytest.approx(count * values["experts"])
        assert np.isnan(recall[layer, expert]) == (count == 0)
        if count:
            assert recall[layer, expert] * count == pytest.approx(found[layer][expert])


def test_close_up_holds_the_strong_predictors_only(values: dict[str, Any]) -> None:
    results = {"weak": {"mean": 0.1, "per_layer": [0.1] * 3}, "strong": {"mean": 0.9, "per_layer": [0.9, 0.88, 0.92]}}
    chained = {**results, "weak": {"mean": 0.2, "per_layer": [0.1, 0.2, 0.3]}}
    figure = figures.recall_by_layer(values | {"recall_at_k": results, "recall_at_k_chained": chained})
    assert len(figure.axes) == 4
    assert set(lines_of(figure, 0)) == {"weak", "strong"}
    assert set(lines_of(figure, 1)) == {"weak"}
    assert set(lines_of(figure, 2)) == {"strong"}
    assert figure.axes[2].get_ylim()[0] == pytest.approx(0.85)


def test_metric_without_values_for_a_predictor_is_left_out_of_its_figure(values: dict[str, Any]) -> None:
    assert set(lines_of(figures.recall_by_layer(values, "cosine"), 0)) == {"router_input", "oracle"}


def test_rank_alignment_has_ranks_down_and_layers_across(values: dict[str, Any]) -> None:
    image = figures.rank_alignment(values).axes[0].get_images()[0].get_array()
    per_layer = values["rank_alignment"]["router_input"]["per_layer"]
    assert image.shape == (values["k"], len(values["targets"]))
    assert image[1][2] == pytest.approx(per_layer[2][1])


def test_quality_figure_has_a_bar_per_run_and_a_dot_per_domain() -> None:
    axes = figures.quality_bars(QUALITY).axes
    assert [bar.get_width() for bar in axes[1].patches] == [1.0, 0.93]
    assert len(axes[0].collections[0].get_offsets()) == 1


def test_calibration_leaves_empty_bins_out(values: dict[str, Any]) -> None:
    axis = figures.calibration(values).axes[0]
    filled = [entry for entry in values["calibration"]["router_input"]["bins"] if entry["count"]]
    assert list(axis.get_lines()[1].get_ydata()) == [entry["frequency"] for entry in filled]


def test_styles_tell_predictors_apart() -> None:
    assert len(set(STYLES.values())) == len(STYLES) == 9
    assert style("anything") == style("anything")
    assert run_colour("speculate quasi_hidden") == STYLES["quasi_hidden"][0]
    assert run_colour("exact") not in {colour for colour, _ in STYLES.values()}


def evaluated() -> dict[str, Any]:
    """An evaluation's values, of 60 tokens, one layer ahead; `router_input` also two."""
    view = tiny_view()
    batch = random_batch(view, 60)
    predictors = {
        "router_input": RouterInput(PredictorConfig(), view.shape),
        "same": Same(PredictorConfig(), view.shape),
        "before": Before(PredictorConfig(), view.shape),
        "oracle": Oracle(batch, view.shape),
    }
    for predictor in predictors.values():
        predictor.bind(view)
    two = {"router_input": RouterInput(PredictorConfig(ahead=(1, 2)), view.shape).bind(view)}
    further = {"2": evaluate(two, [batch], view, ahead=2).as_dict()}
    return {**evaluate(predictors, [batch], view).as_dict(), "further": further}


def examples_of(values: dict[str, Any]) -> dict[str, Any]:
    """Two passages of an evaluation's shape: one with text, one of which only token ids are known."""
    found = {name: [[layer % 2, 2, 0] for layer in values["targets"]] for name in values["recall_at_k"]}
    passage = {"document": 7, "domain": "code", "token_ids": [5, 6, 7], "text": ["if ", "<b>", "&\n"], "found": found}
    return {"passages": [passage, {**passage, "document": 8, "domain": "", "text": None}], "note": "no tokenizer"}


VOID = {"img", "meta", "wbr"}


@dataclass
class Table:
    """Return a table of the page."""

    attributes: dict[str, str | None]
    caption: str = ""
    rows: list[list[tuple[str, dict[str, str | None], str]]] = field(default_factory=list)
    """Return tag, attributes and text of each cell."""


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
    assert {"20.1250", "0.9300"} <= found
    assert {"expertcast eval <traces>", "2.13.0"} <= {text for tag, _, text in page.texts if tag == "code"}


def test_chained_scores_stand_only_where_they_are_different(values: dict[str, Any], page: Page) -> None:
    chained = [table for table in page.tables if table.caption.endswith("chained")]
    assert chained
    for table in chained:
        assert [row[0][2] for row in table.rows[1:] if row[0][2] != "chance"] == ["same"], table.caption
    said = next(text for _, _, text in page.texts if "shown once" in text)
    assert "Chained and teacher-forced scores of router_input, before, oracle are equal" in said
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
    table = next(table for table in page.tables if table.caption.startswith("experts with the lowest recall"))
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
