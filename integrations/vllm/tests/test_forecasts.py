"""Forecasts under vLLM: with compiled layers, for every family's routing rule, and refused settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from elsewhere import elsewhere
from engines import LOADING, both, run
from family_models import FAMILIES, first_layers, make_model


def test_compiled_layers_are_forecast_from_router_inputs(tmp_path: Path) -> None:
    model = first_layers(tmp_path, 4)  # compiling takes longer than running
    options = {"slots": 32, "predictor": "router_input", "forecasts": "always"}
    resident, ran = both(options, engine={"enforce_eager": False}, model=model, tokens=40)
    assert ran.tokens == resident.tokens
    (counted,) = ran.workers
    assert counted["prefetched_used"] > 0.5 * counted["prefetched"] > 0


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("predictor", "reads the residual stream.* --enforce-eager"),
        ("collect", "collect needs hooks.* --enforce-eager"),
    ],
)
def test_what_compiled_layers_do_not_show_is_said(option: str, said: str, tmp_path: Path) -> None:
    value = "next_norm" if option == "predictor" else str(tmp_path / "traces")
    with pytest.raises(RuntimeError, match=said):
        run({"slots": 96, option: value}, engine={"enforce_eager": False})


def test_an_unknown_predictor_ends_it_before_anything_is_loaded() -> None:
    with pytest.raises(RuntimeError, match="unknown predictor 'nonsense'") as caught:
        run({"slots": 96, "predictor": "nonsense"})
    assert LOADING not in str(caught.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_forecast_and_collected(family: str, folder: Path) -> None:
    traces = str(folder / f"{family}-traces")
    options = {"slots": 16, "predictor": "next_norm", "forecasts": "always", "collect": traces}
    model = make_model(folder / family, family, torch.float32, num_hidden_layers=4, initializer_range=0.02)
    environment = {"VLLM_MLA_DISABLE": "1"}
    ran = run(options, engine={"dtype": "float32"}, environment=environment, model=model, tokens=40)
    (counted,) = ran.workers
    assert counted["prefetched_used"] > 0
    assert counted["prefetched_used"] > 0.25 * counted["prefetched"], "chance"


def test_families_have_the_fingerprints_that_transformers_gives_them(folder: Path) -> None:
    made = [family for family in FAMILIES if (folder / f"{family}-traces").exists()]
    found = elsewhere(folders=[str(folder / f"{family}-traces") for family in made])
    assert found == elsewhere(models=[str(folder / family) for family in made])
    assert len(set(found)) == len(made)
