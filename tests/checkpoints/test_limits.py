"""What a checkpoint's files may hold: no more than their bytes warrant, no numbers without end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from expertcast.checkpoints import checkpoint as files
from expertcast.checkpoints.checkpoint import PredictorCheckpoint, load_predictor, save_predictor
from expertcast.predictors import ExpertcastError, MoEView, predictor_class
from expertcast.predictors.artefacts import SEAL, file_digest, seal
from expertcast.predictors.estimator import EstimatorConfig
from expertcast.predictors.linear import LinearConfig
from expertcast.predictors.next_token import NextTokenConfig
from tests.checkpoints.made import write
from tests.sealed import edit_json
from tests.training.synthetic import tiny_view


@pytest.fixture(scope="module")
def view() -> MoEView:
    return tiny_view()


class Allocated(TorchDispatchMode):
    """Counts the bytes of the tensors that are made, but for those on the meta device."""

    nbytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.nbytes += sum(t.nbytes for t in tree_leaves(made) if isinstance(t, Tensor) and t.device.type != "meta")
        return made


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("linear", {"shape": {"L": 10_000, "E": 65_536, "K": 4, "D": 1_000_000}}),
        ("linear", {"shape": {"L": 4, "E": 4096, "K": 4, "D": 65_536}}),
        ("linear", {"predictor_config": {"ahead": [10_000], "strengths": [1.0], "reads": "quasi_hidden"}}),
        ("linear", {"predictor_config": {"ahead": [*range(1, 10_000)], "strengths": [1.0], "reads": "quasi_hidden"}}),
        ("estimator", {"predictor_config": EstimatorConfig(parameters=10**12, expansion=1e-3).as_dict()}),
        ("estimator", {"predictor_config": EstimatorConfig(parameters=10**9).as_dict()}),
        ("next_token", {"predictor_config": NextTokenConfig(tokens=10_000, width=10**6).as_dict()}),
        ("next_token", {"predictor_config": NextTokenConfig(tokens=2, width=20_000, memories=(2, 8)).as_dict()}),
    ],
)
def test_no_memory_is_taken_for_what_the_file_does_not_hold(
    name: str, change: dict[str, Any], view: MoEView, tmp_path: Path
) -> None:
    write(name, view, tmp_path / name)
    edit_json(tmp_path / name / files.CONFIG, lambda config: config.update(change))
    with Allocated() as allocated, pytest.raises(ExpertcastError, match=r"does not hold the tensors|ahead=|cannot be"):
        PredictorCheckpoint.open(tmp_path / name).load()
    assert allocated.nbytes < 1 << 16


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite(value: float, view: MoEView, tmp_path: Path) -> None:
    path = write("linear", view, tmp_path / "linear") / files.WEIGHTS
    tensors = load_file(path)
    tensors["bias_PE_1"][1, 2] = value
    save_file(tensors, path)
    with pytest.raises(ExpertcastError, match=r"model.safetensors was changed after it was written"):
        load_predictor(path.parent)
    found = file_digest(path)
    edit_json(path.parent / files.CONFIG, lambda config: config["files"].update({files.WEIGHTS: found}))
    with pytest.raises(ExpertcastError, match="bias_PE_1 holds numbers that are not finite"):
        load_predictor(path.parent)
    predictor = predictor_class("linear")(LinearConfig(), view.shape)
    predictor.get_buffer("bias_PE_1")[0, 0] = value
    with pytest.raises(ExpertcastError, match="predictor linear: bias_PE_1 holds numbers that are not finite"):
        save_predictor(predictor, tmp_path / "new", view=view)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("missing", ["files", SEAL])
def test_a_checkpoint_without_digests_is_refused(missing: str, view: MoEView, tmp_path: Path) -> None:
    folder = write("linear", view, tmp_path / "linear")
    values = json.loads((folder / files.CONFIG).read_bytes())
    del values[missing]
    (folder / files.CONFIG).write_text(json.dumps(seal(values) if missing == "files" else values))
    with pytest.raises(ExpertcastError, match=f"{missing} is missing; train it again"):
        load_predictor(folder)


def test_a_damaged_checkpoint_is_replaced(view: MoEView, tmp_path: Path) -> None:
    folder = write("linear", view, tmp_path / "linear")
    (folder / files.CONFIG).write_text("{")
    write("linear", view, folder)
    assert load_predictor(folder, view).name == "linear"
