"""Routing within a budget: by hand, against the equation word by word, and over the routers of every family."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expertcast.predictors import ExpertcastError
from expertcast.predictors.routing_rule import renormalises
from expertcast.runtime.policies.routing import _counts
from tests.families.models import CONFIGS
from tests.runtime.policies.routing.made import logits, policy_of, routed, router_of

RENORMALISED = {"qwen3_moe", "mixtral", "gpt_oss", "glm4_moe_lite"}


@pytest.mark.parametrize(
    ("available", "counts"),
    [
        (0, [2, 1, 2]),  # 5 comes all the same, 0 is cached | 6 does not fit | 5 came with the first token, 1 is cached
        (1, [2, 1, 2]),  # 5 takes the slot
        (2, [2, 2, 2]),  # 6 takes the other
    ],
)
def test_tokens_share_the_slots_by_hand(available: int, counts: list[int]) -> None:
    assert _counts([[5, 0], [0, 6], [5, 1]], {0, 1}, available, 2) == counts


def test_one_token_by_hand() -> None:
    """Experts a..f by weight, cached b, d, e: misses after k experts are 1 1 2 2 2 3."""
    ranked, cached = [[0, 1, 2, 3, 4, 5]], {1, 3, 4}
    found = [_counts(ranked, set(cached), available, 6)[0] for available in range(4)]
    assert found == [2, 2, 5, 6]
    assert _counts(ranked, set(cached), 3, 4) == [4], "k_max"


@settings(max_examples=200, deadline=None)
@given(
    experts=st.integers(2, 10),
    cached=st.sets(st.integers(0, 9)),
    available=st.integers(0, 8),
    k_max=st.integers(1, 5),
    seed=st.integers(0, 1000),
)
def test_against_the_equation(experts: int, cached: set[int], available: int, k_max: int, seed: int) -> None:
    """k = max{k <= k_max : u(k) <= available}; without any, the first expert, which is loaded all the same."""
    generator = torch.Generator().manual_seed(seed)
    top_k = min(experts, 5)
    ranked = [torch.randperm(experts, generator=generator)[:top_k].tolist() for _ in range(3)]
    expected, there, left = [], set(cached), available
    for row in ranked:
        feasible = [
            k for k in range(1, min(k_max, top_k) + 1) if sum(expert not in there for expert in row[:k]) <= left
        ]
        if feasible:
            count = max(feasible)
        else:  # nothing is free and the first is missing: it is loaded, and what is there already runs with it
            count = 1
            while count < min(k_max, top_k) and row[count] in there:
                count += 1
        left = max(0, left - sum(expert not in there for expert in row[:count]))
        there.update(row[:count])
        expected.append(count)
    assert _counts(ranked, set(cached), available, k_max) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_enough_room_is_standard(family: str, dtype: torch.dtype) -> None:
    layer = router_of(family, dtype)
    policy = policy_of("budget", layer)
    for token in logits(layer, 20).split(1):
        assert policy.route(routed(layer, token, (), available=layer.top_k)) is None
        assert policy.route(routed(layer, token, range(8), available=0)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_weights_by_the_familys_rule(family: str, dtype: torch.dtype) -> None:
    """Nothing free: of two experts that are missing the heavier one runs, with all of the weight where weights sum to a
    constant, with its own elsewhere. Tokens that keep both keep their weights to the bit."""
    layer = router_of(family, dtype)
    assert renormalises(layer) == (family in RENORMALISED)
    given = routed(layer, logits(layer, 30), {0, 1, 2, 3})
    policy = policy_of("budget", layer)
    changed = policy.route(given)
    assert changed is not None
    ids_TK, weights_TK = changed
    assert torch.equal(ids_TK, given.ids_TK)
    assert weights_TK.dtype == given.weights_TK.dtype
    dropped = (weights_TK == 0).sum(dim=-1)
    assert set(dropped.tolist()) == {0, 1}
    for token, count in enumerate(dropped.tolist()):
        own_K, got_K = given.weights_TK[token], weights_TK[token]
        if not count:
            assert torch.equal(got_K, own_K)
        else:
            heaviest = int(own_K.argmax())
            assert got_K.count_nonzero() == 1
            expected = own_K.sum() if family in RENORMALISED else own_K[heaviest]
            torch.testing.assert_close(got_K[heaviest], expected)


def test_k_max() -> None:
    """Two experts by weight .7 and .3, one allowed."""
    layer = router_of("qwen2_moe")
    given = routed(layer, torch.tensor([[0.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]]), range(8), available=8)
    changed = policy_of("budget:k_max=1", layer).route(given)
    assert changed is not None
    assert given.ids_TK[0, changed[1][0] > 0].tolist() == [1]
    assert policy_of("budget:k_max=none", layer).route(given) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("budget:k_max=0", "k_max=0: give 1 or more experts, or none for the model's K"),
        ("budget:k_max=3", "k_max=3: a token has 2 experts, give 1 to 2"),
        ("budget:slots=3", "its options are k_max"),
    ],
)
def test_bad_values(text: str, message: str) -> None:
    with pytest.raises(ExpertcastError) as caught:
        policy_of(text, router_of("mixtral"))
    assert message in str(caught.value)
