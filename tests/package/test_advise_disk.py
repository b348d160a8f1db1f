"""`expertcast advise --store-folder`: before a model is packed and after, and what it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from expertcast.cli import main
from expertcast.data.traces import TraceDataset
from expertcast.runtime.config import OffloadConfig
from tests.package.test_cli import fails

SHORT = ("--prompt-tokens", "8", "--new-tokens", "4", "--memory", "4MB")


def _advised(capsys: pytest.CaptureFixture[str], tmp_path: Path, *words: str) -> tuple[dict[str, Any], str]:
    result = tmp_path / "result.json"
    folder = str(tmp_path / "packed")
    assert main(["advise", "reference", "--store-folder", folder, *SHORT, "--json", str(result), *words]) == 0
    return json.loads(result.read_text()), capsys.readouterr().out


def test_before_and_after_packing(
    capsys: pytest.CaptureFixture[str], reference_traces: TraceDataset, tmp_path: Path
) -> None:
    """On a disk this slow compressing pays whatever else this machine is doing; what is saved runs."""
    saved, folder = tmp_path / "offload.json", str(tmp_path / "packed")
    slow = ("--bandwidth", "1e6", "--save", str(saved))
    before, text = _advised(capsys, tmp_path, *slow)
    assert before["packed"] is None
    assert before["disk_source"] == "given"
    assert f"pack with: expertcast store reference --store-folder {folder} --codec bitsplit" in text
    config = OffloadConfig.load(saved)
    assert (config.store, config.store_folder, config.codec) == ("disk", folder, "bitsplit")
    assert main(["store", "reference", "--store-folder", folder]) == 0
    capsys.readouterr()
    after, text = _advised(capsys, tmp_path, "--replay", str(reference_traces.folder))
    assert after["packed"] == "bitsplit"
    assert after["disk_source"] == "direct reads of the store"
    assert after["routing"] == str(reference_traces.folder)
    assert after["tokens"] > 100
    assert after["stored_share"] == pytest.approx(before["stored_share"], abs=0.02)
    assert [option["codec"] for option in after["options"][:2]] == ["raw", "bitsplit"]
    assert "an expert is 36,864 bytes" in text
    assert main(["generate", "reference", "--prompt", "It is", "--new-tokens", "2", "--config", str(saved)]) == 0


@pytest.mark.parametrize("command", ["advise", "bench"])
def test_a_busy_machine_is_warned_of(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: range(2))
    line = "warning: the machine's load is 7.0 and 2 processors may be used: times will be too long"
    for load in (7.0, 1.0):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert main([command, "no_such_model"]) == 2
        assert (line in capsys.readouterr().err.splitlines()) == (load == 7.0)


def test_what_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("advise", "reference", "--store-folder", str(tmp_path))
    assert "--link, --predictor: of another question" in fails(
        capsys, *words, "--link", "instant", "--predictor", "next_norm"
    )
    assert "--capacity is for routing files" in fails(capsys, *words, "--capacity", "0.5")
    (tmp_path / "experts.coded.safetensors").write_bytes(b"something else")
    assert "experts.coded.safetensors" in fails(capsys, *words)
