"""What every verdict keeps to, on lookups drawn at random; and what is refused."""

from __future__ import annotations

import pytest

from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.policies.miss import MISS
from expertcast.runtime.storage.layout import FULL, PRECISIONS, is_better
from tests.runtime.policies.miss.lookups import drawn, policy

TEXTS = [
    *MISS.names(),
    "fetch_lowest:levels=int8/int2",
    "fetch_priority:levels=int8/int4/int2,percentile=90",
    "cascade:levels=full/int2,important=2",
    "drop_cascade:fetched=1,minor=1",
    "substitute:tolerance=1",
]


@pytest.mark.parametrize("text", TEXTS)
def test_verdicts_on_random_lookups(text: str) -> None:
    chosen = policy(text, experts=12)
    levels = {FULL, *chosen.precisions}
    acted = 0
    for seed in range(400):
        made = drawn(seed)
        missing, needed = made.missing(), {expert for row in made.ids for expert in row}
        if not missing and all(made.held[expert] == FULL for expert in needed):
            continue
        verdict = chosen.decide(made)
        again = verdict.precision.keys() - missing
        assert again <= needed
        assert all(is_better(verdict.precision[expert], made.held[expert]) for expert in again)
        assert set(verdict.precision.values()) <= levels
        assert verdict.dropped <= missing
        assert verdict.substitute.keys() <= missing
        assert not verdict.dropped & (verdict.precision.keys() | verdict.substitute.keys())
        assert not verdict.substitute.keys() & verdict.precision.keys()
        for row in made.ids:
            run = [verdict.substitute.get(expert, expert) for expert in row if expert not in verdict.dropped]
            assert len(set(run)) == len(run), "one expert twice in a token"
            assert run, "a token without experts"
        assert made.held.keys() >= set(verdict.substitute.values())
        acted += bool(verdict.precision or verdict.dropped or verdict.substitute)
    assert acted == 0 if text == "fetch" else acted > 50


def test_what_the_store_must_hold() -> None:
    assert {text: policy(text).precisions for text in MISS.names()} == {
        "fetch": (),
        "fetch_lowest": ("int4",),
        "fetch_priority": ("int8", "int4"),
        "cascade": ("int4", "int2"),
        "drop": (),
        "drop_cascade": ("int4", "int2"),
        "substitute": (),
    }
    assert [text for text in MISS.names() if not policy(text).lossy] == ["fetch"]
    assert all(set(policy(text).precisions) <= set(PRECISIONS) for text in TEXTS)


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("fetch_lowest:levels=int3", "full/int8/int4/int2"),
        ("fetch_lowest:levels=", "1 to 4 of full/int8/int4/int2"),
        ("fetch_priority:levels=int4/int8", "best first"),
        ("fetch_priority:levels=int4/int4", "best first"),
        ("fetch_priority:levels=int4", "2 to 4 of full/int8/int4/int2"),
        ("fetch_priority:percentile=101", "0 to 100"),
        ("cascade:levels=full", "2 to 3 of full/int8/int4/int2"),
        ("cascade:levels=full/int8/int4/int2", "2 to 3 of full/int8/int4/int2"),
        ("cascade:important=0.1,minor=0.2", "0 <= minor <= important"),
        ("cascade:minor=-1", "0 <= minor <= important"),
        ("drop:fetched=0", "1 or more"),
        ("drop_cascade:fetched=0", "1 or more"),
        ("drop_cascade:minor=nan", "0 <= minor <= important"),
        ("substitute:tolerance=1.5", r"0 \(no loss of score\) to 1"),
        ("drop:ranks=2", "its options are fetched"),
        ("replace", "fetch, fetch_lowest, fetch_priority, cascade, drop, drop_cascade, substitute"),
    ],
)
def test_what_is_refused(text: str, allowed: str) -> None:
    with pytest.raises(ExpertcastError, match=allowed) as caught:
        MISS.choose(text)
    assert "\n" not in str(caught.value)
