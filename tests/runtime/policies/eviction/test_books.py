"""The policies' books against their slowest form, on calls that no runtime would make in that order."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertcast.runtime.policies import EVICTION, CacheShape
from expertcast.runtime.policies.belady import Belady
from expertcast.runtime.policies.eviction import EvictionPolicy
from tests.runtime.policies.eviction import references
from tests.runtime.policies.eviction.references import ORDERS, History
from tests.runtime.policies.eviction.replay import Visit, cache, run

Check = Callable[[EvictionPolicy, History, Container[int]], int | None]
"""Asks for a victim and says what is right."""

SEEDS = st.integers(0, 2**32)
SCORED = ["score", "importance", "importance:alpha=0", "importance:alpha=1,gamma=1", "importance:gamma=1e-15"]


class Storm:
    """Random calls in the order of base.py, with forecasts, evictions of others, and forwards that are cut short."""

    def __init__(self, name: str, seed: int, check: Check) -> None:
        self.choose = choose = random.Random(seed)
        self.layers, self.experts = choose.randint(1, 4), choose.randint(2, 6)
        self.slots = choose.randint(1, self.layers * self.experts)
        shape = CacheShape(layers=self.layers, experts=self.experts, top_k=1, slots=self.slots)
        self.policy = EVICTION.choose(name).make(shape)
        self.history = History(layers=self.layers, experts=self.experts)
        self.check = check
        self.orderly = isinstance(self.policy, Belady)
        """The future is known: nothing is cut short."""

    def run(self) -> None:
        forwards = [
            [self._keys(layer) for layer in range(self.layers)] for _ in range(self.choose.randint(1, 12))
        ]  # fmt: skip
        if isinstance(self.policy, Belady):
            self.history.events = [keys for forward in forwards for keys in forward]
            self.policy.foresee(self.history.events)
        for forward in forwards:
            self.policy.start_pass(fresh=False)
            self.history.forward += 1
            for layer, keys in enumerate(forward):
                if not self.orderly and self.choose.random() < 0.05:
                    break
                self._layer(layer, keys)
            if self.choose.random() < 0.05:
                self.policy.clear()
                self.history.residents.clear()

    def _keys(self, layer: int) -> list[int]:
        count = self.choose.randint(1, min(self.experts, self.slots, 3))
        return [layer * self.experts + expert for expert in self.choose.sample(range(self.experts), count)]

    def _layer(self, layer: int, keys: list[int]) -> None:
        choose, policy, history = self.choose, self.policy, self.history
        if policy.reads_scores:
            probability_E = self._probabilities()
            policy.see_scores(layer, probability_E)
            history.see_scores(layer, probability_E)
        policy.start_layer(layer, keys)
        history.start_layer(layer)
        self._bring_in(keys, set(keys))
        others = [key for key in range(self.layers * self.experts) if key not in keys]
        if policy.reads_forecasts and choose.random() < 0.7:
            target, probability_E = choose.randrange(self.layers), self._probabilities()
            policy.see_forecast(target, probability_E)
            history.see_forecast(target, probability_E)
        wanted = choose.sample(others, choose.randint(0, min(3, len(others))))
        held = [key for key in wanted if key in history.residents]
        policy.touch(held)
        history.touch(held)
        self._bring_in(wanted, {*keys, *wanted, *self._some()})
        policy.use(keys)
        history.use(keys)
        self._ask(self._some())
        if choose.random() < 0.1:
            for key in self._some():
                policy.remove(key)
                del history.residents[key]

    def _bring_in(self, keys: Sequence[int], protected: set[int]) -> None:
        for key in keys:
            if key in self.history.residents:
                continue
            if len(self.history.residents) == self.slots:
                victim = self._ask(protected)
                if victim is None:
                    return
                self.policy.remove(victim)
                del self.history.residents[victim]
            full = self.choose.random() < 0.6
            self.policy.insert(key, full)
            self.history.insert(key, full)

    def _ask(self, protected: Container[int]) -> int | None:
        return self.check(self.policy, self.history, protected)

    def _some(self) -> list[int]:
        """Any of the residents, often all of them."""
        residents = list(self.history.residents)
        return self.choose.sample(
            residents, self.choose.choice([len(residents), self.choose.randint(0, len(residents))])
        )

    def _probabilities(self) -> list[float]:
        """With zeros and equals among them."""
        return [self.choose.choice([0.0, 0.125, self.choose.random()]) for _ in range(self.experts)]


@pytest.mark.parametrize("name", [*EVICTION.names(), "fld:distance=absolute", "least_stale:order=layer", *SCORED[2:]])
@given(seed=SEEDS)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_victim_is_held_and_not_protected(name: str, seed: int) -> None:
    def check(policy: EvictionPolicy, history: History, protected: Container[int]) -> int | None:
        victim = policy.victim(protected)
        free = [key for key in history.residents if key not in protected]
        assert victim in free if free else victim is None
        assert policy.victim(protected) == victim, "asking changes nothing"
        return victim

    Storm(name, seed, check).run()


@pytest.mark.parametrize("name", list(ORDERS))
@given(seed=SEEDS)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_victims_are_those_of_the_documented_order(name: str, seed: int) -> None:
    def check(policy: EvictionPolicy, history: History, protected: Container[int]) -> int | None:
        victim = policy.victim(protected)
        assert victim == history.victim(ORDERS[name], protected)
        return victim

    Storm(name, seed, check).run()


class Ranked:
    """Scores of layers, taken anew when a victim is asked for and something was learnt of the layer since."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.scores: dict[int, list[float]] = {}
        self.seen = 0
        """How much of what was learnt is in the scores."""

    def __call__(self, policy: EvictionPolicy, history: History, protected: Container[int]) -> int | None:
        learnt, self.seen = history.learnt[self.seen :], len(history.learnt)
        for layer in range(history.layers):
            if layer in learnt or layer not in self.scores:
                self.scores[layer] = self._now(policy, history, layer)
        victim = policy.victim(protected)
        free = {
            key: self.scores[key // history.experts][key % history.experts]
            for key in history.residents
            if key not in protected
        }
        if victim is None:
            assert not free
        else:
            assert free[victim] == pytest.approx(min(free.values()), rel=1e-9)
        return victim

    def _now(self, policy: EvictionPolicy, history: History, layer: int) -> list[float]:
        if self.name == "score":
            return references.mean_score(history, layer)
        return references.importance(history, layer, policy.config.alpha, policy.config.gamma)


@pytest.mark.parametrize("name", SCORED)
@given(seed=SEEDS)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_victims_have_the_lowest_score(name: str, seed: int) -> None:
    Storm(name, seed, Ranked(name)).run()


def _forwards(choose: random.Random, layers: int, experts: int, top_k: int) -> Iterator[list[Visit]]:
    for _ in range(choose.randint(2, 15)):
        weights = [[choose.random() ** 3 for _ in range(experts)] for _ in range(layers)]
        yield [
            Visit(
                needs=[
                    layer * experts + expert
                    for expert in sorted(range(experts), key=row.__getitem__)[-choose.randint(1, top_k) :]
                ],
                scores=row,
            )
            for layer, row in enumerate(weights)
        ]


@pytest.mark.parametrize("name", [*EVICTION.names(), "fld:distance=absolute", "least_stale:order=layer"])
def test_one_policy_per_layer_is_one_cache_per_layer(name: str) -> None:
    """A layer with a share of slots misses what it would miss if its experts were the only ones in a cache."""
    choose = random.Random(2)
    for _ in range(25):
        layers, experts, top_k = choose.randint(2, 4), choose.randint(3, 6), 2
        share = choose.randint(top_k, experts)
        forwards = list(_forwards(choose, layers, experts, top_k))
        together = cache(name, layers=layers, experts=experts, slots=share * layers, top_k=top_k, scope="layer")
        run(together, forwards)
        for layer in range(layers):
            alone = cache(name, layers=1, experts=experts, slots=share, top_k=top_k)
            own = [
                [Visit(needs=[key - layer * experts for key in forward[layer].needs], scores=forward[layer].scores)]
                for forward in forwards
            ]
            run(alone, own)
            found, expected = together.stats.layers[layer], alone.stats.layers[0]
            assert (found.hits, found.misses, found.evicted) == (expected.hits, expected.misses, expected.evicted)
            held = [key - layer * experts for key in together.pool.slots if key // experts == layer]
            assert sorted(held) == sorted(alone.pool.slots)


@pytest.mark.parametrize("steps", range(440, 460))
def test_importance_after_many_steps(steps: int) -> None:
    """Weights that grow by 1 / 0.6 per step pass 1e100 at step 451: then, too, an expert that was used until the last
    step is worth 0.6 / 0.4 uses."""
    policy = EVICTION.choose("importance:gamma=0.6").make(CacheShape(layers=1, experts=2, top_k=1, slots=2))
    policy.insert(0)
    policy.insert(1)
    for expert in [0] * steps + [1]:
        policy.start_layer(0, [expert])
        policy.use([expert])
    assert policy.victim(()) == 1
