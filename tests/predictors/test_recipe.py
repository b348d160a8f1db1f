"""docs/add-a-predictor.md, followed to the letter."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from expertcast.checkpoints.checkpoint import load_predictor, save_predictor
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, names, predictor_class
from expertcast.predictors import base as registry
from expertcast.training import fit as fitting
from expertcast.training.evaluation import evaluate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "add-a-predictor.md"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Return the names that the page's code defines; registry and fitters are restored."""
    monkeypatch.setattr(registry.PREDICTORS, "_classes", dict(registry.PREDICTORS._classes))
    monkeypatch.setattr(fitting, "FITTERS", dict(fitting.FITTERS))
    module = ModuleType("recipe")  # dataclasses look their module up
    monkeypatch.setitem(sys.modules, "recipe", module)
    namespace: dict[str, Any] = module.__dict__
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), namespace)
    return namespace


def test_the_recipe_works(recipe: dict[str, Any], reference_traces: TraceDataset, tmp_path: Path) -> None:
    assert names()[-1] == "stay"
    fitted = fitting.fit("stay", reference_traces, config=recipe["StayConfig"](share=0.25))
    shape = reference_traces.view.shape
    assert fitted.report["tokens_counted"] == reference_traces.token_count("train")
    save_predictor(fitted.predictor, tmp_path / "stay", view=reference_traces.view)
    loaded = load_predictor(tmp_path / "stay", reference_traces.view)
    assert torch.equal(loaded.get_buffer("log_frequency_LE"), fitted.predictor.get_buffer("log_frequency_LE"))
    scores = evaluate({"stay": loaded}, reference_traces.batches("test", 4096), reference_traces.view).as_dict()
    assert scores["recall_at_k"]["stay"]["mean"] > 2 * shape.top_k / shape.experts
    with pytest.raises(ExpertcastError, match="share=2"):
        recipe["StayConfig"](share=2.0)


def test_registry_refuses_a_second_class_of_one_name(recipe: dict[str, Any]) -> None:
    class Other(recipe["Stay"]):  # type: ignore[name-defined, misc]
        pass

    with pytest.raises(ExpertcastError, match="'stay' is taken"):
        registry.register(Other)
    with pytest.raises(ExpertcastError, match="unknown predictor 'stey'"):
        predictor_class("stey")
