"""The benchmark of packed experts: the whole command on a model of toy size, its medians and its page."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks import packed
from benchmarks.packed_fidelity import fidelity
from benchmarks.packed_page import page

from expertcast.predictors.messages import Json

gguf = pytest.importorskip("gguf")
SMALL = ["--small", "--layers", "2", "--memory", "0", "--repetitions", "1", "--prompts", "6", "--warm", "2"]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_whole_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, written = tmp_path / "packed.json", tmp_path / "packed.md"
    sides = ["expanded", "packed", "packed, forecasts", "packed, trained"]
    command = [*SMALL, "--new-tokens", "3", "--sides", *sides, "--fidelity"]
    command += ["--keep", str(tmp_path / "kept"), "--out", str(out), "--page", str(written)]
    assert packed.main(command) == 0, capsys.readouterr().err
    result = json.loads(out.read_text())
    assert [row["side"] for row in result["results"]] == sides
    assert (tmp_path / "kept" / packed.TRAINED / "model.safetensors").is_file()
    assert all(row["tpot_s"] > 0 for row in result["results"])
    assert result["stores"]["expanded"]["bytes"] > 3.5 * result["stores"]["packed"]["bytes"]
    assert "Prompt of 6, all in memory" in written.read_text()
    capsys.readouterr()
    assert packed.main(command) == 0
    assert "packed, None" not in capsys.readouterr().err, "nothing is measured twice"


def _run(side: str, tpot_s: float, repetition: int = 0, **more: object) -> Json:
    row = {"side": side, "memory": 0.5, "throttle": None, "prompt": 16, "repetition": repetition}
    return {**row, "tpot_s": tpot_s, "ttft_s": 1.0, "bytes_read": 1.0, "peak_bytes": 1, "limit_bytes": 5, **more}


def test_the_page_compares_medians_with_the_best_of_the_peer() -> None:
    runs = [_run("packed", tpot_s, n) for n, tpot_s in enumerate((0.3, 0.1, 0.2))]
    runs += [_run("llama.cpp, mmap", 3.0), _run("llama.cpp, lazy on", 1.2), _run("expanded", 0.4)]
    runs += [{**_run("llama.cpp, repacked", 0), "failed": "killed"}]
    model = dict.fromkeys(("layers", "experts", "weights", "top_k", "vocabulary", "experts_bytes"), 1)
    model = {"shape": "toy", "kind": "Q4_0", **model}
    result = {"model": model, "settings": {"threads": 2, "warm": 1, "new_tokens": 1}, "command": "", "date": ""}
    made = page(result | {"results": packed.summaries(runs)})
    assert "**yes**, 6.00 (packed; llama.cpp, lazy on)" in made
    assert "**no**, 2.00 (packed; expanded)" in made
    assert "| llama.cpp, repacked | killed |" in made


def test_a_mixed_file_has_weights_of_the_model_s_size(tmp_path: Path) -> None:
    packed.write_model(tmp_path / "model.gguf", packed.shape("olmoe-1b-7b", 2, small=True), packed.MIXED)
    tensors = {each.name: each for each in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    gate = tensors["blk.0.ffn_gate_exps.weight"]
    assert gate.tensor_type.name == "Q4_K"
    assert gguf.dequantize(gate.data, gate.tensor_type).std() == pytest.approx(0.02, rel=0.1)


def test_fidelity_of_eight_bits_is_better_than_of_four() -> None:
    four, eight = (fidelity("reference", 256, form) for form in ("int4", "int8"))
    assert eight["rounded"]["kl"] < four["rounded"]["kl"]
    assert four["packed"]["kl"] < four["rounded"]["kl"], "the kernel costs less than the bits do"
