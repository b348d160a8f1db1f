"""Drafts replayed from recorded routing: closed forms, hand-worked cycles, the simulator's own count of plain steps."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from expertcast.predictors import ExpertcastError
from expertcast.predictors.view import ModelShape
from expertcast.runtime.advising.drafts import DraftTraits, advise_drafts
from expertcast.runtime.policies import Policies
from expertcast.runtime.simulation.machine import Case, Machine, constant_times
from expertcast.runtime.simulation.simulator import simulate
from expertcast.runtime.simulation.trace import Forward, Trace, prefilled, request_order
from expertcast.runtime.storage.layout import FULL

LAYERS, EXPERTS, TOP_K = 3, 8, 2
LAYER_S = 0.004


def routed_trace(ids_TLK: Tensor, experts: int, prompt: int = 64) -> Trace:
    """The trace of one text whose routing is known and nothing else.

    Args:
        ids_TLK: experts of consecutive tokens, [T, L, K].
        experts: E
        prompt: leading tokens that are read at once; half of a text shorter than twice as many.
    """
    count, layers, top_k = ids_TLK.shape
    keys_TLK: list[list[list[int]]] = (ids_TLK + experts * torch.arange(layers)[:, None]).tolist()
    cut = prefilled(count, prompt)
    spans = [(0, cut), *((token, token + 1) for token in range(cut, count))]
    forwards = []
    for start, stop in spans:
        columns = zip(*keys_TLK[start:stop], strict=True)
        keys = [request_order([key for row in column for key in row]) for column in columns]
        forwards.append(Forward(fresh=not start, rows=slice(start, stop), keys=keys))
    return Trace(shape=ModelShape(layers=layers, experts=experts, top_k=top_k, hidden=0), forwards=forwards)


def _trace(tokens: int = 60, seed: int = 0) -> Trace:
    choose = random.Random(seed)
    ids = [[choose.sample(range(EXPERTS), TOP_K) for _ in range(LAYERS)] for _ in range(tokens)]
    return routed_trace(torch.tensor(ids), EXPERTS, prompt=8)


def _case(slots: int, copy_s: float, layers: int = LAYERS) -> Case:
    machine = Machine(times=constant_times(layers, LAYER_S), block_bytes={FULL: 1000}, bandwidth=1000 / copy_s)
    return Case(policies=Policies(), slots=slots, machine=machine)


def test_a_trace_of_a_table() -> None:
    # 2 layers of 4 experts; the prompt is half of 4 tokens
    trace = routed_trace(torch.tensor([[[0, 1], [3, 2]], [[1, 2], [0, 1]], [[0, 3], [2, 3]], [[1, 0], [1, 2]]]), 4)
    assert [forward.keys for forward in trace.forwards] == [
        [[0, 1, 2], [7, 6, 4, 5]],
        [[0, 3], [6, 7]],
        [[1, 0], [5, 6]],
    ]
    assert [forward.fresh for forward in trace.forwards] == [True, False, False]


def test_plain_steps_are_what_the_simulator_says() -> None:
    trace, case = _trace(), _case(10, 0.003)
    plain = advise_drafts(trace, case, DraftTraits(name="int4", acceptance=0.9)).options[0]
    done = simulate(trace, case, waits=True)
    assert plain.cycle_s == pytest.approx(sum(done.steps_s) / len(done.steps_s))
    assert plain.wait_s == pytest.approx(sum(map(sum, done.waits_s)) / len(done.waits_s))
    assert plain.copies == pytest.approx(done.copies)
    assert plain.tokens_per_cycle == 1


@pytest.mark.parametrize("length", range(5))
def test_where_nothing_is_copied_it_is_a_sum(length: int) -> None:
    # after a prompt that used all experts every one has a slot: a layer takes 2 ms, and 1 ms for each distinct expert
    ids = [[[token % EXPERTS, (token + 1) % EXPERTS] for _ in range(LAYERS)] for token in range(40)]
    trace = routed_trace(torch.tensor(ids), EXPERTS, prompt=16)
    case = _case(LAYERS * EXPERTS, 0.003)
    option = advise_drafts(
        trace, case, DraftTraits(name="drop", acceptance=1.0, cost=0.25), longest=4, repetitions=1
    ).options[length]
    # n + 1 tokens in a row use n + 2 experts of each layer
    cycle_s = length * 0.25 * LAYERS * LAYER_S + LAYERS * (0.002 + 0.001 * (length + 2))
    assert option.cycle_s == pytest.approx(cycle_s)
    assert option.tokens_per_s == pytest.approx((length + 1) / cycle_s)
    assert (option.wait_s, option.copies) == (0, 0)


@pytest.mark.parametrize(
    ("foreseen", "cycle_s"),
    [
        # 1 layer, K = 1, each token a new expert, copies of 3 ms, draft passes of 4 ms, 2 ms before the experts and 2
        # each. Foreseen: the first copy takes 3 of the pass's 4 ms. Two experts are used, and the second, the last
        # token's, is asked for 2 ms later: 4 + 2 + 3 + 4 ms
        (1.0, 0.013),
        # not foreseen: the pass asks for an expert that nobody needs and that copy is done before it ends; then both
        # experts are waited for: 4 + 2 + 6 + 4 ms
        (0.0, 0.016),
    ],
)
def test_copies_by_hand(foreseen: float, cycle_s: float) -> None:
    count = 42
    trace = routed_trace(torch.arange(count)[:, None, None], 1000, prompt=2)
    case = _case(8, 0.003, layers=1)
    draft = DraftTraits(name="int4", acceptance=1.0, foreseen=foreseen)
    plain, one, *_ = advise_drafts(trace, case, draft, longest=1, repetitions=1).options
    assert plain.cycle_s == pytest.approx(0.002 + 0.003 + 0.002)
    assert one.cycle_s == pytest.approx(cycle_s, rel=0.01)  # a wrong expert may be one that comes later
    assert one.tokens_per_cycle == 2


def test_acceptance_gives_the_tokens_of_a_cycle() -> None:
    trace, case = _trace(600), _case(24, 0.001)
    for acceptance in (0.0, 0.6, 1.0):
        advice = advise_drafts(trace, case, DraftTraits(name="int4", acceptance=acceptance), longest=4)
        for option in advice.options:
            expected = sum(acceptance**j for j in range(option.length + 1))
            assert option.tokens_per_cycle == pytest.approx(expected, rel=0.08 if 0 < acceptance < 1 else 1e-9)


def test_the_best_length_and_what_is_said_of_it() -> None:
    trace, case = _trace(300), _case(12, 0.006)
    good = advise_drafts(trace, case, DraftTraits(name="int4", acceptance=0.9))
    assert good.chosen.length > 0
    assert good.chosen.tokens_per_s == max(option.tokens_per_s for option in good.options)
    assert good.text().startswith(f"int4, {good.chosen.length} ahead (90% accepted at 1 of a step each): ")
    blind = advise_drafts(trace, case, DraftTraits(name="int4", acceptance=0.9, foreseen=0.0))
    assert blind.chosen.tokens_per_s < good.chosen.tokens_per_s
    # what computing costs, and is seldom accepted, does not pay where nothing is copied
    bad = advise_drafts(trace, replace(case, slots=24), DraftTraits(name="drop", acceptance=0.2))
    assert bad.chosen.length == 0
    assert "drop (20% accepted at 1 of a step each) does not pay: 1 ahead gives" in bad.text()
    found = json.loads(json.dumps(good.as_dict()))
    assert found["best_length"] == good.chosen.length
    assert [option["length"] for option in found["options"]] == list(range(9))


def test_refusals() -> None:
    draft = DraftTraits(name="int4", acceptance=0.9)
    with pytest.raises(ExpertcastError, match="drafts of 1 to 8 tokens need one prompt and 10 steps decoded after it"):
        advise_drafts(_trace(16), _case(10, 0.003), draft)
    with pytest.raises(ExpertcastError, match="slots=1 is fewer than the 2 experts one token needs"):
        advise_drafts(_trace(), _case(1, 0.003), draft)
    with pytest.raises(ExpertcastError, match=r"acceptance=1\.5: must be less than or equal to 1"):
        DraftTraits(name="int4", acceptance=1.5)
