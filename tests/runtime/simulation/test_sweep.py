"""Sweeps: cases that run, cases that are skipped, and results that do not depend on the number of processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expertcast.predictors import ExpertcastError, ModelShape
from expertcast.runtime.policies import EVICTION, Policies
from expertcast.runtime.simulation.figures import hit_rates, labelled, write_figures
from expertcast.runtime.simulation.machine import Case, table
from expertcast.runtime.simulation.sweep import EXACT, slots_of, sweep, with_bounds
from tests.runtime.simulation import made

KEYS = {
    "eviction", "prefetch", "miss", "routing", "pre_eviction", "scope", "slots", "capacity", "bandwidth", "hit_rate",
    "misses", "collisions", "bytes", "tpot_s", "ttft_s", "perplexity", "agreement",
}  # fmt: skip


def cases(*slots: int, **policies: str) -> list[Case]:
    evictions = [Policies(eviction=name, **policies) for name in ("lru", "lfu")]
    return [
        Case(policies=each, slots=count, machine=made.machine(3, layer_s=layer_s))
        for count in slots
        for layer_s in (2.0, 8.0)
        for each in evictions
    ]


def test_result_does_not_depend_on_processes() -> None:
    work, wanted = made.random_trace(3, tokens=30), with_bounds(cases(4, 9))
    one, two = (sweep(work, wanted, processes=count) for count in (1, 2))
    for row in (*one["results"], *two["results"]):
        row.pop("policy_s")  # measured, so it differs
    assert two == one
    assert len(one["results"]) == 8 + 4
    assert all(set(row) >= KEYS for row in one["results"])
    json.dumps(one, allow_nan=False)


def test_belady_is_on_top() -> None:
    found = sweep(made.random_trace(5), with_bounds(cases(4, 9)), processes=1)["results"]
    for slots in (4, 9):
        misses = {row["eviction"]: row["misses"] + row["prefill"]["misses"] for row in found if row["slots"] == slots}
        assert misses["belady"] <= min(misses["lru"], misses["lfu"])


def test_too_small_is_left_out() -> None:
    found = sweep(made.random_trace(0), [*cases(1), *cases(5), *cases(5, scope="layer")], processes=1)
    assert [row["slots"] for row in found["results"]] == [5] * 4
    reasons = [row["reason"] for row in found["skipped"]]
    assert reasons[0] == "slots=1 is fewer than the 2 experts one token needs: give slots=2 or more"
    assert "slots=5 leave 1 for each of 3 layers" in reasons[-1]
    assert len(reasons) == 8


def test_belady_and_lossy_policies_do_not_go_together() -> None:
    bad = Case(policies=Policies(eviction="belady", miss="drop"), slots=5, machine=made.machine(3))
    found = sweep(made.random_trace(0), [bad], processes=1)
    assert found["results"] == []
    assert "lossy policies change them" in found["skipped"][0]["reason"]


def test_capacity_is_a_share_of_bytes() -> None:
    """The number of slots is floor(share x experts); 0.29 x 100 is 28.999... in binary, and 29 experts."""
    shape = ModelShape(layers=10, experts=10, top_k=2, hidden=4)
    assert [slots_of(share, shape) for share in (0.01, 0.29, 0.299, 1.0)] == [1, 29, 29, 100]
    for share in (0.0, 1.5):
        with pytest.raises(ExpertcastError, match="give the share of all experts that fits"):
            slots_of(share, shape)


def test_quality_is_asked_for_lossy_policies(tmp_path: Path) -> None:
    """Quality is measured once, not again for the second machine."""
    asked: list[Mapping[str, Case]] = []

    def quality(wanted: Mapping[str, Case]) -> dict[str, dict[str, float]]:
        asked.append(wanted)
        known = {name: {"perplexity": 11.0, "agreement": 0.9, "kl": 0.1} for name in wanted}
        return {**known, EXACT: {"perplexity": 10.0, "agreement": 1.0, "kl": 0.0}}

    trace, wanted = made.random_trace(2), [*cases(5), *cases(5, miss="drop")]
    rows = sweep(trace, wanted, processes=1, quality=quality)["results"]
    assert [len(names) for names in asked] == [2]
    assert [(row["perplexity"], row["agreement"]) for row in rows] == [(10.0, 1.0)] * 4 + [(11.0, 0.9)] * 4
    plain = sweep(trace, cases(5, miss="drop"), processes=1)["results"]
    assert {row["perplexity"] for row in plain} == {None}


def test_quality_is_measured_for_lossy_policies_and_once_for_all_others() -> None:
    lossy = Case(policies=Policies(miss="drop"), slots=4, machine=made.machine(3))
    exact = replace(lossy, policies=Policies())

    def quality(wanted: Mapping[str, Case]) -> dict[str, dict[str, float]]:
        assert list(wanted.values()) == [lossy]
        return {EXACT: {"perplexity": 5.0}, **{key: {"perplexity": 6.0} for key in wanted}}

    work = made.random_trace(3)
    found = sweep(work, [lossy, exact], processes=1, quality=quality)["results"]
    assert [row["perplexity"] for row in found] == [6.0, 5.0]


def test_figures_are_written(tmp_path: Path) -> None:
    found = sweep(made.random_trace(2), with_bounds(cases(3, 6, 12)), processes=1)["results"]
    paths = write_figures(found, tmp_path)
    assert [path.name for path in paths] == ["hit_rate.png", "tpot.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
    labels = [row["label"] for row in labelled(found)]
    assert set(labels) == {"lru", "lfu", "belady"}


def test_labels_say_what_differs() -> None:
    work = made.random_trace(2)
    found = sweep(work, [*cases(6), *cases(6, scope="layer")], processes=1)["results"]
    assert list(dict.fromkeys(row["label"] for row in labelled(found))) == [
        "lru, global", "lfu, global", "lru, layer", "lfu, layer",
    ]  # fmt: skip


def named(**hits: tuple[float, ...]) -> list[dict[str, Any]]:
    """Rows of policies by name, with these hits at capacities 10%, 20%, ..."""
    common = {"bandwidth": 1e9, "scope": "global", "tpot_s": 1.0}
    return [
        {**common, "eviction": name, "capacity": 0.1 * (index + 1), "hit_rate": value}
        for name, values in hits.items()
        for index, value in enumerate(values)
    ]


def drawn(figure: Any) -> dict[str, list[float]]:
    """The lines of a figure's first axes under the names of its legend, in the same order."""
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    return dict(zip(names, (list(line.get_ydata()) for line in figure.axes[0].get_lines()), strict=True))


def test_lines_differ() -> None:
    names = [*EVICTION.names(), "score:decay=0.5"]
    figure = hit_rates(named(**{name: (0.1 * index, 0.08 * index) for index, name in enumerate(names)}))
    lines = figure.axes[0].get_lines()
    assert drawn(figure)["lfu"] == [0.1 * names.index("lfu"), 0.08 * names.index("lfu")]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(names)


def test_table_leaves_out_what_nobody_chose() -> None:
    found = sweep(made.random_trace(2), cases(6), processes=1)["results"]
    heading, *rows = table(found)
    assert heading[:3] == ("eviction", "slots", "capacity")
    assert len(rows) == 4
    heading = table(sweep(made.random_trace(2), cases(6, miss="drop"), processes=1)["results"])[0]
    assert heading[:3] == ("eviction", "miss", "slots")
