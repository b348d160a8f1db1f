"""Refitted forecasts: what they change and put back, whom the guard lets through, what they may cost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.data.batch import RouterCall
from expertcast.predictors import ExpertcastError, MoEView, Predictor, RouterState
from expertcast.predictors.estimator import INPUTS, Estimator, EstimatorConfig
from expertcast.predictors.linear import Linear, LinearConfig
from expertcast.runtime import offload
from expertcast.runtime.engine import refit as refit_layer
from expertcast.runtime.engine import refit as refit_part
from expertcast.runtime.engine.refit import (
    BLOCK,
    FIRST,
    Example,
    Guard,
    LayerRefit,
    OnlineRefit,
    RecursiveRidge,
    RidgePart,
    changed,
    ridge_part,
)
from expertcast.runtime.engine.traced import TracedForecasts
from tests.runtime.conftest import assert_same, greedy


@pytest.fixture(params=["linear", "estimator with early attention"])
def predictor(request: pytest.FixtureRequest, reference_view: MoEView) -> Linear | Estimator:
    """A ridge part that is the next router: what `next_norm` does, as a map that can change."""
    made: Linear | Estimator
    shape, generator = reference_view.shape, torch.Generator().manual_seed(0)
    if request.param == "linear":
        made = Linear(LinearConfig(), shape)
        weight_PFE = made.get_buffer("weight_PDE_1")
    else:
        inputs = INPUTS if "early" in request.param else ()
        made = Estimator(EstimatorConfig(parameters=80_000, inputs=inputs), shape)
        weight_PFE = made.get_buffer("weight_PFE_1")
        made.get_buffer("mean_PF_1").copy_(torch.randn(made.get_buffer("mean_PF_1").shape, generator=generator))
        torch.nn.init.normal_(made.network(1).head_GWE, generator=generator)
    for pair in range(shape.layers - 1):
        router = next(reference_view[pair + 1].router.parameters()).detach().float()
        weight_PFE[pair, : shape.hidden] = router.T
    return made.bind(reference_view)  # type: ignore[return-value]


def _state(view: MoEView, layer: int, tokens: int, generator: torch.Generator) -> RouterState:
    residual_TD = torch.randn(tokens, view.shape.hidden, generator=generator).bfloat16()
    router_input_TD = view[layer].router_input(residual_TD)
    logits_TE, weights_TK, ids_TK = view[layer].router(router_input_TD)
    return RouterState(
        layer=layer, residual_TD=residual_TD, router_input_TD=router_input_TD, logits_TE=logits_TE, topk_ids_TK=ids_TK,
        topk_weights_TK=weights_TK,
        previous_logits_TLE=torch.randn(tokens, view.shape.layers, view.shape.experts, generator=generator),
        early_TD=torch.randn(tokens, view.shape.hidden, generator=generator).bfloat16(),
    )  # fmt: skip


@pytest.fixture
def states(reference_view: MoEView) -> Iterator[RouterState]:
    generator = torch.Generator().manual_seed(1)
    return (_state(reference_view, 3, BLOCK, generator) for _ in itertools.count())


@torch.no_grad()
@pytest.mark.parametrize("most", [512, 96])
@pytest.mark.parametrize("predictor", ["linear", "estimator", "estimator with early attention"], indirect=True)
def test_a_change_is_in_the_weights_and_out_again(
    most: int, predictor: Linear | Estimator, states: Iterator[RouterState], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where more features than may be learned from are seen in some directions only; traces see the change."""
    monkeypatch.setattr(refit_part, "MOST_DIRECTIONS", most)
    before = {name: tensor.clone() for name, tensor in predictor.state_dict().items()}
    part = ridge_part(predictor, 3, 1)
    assert part is not None
    state = next(states)
    x_TR, frozen_TE = part.directions_of(state), predictor.logits(state, 1)
    assert x_TR.shape[1] == part.directions == min(most, part._weight_FE.shape[0])
    traced = TracedForecasts(predictor)
    for _ in range(4):
        traced.forecast(state, 1)
    change_GE = torch.randn(x_TR.shape[1] + 1, frozen_TE.shape[1], generator=torch.Generator().manual_seed(2)) / 10
    part.apply(change_GE)
    got_TE = predictor.logits(state, 1)
    assert not torch.allclose(got_TE, frozen_TE, atol=0.1)
    assert torch.allclose(got_TE, frozen_TE + changed(x_TR, change_GE), atol=1e-3)
    assert torch.equal(traced.forecast(state, 1).logits_TE, got_TE)
    assert all(program.run is not None for program in traced._programs.values())
    assert torch.allclose(part.frozen_logits(state, x_TR), frozen_TE, atol=1e-3)
    part.apply(None)
    assert all(torch.equal(before[name], tensor) for name, tensor in predictor.state_dict().items())


def _follow(layer: LayerRefit, states: Iterator[RouterState], shifts: list[Tensor | None]) -> tuple[float, list[bool]]:
    """A stream in which the target's scores are the frozen forecast's and what a linear map of the inputs adds, a map
    for each block. Returns recall of what was used less that of the frozen map, and whether it was the refitted one."""
    lead, used = 0.0, []
    for shift_RE, state in zip(shifts, states, strict=False):
        x_TR = layer.part.directions_of(state)
        logits_TE = layer.part.frozen_logits(state, x_TR)
        if shift_RE is not None:
            logits_TE = logits_TE + x_TR @ shift_RE
        ids_TK = layer._target.route(logits_TE)[0]
        used.append(layer.guard.used)
        frozen_TK, refitted_TK = layer.learn(Example(state, logits_TE, ids_TK))
        chosen_TK = refitted_TK if used[-1] else frozen_TK
        lead += sum(
            len(set(one) & set(true)) - len(set(other) & set(true))
            for one, other, true in zip(chosen_TK.tolist(), frozen_TK.tolist(), ids_TK.tolist(), strict=True)
        ) / ids_TK.numel()  # fmt: skip
        if layer.due:
            layer.solve()
    return lead / len(shifts), used


def _layer(predictor: Predictor) -> LayerRefit:
    part = ridge_part(predictor, 3, 1)
    assert part is not None
    return LayerRefit(part, predictor.view[4])


def _shift(part: RidgePart, seed: int) -> Tensor:
    """As large as the scores themselves."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(part.directions, part.predictor.shape.experts, generator=generator) / part.directions**0.5 * 3


@torch.no_grad()
def test_what_is_better_is_used_and_what_turns_bad_is_left(
    predictor: Linear | Estimator, states: Iterator[RouterState]
) -> None:
    layer = _layer(predictor)
    shift_RE = _shift(layer.part, 0)
    lead, used = _follow(layer, states, [shift_RE] * 40)
    assert not any(used[:FIRST]), "not before it was tested"
    assert all(used[20:])
    assert lead > 0.05
    assert not torch.equal(layer.part._frozen[0], layer.part._weight_FE)
    lead, used = _follow(layer, states, [None] * 40)  # the text is as it was in training again
    assert lead > -0.1
    assert used[0]
    assert not all(used), "the frozen map is perfect now"


@torch.no_grad()
@pytest.mark.parametrize("predictor", ["linear"], indirect=True)
def test_what_was_true_of_an_earlier_text_fades(predictor: Linear, states: Iterator[RouterState]) -> None:
    """1,920 tokens of the second text leave 15% of what was learned from the first."""
    layer = _layer(predictor)
    first_RE, second_RE = _shift(layer.part, 0), _shift(layer.part, 1)
    _follow(layer, states, [first_RE] * 40)
    _follow(layer, states, [second_RE] * 60)
    assert layer._change_GE is not None
    learned_RE = layer._change_GE[: len(second_RE)]
    assert (learned_RE - second_RE).norm() < 0.3 * (learned_RE - first_RE).norm()


@torch.no_grad()
def test_never_lets_a_worse_one_through(predictor: Linear | Estimator, states: Iterator[RouterState]) -> None:
    """An adversary: what was true of every block before is wrong in the next ones."""
    layer = _layer(predictor)
    shift_RE = _shift(layer.part, 0)
    signs = [1 if block // 4 % 2 else -1 for block in range(48)]
    lead, used = _follow(layer, states, [sign * shift_RE for sign in signs])
    assert not any(used)
    assert lead == 0
    assert torch.equal(layer.part._frozen[0], layer.part._weight_FE)
    noise = _layer(predictor)
    lead, used = _follow(noise, states, [_shift(noise.part, seed) for seed in range(40)])
    assert lead >= -1e-3


def test_the_guard_asks_for_more_than_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    gains = (torch.randn(400, generator=generator) * 0.02).tolist()
    guard = Guard()
    assert sum(guard.add(gain) for gain in gains) < 20, "no gain at all"
    guard = Guard()
    assert not any(guard.add(0.1) for _ in range(FIRST - 1))
    assert guard.add(0.1)
    while guard.used:
        guard.add(-0.1)
    assert guard.gain.count < FIRST + 20


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was learned from a few tokens is used."""
    monkeypatch.setattr(refit_layer, "BLOCK", 2)
    monkeypatch.setattr(refit_layer, "FIRST", 1)
    monkeypatch.setattr(refit_layer, "MARGIN", -2.0)
    monkeypatch.setattr(refit_layer, "ERRORS", -1e9)


@pytest.mark.usefixtures("eager")
def test_bits_are_the_models_own(
    predictor: Linear | Estimator, reference_model: PreTrainedModel, one: dict[str, Tensor]
) -> None:
    expected = greedy(reference_model, one, tokens=10)
    before = {name: tensor.clone() for name, tensor in predictor.state_dict().items()}
    with offload(reference_model, predictor=predictor, slots=96, refit=1000.0, forecasts="always") as offloaded:
        assert_same(greedy(offloaded, one, tokens=10), expected)
        report = offloaded.stats.as_dict()["refit"]
        assert list(report["layers"]) == list(range(1, 12))
        assert all(layer["tokens"] >= 6 for layer in report["layers"].values())
        assert 0 < report["longest_ms"] / 1e3 <= report["seconds"]
        changes = [name for name, tensor in predictor.state_dict().items() if not torch.equal(before[name], tensor)]
        assert changes, "what was learned was used"
        assert_same(greedy(offloaded, one, tokens=4), (expected[0][:, :-6], expected[1][:4]))
    assert all(torch.equal(before[name], tensor) for name, tensor in predictor.state_dict().items())
    with torch.inference_mode(), offload(reference_model, predictor=predictor, slots=96, refit=1000.0) as offloaded:
        assert_same(greedy(offloaded, one, tokens=4), (expected[0][:, :-6], expected[1][:4]))


@pytest.mark.usefixtures("eager")
def test_executed_forecasts_are_no_targets(
    predictor: Linear | Estimator,
    reference_model: PreTrainedModel,
    one: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: dict[int, list[RouterCall]] = {}
    learned: list[Example] = []
    routed = OnlineRefit.routed
    collect = LayerRefit.collect
    monkeypatch.setattr(
        OnlineRefit, "routed", lambda self, call: (calls.setdefault(call.layer, []).append(call), routed(self, call))
    )
    monkeypatch.setattr(LayerRefit, "collect", lambda self, each: (learned.append(each), collect(self, each)))
    with offload(reference_model, predictor=predictor, mode="speculate", slots=96, refit=1000.0) as offloaded:
        greedy(offloaded, one, tokens=6)
        assert sum(layer["tokens"] for layer in offloaded.stats.as_dict()["refit"]["layers"].values())
    assert learned
    for example in learned:
        seen = calls[example.state.layer + 1]
        assert any(torch.equal(example.logits_TE, call.logits_TE) for call in seen), "the router's own scores"
        assert any(torch.equal(example.ids_TK, call.ids_TK) for call in seen)


@torch.no_grad()
def test_time_is_bounded(predictor: Linear | Estimator, reference_view: MoEView) -> None:
    """Every question for the time takes a millisecond here: each piece of work does."""
    clock = itertools.count(0.0, 1e-3)
    refit = OnlineRefit(predictor, 1, budget_ms=2.5, clock=lambda: next(clock))
    generator = torch.Generator().manual_seed(0)
    tokens = 60
    for _ in range(tokens):
        refit.start()
        before = refit.seconds
        for layer in range(4):
            state = _state(reference_view, layer, 8, generator)
            refit.routed(
                RouterCall(
                    layer=layer, sequences=8, tokens=1, residual_TD=state.residual_TD,
                    router_input_TD=state.router_input_TD,
                    logits_TE=state.logits_TE, weights_TK=state.topk_weights_TK, ids_TK=state.topk_ids_TK,
                )
            )  # fmt: skip
            refit.made(state)
            refit.work()
        assert refit.seconds - before <= 2.5e-3 + 8e-3, "one token's collecting goes on"
    assert refit.seconds <= tokens * 2.5e-3 + 8e-3
    report = refit.as_dict()["refit"]
    assert report["longest_ms"] == pytest.approx(1.0)
    learned = [layer["tokens"] for layer in report["layers"].values()][:3]
    assert min(learned) > 0, "each layer has its turn"


def test_off_is_nothing_and_what_cannot_be_is_refused(
    predictor: Linear | Estimator, reference_model: PreTrainedModel
) -> None:
    with offload(reference_model, predictor=predictor, slots=96) as offloaded:
        assert offloaded.refit is None
        assert "refit" not in offloaded.stats.as_dict()
    for fields, expected in (
        ({"predictor": "next_norm", "refit": 1.0}, "has none: leave refit out"),
        ({"refit": 1.0}, "refits a predictor"),
        ({"predictor": predictor, "refit": -1.0}, "refit=-1.0: must be greater than or equal to 0"),
        ({"predictor": predictor, "refit": float("nan")}, "refit=nan"),
    ):
        with pytest.raises(ExpertcastError, match=expected):
            offload(reference_model, **fields)


# Recursive least squares against the normal equations of all rows at once, in fp64

FEATURES, OUTPUTS, PRIOR = 12, 5, 30.0


@pytest.mark.parametrize("keep", [1.0, 0.9])
def test_equals_batch_ridge_about_the_frozen_map(keep: float) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = [torch.randn(rows, FEATURES, generator=generator) + 0.5 for rows in (7, 32, 1, 32, 19)]
    frozen_GE = torch.randn(FEATURES + 1, OUTPUTS, generator=generator, dtype=torch.float64)
    true_GE = frozen_GE + torch.randn(FEATURES + 1, OUTPUTS, generator=generator, dtype=torch.float64)
    ridge = RecursiveRidge(FEATURES, OUTPUTS, prior=PRIOR)
    x_NG, y_NE, weight_N = torch.empty(0, FEATURES + 1), torch.empty(0, OUTPUTS), torch.empty(0)
    for x_NF in blocks:
        own_NG = torch.cat([x_NF.double(), torch.ones(len(x_NF), 1)], dim=1)
        own_NE = own_NG @ true_GE + torch.randn(len(x_NF), OUTPUTS, generator=generator)
        ridge.add(x_NF, (own_NE - own_NG @ frozen_GE).float(), keep=keep)
        x_NG, y_NE = torch.cat([x_NG.double(), own_NG]), torch.cat([y_NE.double(), own_NE])
        weight_N = torch.cat([weight_N * keep, torch.ones(len(x_NF))])
        # rows of zeros with weight PRIOR that ask for the frozen map: what a prior is, as data
        all_NG = torch.cat([x_NG * weight_N[:, None].double().sqrt(), PRIOR**0.5 * torch.eye(FEATURES + 1)])
        all_NE = torch.cat([y_NE * weight_N[:, None].double().sqrt(), PRIOR**0.5 * frozen_GE])
        expected_GE = torch.linalg.lstsq(all_NG, all_NE).solution
        change_GE = ridge.solve()
        assert change_GE is not None
        assert torch.allclose(frozen_GE + change_GE, expected_GE, atol=2e-5)


def test_nothing_seen_changes_nothing_and_no_answer_is_none() -> None:
    ridge = RecursiveRidge(3, 2, prior=1.0)
    change_GE = ridge.solve()
    assert change_GE is not None
    assert not change_GE.any()
    ridge.add(torch.full((4, 3), float("nan")), torch.zeros(4, 2))
    assert ridge.solve() is None
