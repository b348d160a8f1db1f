"""Forecasts under vLLM: with compiled layers, on every family's routing, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from elsewhere import elsewhere
from engines import run
from tiny_models import FAMILIES, make


def test_compiled_layers_are_forecast_from_router_inputs() -> None:
    resident = run(engine={"enforce_eager": False}, tokens=40)
    ran = run({"slots": 96, "predictor": "router_input"}, engine={"enforce_eager": False}, tokens=40)
    assert ran.tokens == resident.tokens
    (counted,) = ran.workers
    assert counted["prefetched_used"] > 0.5 * counted["prefetched"] > 0
    assert counted["forecast_recall"]["mean"] > 0.7


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("predictor", "reads the residual stream, which compiled layers do not show: start vLLM with --enforce-eager"),
        ("collect", "which compiled ones do not show: start vLLM with --enforce-eager"),
    ],
)
def test_what_compiled_layers_do_not_show_is_said(option: str, said: str, tmp_path: Path) -> None:
    value = "next_norm" if option == "predictor" else str(tmp_path / "traces")
    with pytest.raises(RuntimeError, match=said):
        run({"slots": 96, option: value}, engine={"enforce_eager": False})


def test_an_unknown_predictor_ends_it_before_anything_is_loaded() -> None:
    with pytest.raises(RuntimeError, match="predictor 'nonsense' is neither a folder nor one of") as caught:
        run({"slots": 96, "predictor": "nonsense"})
    assert "Loading safetensors" not in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_wired_forecast_and_collected_as_transformers_has_them(family: str, tmp_path: Path) -> None:
    model = make(family, tmp_path / "model")
    engine, environment = {"dtype": "float32", "max_model_len": 256}, {"VLLM_MLA_DISABLE": "1"}
    resident = run(engine=engine, environment=environment, model=model, tokens=40)
    options = {"slots": 8, "predictor": "next_norm", "collect": str(tmp_path / "traces")}
    ran = run(options, engine=engine, environment=environment, model=model, tokens=40)
    assert ran.tokens == resident.tokens
    (counted,) = ran.workers
    assert counted["prefetched_used"] > 0
    assert elsewhere(traces=str(tmp_path / "traces")) == elsewhere(model=model)
