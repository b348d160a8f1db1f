"""Miss policies: verdicts by hand, their properties, and slots that hold lower precisions."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from expertcast import OffloadedModel, offload
from expertcast.runtime.links.emulated import EmulatedLink
from expertcast.runtime.policies import PRESETS, Policies
from expertcast.runtime.policies.base import CacheShape
from expertcast.runtime.policies.miss import MISS, Lookup, MissDecision, MissPolicy
from expertcast.runtime.storage.layout import FULL, PRECISIONS, is_better
from expertcast.runtime.storage.slots import SlotState
from tests.families.models import tiny_model

# Lookups made by hand and drawn at random


def policy(text: str, *, experts: int = 8, top_k: int = 4) -> MissPolicy:
    return MISS.choose(text).make(CacheShape(layers=4, experts=experts, top_k=top_k, slots=12))


def lookup(
    ids: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]],
    held: Mapping[int, str],
    *,
    free: int = 0,
    probabilities: Sequence[Sequence[float]] = (),
) -> Lookup:
    return Lookup(layer=0, ids=ids, weights=weights, probabilities=lambda: probabilities, held=held, free=free)


def drawn(seed: int, *, experts: int = 12, top_k: int = 4) -> Lookup:
    """Some tokens' routing as a softmax over random logits gives it, and any content of the cache."""
    draw = random.Random(seed)
    rows = [[draw.expovariate(1.0) ** 3 for _ in range(experts)] for _ in range(draw.choice((1, 1, 2, 5)))]
    probabilities = [[value / sum(row) for value in row] for row in rows]
    ids = [sorted(range(experts), key=lambda expert: -row[expert])[:top_k] for row in probabilities]
    weights = [[row[expert] for expert in chosen] for row, chosen in zip(probabilities, ids, strict=True)]
    held = {
        expert: draw.choice((FULL, FULL, *PRECISIONS))
        for expert in draw.sample(range(experts), draw.randint(0, experts))
    }
    return lookup(ids, weights, held, free=draw.choice((0, 0, 2, 50)), probabilities=probabilities)


# Exact verdicts on lookups worked out by hand
#
# One token, K=4: its experts 0..3 have weights .4 .3 .2 .1, so shares of 4 x that = 1.6 1.2 0.8 0.4 (mean 1).


IDS = [[0, 1, 2, 3]]
WEIGHTS = [[0.4, 0.3, 0.2, 0.1]]


def test_shares_do_not_depend_on_the_scale_of_the_weights() -> None:
    """The second token's weights 3 1 sum to 4: parts 3/4 and 1/4, times K=2. Expert 5's best is the first token's."""
    found = lookup([[5, 6], [7, 5]], [[0.6, 0.4], [3.0, 1.0]], {}).shares()
    assert found == pytest.approx({5: 1.2, 6: 0.8, 7: 1.5})


def test_fetch() -> None:
    assert policy("fetch").decide(lookup(IDS, WEIGHTS, {0: "full"})) == MissDecision()


def test_fetch_lowest() -> None:
    """1 and 3 are missing; 2 is held as int2, which is below the lowest level, and stays."""
    found = policy("fetch_lowest").decide(lookup(IDS, WEIGHTS, {0: "full", 2: "int2"}))
    assert found == MissDecision(precision={1: "int4", 3: "int4"})
    assert policy("fetch_lowest:levels=int8/int4/int2").precisions == ("int2",)


def test_cascade() -> None:
    """Shares 1.6 1.2 0.8 0.4 against 1 and 0.5. 0 is held in full; 1 as int4 and deserves full; 2 and 3 are missing."""
    cascade = policy("cascade:minor=0.5")
    assert cascade.precisions == ("int4", "int2")
    found = cascade.decide(lookup(IDS, WEIGHTS, {0: "full", 1: "int4"}))
    assert found == MissDecision(precision={1: "full", 2: "int4", 3: "int2"})
    # 3 is held better than it deserves, 2 worse
    found = cascade.decide(lookup(IDS, WEIGHTS, {0: "full", 1: "full", 2: "int2", 3: "int4"}))
    assert found == MissDecision(precision={2: "int4"})


def test_cascade_takes_the_best_of_several_tokens() -> None:
    """Expert 3 has share 0.4 with the first token and 1.6 with the second."""
    found = policy("cascade").decide(lookup([*IDS, [3, 4, 5, 6]], WEIGHTS * 2, dict.fromkeys((0, 1, 2, 4, 5), "full")))
    assert found == MissDecision(precision={3: "full", 6: "int4"})


def test_cascade_with_two_levels() -> None:
    """HOBBIT's int2 for int8: below the mean everything gets the second."""
    cascade = policy("cascade:levels=int8/int2")
    assert cascade.decide(lookup(IDS, WEIGHTS, {})) == MissDecision(
        precision={0: "int8", 1: "int8", 2: "int2", 3: "int2"}
    )


def test_drop() -> None:
    """Ranks 0..3; 1 and 3 are missing, and 3 is beyond the two that are always fetched."""
    assert policy("drop").decide(lookup(IDS, WEIGHTS, {0: "full", 2: "full"})) == MissDecision(dropped={3})
    assert policy("drop:fetched=1").decide(lookup(IDS, WEIGHTS, {0: "full", 2: "full"})) == MissDecision(dropped={1, 3})
    # the second token has 3 as its second: fetched for both
    assert policy("drop").decide(lookup([*IDS, [4, 3, 5, 6]], WEIGHTS * 2, {0: "full"})) == MissDecision(
        dropped={2, 5, 6}
    )
    assert policy("drop").precisions == ()


def test_drop_cascade() -> None:
    """1 (share 1.2) is held as int2 and deserves full; 2 is held as it should be; 3 is missing, of rank 3."""
    found = policy("drop_cascade").decide(lookup(IDS, WEIGHTS, {0: "full", 1: "int2", 2: "int4"}))
    assert found == MissDecision(precision={1: "full"}, dropped={3})
    # 1 is missing with rank 1: fetched, in the precision of a share of 1.2 against 1.5
    found = policy("drop_cascade:important=1.5").decide(lookup(IDS, WEIGHTS, {0: "full"}))
    assert found == MissDecision(precision={1: "int4"}, dropped={2, 3})


def test_substitute() -> None:
    """1 and 3 are missing. Held and not chosen: 4 (.10) and 5 (.04); 6 is not held.

    1 (.25) comes first: it would need .125. 3 (.08) would need .04: 4, the likeliest, is free to take.
    """
    probabilities = [[0.3, 0.25, 0.15, 0.08, 0.10, 0.04, 0.07, 0.01]]
    held = {0: "full", 2: "full", 4: "int4", 5: "full"}
    made = lookup(IDS, WEIGHTS, held, probabilities=probabilities)
    assert policy("substitute").decide(made) == MissDecision(substitute={3: 4})
    # with 0.6 of the score to lose, 1 needs .10 and takes 4; for 3, which needs .032, 5 is left
    assert policy("substitute:tolerance=0.6").decide(made) == MissDecision(substitute={1: 4, 3: 5})
    assert policy("substitute:tolerance=0").decide(made) == MissDecision(substitute={3: 4}), "4 scores above 3"


def test_substitute_for_two_tokens() -> None:
    """K=2. Both tokens chose 1, which is missing; 2 is held, but the second token runs it already.

    Mean probabilities: 1 (.3 + .4) / 2 = .35, 3 (.2 + .2) / 2 = .2, which is over half of it.
    """
    probabilities = [[0.4, 0.3, 0.1, 0.2], [0.0, 0.4, 0.4, 0.2]]
    made = lookup([[0, 1], [1, 2]], [[0.5, 0.5]] * 2, {0: "full", 2: "full", 3: "full"}, probabilities=probabilities)
    assert policy("substitute", experts=4, top_k=2).decide(made) == MissDecision(substitute={1: 3})


def test_no_scores_are_read_where_nothing_is_missing() -> None:
    made = lookup(IDS, WEIGHTS, dict.fromkeys(range(4), "int8"))
    made.probabilities = lambda: pytest.fail("costs a copy to the host")
    assert policy("substitute").decide(made) == MissDecision()


# Properties of all decisions, on random lookups; and refused options


TEXTS = [
    *MISS.names(),
    "fetch_lowest:levels=int8/int2",
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
        "cascade": ("int4", "int2"),
        "drop": (),
        "drop_cascade": ("int4", "int2"),
        "substitute": (),
    }
    assert [text for text in MISS.names() if not policy(text).lossy] == ["fetch"]
    assert all(set(policy(text).precisions) <= set(PRECISIONS) for text in TEXTS)


# What lies in the slots after a run whose misses came in several precisions


def _expected(offloaded: OffloadedModel, key: int, precision: str) -> Tensor:
    """uint8 [block_bytes]: the expert's block in full, or expanded from its copy."""
    store = offloaded.store
    if precision == FULL:
        return store.block(key)
    block = torch.zeros(store.layout.block_bytes, dtype=torch.uint8)
    packed = store.copies(precision)
    packed.layout.expand(packed.block(key), block)
    return block


@pytest.mark.parametrize(
    ("miss", "family", "cache"),
    [
        ("fetch_lowest:levels=int2", "gpt_oss", True),
        ("fetch_lowest:levels=int2", "qwen3_moe", False),
        ("cascade", "gpt_oss", True),
        ("cascade", "qwen3_moe", False),
        ("drop_cascade", "phimoe", True),
    ],
)
def test_slots_hold_what_the_books_say(miss: str, family: str, cache: bool) -> None:
    """Every slot holds the full block of its expert, or the expansion of its copy, in the recorded precision.

    Copies of forecasts (full) and of misses (any precision) arrive in any order, are dropped, promoted, and noticed by
    a wait or a sweep; prefill runs in chunks.
    """
    model = tiny_model(family)
    link = EmulatedLink(2e9, jitter=2e-4, seed=3)
    seen: dict[str, int] = {}
    options = {"predictor": "router_input", "forecasts": "always", "slots": 7, "link": link, "cache": cache}
    with offload(model, policies=Policies(miss=miss), **options) as offloaded:
        residency, pool, layout = offloaded.residency, offloaded.pool, offloaded.store.layout
        model.generate(torch.arange(1, 20)[None], max_new_tokens=6, do_sample=False)
        for step in range(5):
            model.generate(torch.tensor([[7 * step + 1, 3 * step + 2]]), max_new_tokens=4, do_sample=False)
            for layer in range(offloaded.store.layers):
                for expert, precision in residency.held(layer).items():
                    key = layer * offloaded.store.experts + expert
                    slot = pool.slots[key]
                    if pool.state(slot) is SlotState.LOADING:
                        continue
                    seen[precision] = seen.get(precision, 0) + 1
                    expected = _expected(offloaded, key, precision)
                    for field in layout.fields:
                        part = slice(field.offset, field.offset + field.nbytes)
                        assert torch.equal(pool.block(slot)[part], expected[part]), (key, precision, field.name)
        if cache:
            assert link.bytes_moved < link.copies * layout.block_bytes, "no copy was packed"
            assert len(seen) > 1, seen


@pytest.fixture
def only_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine takes values from the device by `LayerFlow.read` only, which moves the link meanwhile."""
    tolist = torch.Tensor.tolist

    def spied(tensor: Tensor) -> object:
        caller = sys._getframe(1).f_code
        assert not caller.co_filename.endswith("engine/engine.py") or caller.co_qualname.startswith("LayerFlow.read")
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", spied)


@pytest.mark.usefixtures("only_read")
@pytest.mark.parametrize("preset", ["specmd_2", "activeevict", "moe_apex"])
def test_values_are_read_while_the_link_goes_on(preset: str) -> None:
    model, policies = tiny_model("qwen3_moe"), PRESETS[preset].policies
    with offload(model, slots=10, predictor="next_norm", policies=policies) as offloaded:
        offloaded.generate(torch.arange(6).unsqueeze(0), max_new_tokens=4)
