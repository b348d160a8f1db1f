"""What forecasts of whole tokens bring about: early loads in the order of layers, and nothing where all is there."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors import ExpertcastError, ModelShape, NextToken, Predictor
from expertcast.predictors.next_token import NextTokenConfig
from expertcast.runtime import OffloadConfig, offload
from expertcast.runtime.engine import forecasting as module
from expertcast.runtime.engine.cache import ExpertCache
from expertcast.runtime.engine.forecasting import ForecastGate, TokensAhead, early_layers
from expertcast.runtime.experimental.kernel_link import KernelLink
from expertcast.runtime.policies import Policies
from expertcast.runtime.recording.recorder import Observer
from expertcast.runtime.recording.statistics import RunStatistics
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy
from tests.runtime.engine.evictions import eviction
from tests.runtime.links.manual import ManualLink

SHAPE = ModelShape(layers=4, experts=8, top_k=2, hidden=4)


class Said:
    """Forecasts what a test says; remembers the ids that it was given."""

    def __init__(self, likely: Mapping[int, float] | None) -> None:
        self.probability_HLE: Tensor | None = None
        self.ids: list[Tensor | None] = []
        if likely is not None:
            self.probability_HLE = torch.zeros(2, 4, 8)
            for key, probability in likely.items():
                self.probability_HLE[0].view(-1)[key] = probability

    def start(self, fresh: bool, token_BS: Tensor | None = None) -> Tensor | None:
        self.ids.append(token_BS)
        return self.probability_HLE

    def see(self, layer: int, residual_TD: Tensor, logits_TE: Tensor, sequences: int) -> None:
        pass


@pytest.fixture
def residency() -> ExpertCache:
    model = tiny_model("qwen3_moe")
    view = find_moe_layers(model)
    store = ExpertStore(view)
    store.pack(view)
    pool, link = SlotPool(store.layout, 12, store.device), ManualLink()
    link.attach(store, pool)
    return ExpertCache(pool, link, eviction(layers=4, experts=8, slots=12), RunStatistics(4), experts=8)


def made(residency: ExpertCache, likely: Mapping[int, float] | None, *, layers: int = 4) -> TokensAhead:
    return TokensAhead(Said(likely), residency, residency.eviction, SHAPE, layers=layers, likely=0.3)


def test_likely_experts_come_in_the_order_of_layers(residency: ExpertCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers early. Layer 0: 0.3 before 0.1; layer 1: 1.5; layer 2, 2.0, only when layer 0 is finished. 1.6 is too
    unlikely."""
    monkeypatch.setattr(module, "REACH", 2)
    ahead = made(residency, {1: 0.4, 3: 0.9, 13: 0.5, 14: 0.29, 16: 0.8, 31: 0.7})
    ahead.start(False, None)
    assert list(residency.copies) == [3, 1, 13]
    ahead.finish(0)
    assert list(residency.copies) == [3, 1, 13, 16]
    ahead.finish(1)
    ahead.finish(2)
    assert list(residency.copies) == [3, 1, 13, 16, 31]


def test_only_the_first_layers_where_others_have_forecasts(residency: ExpertCache) -> None:
    made(residency, {1: 0.4, 13: 0.5}, layers=1).start(False, None)
    assert list(residency.copies) == [1]


def test_nothing_is_asked_for_that_is_there(residency: ExpertCache) -> None:
    """A layer whose likely experts have slots is left alone; one that lacks some asks for all, and keeps them."""
    residency.prefetch([1, 3])
    asked: list[list[int]] = []

    class Asked(Observer):
        def asked(self, layer: int, keys: object) -> None:
            asked.append(list(keys))  # type: ignore[call-overload]

    residency.tell(Asked())
    made(residency, {1: 0.4, 3: 0.9}).start(False, None)
    assert asked == []
    made(residency, {1: 0.4, 3: 0.9, 5: 0.5}).start(False, None)
    assert asked == [[3, 5, 1]]


def test_what_will_be_missing(residency: ExpertCache) -> None:
    """The sum over experts without a slot: .29 of layer 1, the others of which come; nothing is known without one."""
    ahead = made(residency, {1: 0.4, 13: 0.5, 14: 0.25, 15: 0.04, 12: 0.01})
    ahead.start(False, None)
    assert ahead.missing(0) == 0
    assert ahead.missing(1) == pytest.approx(0.29)
    unknown = made(residency, None)
    unknown.start(False, None)
    assert unknown.missing(0) is None
    unknown.finish(0)


@pytest.mark.parametrize(
    ("keep", "loads", "forecast_from", "layers"),
    [(True, True, 1, 4), (True, True, None, 4), (False, True, 1, 1), (False, True, None, 4), (True, False, 1, 0)],
)
def test_early_layers(keep: bool, loads: bool, forecast_from: int | None, layers: int) -> None:
    assert early_layers(SHAPE, keep=keep, loads=loads, forecast_from=forecast_from) == layers


def test_a_gate_weighs_waiting_against_cost(residency: ExpertCache) -> None:
    """A copy takes 1 s, a forecast .25 s, and finds six tenths: it pays where .25 / .6 = .42 experts are missing."""
    residency.link.bytes_moved, residency.link.busy_s = residency.pool.layout.block_bytes, 1.0
    assert residency.link.copy_s == 1.0
    ahead = made(residency, {9: 0.25, 10: 0.2, 17: 0.25, 18: 0.1})
    ahead.start(False, None)
    gate = ForecastGate(residency.link, 4, ahead)
    assert gate.pays(2)  # nothing is known of what forecasts cost
    gate.took(0.25)
    assert [gate.pays(layer) for layer in range(4)] == [False, True, False, False]


def test_a_gate_goes_by_the_mean_where_nothing_else_is_known(residency: ExpertCache) -> None:
    """Layer 0 has missed two experts, layer 1 none; what a forecast brought in counts as missed before it."""
    residency.link.bytes_moved, residency.link.busy_s = residency.pool.layout.block_bytes, 1.0
    gate = ForecastGate(residency.link, 4, None)
    gate.took(0.5)
    residency.settle(0, [0, 1])
    residency.prefetch([0])
    gate.missed(0, residency.request([0, 1]))
    assert gate.pays(0)
    gate.missed(1, 0)
    assert not gate.pays(1)
    assert gate.pays(2)  # it has never run
    for _ in range(100):  # two were missing the first time, none since
        gate.missed(0, residency.request([0, 1]))
    assert not gate.pays(0)


@pytest.fixture(scope="module")
def next_token(reference_model: PreTrainedModel) -> Predictor:
    """Of random weights: it is sure of something else for every token."""
    view = find_moe_layers(reference_model)
    torch.manual_seed(1)
    predictor = NextToken(NextTokenConfig(tokens=2, width=16, inner=8, known_ids=5000), view.shape)
    for tensor in (predictor.network.head.weight, predictor.network.token_VW):
        torch.nn.init.normal_(tensor)
    predictor.know(torch.arange(5000))
    return predictor.eval().bind(view)


@pytest.mark.parametrize("fields", [{}, {"cache": False}, {"policies": Policies(eviction="forecast")}])
@pytest.mark.parametrize("predictor", [None, "next_norm"])
def test_the_same_bits(
    reference_model: PreTrainedModel, one: dict[str, Tensor], next_token: Predictor, fields: dict[str, object],
    predictor: str | None,
) -> None:  # fmt: skip
    """Whatever is loaded early, and whichever forecasts by layers are left out."""
    expected = greedy(reference_model, one)
    gated = {"forecasts": "worth"} if predictor is not None else {}
    config = OffloadConfig(slots=60, bandwidth=2e8, next_token=next_token, predictor=predictor, **gated, **fields)  # type: ignore[arg-type]
    with offload(reference_model, config) as offloaded:
        assert_same(greedy(reference_model, one), expected)
        assert offloaded.stats.total.prefetched > 0


def test_ids_come_from_the_forward(reference_model: PreTrainedModel, next_token: Predictor) -> None:
    """As an argument, by place or by name; embeddings in their place tell nothing, and forecasts go on without ids."""
    said = Said(None)
    embed = reference_model.get_input_embeddings()
    with offload(reference_model, slots=60, next_token=next_token) as offloaded, torch.no_grad():
        ahead = offloaded.flow.tokens_ahead
        assert ahead is not None
        ahead._forecasts = said
        ids = torch.tensor([[5, 6]])
        reference_model(input_ids=ids)
        reference_model.base_model(ids)
        reference_model(inputs_embeds=embed(ids))
    assert said.ids[0] is not None
    assert torch.equal(said.ids[0], ids)
    assert said.ids[1] is not None
    assert torch.equal(said.ids[1], ids)
    assert said.ids[2] is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policies": Policies(prefetch="none")}, "serves prefetching and the eviction policy 'forecast'"),
        ({"link": KernelLink()}, "on the device, without next_token"),
        ({"likely": 0.0}, "likely=0.0: give a probability above 0"),
        ({"forecasts": "sometimes"}, "unknown forecasts 'sometimes': choose from always, worth"),
    ],
)
def test_refused(
    reference_model: PreTrainedModel, next_token: Predictor, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ExpertcastError, match=message):
        offload(reference_model, slots=60, next_token=next_token, **fields)
