"""`expertcast simulate` with experts on a disk: rows, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expertcast.cli import main
from expertcast.data.traces import TraceDataset
from tests.package.test_cli import fails


def test_codecs_beside_each_other(
    capsys: pytest.CaptureFixture[str], reference_traces: TraceDataset, tmp_path: Path
) -> None:
    """Misses do not change with the codec; a slow disk is waited for less when it reads fewer bytes, and least when
    memory holds parts of them."""
    rows, words = [], ["simulate", str(reference_traces.folder), "--tokens", "200", "--processes", "1"]
    disk = ["--bandwidth", "2e7", "--slots", "60", "--layer-time", "1e-4"]
    for more in (
        ["raw"],
        ["bitsplit", "--decode-rate", "4e9"],
        ["bitsplit", "--decode-rate", "4e9", "--pools", "C=9MB"],
    ):
        result = tmp_path / "result.json"
        assert main([*words, *disk, "--json", str(result), "--codec", *more]) == 0
        rows += json.loads(result.read_text())["results"]
    raw, coded, pooled = rows
    assert raw["misses"] == coded["misses"] > 0
    assert [row["eviction"] for row in rows] == ["lru", "lru", "pooled"]
    assert [row["codec"] for row in rows] == ["raw", "bitsplit", "bitsplit"]
    assert pooled["pools"] == "C=9000000"
    assert raw["read_per_step"] == raw["bytes_per_step"]
    assert coded["read_per_step"] == pytest.approx(0.68 * raw["read_per_step"], rel=1e-3)
    assert pooled["read_per_step"] < coded["read_per_step"]
    assert raw["tpot_s"] > coded["tpot_s"] > pooled["tpot_s"]
    printed = capsys.readouterr().out
    assert "MB read" in printed
    assert "C=9000000" in printed


def test_what_is_refused(capsys: pytest.CaptureFixture[str], reference_traces: TraceDataset) -> None:
    words = ("simulate", str(reference_traces.folder))
    assert "--pools, --decoders: of compressed" in fails(capsys, *words, "--pools", "C=1MB", "--decoders", "2")
    assert "--stored: of compressed" in fails(capsys, *words, "--codec", "raw", "--stored", "0.7")
    assert "give .5 to 1" in fails(capsys, *words, "--codec", "bitsplit", "--stored", "0.4")
    assert "choose from raw, bitsplit" in fails(capsys, *words, "--codec", "int8")
    assert "unknown codec 'zip'" in fails(capsys, *words, "--codec", "zip")
    assert "such as 'C=2GB" in fails(capsys, *words, "--codec", "bitsplit", "--pools", "F=1MB")
    pools = ("--codec", "bitsplit", "--pools", "C=1MB")
    assert "pools decide what stays in a slot" in fails(capsys, *words, *pools, "--policy", "lfu")
    assert "'much' is no size" in fails(capsys, *words, "--codec", "bitsplit", "--pools", "C=much")
