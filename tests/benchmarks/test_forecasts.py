"""The grid of forecasts: trained predictors, a resumed file, the order of turns, and ratios of turns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.forecasts import main, sharing_copy
from benchmarks.forecasts_page import AUTO, ON_DEMAND, Compared

from expertcast.data.models import load_model
from expertcast.predictors.messages import Json
from expertcast.runtime.benchmarking.shapes import SHAPES, Shape

FIXED = ("quasi_hidden", "linear", "early_attention", "estimator")


def run_of(seconds: dict[str, list[float]], waited: float = 0.5) -> Json:
    """A setting whose sides took these seconds in their turns, `waited` of which was waiting."""
    sides = {
        name: {"seconds": own, "waited_s": [waited * value for value in own], "hit_rate": 0.5, "bytes": 7e3}
        for name, own in seconds.items()
    }
    setting = {"link": "2", "capacity": 0.25, "batch": 1, "accuracy": None}
    return {**setting, "bandwidth": 1e6, "repetitions": 1, "identical": True, "sides": sides}


def noisy_run(generator: np.random.Generator, repetitions: int = 1) -> Json:
    """A setting whose sides all take the same time, apart from independent noise of 10% in each turn.

    With several repetitions a side is faster or slower by another 4% in all turns of one, by its place in memory.
    """
    seconds = {}
    for name in (ON_DEMAND, *FIXED, AUTO):
        place = np.repeat(generator.normal(1.0, 0.04 if repetitions > 1 else 0.0, repetitions), 24 // repetitions)
        seconds[name] = [float(value) for value in place * generator.normal(1.0, 0.1, 24)]
    return run_of(seconds) | {"repetitions": repetitions}


def test_a_copy_shares_parameters_and_owns_modules() -> None:
    model = load_model("reference")
    copied = sharing_copy(model)
    assert copied.config is not model.config
    for (name, own), (other_name, other) in zip(model.named_modules(), copied.named_modules(), strict=True):
        assert name == other_name
        assert own is not other
    assert all(own is other for own, other in zip(model.parameters(), copied.parameters(), strict=True))


def test_ratios_are_of_the_same_turns() -> None:
    machine = [1.0, 5.0, 1.0, 2.0, 1.0, 1.0, 9.0, 1.0]  # it slows down for both sides
    auto = [0.9 * value for value in machine[:4]] + [0.5 * value for value in machine[4:]]
    compared = Compared(run_of({ON_DEMAND: machine, "linear": [2 * value for value in machine], AUTO: auto}))
    assert compared.best == ON_DEMAND
    first, later = compared.over(ON_DEMAND, compared.first), compared.over(ON_DEMAND, compared.later)
    assert first is not None
    assert later is not None
    assert [first.value, first.low, first.high] == pytest.approx([0.9] * 3)
    assert [later.value, later.low, later.high] == pytest.approx([0.5] * 3)
    whole = compared.over(ON_DEMAND)
    assert whole is not None
    assert whole.value == pytest.approx((0.9 * 9 + 0.5 * 12) / 21)
    assert whole.low < whole.value < whole.high
    assert compared.ms(AUTO) == pytest.approx(1e3 * sum(auto) / 8 / 10)


@pytest.mark.parametrize("repetitions", [1, 3])
def test_the_best_fixed_side_of_equal_ones_is_not_biased_low(repetitions: int) -> None:
    generator = np.random.default_rng(0)
    naive, apart = [], []
    for _ in range(200):
        compared = Compared(noisy_run(generator, repetitions))
        found = compared.over_best()
        assert found is not None
        apart.append(found.value)
        naive.append(compared.ms(AUTO) / compared.ms(compared.best))
    assert np.mean(naive) > 1.02
    assert abs(np.mean(apart) - 1) < 0.006


def test_intervals_hold_the_true_ratio_nine_times_in_ten() -> None:
    generator = np.random.default_rng(1)
    found = [Compared(noisy_run(generator)).over(ON_DEMAND) for _ in range(100)]
    inside = sum(ratio is not None and ratio.low <= 1 <= ratio.high for ratio in found)
    assert 80 <= inside <= 97


def test_steps_fill_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--allow-dirty", "--out", str(tmp_path / "grid.json"), "--new-tokens", "20"])
    assert "give a multiple of 11 from 22" in capsys.readouterr().err


@pytest.mark.slow
def test_settings_of_the_bundled_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, checkpoints = tmp_path / "grid.json", tmp_path / "checkpoints"
    words = ["--allow-dirty", "--out", str(out), "--checkpoints", str(checkpoints), "--train-tokens", "4000"]
    words += ["--new-tokens", "22", "--prompt-tokens", "16", "--links", "2", "--batches", "1", "2"]
    words += ["--repetitions", "2"]
    assert main([*words, "--capacities", "0.25"]) == 0
    kept = json.loads(out.read_text())["runs"]
    assert [run["batch"] for run in kept] == [1, 2]
    for run in kept:
        assert run["identical"]
        sides = run["sides"]
        assert list(sides) == [ON_DEMAND, *FIXED, AUTO]
        assert all(len(side[name]) == 4 for side in sides.values() for name in ("seconds", "waited_s", "first_s"))
        assert sides["estimator"]["hit_rate"] > sides[ON_DEMAND]["hit_rate"]
    assert "| 2 | 25% | 1 |  |" in capsys.readouterr().out
    assert main([*words, "--capacities", "0.25", "0"]) == 0
    runs = json.loads(out.read_text())["runs"]
    assert runs[:2] == kept
    assert [(run["capacity"], run["batch"]) for run in runs[2:]] == [(0.0, 1), (0.0, 2)]
    assert kept[0]["bandwidth"] > 0
    assert {run["bandwidth"] for run in runs} == {kept[0]["bandwidth"]}, "R = 1 is measured once for a file"


@pytest.mark.slow
@pytest.mark.parametrize(("link", "experts"), [("2", "expanded"), ("disk", "int4"), ("disk:5e8", "expanded")])
def test_a_shape_over_any_link(link: str, experts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    small |= {"vocab_size": 128, "num_experts": 16, "num_experts_per_tok": 2}
    monkeypatch.setitem(SHAPES, "small", Shape(hub_id="", model_type="olmoe", values=small))
    out = tmp_path / "grid.json"
    words = [
        "--allow-dirty",
        "--out",
        str(out),
        "--shape",
        "small",
        "--layers",
        "3",
        "--links",
        link,
        "--capacities",
        "0.25",
    ]
    words += ["--experts", experts]
    assert main([*words, "--new-tokens", "22", "--prompt-tokens", "4", "--accuracies", "1", "0.5"]) == 0
    runs = json.loads(out.read_text())["runs"]
    assert [run["accuracy"] for run in runs] == [1.0, 0.5]
    for run in runs:
        assert run["identical"]
        assert list(run["sides"]) == [ON_DEMAND, "always", AUTO]
        assert run["sides"]["always"]["hit_rate"] > run["sides"][ON_DEMAND]["hit_rate"]
