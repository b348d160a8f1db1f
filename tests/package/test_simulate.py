"""Policies, machines and disks of `expertcast simulate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from expertcast.cli import main
from expertcast.commands.numbers import BANDWIDTHS
from expertcast.commands.simulate import MachineOptions, PolicyOptions, cases_of
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError
from expertcast.runtime.simulation.machine import Case
from expertcast.runtime.storage.layout import BlockLayout
from expertcast.runtime.storage.packed import PackedLayout
from tests.package.test_cli import fails
from tests.training.synthetic import tiny_view

NAMES = {"router_input": "router_input"}


def cases(policies: PolicyOptions, **given: object) -> list[Case]:
    speeds = given.pop("bandwidth", ())
    options = MachineOptions(bandwidth=speeds)  # type: ignore[arg-type]
    places = {"slots": (), "shares": (), **given}
    chosen = list(policies.chosen((), ["lru"]))
    return cases_of(chosen, tiny_view(), options, names=NAMES, **places)  # type: ignore[arg-type]


def test_presets_run_at_their_published_settings_where_that_is_asked_for() -> None:
    """5% of the experts, in 4 bits, over 5 GB/s; a policy beside them runs as always."""
    view = tiny_view()
    layout, everything = BlockLayout.of(view), view.shape.layers * view.shape.experts
    own, policy = cases(PolicyOptions(preset=("specmd_1",), policy=("lru",), published=True))
    assert own.slots == int(0.05 * everything)
    assert (own.machine.bandwidth, own.machine.base) == (5e9, "int4")
    assert own.machine.block_bytes["full"] == PackedLayout.of(layout, "int4").block_bytes < layout.block_bytes
    assert policy.slots == int(0.25 * everything)
    assert (policy.machine.bandwidth, policy.machine.base) == (BANDWIDTHS["pcie4"], "full")
    (plain,) = cases(PolicyOptions(preset=("specmd_1",)))
    assert (plain.slots, plain.machine.block_bytes["full"]) == (policy.slots, layout.block_bytes)


def test_what_is_given_wins_over_what_was_published() -> None:
    both = PolicyOptions(preset=("specmd_1", "specmd_3"), published=True)
    assert [case.slots for case in cases(both, slots=(9, 12))] == [9, 9, 12, 12]
    half = tiny_view().shape.layers * tiny_view().shape.experts // 2
    assert [case.slots for case in cases(both, shares=(0.5,))] == [half, half]
    for case in cases(both, bandwidth=(2e9,)):
        assert (case.machine.bandwidth, case.machine.base) == (2e9, "int4")


def test_no_copy_is_larger_than_the_base() -> None:
    """specmd_3 loads less important experts in fewer bits: of 4-bit experts, int4 is what they are and int2 is less."""
    (case,) = cases(PolicyOptions(preset=("specmd_3",), published=True))
    sizes = case.machine.block_bytes
    assert sizes["int4"] == sizes["full"] > sizes["int2"]


def test_presets_without_published_settings_are_refused() -> None:
    with pytest.raises(ExpertcastError, match="'activeevict' was published without capacity"):
        list(PolicyOptions(preset=("activeevict",), published=True).chosen((), ["lru"]))
    with pytest.raises(ExpertcastError, match="give --preset"):
        list(PolicyOptions(published=True).chosen((), ["lru"]))


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
