"""The engine behind a front that is no transformers model: the same bits, real misses, forecasts that come early."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from expertcast.predictors import ExpertcastError
from expertcast.runtime.config import OffloadConfig
from expertcast.runtime.storage.layout import BlockLayout, ExpertsForm
from expertcast.runtime.storage.store import ExpertStore
from tests.runtime.engine.plain_front import SHAPE, Front, PlainModel

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def model() -> PlainModel:
    return PlainModel()


@pytest.fixture(scope="module")
def resident(model: PlainModel) -> list[torch.Tensor]:
    return model.texts(None)


@pytest.mark.parametrize("slots", [3, 8, SHAPE.layers * SHAPE.experts])
@pytest.mark.parametrize("predictor", [None, "router_input"])
@pytest.mark.parametrize(
    "options", [{}, {"bandwidth": 50e6}, {"store": "disk"}, {"store": "disk", "codec": "bitsplit"}]
)
def test_the_bits_of_the_resident_model(
    model: PlainModel, resident: list[torch.Tensor], slots: int, predictor: str | None, options: dict[str, Any],
    tmp_path: Path,
) -> None:  # fmt: skip
    """With few slots the prompt's layers run in chunks: the experts that are there first."""
    if "store" in options:
        options = {**options, "store_folder": tmp_path}
    front = Front(model, slots=slots, predictor=predictor, **options)
    offloaded = model.texts(front.engine)
    total = front.engine.stats.total
    front.close()
    assert all(torch.equal(one, other) for one, other in zip(resident, offloaded, strict=True))
    assert total.misses > 0
    streamed = front.link.overlaps and (predictor is None or slots == SHAPE.layers * SHAPE.experts)
    if not streamed:  # else prefills load the next layer without forecasts
        assert (total.prefetched > 0) == (predictor is not None)
    assert (total.chunks > total.steps) == (slots < SHAPE.layers * SHAPE.experts)


def test_without_transformers() -> None:
    command = [sys.executable, "-m", "tests.runtime.engine.plain_front"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    same, misses, prefetched = run.stdout.split()
    assert same == "True"
    assert int(misses) > 0
    assert int(prefetched) > 0


def test_a_file_is_not_opened_for_writing_in_any_order(model: PlainModel, tmp_path: Path) -> None:
    store = model.store(OffloadConfig(store="disk", store_folder=tmp_path))
    with pytest.raises(ExpertcastError, match="does not support open"):
        store.open(0)
    store.close()


def test_a_form_needs_a_device() -> None:
    form = ExpertsForm(shape=SHAPE, layout=BlockLayout.of_tensors({"w": torch.empty(2, 3, device="meta")}))
    with pytest.raises(AssertionError, match="pass the device where the model computes"):
        ExpertStore(form)
    store = ExpertStore(form, device=torch.device("cpu"))
    assert store.nbytes == SHAPE.layers * SHAPE.experts * 256
