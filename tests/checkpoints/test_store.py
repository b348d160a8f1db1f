"""Round trips of every predictor, and every way a checkpoint can be wrong."""

from __future__ import annotations

import errno
import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from expertcast.checkpoints import checkpoint as files
from expertcast.checkpoints.card import model_card
from expertcast.checkpoints.checkpoint import PredictorCheckpoint, load_predictor, save_predictor
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, Predictor, names
from expertcast.predictors.artefacts import locked, write_user_file
from expertcast.predictors.linear import LinearConfig
from expertcast.training.scoring import Fitted
from tests.sealed import edit_json
from tests.training.synthetic import tiny_view

LINEAR = LinearConfig(inputs=["quasi_hidden"]).as_dict()
METRICS = {"recall_at_k": {"linear": {"mean": 0.5, "per_layer": [0.25, 0.75]}}}


@pytest.fixture
def linear(fitted_predictors: dict[str, Fitted], reference_traces: TraceDataset, tmp_path: Path) -> Path:
    folder = tmp_path / "linear"
    save_predictor(fitted_predictors["linear"].predictor, folder, view=reference_traces.view, metrics=METRICS)
    return folder


def assert_same(left: Predictor, right: Predictor, traces: TraceDataset) -> None:
    """Equal tensors, and bit-equal forecasts at the first and last pair."""
    a, b = left.state_dict(), right.state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in a)
    batch = next(traces.batches("test", 64))
    for layer in (0, len(traces.view) - 2):
        one, other = (p.forecast(batch.state(traces.view, layer)) for p in (left, right))
        assert torch.equal(one.logits_TE, other.logits_TE)
        assert torch.equal(one.topk_ids_TK, other.topk_ids_TK)
        assert torch.equal(one.topk_weights_TK, other.topk_weights_TK)


@pytest.mark.parametrize("name", names())
def test_round_trip(
    name: str, fitted_predictors: dict[str, Fitted], reference_traces: TraceDataset, tmp_path: Path
) -> None:
    predictor = fitted_predictors[name].predictor
    training = {"tried": {3: [1, 2.5, float("nan")]}}
    written = save_predictor(predictor, tmp_path / name, view=reference_traces.view, training=training)
    loaded = load_predictor(tmp_path / name, reference_traces.view)
    assert loaded.name == name
    assert loaded.config.as_dict() == predictor.config.as_dict()
    assert not loaded.training
    assert_same(predictor, loaded, reference_traces)
    assert sorted(path.name for path in (tmp_path / name).iterdir()) == sorted(files.ALL)
    assert written.config["training"] == {"tried": {"3": [1, 2.5, None]}}
    assert written.config["fingerprint"] == reference_traces.view.fingerprint()
    assert set(written.config["versions"]) >= {"torch", "transformers"}
    assert [path.name for path in tmp_path.iterdir()] == [name], "no temporary folder stays behind"


def test_card_says_what_was_measured(linear: Path) -> None:
    text = (linear / files.CARD).read_text()
    assert "| mean | 0.500 |\n| 1 | 0.250 |\n| 2 | 0.750 |\n" in text
    assert f'predictor="{linear}"' in text
    card = ModelCard(text).data
    assert (card.license, card.library_name) == ("apache-2.0", "expertcast")
    assert json.loads((linear / files.METRICS).read_text()) == METRICS


@pytest.mark.parametrize(("model_id", "base"), [("you/moe", "you/moe"), ("/models/moe", None), ("models", None)])
def test_card_names_a_base_model_of_the_hub_alone(model_id: str, base: str | None, linear: Path) -> None:
    config = PredictorCheckpoint.open(linear).config | {"model_id": model_id}
    text = model_card(config, {"tokens": 7, "k": 4, **METRICS}, "me/linear")
    card = ModelCard(text).data
    assert (card.base_model, card.license) == (base, None)
    assert f'AutoModelForCausalLM.from_pretrained("{model_id}"' in text


def test_a_model_of_another_shape_is_refused(linear: Path) -> None:
    """`test_fingerprints` has models with other weights."""
    with pytest.raises(ExpertcastError, match="is for a model"):
        PredictorCheckpoint.open(linear).load().bind(tiny_view())


@pytest.mark.parametrize("name", [files.CONFIG, files.WEIGHTS, files.METRICS])
def test_a_missing_file_gives_one_clear_line(linear: Path, name: str) -> None:
    """`test_mutations` has changed and cut ones."""
    (linear / name).unlink()
    with pytest.raises(ExpertcastError) as caught:
        load_predictor(linear)
    line = str(caught.value)
    assert "\n" not in line
    assert name in line
    assert "expertcast train" in line


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 99}, "format is 99.*upgrade expertcast"),
        ({"predictor": "oracle"}, r"linear/config.json: unknown predictor 'oracle'.*train it again"),
        ({"predictor": "o" * 9999}, r"linear/config.json: unknown predictor 'o{,40}\.\.\.o{,40}':"),
        ({"predictor_config": LINEAR | {"depth": 3}}, "unknown field 'depth'"),
        ({"predictor_config": LINEAR | {"strengths": []}}, "strengths"),
        ({"predictor_config": {"ahead": [1]}}, "stand_in_rank is missing"),
        ({"predictor_config": LINEAR | {"ahead": [2]}}, "tensor"),
        ({"shape": {"L": 12, "E": 64, "K": 4, "D": 96}}, "tensor"),
    ],
)
def test_wrong_config_gives_one_clear_line(linear: Path, changes: dict[str, Any], message: str) -> None:
    edit_json(linear / files.CONFIG, lambda config: config.update(changes))
    with pytest.raises(ExpertcastError, match=message) as caught:
        load_predictor(linear)
    assert "\n" not in str(caught.value)


def test_a_failed_save_leaves_the_old_checkpoint_whole(
    linear: Path, fitted_predictors: dict[str, Fitted], reference_traces: TraceDataset
) -> None:
    before = {path.name: path.read_bytes() for path in linear.iterdir()}
    unwritable = {"recall": object()}
    with pytest.raises(TypeError):
        save_predictor(fitted_predictors["frequency"].predictor, linear, view=reference_traces.view, metrics=unwritable)
    assert {path.name: path.read_bytes() for path in linear.iterdir()} == before
    assert [path.name for path in linear.parent.iterdir()] == ["linear"]
    save_predictor(fitted_predictors["frequency"].predictor, linear, view=reference_traces.view)
    assert load_predictor(linear).name == "frequency"


def test_a_save_removes_what_killed_processes_left(
    linear: Path, fitted_predictors: dict[str, Fitted], reference_traces: TraceDataset
) -> None:
    """But not what another process is writing, nor folders of other names."""
    parent = linear.parent
    left, held = parent / f".linear.{'0' * 32}", parent / f".linear.{'1' * 32}"
    others = [held, parent / ".linear.mine", parent / f".linear.x.{'2' * 32}"]
    for folder in (left, left.with_name(left.name + ".0.old"), *others):
        folder.mkdir()
        (folder / "config.json").touch()
    with locked(held):
        save_predictor(fitted_predictors["frequency"].predictor, linear, view=reference_traces.view)
    assert sorted(parent.iterdir()) == sorted([linear, *others])


@pytest.mark.parametrize("opened", [False, True])
def test_a_save_that_is_killed_between_two_renames_loses_nothing(
    opened: bool, linear: Path, fitted_predictors: dict[str, Fitted], reference_traces: TraceDataset,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The next who opens the checkpoint, or saves one there, puts the old one back; a reader may do so while it is
    replaced."""
    rename, calls = os.rename, []

    def killed(old: Path, new: Path) -> None:
        calls.append(new)
        if len(calls) == 2:
            if not opened:
                raise KeyboardInterrupt
            PredictorCheckpoint.open(linear)
        rename(old, new)

    monkeypatch.setattr(os, "rename", killed)
    predictor, view = fitted_predictors["router_input"].predictor, reference_traces.view
    with nullcontext() if opened else pytest.raises(KeyboardInterrupt):
        save_predictor(predictor, linear, view=view)
    monkeypatch.undo()
    assert linear.exists() is opened
    assert PredictorCheckpoint.open(linear).name == ("router_input" if opened else "linear")
    save_predictor(predictor, linear, view=view)
    assert PredictorCheckpoint.open(linear).name == "router_input"
    assert [path.name for path in linear.parent.iterdir()] == [linear.name]


def test_a_link_stays_a_link(
    linear: Path, fitted_predictors: dict[str, Fitted], reference_traces: TraceDataset, tmp_path: Path
) -> None:
    """To a folder, perhaps on another disk, and to a file; a mount point cannot be replaced."""
    link = tmp_path / "link"
    link.symlink_to(linear)
    predictor, view = fitted_predictors["frequency"].predictor, reference_traces.view
    for _ in range(2):
        assert save_predictor(predictor, link, view=view).folder == link
        assert link.is_symlink()
        assert PredictorCheckpoint.open(linear).name == "frequency"
    with pytest.raises(ExpertcastError, match="/proc is a mount point, which cannot be replaced as a whole"):
        save_predictor(predictor, "/proc", view=view)
    file = tmp_path / "file"
    file.symlink_to(tmp_path / "real")
    write_user_file(file, b"new")
    assert file.is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_a_folder_that_cannot_be_renamed_is_replaced(
    linear: Path, fitted_predictors: dict[str, Fitted], reference_traces: TraceDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder in a container's image: an overlay file system renames it to no other name."""
    rename = os.rename

    def overlay(old: Path, new: Path) -> None:
        if Path(old) == linear:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        rename(old, new)

    monkeypatch.setattr(os, "rename", overlay)
    save_predictor(fitted_predictors["frequency"].predictor, linear, view=reference_traces.view)
    assert PredictorCheckpoint.open(linear).name == "frequency"
    assert [path.name for path in linear.parent.iterdir()] == [linear.name]


def test_a_folder_of_something_else_is_left_alone(
    fitted_predictors: dict[str, Fitted], reference_traces: TraceDataset, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ExpertcastError, match="not empty"):
        save_predictor(fitted_predictors["linear"].predictor, tmp_path, view=reference_traces.view)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ExpertcastError, match="no predictor checkpoint at"):
            load_predictor(folder)
