"""Models of a hub at a revision, by the real commands."""

from __future__ import annotations

import html
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3MoeConfig

from tests.families.models import tiny_model
from tests.hub.fake_repos import FakeHub, Repo
from tests.hub.test_checkpoints import right
from tests.hub.worker import Worker
from tests.sealed import edit_json


@pytest.fixture
def model(hub: FakeHub, tmp_path: Path, reference_tokenizer: Any) -> str:
    """me/moe, whose two branches hold models with other numbers of layers."""
    repo = hub.repos["model", "me/moe"] = Repo(private=False)
    made = tiny_model("qwen3_moe")
    assert isinstance(made.config, Qwen3MoeConfig)
    for branch, layers in (("main", 3), ("older", 2)):
        made.model.layers = made.model.layers[:layers]
        made.config.num_hidden_layers = layers
        made.save_pretrained(tmp_path / branch)
        reference_tokenizer.save_pretrained(tmp_path / branch)
        files = {path.name: path.read_bytes() for path in (tmp_path / branch).iterdir()}
        repo.commit(branch, files, branch)
    return "me/moe"


def test_a_revision_is_another_model(model: str, worker: Worker, work: Path) -> None:
    found = []
    for number, given in enumerate(([], ["--revision", "older"])):
        right(worker.run("inspect", model, *given, "--json", "inspected.json"))
        out = f"of-{number}"
        text = ["--data", "few.parquet", "--tokens", "700"]
        right(worker.run("collect", model, *text, *given, "--out", out))
        right(worker.run("generate", model, "--prompt", "It", "--slots", "8", "--new-tokens", "1", *given))
        layers = json.loads((work / out / "trace.json").read_text())["shape"]["L"]
        found.append((json.loads((work / "inspected.json").read_text())["layers"], layers))
    assert found[0] == (found[0][0], found[0][0])
    assert found[1] == (2, 2) != found[0]
    assert "'me/moe'" in worker.run("inspect", model, "--revision", "newer").line


def test_a_report_asks_no_hub_for_a_tokenizer(hub: FakeHub, model: str, worker: Worker, work: Path) -> None:
    """One that lies in the cache is found, and for one that does not nothing is asked."""
    for name, found in ((model, True), ("me/elsewhere", False)):
        traces = shutil.copytree(work / "traces", work / f"of-{found}")
        edit_json(traces / "trace.json", lambda info, name=name: info.update(model=name))
        if found:
            code = f"from expertcast.data.models import load_tokenizer as load\nload({model!r})"
            right(worker.code(code))
        before = len(hub.requests)
        right(worker.run("eval", str(traces), "--predictor", "next_norm", "--report", f"report-{found}"))
        assert len(hub.requests) == before
        page = (work / f"report-{found}" / "index.html").read_text()
        page = html.unescape(page)
        assert (f"no tokenizer for '{name}' on this machine" in page) is not found
