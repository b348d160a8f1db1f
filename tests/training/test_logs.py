"""TensorBoard's HPARAMS tab of a training, read back from the event files as TensorBoard reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from expertcast.training.report import log_evaluation
from tests.training.reports import evaluated


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
