"""Sides in equal memory: whole commands on tiny models, medians, limits, pages and conditions."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import pytest
from benchmarks import conditions, packed
from benchmarks.__main__ import main
from benchmarks.children import drop_cached
from benchmarks.fidelity import fidelity
from benchmarks.life_size_files import make, qwen3
from benchmarks.results import ResultFile, shown, spread, write_section

from expertcast.predictors import ExpertcastError

gguf = pytest.importorskip("gguf")
SMALL = ["--small", "--layers", "2", "--repetitions", "1", "--prompt", "6", "--warm", "2", "--new-tokens", "3"]
SMALL += ["--readahead", "0", "--allow-dirty"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["packed", "disk"])
def test_the_whole_command(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, written = tmp_path / "out.json", tmp_path / "page.md"
    sides = ["packed", "expanded"] if name == "packed" else ["in place", "accelerate, half"]
    command = [name, *SMALL, "--memory", "0", "--sides", *sides]
    command += ["--keep", str(tmp_path / "kept"), "--out", str(out), "--page", str(written)]
    assert main(command) == 0, capsys.readouterr().err
    result = json.loads(out.read_text())
    assert sorted(row["side"] for row in result["results"]) == sorted(sides), result["runs"]
    for row in result["results"]:
        assert row["tpot_s"]["median"] > 0
        assert row["needed_bytes"] <= 1.01 * result["model"]["experts_bytes"]
    assert result["results"][0]["largest"] == result["results"][1]["largest"] or name == "packed"
    assert "| all |" in written.read_text()
    before = out.read_text()
    assert main(command) == 0
    assert json.loads(out.read_text())["runs"] == json.loads(before)["runs"], "nothing is measured twice"
    assert main([*command, "--prompt", "7"]) == 2
    assert "other settings" in capsys.readouterr().err


def test_readahead_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "read_ahead_kb"
    file.write_text("8192\n")
    monkeypatch.setattr(conditions, "_readahead", lambda folder: file)

    def fail() -> None:
        with conditions.readahead(tmp_path, 128):
            assert file.read_text() == "128"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert conditions.readahead_kib(tmp_path) == 8192


def test_a_result_is_of_clean_code_and_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions, "revision", lambda: "abc-dirty")
    args = argparse.Namespace(out=tmp_path / "out.json", page=None, allow_dirty=False)
    with pytest.raises(ExpertcastError, match="uncommitted changes"):
        ResultFile(args, {})
    args.allow_dirty = True
    ResultFile(args, {"a": 1}).write()
    assert ResultFile(args, {"a": 1}).values["conditions"]["git_revision"] == "abc-dirty"
    monkeypatch.setattr(conditions, "revision", lambda: "def")
    with pytest.raises(ExpertcastError, match="another revision"):
        ResultFile(args, {"a": 1})


def test_a_section_replaces_itself(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\ntext\n\n## A\n\nold\n\n## Kernels\n\nby hand\n")
    write_section(page, "A", "new")
    write_section(page, "B", "first")
    assert page.read_text() == "# Title\n\ntext\n\n## B\n\nfirst\n\n## A\n\nnew\n\n## Kernels\n\nby hand\n"
    assert shown(spread([0.2, None, 0.1, 0.4]), 1e3) == "200.0 (100.0-400.0)"


def test_a_mixed_file_has_weights_of_the_model_s_size(tmp_path: Path) -> None:
    path = make(tmp_path, "Q4_K_M", 2, qwen3(2, small=True))
    tensors = {each.name: each for each in gguf.GGUFReader(path).tensors}
    for name, kind in (("blk.0.ffn_gate_exps.weight", "Q4_K"), ("blk.1.ffn_down_exps.weight", "Q6_K")):
        assert tensors[name].tensor_type.name == kind
        values = gguf.dequantize(tensors[name].data, tensors[name].tensor_type)
        assert values.std() == pytest.approx(0.02, rel=0.15)
    assert packed.described_file(path, 2)["count"] == 32
    drop_cached([path])
    assert os.path.getsize(path) > packed.described_file(path, 2)["experts_bytes"] > 0


def test_fidelity_of_eight_bits_is_better_than_of_four() -> None:
    four, eight = (fidelity("reference", 256, form) for form in ("int4", "int8"))
    assert eight["rounded"]["kl"] < four["rounded"]["kl"]
    assert four["packed"]["kl"] < four["rounded"]["kl"], "the kernel costs less than the bits do"
