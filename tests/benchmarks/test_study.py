"""The policy study end to end on a tiny model, going on where it stopped, and its judgements on rows made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.study import __main__ as benchmark_policies
from benchmarks.study import quality, study
from benchmarks.study.claims import CLAIMS, claims
from benchmarks.study.claims_eviction import literal_is_lru
from benchmarks.study.claims_forecast import forecast_closes
from benchmarks.study.claims_systems import drop_is_fastest
from benchmarks.study.findings import findings
from benchmarks.study.found import HELD, NOT, PART, UNKNOWN, Claim, Found, MissingRowError, verdict
from benchmarks.study.replay import replays

from expertcast.checkpoints.bundled import REFERENCE
from expertcast.data.models import load_tokenizer
from tests.families.models import tiny_model
from tests.runtime.simulation import made

KEYS = {
    "eviction", "prefetch", "miss", "routing", "scope", "slots", "capacity", "bandwidth", "hit_rate", "misses",
    "collisions", "bytes", "tpot_s", "perplexity", "agreement",
}  # fmt: skip
FIGURES = ("hit-rate", "tpot", "collisions", "pareto")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments of a run that has been through: traces, next_token, stages and quality of a model of four layers."""
    folder = tmp_path_factory.mktemp("study")
    tiny_model("qwen3_moe").save_pretrained(folder / "model")
    load_tokenizer(REFERENCE).save_pretrained(folder / "model")
    arguments = ["--quick", "--model", str(folder / "model"), "--data", REFERENCE, "--processes", "1"]
    arguments += ["--work", str(folder / "work"), "--out", str(folder / "out")]
    assert benchmark_policies.main(arguments) == 0
    return arguments


def out_of(run: list[str]) -> Path:
    return Path(run[-1])


def refuse(value: str) -> None:
    raise AssertionError(f"{value} in the JSON")


def test_everything_is_written(run: list[str]) -> None:
    text = (out_of(run) / "results" / "policies.json").read_text()
    result = json.loads(text, parse_constant=refuse)
    assert all(set(row) >= KEYS for row in result["results"])
    assert {row["stage"] for row in result["results"]} == {"headline", "eviction", "prefetch", "lossy", "presets"}
    assert {row["eviction"] for row in result["results"]} >= {"lru", "forecast", "forecast:idle_loads=0", "belady"}
    lossy = [row for row in result["results"] if row["miss"] == "drop"]
    assert all(row["perplexity"] > 1 and 0 < row["agreement"] <= 1 for row in lossy)
    assert result["skipped"]
    assert len(result["claims"]) == len(CLAIMS)
    assert result["replay"]
    for name in FIGURES:
        assert (out_of(run) / "results" / f"policies-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_page_says_what_the_rows_say(run: list[str]) -> None:
    result = json.loads((out_of(run) / "results" / "policies.json").read_text())
    page = (out_of(run) / "policies.md").read_text()
    assert "What was found" in page
    assert "its numbers mean nothing" in page
    for title in ("Evicting by forecast", "Published systems", "What held and what did not", "Left out"):
        assert f"## {title}\n" in page
    rows = [row for row in result["results"] if row["stage"] == "headline" and row["share"] == 0.25]
    hits = {row["eviction"]: f"{100 * row['hit_rate']:.1f}%" for row in rows}
    line = next(line for line in page.splitlines() if line.startswith("| 25% | `"))
    assert [hits["forecast:idle_loads=0"], hits["forecast"], hits["belady"]] == [
        line.split(" | ")[at] for at in (3, 5, 6)
    ]
    assert all(len(part) <= 130 or part.startswith(("|", "    ")) for part in page.splitlines())


def test_second_call_runs_nothing_again(run: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def again(*args: Any, **options: Any) -> None:
        pytest.fail("run again")

    page = (out_of(run) / "policies.md").read_text()
    monkeypatch.setattr(study, "sweep", again)
    monkeypatch.setattr(quality, "measure_policies", again)
    monkeypatch.setattr(benchmark_policies, "fit", again)
    monkeypatch.setattr("benchmarks.study.stages.replays", again)
    assert benchmark_policies.main(run) == 0
    assert (out_of(run) / "policies.md").read_text() == page


def test_other_tokens_are_another_study(run: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class AgainError(Exception):
        pass

    def again(*args: Any, **options: Any) -> None:
        raise AgainError

    monkeypatch.setattr(study, "sweep", again)
    with pytest.raises(AgainError):
        benchmark_policies.main([*run, "--tokens", "170"])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["missing"], "holds no traces"),
        (["--model", "other"], "give --data"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark_policies.main([*arguments, "--quick", "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--tokens", "--processes", "--quality-tokens"])
def test_counts_are_checked(option: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        benchmark_policies.main(["--out", str(tmp_path), option, "0"])


def headline(share: float, **misses: int) -> list[dict[str, Any]]:
    names = {"only": "forecast:idle_loads=0"}
    return [
        {
            "stage": "headline", "share": share, "eviction": names.get(name, name), "misses": count,
            "hit_rate": 1 - count / 1000,
        }
        for name, count in misses.items()
    ]  # fmt: skip


def judged(claim: Claim, rows: list[dict[str, Any]]) -> tuple[str, str]:
    found = claim.judged(Found({"results": rows, "replay": []}))
    return found["verdict"], found["measured"]


def test_half_of_the_gap() -> None:
    """At 10% lfu is the best classic policy: of its 500 misses 200 can be avoided, and 120 are; at 25% 30 of 100."""
    few = headline(0.10, lru=600, lfu=500, only=380, forecast=350, belady=300)
    many = headline(0.25, lru=250, lfu=260, only=220, forecast=100, belady=150)
    assert Found({"results": few}).closed(0.10, "forecast:idle_loads=0") == 0.6
    text, measured = judged(forecast_closes, few)
    assert (text, measured) == (HELD, "misses, evicting only: 10% 60.0% (lfu/forecast/belady 500/380/300)")
    assert judged(forecast_closes, many)[0] == NOT
    assert judged(forecast_closes, few + many)[0] == PART
    (forecast, classic) = findings({"results": few, "replay": []})
    assert "60.0% at 10% (hits 50.0% -> 62.0%, belady 70.0%)" in forecast
    assert "`lfu` at 10% (50.0%; lru 40.0%)" in classic


def lossy(miss: str, tpot_s: float) -> dict[str, Any]:
    return {"stage": "lossy", "share": 0.1, "miss": miss, "routing": "standard", "tpot_mean_s": tpot_s, "kl": 0.1}


def test_claim_that_did_not_hold() -> None:
    rows = [lossy("fetch", 0.030), lossy("drop", 0.020), lossy("cascade", 0.010)]
    assert judged(drop_is_fastest, rows) == (
        NOT,
        "fastest with standard routing: 10% cascade 10.0, drop 20.0, fetch 30.0 ms per token",
    )
    assert judged(drop_is_fastest, rows[:2])[0] == HELD


def test_claims_without_rows_are_unknown() -> None:
    unmeasured = [{**lossy("drop", 0.01), "kl": None}]
    assert judged(drop_is_fastest, unmeasured)[0] == UNKNOWN
    assert judged(literal_is_lru, headline(0.10, lru=1))[0] == UNKNOWN
    assert {claim["verdict"] for claim in claims({"results": [], "replay": []})} == {UNKNOWN}
    with pytest.raises(MissingRowError):
        verdict([])


def test_replay_by_hand() -> None:
    """One layer, two slots, K = 2, lru; the prefill leaves 0 and 1.

    Then 2 and 0 are needed. Together: 2 is missing and takes the slot of 1. One by one: 2 takes that of 0, which was
    used longer ago, and 0 is missing then. The last token needs the same two: nothing is missing.
    """
    trace = made.trace([[[0, 1]], [[2, 0]], [[2, 0]]], experts=3)
    (row,) = replays(trace, ["lru"], 2, "global")
    assert (row["misses"], row["misses_per_access"], row["inflation"]) == (1, 2, 1.0)
