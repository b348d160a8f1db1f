"""Commands on a quantised checkpoint, with its experts packed and expanded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from expertcast.cli import main
from expertcast.runtime.config import OffloadConfig
from tests.package.conftest import RUN
from tests.package.test_cli import fails, ran
from tests.runtime.test_packed import checkpoint, gptq

SHORT = "--prompt-tokens 8 --new-tokens 4"
PACKED_BYTES = 3840
"""Bytes of one packed expert: 64 x 64 and 64 x 32 codes of 4 bits, and scales and zeros for groups of 32."""


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory, reference_tokenizer: Any) -> str:
    """GPTQ, 2 layers of 8 experts, 2 per token."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32}
    settings: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    path, _ = checkpoint(tmp_path_factory.mktemp("quantised"), gptq(group=32), sizes, **settings)
    reference_tokenizer.save_pretrained(path)
    return path


def test_inspect_shows_the_forms(quantised: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = ran(tmp_path, f"inspect {quantised} --memory 40kB")
    rows = {row["form"]: row for row in found["forms"]}
    assert list(rows) == ["expanded", "packed", "int8", "int4"]
    assert {form: row["slots"] for form, row in rows.items()} == {"expanded": 3, "packed": 10, "int8": 6, "int4": 11}
    assert rows["packed"]["expert_bytes"] == PACKED_BYTES
    assert rows["packed"]["all_experts_bytes"] == 16 * PACKED_BYTES
    assert rows["packed"]["weight_bits"] == 5
    said = capsys.readouterr().out
    assert "slots in 40 kB for experts alone" in said
    assert "int4: rounded, which changes the model's output" in said
    assert ran(tmp_path, f"inspect {quantised}")["memory"] > 1e6  # what is available


def test_advise_deploys_packed_experts(quantised: str, tmp_path: Path) -> None:
    """In memory and on a disk, in the form that other commands choose too."""
    saved = tmp_path / "offload.json"
    found = ran(tmp_path, f"advise {quantised} {SHORT} --slots 5 --bandwidth 1e5 --save {saved}")
    assert (found["slots"], found["block_bytes"]) == (5, PACKED_BYTES)
    config = OffloadConfig.load(saved)
    assert (config.experts, config.slots, config.bandwidth) == ("auto", 5, 1e5)
    disk = f"--store-folder {tmp_path / 'store'} --memory 30kB --bandwidth 1e4 --save {saved}"
    found = ran(tmp_path, f"advise {quantised} {SHORT} {disk}")
    assert found["block_bytes"] == PACKED_BYTES
    config = OffloadConfig.load(saved)
    assert (config.experts, config.store, config.codec, config.slots) == ("auto", "disk", "raw", 7)
    assert main(f"generate {quantised} --prompt It --new-tokens 1 --config {saved}".split()) == 0


def test_bench_of_packed_experts(quantised: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    few = f"{SHORT} --repetitions 1 --mode on_demand --cache with"
    found = ran(tmp_path, f"bench {quantised} --experts packed {few}")
    assert (found["experts_form"], found["block_bytes"]) == ("packed", PACKED_BYTES)
    assert found["runs"]["on_demand_cache"]["identical"]
    capsys.readouterr()
    line = fails(capsys, "generate", quantised, "--prompt", "It", "--experts", "packed", "--draft", "int4")
    assert "repetition" not in line
    assert "no cheaper" in line


def test_traces_and_training_of_packed_experts(quantised: str, tmp_path: Path) -> None:
    """On traces and online: the same predictor; then its effect on the packed model, and a simulation of its sizes."""
    text, traces = ["--data", "reference", *RUN, "--tokens", "400"], str(tmp_path / "traces")
    assert main(["collect", quantised, *text, "--experts", "packed", "--out", traces]) == 0
    for name, words in (("made", [traces]), ("online", [quantised, *text, "--experts", "packed"])):
        assert main(["train", *words, "--predictor", "linear", "--out", str(tmp_path / name)]) == 0
    scores = [json.loads((tmp_path / name / "metrics.json").read_text())["recall_at_k"] for name in ("made", "online")]
    assert scores[0] == scores[1]
    quality = f"--model {quantised} --data reference --quality-tokens 64 --experts packed"
    scored = ran(tmp_path, f"eval {traces} --predictor {tmp_path / 'made'} {quality}")
    assert scored["quality"]
    simulated = ran(tmp_path, f"simulate {traces} --miss drop --capacity 0.25 --tokens 50 {quality}")
    assert simulated["block_bytes"]["full"] == PACKED_BYTES
    as_traced = ran(tmp_path, f"simulate {traces} --capacity 0.25 --tokens 50")
    assert as_traced["block_bytes"]["full"] == PACKED_BYTES
    for experts, nbytes in (("int8", 4352 + 2304), ("int4", 2304 + 1280)):  # the traces' experts have no weights
        rounded = ran(tmp_path, f"simulate {traces} --experts {experts} --capacity 0.25 --tokens 50")
        assert rounded["block_bytes"]["full"] == nbytes


def test_packed_sizes_need_the_checkpoint(quantised: str, tiny_traces: Any, capsys: pytest.CaptureFixture[str]) -> None:
    line = fails(capsys, "simulate", str(tiny_traces.folder), "--experts", "packed")
    assert "give --model" in line
