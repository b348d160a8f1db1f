"""`expertcast demo`: the real command on few tokens, and the folder that it leaves."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from expertcast.checkpoints.checkpoint import PredictorCheckpoint
from expertcast.cli import build_parser, main
from expertcast.commands import demo
from expertcast.data.traces import TraceDataset
from tests.package.test_cli import fails


@pytest.mark.slow
def test_a_short_demo_leaves_what_comes_next(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "NEW_TOKENS", 8)
    monkeypatch.setattr(demo, "QUALITY_TOKENS", 512)
    assert main(["demo", "--tokens", "3000", "--steps", "4"]) == 0
    said = capsys.readouterr()
    out = tmp_path / "expertcast-demo"
    result = json.loads((out / "demo.json").read_text())
    assert result["finished"]
    assert result["new_tokens"] == 8
    assert result["steps"] == 4
    assert result["quality"]["tokens"] == 2 * 255
    assert all(result["runs"][name]["identical"] for name in ("on_demand", "exact"))
    recall = {name: values["mean"] for name, values in result["recall_at_k"].items()}
    for name, mean in recall.items():
        assert re.search(rf"^{name} +{mean:.3f} ", said.out, flags=re.MULTILINE)
    checkpoint = PredictorCheckpoint.open(out / "checkpoint")
    assert checkpoint.name == result["deployed_predictor"]
    assert checkpoint.metrics["recall_at_k"][checkpoint.name] == result["recall_at_k"][checkpoint.name]
    assert "recall_at_k" in checkpoint.metrics["validation"]
    assert TraceDataset.open(out / "traces").token_count() == 3000
    assert checkpoint.name in (out / "report" / "index.html").read_text()
    commands = re.findall(r"^    expertcast (.*)$", said.out, flags=re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["generate", "eval", "advise", "simulate"]
    words = [shlex.split(command) for command in commands]
    for command in words:
        build_parser(command[0]).parse_args(command)
    assert main([*words[0], "--new-tokens", "2"]) == 0
    assert main(words[1]) == 0


def test_folders_of_others_are_left_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    assert "earlier demo" in fails(capsys, "demo", "--out", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
