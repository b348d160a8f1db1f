"""docs/architecture.md: its picture against the import contracts, its paths against the files. The recipes of
docs/extending.md run."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import expertcast
from expertcast import cli
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.traces import TraceDataset
from expertcast.predictors import PredictorConfig
from expertcast.predictors.baselines import RouterInput
from expertcast.predictors.view import MoEView
from expertcast.runtime.storage.codecs import CODECS, make_codec
from expertcast.runtime.storage.store import ExpertStore
from expertcast.training import evaluation, metrics
from tests.families.models import tiny_model

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
RECIPES = (ROOT / "docs" / "extending.md").read_text()
FOLDERS = ("src/expertcast", "runtime", "training", "data", "checkpoints", "predictors")

Make = Callable[[str, str], ModuleType]


def blocks(title: str) -> list[str]:
    """The code of one recipe."""
    sections = re.split(r"^## ", RECIPES, flags=re.MULTILINE)
    (text,) = (section for section in sections if section.startswith(title + "\n"))
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    """Makes a module of a block, in a file as its author would; registries are put back afterwards."""
    monkeypatch.setattr(CODECS, "_classes", dict(CODECS._classes))

    def make(name: str, code: str) -> ModuleType:
        path = tmp_path / f"{name.rpartition('.')[2]}.py"
        path.write_text(code)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, made)
        spec.loader.exec_module(made)
        return made

    return make


def picture() -> list[str]:
    """The lines of the picture that name a row of the house."""
    (drawn,) = re.findall(r"```text\n(.*?)```", PAGE, flags=re.DOTALL)
    return [line for line in drawn.splitlines()[1:] if line[:24].strip(" ─│")]


def test_the_picture_is_the_import_contracts() -> None:
    """Every package and every room of the runtime is drawn, none above what may import it."""
    rows = [re.match(r" *((?:[\w/]+ ?)*)", line[:24])[1].split() for line in picture()]  # type: ignore[index]
    row_of = {name: number for number, row in enumerate(rows) for name in row}
    assert [name for name in row_of if name in FOLDERS] == list(FOLDERS)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    runtime = next(each["layers"] for each in contracts if "expertcast.runtime.engine" in each["layers"])
    layers = [[name.strip().rpartition(".")[2] for name in layer.split("|")] for layer in runtime]
    drawn = {name for name, row in row_of.items() if row_of["runtime"] < row < row_of["training"]}
    assert drawn == {name for layer in layers for name in layer}
    for upper, lower in pairwise(layers):
        assert max(row_of[name] for name in upper) < min(row_of[name] for name in lower)


def test_files_that_are_named_exist() -> None:
    text = PAGE + RECIPES
    named = set(re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?)`", text)) | set(re.findall(r"\]\(([\w-]+\.md)\)", text))
    assert len(named) > 20
    places = (ROOT, ROOT / "docs", ROOT / "runtime" / "policies")
    assert not {name for name in named if not any((place / name).exists() for place in places)}


def same_as_resident(model: PreTrainedModel, **options: Any) -> expertcast.OffloadedModel:
    """Decode offloaded, with few slots; the logits are those of the model as it was, then and afterwards."""
    ids = torch.arange(1, 9).unsqueeze(0)
    decode: dict[str, Any] = {
        "input_ids": ids, "max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True,
        "output_logits": True,
    }  # fmt: skip
    expected = model.generate(**decode)
    with expertcast.offload(model, slots=8, **options) as offloaded:
        found = offloaded.generate(**decode)
        assert offloaded.stats.total.misses > 0
    for output in (found, model.generate(**decode)):
        assert all(torch.equal(one, other) for one, other in zip(expected.logits, output.logits, strict=True))
    return offloaded


@pytest.mark.parametrize("predictor", [None, "router_input"])
def test_a_link(module: Make, predictor: str | None) -> None:
    (code,) = blocks("A link")
    link = module("steady", code).SteadyLink(20e6)
    same_as_resident(tiny_model("qwen3_moe"), link=link, predictor=predictor, forecasts="always")
    assert link.copies > 0
    assert link.busy_s >= link.bytes_moved / link.bandwidth


def test_a_store(module: Make) -> None:
    (code,) = blocks("A store")
    model = tiny_model("qwen3_moe")
    store = module("shared", code).SharedStore(find_moe_layers(model))
    shared: list[bool] = []
    block = store.block
    store.block = lambda key: (shared.append(block(key).is_shared()), block(key))[1]
    same_as_resident(model, store=store, predictor="router_input", forecasts="always")
    assert shared
    assert all(shared)


def test_a_codec(module: Make) -> None:
    """float32 weights come back, all at once and plane by plane."""
    (code,) = blocks("A codec")
    module("by_place", code)
    view = find_moe_layers(tiny_model("qwen3_moe"))
    store = ExpertStore(view)
    store.pack(view)
    codec, block = make_codec("by_place", store.layout), store.block(3)
    parts, found = codec.encode(block), torch.zeros_like(block)
    codec.decode(parts, found)
    assert torch.equal(found, block)
    planes, again = codec.new_planes(block), torch.zeros_like(block)
    for index in (2, 0, 3, 1):
        codec.expand(index, parts[index], planes)
        codec.recover(planes, again, codec.shards[index])
    assert torch.equal(again, block)


def test_a_metric(
    module: Make, monkeypatch: pytest.MonkeyPatch, reference_traces: TraceDataset, reference_view: MoEView
) -> None:
    """Listed, it is part of every evaluation; its value is that of a loop over tokens."""
    code, line = blocks("A metric")
    made = module("heaviest_found", code)
    listed = metrics.routing_scores

    def routing_scores(shape: Any) -> Any:
        scores = listed(shape)
        exec(line, {**vars(made), "scores": scores})
        return scores

    monkeypatch.setattr(metrics, "routing_scores", routing_scores)
    view = reference_traces.view
    predictor = RouterInput(PredictorConfig(), view.shape).bind(view)
    batch = next(reference_traces.batches("test", 64))
    found = evaluation.evaluate({"router_input": predictor}, [batch], view).as_dict()["heaviest_found"]["router_input"]
    true, forecast = batch.state(view, 1), predictor.forecast(batch.state(view, 0))
    heaviest_T = true.topk_ids_TK[torch.arange(len(batch)), true.topk_weights_TK.argmax(dim=1)].tolist()
    hits = [one in ids for one, ids in zip(heaviest_T, forecast.topk_ids_TK.tolist(), strict=True)]
    assert found["per_layer"][0] == pytest.approx(sum(hits) / len(hits))
    assert len(found["per_layer"]) == view.shape.layers - 1


def test_a_command(
    module: Make,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    reference_view: MoEView,
) -> None:
    code, line = blocks("A command")
    monkeypatch.setattr(cli, "COMMANDS", dict(cli.COMMANDS))
    module("expertcast.commands.fingerprint", code)
    exec(line, {})
    assert cli.main(["fingerprint", "reference", "--digits", "8", "--json", str(tmp_path / "out.json")]) == 0
    assert reference_view.fingerprint()[:8] in capsys.readouterr().out
    assert reference_view.fingerprint()[:8] in (tmp_path / "out.json").read_text()
    assert reference_view.fingerprint()[:9] not in (tmp_path / "out.json").read_text()
    with pytest.raises(SystemExit, match="0"):
        cli.main(["fingerprint", "--help"])
    assert "digits to print (default: 64)" in capsys.readouterr().out.lower()
