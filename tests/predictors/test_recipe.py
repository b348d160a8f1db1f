"""docs/add-a-predictor.md, followed to the letter."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from expertcast.checkpoints.checkpoint import PredictorCheckpoint, load_predictor, save_predictor
from expertcast.cli import build_parser, main
from expertcast.commands.options import own_code
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, Predictor, PredictorConfig, RouterState, names, predictor_class
from expertcast.predictors import base as registry
from expertcast.predictors.artefacts import seal
from expertcast.predictors.hybrid import Hybrid, HybridConfig
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


OWN = """
import expertcast
from torch import nn

class Head(expertcast.Predictor):
    name = "own_head"

    def __init__(self, config, shape):
        super().__init__(config, shape)
        self.head = nn.Linear(shape.experts, shape.experts)

    def logits(self, state, ahead):
        return self.head(state.logits_TE.float())
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a module of the user's own, which is the current one."""
    monkeypatch.setattr(registry.PREDICTORS, "_classes", dict(registry.PREDICTORS._classes))
    monkeypatch.delitem(sys.modules, "own_module", raising=False)
    (tmp_path / "own_module.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("together", [False, True])
def test_a_checkpoint_of_own_code(
    own_module: Path, together: bool, reference_traces: TraceDataset, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says which class it needs, imports nothing by itself, and is loaded where the class is named."""
    name, view = own_code("own_module:Head"), reference_traces.view
    config = HybridConfig(candidates=["next_norm", name]) if together else None
    fitted = fitting.fit("hybrid" if together else name, reference_traces, config=config).predictor
    if together:  # as if it were the best at one layer
        first, *others = fitted.config.choices
        config = replace(
            fitted.config,
            choices=[{**first, "predictor": name}, *others],
            member_configs={key: {"ahead": [1]} for key in config.candidates},
        )
        fitted = Hybrid(config, view.shape).bind(view)
    save_predictor(fitted, "ckpt", view=view)
    registry.PREDICTORS._classes.pop(name)
    del sys.modules["own_module"]
    with pytest.raises(ExpertcastError, match=r"needs the class own_module:Head, .*give own_module:Head@ckpt"):
        load_predictor("ckpt", view)
    assert "own_module" not in sys.modules
    with pytest.raises(ExpertcastError, match=r"needs the class Head of the program that saved it: .*module"):
        PredictorCheckpoint.open(_saved_by_a_script(Path("ckpt"), name)).load(view)
    assert main(["inspect", "own_module:Head@ckpt", "--verify"]) == 0
    assert main(["advise", "reference", "--predictor", "own_module:Head", "--save", "offload.json"]) == 2
    assert "predictor 'own_head' is a class of your own" in capsys.readouterr().err
    assert load_predictor("ckpt", view).state_dict().keys() == fitted.state_dict().keys()


def _saved_by_a_script(folder: Path, name: str) -> Path:
    config = json.loads((folder / "config.json").read_text())
    del config["digest"]
    script = folder.with_name("of_a_script")
    shutil.copytree(folder, script)
    (script / "config.json").write_text(json.dumps(seal(config | {"code": {name: "__main__:Head"}})))
    return script


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("nowhere:Head@ckpt", "cannot import predictor nowhere:Head (ModuleNotFoundError: No module named 'nowhere')"),
        ("own_module:Tail", "cannot import predictor own_module:Tail (AttributeError"),
        ("own_module:expertcast", "own_module:expertcast is no subclass of expertcast.Predictor"),
    ],
)
def test_own_code_that_is_not_there(
    own_module: Path, word: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["eval", "traces", "--predictor", word])
    assert message in capsys.readouterr().err


def test_every_command_with_a_predictor_takes_own_code() -> None:
    commands = next(action for action in build_parser()._actions if action.dest == "command").choices
    assert commands is not None
    found = {
        name: action.type
        for name, parser in dict(commands).items()
        for action in parser._actions
        if action.dest == "predictor"
    }
    assert found.keys() == {"advise", "bench", "chat", "eval", "generate", "serve", "simulate", "train"}
    assert set(found.values()) == {own_code}


class Faulty(Predictor):
    """Fails in the way of its subclass."""

    name = "faulty"


class _Nan(Faulty):
    def logits(self, state: RouterState, ahead: int) -> Tensor:
        return state.logits_TE * float("nan")


class _Narrow(Faulty):
    def logits(self, state: RouterState, ahead: int) -> Tensor:
        return state.logits_TE[:, 1:]


class _Raising(Faulty):
    def logits(self, state: RouterState, ahead: int) -> Tensor:
        raise KeyError("a key")


@pytest.mark.parametrize(
    ("cls", "why"), [(_Nan, "logits are NaN"), (_Narrow, "logits of shape [64, 63]"), (_Raising, "KeyError: 'a key'")]
)
def test_a_faulty_predictor_is_named(cls: type[Predictor], why: str, reference_traces: TraceDataset) -> None:
    view = reference_traces.view
    predictor = cls(PredictorConfig(), view.shape).bind(view)
    with pytest.raises(ExpertcastError) as caught:
        evaluate({"it": predictor}, reference_traces.batches("test", 64), view)
    assert str(caught.value).startswith(f"predictor faulty, from layer 0 to 1: {why}")


def test_registry_refuses_a_second_class_of_one_name(recipe: dict[str, Any]) -> None:
    class Other(recipe["Stay"]):  # type: ignore[name-defined, misc]
        pass

    with pytest.raises(ExpertcastError, match="'stay' is taken"):
        registry.register(Other)
    with pytest.raises(ExpertcastError, match="unknown predictor 'stey'"):
        predictor_class("stey")
