"""Whatever is done to a checkpoint's files: one line, or the same forecasts as before."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from expertcast.checkpoints import checkpoint as files
from expertcast.checkpoints.checkpoint import PredictorCheckpoint, load_predictor, save_predictor
from expertcast.commands.output import table
from expertcast.predictors import ExpertcastError, MoEView, predictor_class
from expertcast.predictors.artefacts import SEAL, file_digest, seal
from expertcast.predictors.estimator import EstimatorConfig
from expertcast.predictors.linear import LinearConfig
from expertcast.runtime.forecasters import recall_per_layer
from tests.checkpoints.made import CONFIGS, LEARNED, METRICS, write
from tests.sealed import edit_json
from tests.training.synthetic import tiny_view

LINEAR = LinearConfig(inputs=["quasi_hidden"]).as_dict()
WILD: tuple[Any, ...] = (None, True, -1, 10**9, 10**30, 0.5, "x", [], [[]], [-1], {})


@pytest.fixture(scope="module")
def view() -> MoEView:
    return tiny_view()


@pytest.fixture(scope="module", params=list(CONFIGS))
def written(request: pytest.FixtureRequest, view: MoEView, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(request.param, view, tmp_path_factory.mktemp("written") / request.param)


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / written.name))


def tensors_of(folder: Path, view: MoEView) -> dict[str, list[Any]]:
    """After all that commands do with a checkpoint has been done."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint = PredictorCheckpoint.open(folder)
        predictor = checkpoint.load(view)
        assert predictor.learned_from == LEARNED
    json.dumps(recall_per_layer(checkpoint), allow_nan=False)
    table(checkpoint.config).encode()
    return {name: tensor.tolist() for name, tensor in predictor.state_dict().items()}


def refusal(folder: Path, view: MoEView, before: dict[str, list[Any]]) -> str | None:
    """The line that a checkpoint is refused with, None where it is loaded as it was."""
    try:
        after = tensors_of(folder, view)
    except ExpertcastError as error:
        line = str(error)
    else:
        assert after == before
        return None
    assert line.isprintable()
    assert len(line) < 1000
    return line


def test_bytes(folder: Path, view: MoEView) -> None:
    """Flipped bits, bytes set, exchanged and left out in each of the four files."""
    before, rng = tensors_of(folder, view), random.Random(folder.name)
    for name in (files.CONFIG, files.METRICS, files.DOCUMENTS, files.WEIGHTS):
        content = (folder / name).read_bytes()
        for place in rng.sample(range(len(content) - 8), min(60, len(content) - 8)):
            changed = bytearray(content)
            match rng.randrange(4):
                case 0:
                    changed[place] ^= 1 << rng.randrange(8)
                case 1:
                    changed[place : place + 8] = b"\xff" * 8
                case 2:
                    changed[place], changed[place + 4] = changed[place + 4], changed[place]
                case 3:
                    del changed[place:]
            (folder / name).write_bytes(bytes(changed))
            line = refusal(folder, view, before)
            assert line is None or name in line
            # blanks and escapes of config.json may be others, its values may not
            same = json.loads(changed) == json.loads(content) if line is None and name == files.CONFIG else False
            assert line or same or changed == content
        (folder / name).write_bytes(content)
    assert refusal(folder, view, before) is None


Change = Callable[[Any, Any], object]
"""Mutations of a field of an object or an element of a list, by name."""


def put(value: Any) -> Change:
    return lambda holder, key: holder.update({key: value}) if isinstance(holder, dict) else holder.insert(key, value)


def drop(holder: Any, key: Any) -> None:
    del holder[key]


def add(holder: Any, key: Any) -> None:
    if isinstance(holder, dict):
        holder["no\nsuch"] = 1


def mistype(holder: Any, key: Any) -> None:
    holder[key] = [1] if isinstance(holder[key], dict) else {"a": 1}


def places(values: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in nested values, of a list the first element only."""
    for key in values if isinstance(values, dict) else range(min(1, len(values))) if isinstance(values, list) else ():
        yield (*way, key)
        yield from places(values[key], (*way, key))


def apply(change: Change, way: tuple[Any, ...], values: Any) -> None:
    for key in way[:-1]:
        values = values[key]
    change(values, way[-1])


def test_fields_of_sealed_files(folder: Path, view: MoEView) -> None:
    before = tensors_of(folder, view)
    for name in (files.CONFIG, files.METRICS, files.DOCUMENTS):
        content = (folder / name).read_text()
        for way in places(json.loads(content)):
            for change in (drop, add, mistype, put(10**9), put(None)):
                values = json.loads(content)
                apply(change, way, values)
                (folder / name).write_text(json.dumps(values))
                assert refusal(folder, view, before) or values == json.loads(content), way
        (folder / name).write_text(content)


OPTIONAL = {
    "stand_in_rank",
    "reads",
    "experts_fingerprint",
    "training",
    "versions",
    "choices",
    "member_configs",
    "cost_ms",
}
"""Members that may be missing, or hold what they like: nothing else tells a field of theirs is wrong but the seal."""


def test_fields_of_config(folder: Path, view: MoEView) -> None:
    """By the schema alone, the file being sealed after the change."""
    before, path = tensors_of(folder, view), folder / files.CONFIG
    values = json.loads(path.read_bytes())
    for way in places({key: value for key, value in values.items() if key != SEAL}):
        for change in (drop, add, mistype, *map(put, WILD)):
            path.write_text(json.dumps(values))
            edit_json(path, partial(apply, change, way))
            line = refusal(folder, view, before)
            harmless = change in (drop, add) and isinstance(way[-1], int)
            assert line or harmless or OPTIONAL & set(way) or change not in (drop, add, mistype), (way, change)


@pytest.mark.parametrize("written", ["linear"], indirect=True)
def test_fields_of_metrics(folder: Path, view: MoEView) -> None:
    """By the schema alone: the digest in config.json follows each change."""
    before, path = tensors_of(folder, view), folder / files.METRICS
    content = path.read_text()
    for way in places(METRICS):
        for change in (drop, add, mistype, *map(put, WILD)):
            path.write_text(content)
            edit_json(path, partial(apply, change, way))
            found = file_digest(path)
            edit_json(folder / files.CONFIG, lambda config, found=found: config["files"].update({files.METRICS: found}))
            line = refusal(folder, view, before)
            computed_from = {"recall_at_k", "targets", "ahead"} & set(way)
            assert line or not computed_from or change is not mistype, (way, change)


@pytest.mark.parametrize("written", ["linear"], indirect=True)
def test_fields_of_documents(folder: Path, view: MoEView) -> None:
    """Likewise."""
    path = folder / files.DOCUMENTS
    content = path.read_text()
    before = tensors_of(folder, view)
    hashes = [["0123456789ABCDEF"], ["0123456789abcde"], [1], "0123456789abcdef", None, [None], {}]
    for changed in ({}, *({"learned_from": value} for value in hashes), {**json.loads(content), "more": 1}):
        path.write_text(json.dumps(changed))
        found = file_digest(path)
        edit_json(folder / files.CONFIG, lambda config, found=found: config["files"].update({files.DOCUMENTS: found}))
        line = refusal(folder, view, before)
        assert line, changed
        assert files.DOCUMENTS in line


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
        ("linear", {"predictor_config": LINEAR | {"ahead": [10_000]}}),
        ("linear", {"predictor_config": LINEAR | {"ahead": [*range(1, 10_000)]}}),
        ("estimator", {"predictor_config": EstimatorConfig(width=10**6, expansion=1e-3).as_dict()}),
        ("estimator", {"predictor_config": EstimatorConfig(width=10**6).as_dict()}),
    ],
)
def test_no_memory_is_taken_for_what_the_file_does_not_hold(
    name: str, change: dict[str, Any], view: MoEView, tmp_path: Path
) -> None:
    write(name, view, tmp_path / name)
    edit_json(tmp_path / name / files.CONFIG, lambda config: config.update(change))
    with Allocated() as allocated, pytest.raises(ExpertcastError, match=r"tensor|ahead=|cannot be"):
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
    with pytest.raises(ExpertcastError, match="bias_PE_1 contains NaN or infinity"):
        load_predictor(path.parent)
    predictor = predictor_class("linear")(LinearConfig(), view.shape)
    predictor.get_buffer("bias_PE_1")[0, 0] = value
    with pytest.raises(ExpertcastError, match="predictor linear: bias_PE_1 contains NaN or infinity"):
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
