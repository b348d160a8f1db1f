"""Traces through a hub: sent, read by `datasets` as any data set, and taken by every command that takes traces."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.hub.conftest import TOKENS
from tests.hub.fake_hub import FakeHub
from tests.hub.test_checkpoints import right, snippet
from tests.hub.worker import Worker
from tests.pages import commands_of

datasets = pytest.importorskip("datasets")


def test_datasets_loads_them_as_any_data_set(hub: FakeHub, worker: Worker, work: Path) -> None:
    code = snippet(hub.tree("dataset", "me/traces")["README.md"].decode()).replace('"traces"', '"me/traces"')
    code += (
        "import json\nprint(json.dumps([rows.column_names, rows['token'][:], rows[-2:], traces.token_count('all')]))"
    )
    names, ids, rows, tokens = json.loads(right(worker.code(code)).out)
    local = datasets.load_from_disk(str(work / "traces"))
    assert names == local.column_names
    assert ids == local["token"][:]
    assert rows == local[-2:]
    assert tokens == len(ids) == TOKENS


def test_commands_take_them_by_name(hub: FakeHub, worker: Worker, work: Path) -> None:
    right(worker.run("train", "me/traces@main", "--predictor", "linear", "--out", "of_there"))
    weights = [(work / folder / "model.safetensors").read_bytes() for folder in ("linear", "of_there")]
    assert weights[0] == weights[1]
    right(worker.run("eval", "me/traces", "--predictor", "of_there", "--json", "scored.json"))
    scored, kept = (json.loads((work / path).read_text()) for path in ("scored.json", "linear/metrics.json"))
    assert scored["recall_at_k"] == kept["recall_at_k"]
    few = ["--tokens", "60", "--processes", "1", "--no-quality"]
    right(worker.run("simulate", "me/traces", "--predictor", "me/linear", *few))


def test_default_vectors_come_from_traces(hub: FakeHub, worker: Worker, work: Path) -> None:
    """By name; of traces in the cache without the hub too."""
    train = ["train", "traces", "--predictor", "quasi_hidden", "--out", "quasi", "--default-vectors"]
    kept = load_file(work / "linear" / "model.safetensors")
    right(worker.run(*train, "me/traces"))
    training = json.loads((work / "quasi" / "config.json").read_text())["training"]
    assert training["default_vectors_from"]["given"] == "me/traces"
    found = load_file(work / "quasi" / "model.safetensors")
    assert all(torch.equal(found[name], kept[name]) for name in ("expert_LED", "shared_LD"))
    with hub.away():
        right(worker.run(*train, "me/traces"))
        assert "nor in the hub's cache" in worker.run(*train, "me/new").line
    assert "nor a visible dataset repository" in worker.run(*train, "me/new").line


def test_who_means_a_model_is_told_what_lacks(hub: FakeHub, worker: Worker) -> None:
    train = ["train", "me/model", "--predictor", "linear", "--out", "never"]
    line = worker.run(*train).line
    assert "nor a visible dataset repository" in line
    assert "to train online on a model of that name, give --data" in line


def test_the_pages_commands_run(hub: FakeHub, worker: Worker, work: Path) -> None:
    names = {"MODEL": "reference", "checkpoint": "./linear"}
    lines = commands_of("docs/sharing.md")
    assert {line.split()[0] for line in lines} == {"generate", "eval"}
    for line in lines:
        words = [names.get(word, word).replace("user/estimator", "me/linear") for word in shlex.split(line)]
        right(worker.run(*[word.replace("user/", "me/") for word in words]))
