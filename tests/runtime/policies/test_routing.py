"""Routing policies: cache-aware routing and the budget, by hand and against their equations."""

from __future__ import annotations

import itertools
from collections.abc import Collection

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors.view import MoELayer, renormalises, weights_over
from expertcast.runtime.policies.base import CacheShape
from expertcast.runtime.policies.routing import ROUTING, RouterOutput, RoutingPolicy, _counts
from tests.families.models import CONFIGS, tiny_model

# Routers of every family, and their routing


def router_of(family: str, dtype: torch.dtype = torch.float32) -> MoELayer:
    return find_moe_layers(tiny_model(family, dtype))[0]


def routed(layer: MoELayer, logits_TE: Tensor, cached: Collection[int], available: int = 0) -> RouterOutput:
    ids_TK, weights_TK = layer.route(logits_TE)
    return RouterOutput(
        layer=layer,
        logits_TE=logits_TE,
        ids_TK=ids_TK,
        weights_TK=weights_TK,
        cached=cached,
        available=available,
        read=lambda *tensors: [tensor.tolist() for tensor in tensors],
    )


def logits(layer: MoELayer, tokens: int, seed: int = 0) -> Tensor:
    """Return the logits of the layer's own router."""
    hidden_TD = torch.randn(tokens, layer.hidden_size, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return layer.router_logits(hidden_TD.to(next(layer.router.parameters()).dtype))


def policy_of(text: str, layer: MoELayer) -> RoutingPolicy:
    shape = CacheShape(layers=4, experts=layer.num_experts, top_k=layer.top_k, slots=16)
    return ROUTING.choose(text).make(shape)


def rerouted(text: str, given: RouterOutput) -> tuple[Tensor, Tensor]:
    """Return the ids and weights that the policy executes; a copy if it keeps the routing."""
    changed = policy_of(text, given.layer).route(given)
    assert changed is not None
    return changed


# Cache-aware routing: by hand, and over the routers of every family


ROW = torch.tensor([[4.0, 3.0, 2.5, 2.0, 1.0, 0.0, 0.0, 0.0]])
"""Range 4. Experts 0 and 1 are chosen."""


def _sets(ids_TK: Tensor) -> list[set[int]]:
    return [set(row) for row in ids_TK.tolist()]


@pytest.mark.parametrize(
    ("strength", "cached", "chosen"),
    [
        (0.1, {2}, {0, 1}),  # 2.5 + .4 < 3
        (0.2, {2}, {0, 2}),  # 2.5 + .8 > 3
        (0.2, {3}, {0, 1}),  # 2.0 + .8 < 3
        (0.2, {1, 2}, {0, 1}),  # both rise
        (0.3, {2, 3}, {0, 2}),  # 3.7 and 3.2
        (0.7, {3, 4}, {0, 3}),  # 4.8 and 3.8: expert 0 stays all the same
    ],
)
def test_by_hand(strength: float, cached: set[int], chosen: set[int]) -> None:
    layer = router_of("mixtral")
    given = routed(layer, ROW, cached)
    ids_TK, weights_TK = rerouted(f"cache_aware:strength={strength}", given)
    assert _sets(ids_TK) == [chosen]
    scores_K = ROW[0, ids_TK[0]].exp()
    torch.testing.assert_close(weights_TK[0], scores_K / scores_K.sum())


def test_how_many_are_kept() -> None:
    """A bonus above everything, all but 0 and 1 on the device."""
    layer = router_of("mixtral")
    for keep, chosen in ((0, {2, 3}), (1, {0, 2}), (2, {0, 1})):
        changed = rerouted(f"cache_aware:strength=9,keep={keep}", routed(layer, ROW, range(2, 8)))
        assert _sets(changed[0]) == [chosen]


def test_the_range_is_a_running_mean_of_its_layer() -> None:
    """Expert 4 is cached, .4 of delta is its bonus. Ranges 4, 12, 4: deltas 4, 8, 6.67.

    1 + 1.6 < 3; 3 + 3.2 < 9; 1 + 2.67 > 3. Another layer starts at 4 again.
    """
    first, other, *_ = find_moe_layers(tiny_model("mixtral", torch.float32))
    policy = policy_of("cache_aware:strength=0.4", first)

    def chosen(layer: MoELayer, row: Tensor) -> set[int]:
        changed = policy.route(routed(layer, row, {4}))
        assert changed is not None
        return _sets(changed[0])[0]

    assert chosen(first, ROW) == {0, 1}
    assert chosen(first, 3 * ROW) == {0, 1}
    assert chosen(first, ROW) == {0, 4}
    assert chosen(other, ROW) == {0, 1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_no_strength_changes_nothing(family: str, dtype: torch.dtype) -> None:
    layer = router_of(family, dtype)
    given = routed(layer, logits(layer, 40), {0, 3, 5})
    changed = rerouted("cache_aware:strength=0", given)
    assert torch.equal(changed[0], given.ids_TK)
    assert torch.equal(changed[1], given.weights_TK)
    assert changed[1].dtype == given.weights_TK.dtype


def _most_cached(family: str, layer: MoELayer, guard: int, cached: set[int]) -> int:
    """Most cached experts that a token's K can hold beside the guarded one, by what the family's rule may choose."""
    group = {expert // 4 for expert in range(layer.num_experts)}
    pools = [set(range(4 * number, 4 * number + 4)) for number in group] if family == "deepseek_v2" else [
        set(range(layer.num_experts))
    ]  # fmt: skip
    return max(
        len(cached.intersection(choice))
        for pool in pools
        for choice in itertools.combinations(sorted(pool), layer.top_k)
        if guard in choice
    )


@pytest.mark.parametrize("strength", [5.0, 1e6])
@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_a_huge_strength_chooses_what_is_cached(family: str, strength: float) -> None:
    """All but the guarded expert come from the device where the rule allows it, with the original logits' weights."""
    layer = router_of(family)
    if family == "glm4_moe_lite":  # a correction bias may weigh more than any logit: see the test after this one
        layer.router.e_score_correction_bias.zero_()
    cached = {1, 4, 6}
    given = routed(layer, logits(layer, 60), cached)
    ids_TK, weights_TK = rerouted(f"cache_aware:strength={strength}", given)
    expected_TK = weights_over(layer, given.logits_TE, ids_TK)
    differs = 0
    for token, (ids, own) in enumerate(zip(ids_TK.tolist(), given.ids_TK.tolist(), strict=True)):
        guard = own[int(given.weights_TK[token].argmax())]
        assert guard in ids
        assert len(set(ids)) == layer.top_k
        assert len(cached.intersection(ids)) == _most_cached(family, layer, guard, cached)
        if set(ids) == set(own):
            assert torch.equal(weights_TK[token], given.weights_TK[token])
        else:
            torch.testing.assert_close(weights_TK[token], expected_TK[token])
            differs += 1
    assert differs > 20
    assert (weights_TK > 0).all()


def test_the_guard_holds_against_a_correction_bias() -> None:
    """A bias of 5 on three experts: sigmoid scores lie under 1, so the rule takes them whatever the logits say."""
    layer = router_of("glm4_moe_lite")
    layer.router.e_score_correction_bias.zero_()
    given = routed(layer, logits(layer, 40), {2})
    layer.router.e_score_correction_bias[5:] = 5.0
    changed = rerouted("cache_aware:strength=0.3", given)
    for ids, own, weights in zip(changed[0].tolist(), given.ids_TK.tolist(), given.weights_TK.tolist(), strict=True):
        assert own[weights.index(max(weights))] in ids
        assert len(set(ids)) == 2


def test_among_cached_experts_the_logits_decide() -> None:
    """However large the bonus: it must not swallow the logits' differences."""
    layer = router_of("qwen3_moe")
    given = routed(layer, 0.01 * logits(layer, 50), {0, 2, 3, 5, 7})
    changed = rerouted("cache_aware:strength=1e9,keep=0", given)
    cached_TE = given.logits_TE.masked_fill(~given.cached_E(), float("-inf"))
    assert _sets(changed[0]) == _sets(cached_TE.topk(2).indices)


def test_too_few_cached_leaves_the_best_of_the_others() -> None:
    layer = router_of("olmoe")
    given = routed(layer, 6 * logits(layer, 50), {3})
    changed = rerouted("cache_aware:strength=1e9,keep=0", given)
    others_TE = given.logits_TE.masked_fill(given.cached_E(), float("-inf"))
    assert _sets(changed[0]) == [{3, best} for best in others_TE.argmax(dim=-1).tolist()]


# Routing within a budget: by hand, against the equation word by word, and over the routers of every family


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
    assert _counts([[5, 0], [0, 6], [5, 1]], {0, 1}, available) == counts


def test_one_token_by_hand() -> None:
    """Experts a..f by weight, cached b, d, e: misses after k experts are 1 1 2 2 2 3."""
    ranked, cached = [[0, 1, 2, 3, 4, 5]], {1, 3, 4}
    found = [_counts(ranked, set(cached), available)[0] for available in range(4)]
    assert found == [2, 2, 5, 6]


@settings(max_examples=100, deadline=None)
@given(
    experts=st.integers(2, 10),
    cached=st.sets(st.integers(0, 9)),
    available=st.integers(0, 8),
    seed=st.integers(0, 1000),
)
def test_against_the_equation(experts: int, cached: set[int], available: int, seed: int) -> None:
    """k = max{k <= K : u(k) <= available}; without any, the first expert, which is loaded all the same."""
    generator = torch.Generator().manual_seed(seed)
    top_k = min(experts, 5)
    ranked = [torch.randperm(experts, generator=generator)[:top_k].tolist() for _ in range(3)]
    expected, there, left = [], set(cached), available
    for row in ranked:
        feasible = [k for k in range(1, top_k + 1) if sum(expert not in there for expert in row[:k]) <= left]
        if feasible:
            count = max(feasible)
        else:  # nothing is free and the first is missing: it is loaded, and what is there already runs with it
            count = 1
            while count < top_k and row[count] in there:
                count += 1
        left = max(0, left - sum(expert not in there for expert in row[:count]))
        there.update(row[:count])
        expected.append(count)
    assert _counts(ranked, set(cached), available) == expected


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
    """Without free slots the heavier of two missing experts runs: with the weight of both where the router normalises,
    else with its own. Tokens that keep both experts keep their weights bit for bit."""
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


@pytest.mark.parametrize("text", ["budget", "cache_aware:strength=0.5"])
def test_values_are_read_by_the_flow(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU `Tensor.tolist` and `Tensor.item` would keep the host from the link."""
    layer = router_of("qwen3_moe")
    given = routed(layer, logits(layer, 3), {0, 1}, available=1)
    host = [given.ids_TK.gather(-1, given.weights_TK.argsort(dim=-1, descending=True, stable=True)).tolist()]
    given.read = lambda *_: host
    policy = policy_of(text, layer)
    policy.route(given)  # once for what it keeps of a layer
    with monkeypatch.context() as patched:
        for name in ("tolist", "item", "cpu", "nonzero"):
            patched.setattr(Tensor, name, None, raising=False)
        policy.route(given)
