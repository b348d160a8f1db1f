"""The report folder, its figures, and what TensorBoard shows of an evaluation."""

from __future__ import annotations

import itertools
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from expertcast.predictors.messages import ExpertcastError
from expertcast.training import figures
from expertcast.training.figures import STYLES, floor, run_colour, short, spread, style
from expertcast.training.report import CURVE, FILES, FORMAT, log_evaluation, write_report
from tests.training.reports import PROVENANCE, QUALITY, evaluated


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    return evaluated()


def test_report_json_holds_what_was_given(values: dict[str, Any], tmp_path: Path) -> None:
    write_report(tmp_path / "r", values, chosen="same", quality=QUALITY)
    assert {path.name for path in (tmp_path / "r").iterdir()} == set(FILES) - {CURVE}
    assert [path.name for path in tmp_path.iterdir()] == ["r"]
    data = json.loads((tmp_path / "r" / "report.json").read_text())
    assert data["evaluation"] == values
    assert (data["chosen"], data["quality"], data["learning_curve"]) == ("same", QUALITY, None)
    assert data["provenance"]["versions"]["torch"]
    assert data["provenance"]["date"].endswith("UTC")


def test_own_report_is_replaced_and_its_old_pictures_go(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps({"format": FORMAT}))
    (tmp_path / "quality.png").write_bytes(b"of an earlier one")
    write_report(tmp_path, values, chosen="same", title="second", provenance=PROVENANCE)
    assert not (tmp_path / "quality.png").exists()
    assert "second" in (tmp_path / "index.html").read_text()


@pytest.mark.parametrize("name", ["notes.txt", "index.html", "report.json"])
def test_folder_with_other_things_is_refused_and_left_alone(values: dict[str, Any], tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ExpertcastError, match="name an empty or a new folder"):
        write_report(tmp_path, values, chosen="same")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


def test_stranger_in_an_own_report_is_named(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps({"format": FORMAT}))
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ExpertcastError, match=r"thesis\.tex"):
        write_report(tmp_path, values, chosen="same")


def test_file_in_the_way_is_named(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "report").write_text("")
    with pytest.raises(ExpertcastError, match="is a file"):
        write_report(tmp_path / "report", values, chosen="same")


def lines_of(figure: Figure, panel: int) -> dict[str, list[float]]:
    lines = figure.axes[panel].get_lines()
    return {line.get_label(): list(line.get_ydata()) for line in lines if not line.get_label().startswith("_")}


def test_recall_figure_shows_the_numbers_and_the_chance_level(values: dict[str, Any]) -> None:
    figure = figures.recall_by_layer(values)
    shown = {"recall_at_k": set(values["recall_at_k"]), "recall_at_k_chained": {"same"}}  # the others are blind to it
    for panel, (key, names) in enumerate(shown.items()):
        assert lines_of(figure, panel) == {name: values[key][name]["per_layer"] for name in names}
        texts = {text.get_text().strip() for text in figure.axes[panel].texts}
        assert names <= texts
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


def test_learning_curve_is_in_order_of_tokens() -> None:
    curve = {"linear": {"400000": 0.9, "50000": 0.88, "100000": 0.89}}
    axis = figures.learning_curve(curve).axes[0]
    assert list(axis.get_lines()[0].get_xdata()) == [50_000, 100_000, 400_000]
    assert [label.get_text() for label in axis.get_xticklabels()] == ["50k", "100k", "400k"]


def test_quality_figure_has_a_bar_per_run_and_a_dot_per_domain() -> None:
    axes = figures.quality_bars(QUALITY).axes
    assert [bar.get_width() for bar in axes[1].patches] == [1.0, 0.93]
    assert len(axes[0].collections[0].get_offsets()) == 1


def test_calibration_leaves_empty_bins_out(values: dict[str, Any]) -> None:
    axis = figures.calibration(values).axes[0]
    filled = [entry for entry in values["calibration"]["router_input"]["bins"] if entry["count"]]
    assert list(axis.get_lines()[1].get_ydata()) == [entry["frequency"] for entry in filled]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_names_are_spread_without_overlap_or_reordering(heights: list[float]) -> None:
    named = {str(index): height for index, height in enumerate(heights)}
    placed = spread(named, 0.05, 0.0, 1.0)
    ordered = sorted(placed.values())
    assert all(right - left >= 0.05 - 1e-9 for left, right in itertools.pairwise(ordered))
    assert ordered[0] >= -1e-9
    assert ordered[-1] <= 1 + 1e-9
    assert all(placed[a] <= placed[b] for a in named for b in named if named[a] < named[b])


def test_far_names_stay_where_they_are() -> None:
    assert spread({"a": 0.2, "b": 0.9}, 0.05, 0.0, 1.0) == pytest.approx({"a": 0.2, "b": 0.9})
    assert spread({"a": 0.5, "b": 0.5}, 0.1, 0.0, 1.0) == pytest.approx({"a": 0.45, "b": 0.55})


def test_small_helpers() -> None:
    assert [short(number) for number in (500, 20_000, 1_500_000)] == ["500", "20k", "1.5M"]
    assert floor([0.58, None, 0.9]) == pytest.approx(0.55)
    assert floor([0.01]) == 0.0
    assert len(set(STYLES.values())) == len(STYLES) == 9
    assert style("anything") == style("anything")
    assert run_colour("speculate quasi_hidden") == STYLES["quasi_hidden"][0]
    assert run_colour("exact") not in {colour for colour, _ in STYLES.values()}


def read(run: Path) -> tuple[dict[str, Any], set[str], EventAccumulator]:
    """A run's hyperparameters, the metrics that the tab lists, and all of it."""
    events = EventAccumulator(str(run), size_guidance={"images": 0}).Reload()
    found = events.summary_metadata
    start = plugin_data_pb2.HParamsPluginData.FromString(
        found["_hparams_/session_start_info"].plugin_data.content
    ).session_start_info
    experiment = plugin_data_pb2.HParamsPluginData.FromString(
        found["_hparams_/experiment"].plugin_data.content
    ).experiment
    given = {name: getattr(value, str(value.WhichOneof("kind"))) for name, value in start.hparams.items()}
    return given, {info.name.tag for info in experiment.metric_infos}, events


def test_settings_and_final_scores_are_the_runs_hyperparameters(tmp_path: Path) -> None:
    values = evaluated()
    settings = {"predictor": "same", "seed": 3, "learning_rate": 0.5, "ahead": (1, 2), "inputs": [], "rank": None}
    run = log_evaluation(tmp_path, "same", values, settings)
    given, listed, events = read(run)
    assert given == {
        "predictor": "same",
        "seed": 3,
        "learning_rate": 0.5,
        "ahead": "1, 2",
        "inputs": "",
        "rank": "none",
    }
    assert "test/recall_at_k" in listed
    for tag in listed:
        name = tag.removeprefix("test/")
        expected = values["calibration"]["same"]["ece"] if name == "ece" else values[name]["same"]["mean"]
        (point,) = events.Scalars(tag)
        assert abs(point.value - expected) < 1e-6, tag
    assert set(events.Tags()["images"]) >= {"recall", "experts", "rank_alignment"}
    again = log_evaluation(tmp_path, "same", values, settings | {"seed": 4})
    assert (run.name, again.name) == ("same_0", "same_1")
    assert read(again)[0]["seed"] == 4
