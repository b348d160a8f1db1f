"""Early attention in an offloaded run: forecasts beside the experts, further layers, no routers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, MoEView, Predictor, PredictorConfig
from expertcast.predictors.base import Forecast
from expertcast.predictors.baselines import QuasiHidden
from expertcast.predictors.early_attention import EarlyAttention, EarlyConfig
from expertcast.predictors.hybrid import Choice, Hybrid, HybridConfig
from expertcast.runtime import offload
from expertcast.runtime.policies import Policies
from expertcast.training.fit import fit
from tests.runtime.conftest import assert_same, greedy

SLOW = 60e6
"""Bytes per second at which copies are still under way when a forecast is made."""


@pytest.fixture(scope="module")
def early(reference_traces: TraceDataset) -> Predictor:
    return fit("early_attention", reference_traces, config=EarlyConfig(ahead=(1, 2, 3))).predictor


@pytest.fixture(scope="module")
def quasi(reference_view: MoEView, reference_traces: TraceDataset) -> Predictor:
    predictor = QuasiHidden(PredictorConfig(ahead=(1, 2)), reference_view.shape)
    predictor.set_defaults(reference_traces.defaults)
    return predictor.bind(reference_view)


class _Order:
    """In place of a second stream: says when work is launched on it."""

    def __init__(self, told: list[str]) -> None:
        self._told = told

    @contextmanager
    def running(self) -> Iterator[None]:
        self._told.append("forecast")
        with nullcontext():
            yield


def test_a_forecast_beside_the_experts_is_asked_for_once_they_are_launched(
    reference_model: PreTrainedModel, early: Predictor, one: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = greedy(reference_model, one)
    with offload(reference_model, predictor=early, slots=96) as offloaded:
        assert_same(greedy(offloaded, one), expected)
        plain = offloaded.stats.as_dict()
    told: list[str] = []
    with offload(reference_model, predictor=early, slots=96) as offloaded:
        engine = offloaded._engine
        engine._foresight._beside = _Order(told)
        run, hint = engine._kernel.run, engine._foresight._hint
        monkeypatch.setattr(engine._kernel, "run", lambda *given: (told.append("experts"), run(*given))[1])
        monkeypatch.setattr(engine._foresight, "_hint", lambda read: (told.append("hint"), hint(read))[1])
        assert_same(greedy(offloaded, one), expected)
        beside = offloaded.stats.as_dict()
    step = told[-(12 + 12 + 11) :]  # a token: 12 layers, of which 11 have a forecast
    assert step[:6] == ["forecast", "experts", "hint"] * 2
    assert step[-2:] == ["forecast", "experts"], "the last layer has none"
    assert beside["hits"] == plain["hits"], "with an instant link later hints bring the same experts"


@pytest.mark.parametrize("mode", ["exact", "speculate"])
def test_further_layers_are_asked_for_while_the_link_idles(
    mode: str, reference_model: PreTrainedModel, early: Predictor, one: dict[str, Tensor]
) -> None:
    def run(**options: object) -> tuple[tuple[Tensor, list[Tensor]], list[int]]:
        asked: list[int] = []
        with offload(reference_model, predictor=early, mode=mode, slots=128, **options) as offloaded:
            flow, here = offloaded.flow, -1
            begin, hint = flow.begin, flow.hint

            def begun(layer: int, *given: object) -> object:
                nonlocal here
                here = layer
                return begin(layer, *given)  # type: ignore[arg-type]

            def hinted(forecast: object, *given: object) -> None:
                asked.append(forecast.layer - here)  # type: ignore[attr-defined]
                hint(forecast, *given)  # type: ignore[arg-type]

            flow.begin, flow.hint = begun, hinted  # type: ignore[assignment, method-assign]
            return greedy(offloaded, one), asked

    near, only = run()
    far, all_distances = run(reach=3)
    assert set(only) == {1}
    assert set(all_distances) == {1, 2, 3}, "an instant link is always idle"
    assert all(before == now - 1 for before, now in pairwise(all_distances) if now > 1), "the nearest first"
    assert_same(far, near)
    _, slow = run(reach=3, bandwidth=2e6)
    assert slow.count(3) < all_distances.count(3) / 2, "a busy link gets the nearest layer's experts only"


def test_further_layers_have_early_attention_where_the_nearest_needs_none(
    reference_model: PreTrainedModel, reference_view: MoEView, one: dict[str, Tensor]
) -> None:
    """A hybrid may choose early attention for the second layer ahead alone, whose forecasts are then its own."""
    config = EarlyConfig(ahead=(1, 2))
    choices = [
        Choice(ahead=ahead, layer=layer, predictor="early_attention" if ahead == 2 else "next_norm", recall={})
        for ahead in config.ahead
        for layer in range(ahead, len(reference_view))
    ]
    members = {"next_norm": PredictorConfig(ahead=config.ahead).as_dict(), "early_attention": config.as_dict()}
    hybrid = HybridConfig(ahead=config.ahead, candidates=list(members), member_configs=members, choices=choices)

    def run(predictor: Predictor) -> tuple[tuple[Tensor, list[Tensor]], dict[tuple[int, int], list[list[int]]]]:
        second: dict[tuple[int, int], list[list[int]]] = {}
        with offload(reference_model, predictor=predictor, reach=2, slots=128) as offloaded:
            flow, here = offloaded.flow, [0, 0]
            begin, hint = flow.begin, flow.hint

            def begun(layer: int, *given: object) -> object:
                here[:] = here[0] + (layer == 0), layer
                return begin(layer, *given)  # type: ignore[arg-type]

            def hinted(forecast: Forecast, ids: list[list[int]], *given: object) -> None:
                if forecast.layer == here[1] + 2:
                    second[here[0], forecast.layer] = ids
                hint(forecast, ids, *given)  # type: ignore[arg-type]

            flow.begin, flow.hint = begun, hinted  # type: ignore[assignment, method-assign]
            return greedy(offloaded, one), second

    expected, by_early = run(EarlyAttention(config, reference_view.shape).bind(reference_view))
    got, by_hybrid = run(Hybrid(hybrid, reference_view.shape).bind(reference_view))
    assert_same(got, expected)
    both = by_early.keys() & by_hybrid.keys()
    assert len(both) > 20
    assert all(by_hybrid[key] == by_early[key] for key in both)


def test_a_distance_that_was_not_trained_is_refused(reference_model: PreTrainedModel, quasi: Predictor) -> None:
    for reach in (3, 10**30):  # no further than there are layers
        with pytest.raises(ExpertcastError, match=r"looks .* not 3"):
            offload(reference_model, predictor=quasi, reach=reach)
    with pytest.raises(ExpertcastError, match="reach=1 is nearer than ahead=2"):
        offload(reference_model, predictor=quasi, ahead=2, reach=1)


def test_routers_are_left_out_where_forecasts_are_executed(
    reference_model: PreTrainedModel, quasi: Predictor, one: dict[str, Tensor]
) -> None:
    """Leaving routers out changes nothing but their number."""
    ran: list[int] = []
    routers = [layer.router for layer in quasi.view]
    own = type(routers[0]).forward

    def counted(router: torch.nn.Module, hidden: Tensor) -> object:
        ran.append(routers.index(router))
        return own(router, hidden)

    def run(**options: object) -> tuple[Tensor, list[Tensor], list[int]]:
        policies = Policies(eviction="score")
        with offload(
            reference_model, predictor=quasi, mode="speculate", slots=128, policies=policies, **options
        ) as offloaded:
            starts = reference_model.model.register_forward_pre_hook(lambda *_: ran.clear())
            try:
                return (*greedy(offloaded, one, 6), [layer.evicted for layer in offloaded.stats.layers])
            finally:
                starts.remove()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quasi, "traceable", False)  # traces call no module
        patch.setattr(type(routers[0]), "forward", counted)
        with_routers, usual = run(), len(ran)
        without, fewer = run(router_free=True), len(ran)
    assert_same(without[:2], with_routers[:2])
    assert without[2] == with_routers[2], "evictions go by the scores of what was executed"
    assert usual == 12 + 11, "in the last step: all layers, and forecasts for all but the first"
    assert fewer == 1 + 11
    assert all("forward" not in vars(router) for router in routers)


@pytest.mark.parametrize("options", [{"mode": "exact"}, {"mode": "speculate", "true_weights": True}])
def test_router_free_with_what_needs_routers_is_refused(
    options: dict[str, object], reference_model: PreTrainedModel, quasi: Predictor
) -> None:
    with pytest.raises(ExpertcastError, match="router_free leaves routers out"):
        offload(reference_model, predictor=quasi, router_free=True, **options)
