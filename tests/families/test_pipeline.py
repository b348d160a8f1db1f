"""A family of each kind goes the whole way: collect, train, evaluate, save, load, generate offloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import expertcast
from expertcast.checkpoints.checkpoint import load_predictor, save_predictor
from expertcast.data.collect import collect
from expertcast.data.models import load_tokenizer
from expertcast.data.text import load_documents
from expertcast.predictors.base import Predictor, PredictorConfig
from expertcast.predictors.estimator import EstimatorConfig
from expertcast.training.evaluation import evaluate
from expertcast.training.fit import fit
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy

TOKENS = 1000
FAMILIES = ("qwen3_moe", "gpt_oss", "glm4_moe_lite", "phimoe", "deepseek_v2")
"""One of each way to route; `test_all_families` has the others."""
PROMPT = {"input_ids": torch.randint(3, 4096, (1, 9), generator=torch.Generator().manual_seed(3))}
CONFIGURED: dict[str, PredictorConfig | None] = {
    "router_input": None,
    "quasi_hidden": None,
    "linear": None,
    "early_attention": None,
    "estimator": EstimatorConfig(parameters=20_000, steps=12, step_tokens=128),
}


@pytest.fixture(scope="module", params=FAMILIES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A tiny model of the family, its traces, and predictors that went through a checkpoint folder."""
    model = tiny_model(request.param)
    folder = tmp_path_factory.mktemp(request.param)
    traces = collect(
        model, load_tokenizer("reference"), load_documents(["reference"]), folder / "traces",
        tokens=TOKENS, window=64, batch_size=8,
    )  # fmt: skip
    predictors: dict[str, Predictor] = {}
    for name, config in CONFIGURED.items():
        save_predictor(fit(name, traces, config=config).predictor, folder / name, view=traces.view)
        predictors[name] = load_predictor(folder / name, traces.view)
    return {"model": model, "traces": traces, "predictors": predictors, "folder": folder}


def test_recall_beats_chance(trained: dict[str, Any]) -> None:
    traces = trained["traces"]
    result = evaluate(trained["predictors"], traces.batches("test", 4096), traces.view).as_dict()
    shape = traces.view.shape
    for name in CONFIGURED:
        recall = result["recall_at_k"][name]
        assert len(recall["per_layer"]) == shape.layers - 1
        assert recall["mean"] > shape.top_k / shape.experts + 0.05


def test_exact_mode_is_bit_identical(trained: dict[str, Any]) -> None:
    """Forecasts of the kinds that read most; slots for two layers' worth of experts force evictions."""
    model = trained["model"]
    expected = greedy(model, PROMPT, 4)
    for name in ("linear", "early_attention", "estimator"):
        predictor = trained["predictors"][name]
        with expertcast.offload(model, predictor=predictor, slots=8, forecasts="always") as offloaded:
            assert_same(greedy(model, PROMPT, 4), expected)
            assert offloaded.stats.as_dict()["bytes_moved"] > 0
    assert_same(greedy(model, PROMPT, 4), expected)


def test_speculation_runs_from_a_checkpoint_folder(trained: dict[str, Any]) -> None:
    folder: Path = trained["folder"] / "quasi_hidden"
    with expertcast.offload(trained["model"], predictor=str(folder), mode="speculate", slots=8):
        _, logits = greedy(trained["model"], PROMPT, 4)
    assert all(torch.isfinite(row).all() for row in logits)
