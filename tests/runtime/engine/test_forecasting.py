"""Which forecasts are made, and what forecasts of whole tokens bring about: early loads in the order of layers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from expertcast import offload
from expertcast.data import early as early_attention
from expertcast.data import traced as traced_forecasts
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.tracing import traced
from expertcast.predictors import ModelShape, Predictor
from expertcast.predictors.estimator import Estimator, EstimatorConfig
from expertcast.predictors.messages import Json
from expertcast.runtime.engine.cache import ExpertCache
from expertcast.runtime.engine.engine import LayerFlow
from expertcast.runtime.engine.forecasting import RECALL, ForecastGovernor
from expertcast.runtime.offloading import OffloadedModel
from expertcast.runtime.policies import Policies
from expertcast.runtime.policies.base import CacheShape
from expertcast.runtime.policies.settings import FORECASTS
from expertcast.runtime.recording.recorder import RunStatistics
from expertcast.runtime.simulation.link import VirtualLink
from expertcast.runtime.storage.layout import FULL, BlockLayout, Field
from expertcast.runtime.storage.slots import SlotPool
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy

SHAPE = ModelShape(layers=4, experts=8, top_k=2, hidden=4)


# Which forecasts are made


class Steps:
    """A governor over a link on which a copy takes 1 s. Time passes when a test says so.

    Args:
        rungs: ways to forecast, with their recall@k.
    """

    def __init__(self, rungs: Mapping[str, float | None]) -> None:
        self.link = VirtualLink({FULL: 8}, bandwidth=8.0)
        block = Field(name="block", shape=(8,), dtype=torch.uint8, offset=0)
        pool = SlotPool(BlockLayout(fields=(block,), block_bytes=8), 12, torch.device("meta"))
        policies = Policies().make(CacheShape(layers=4, experts=8, top_k=2, slots=12))
        self.residency = ExpertCache(pool, self.link, policies.eviction, RunStatistics(4), experts=8)
        self.flow = LayerFlow(self.residency, policies, SHAPE, rungs=rungs)
        self.start()

    def start(self, sequences: int = 1) -> ForecastGovernor:
        """A decode step begins."""
        self.flow.start_pass(False)
        self.flow.start_step(sequences)
        assert self.flow.governor is not None
        return self.flow.governor

    @property
    def governor(self) -> ForecastGovernor:
        assert self.flow.governor is not None
        return self.flow.governor

    def chosen(self, target: int) -> str | None:
        """The name of the rung that would forecast a layer."""
        number = self.flow.choose(target, len(self.governor.rungs) - 1)
        return None if number is None else self.governor.rungs[number].name

    def know(self, costs_s: Sequence[float], target: int = 3) -> None:
        """Each rung has forecast a layer so often that its cost is known."""
        for number, seconds in enumerate(costs_s):
            for _ in range(8):
                self.start()
                self.flow.forecast(target, number, seconds)
        self.start()

    def reach(self, layers: int, seconds: float) -> None:
        """The first so many layers are reached, `seconds` after one another; each needs an expert that has a slot."""
        keys = [layer * SHAPE.experts for layer in range(layers)]
        for layer, key in enumerate(keys):
            if not self.residency.holds(key):
                self.residency.prefetch([key])
                self.link.spend(1.0)
            self.flow.begin(layer, [key])
            self.residency.release([key])
            self.link.spend(seconds)


@pytest.fixture
def two() -> Steps:
    """A cheap way to forecast that finds half of what is missing, and a dear one that finds nine tenths."""
    return Steps({"cheap": 0.5, "dear": 0.9})


@pytest.fixture
def one_rung() -> Steps:
    """One that finds nine tenths."""
    return Steps({"only": 0.9})


def test_nothing_is_forecast_where_nothing_is_missing(two: Steps) -> None:
    assert two.chosen(1) == "cheap"  # it has never run
    two.governor.requested(1, 0, 0)
    assert two.chosen(1) is None
    assert two.governor.report()["left_out"] == {"nothing is missing": 1}
    two.governor.requested(1, 1, 1)
    assert two.chosen(1) == "cheap"


@pytest.mark.parametrize(
    ("missing", "waiting", "rung"), [(1, False, None), (2, False, "only"), (1, True, "only"), (0, True, None)]
)
def test_a_dear_forecast_belongs_into_a_wait(
    one_rung: Steps, missing: int, waiting: bool, rung: str | None
) -> None:  # fmt: skip
    """It takes 1.2 s; of one missing copy it saves .9 s. While the layer waits for a copy of its own, 1 s is free."""
    one_rung.know([1.2])
    one_rung.governor.requested(1, missing, 0)
    if waiting:
        one_rung.flow.begin(0, [0])
    assert one_rung.chosen(1) == rung


def test_only_what_computing_hides_is_saved(one_rung: Steps) -> None:
    """Two copies are missing. Between the layers the model computes for .1 s: a forecast saves .09 s at most."""
    one_rung.governor.requested(3, 2, 0)
    one_rung.know([0.2])
    assert one_rung.chosen(3) == "only"
    for _ in range(3):
        one_rung.start()
        one_rung.reach(4, 0.1)
    one_rung.start()
    one_rung.reach(3, 0.1)
    for _ in range(20):
        one_rung.governor.requested(3, 2, 0)
    assert one_rung.chosen(3) is None


def test_wrong_copies_delay_the_layer(one_rung: Steps) -> None:
    """A forecast that finds little is not made while the layer waits, though its time is free there: the wrong copies
    are under way when the next layer is reached."""
    one_rung.know([0.2])
    for _ in range(3):
        one_rung.start()
        one_rung.reach(4, 0.1)
    for _ in range(40):
        one_rung.flow.forecast(3, 0, 0.2)
        one_rung.governor.requested(3, 2, 0)
    one_rung.start()
    one_rung.reach(2, 0.1)
    one_rung.flow.begin(2, [20])
    assert one_rung.chosen(3) is None


def test_what_is_missing_is_counted_over_all_chunks(one_rung: Steps) -> None:
    """A layer needs four experts, one at a time: a forecast of 2 s saves 3.6 s."""
    one_rung.know([2.0])
    one_rung.flow.most = 2
    chunks = one_rung.flow.begin(1, [8, 9, 10, 11])
    for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
        if following is not None:
            one_rung.flow.request(1, following)
        one_rung.residency.wait(chunk)
        one_rung.residency.release(chunk)
    one_rung.start()
    assert len(chunks) == 4
    assert one_rung.chosen(1) == "only"


def test_a_forecast_that_costs_more_than_it_saves_is_not_made(two: Steps) -> None:
    """In steps of the best kind."""
    two.know([1.0, 2.0])
    two.governor.requested(1, 1, 0)
    assert two.chosen(1) is None
    assert two.governor.report()["left_out"] == {"it costs more than it saves": 1}


def test_a_price_of_a_bad_moment_is_forgotten(two: Steps) -> None:
    """A forecast that took 5 s takes .01 s now: a step tries it whatever it cost, and then it is taken."""
    two.know([5.0, 5.0])
    chosen = []
    for _ in range(800):
        two.start()
        chosen.append(two.chosen(1))
        rung = two.governor.rung
        if rung is not None and chosen[-1] is not None:
            two.flow.forecast(3, rung, 0.01)
            two.governor.made(1, rung, 0.01)
        two.governor.requested(1, chosen[-1] is None, chosen[-1] is not None)
        two.link.spend(2.0 - (chosen[-1] is not None))
        two.residency.waited_s += 1.0 - (chosen[-1] is not None)
        two.governor.end()
    assert chosen[0] is None
    assert sum(name is not None for name in chosen[-64:]) > 55


@pytest.mark.parametrize(("found", "rung"), [(0, None), (1, "only")])
def test_what_forecasts_find_is_learned(one_rung: Steps, found: int, rung: str | None) -> None:
    """It is taken by its recall, until it has found nothing several times."""
    one_rung.know([0.5])
    assert one_rung.chosen(1) == "only"
    for _ in range(20):
        one_rung.flow.forecast(1, 0, 0.5)
        one_rung.governor.requested(1, 1 - found, found)
    assert one_rung.chosen(1) == rung
    assert one_rung.governor.report()["rungs"]["only"]["found"] == pytest.approx(0.9 if found else 0.25, abs=0.1)


def test_recall_that_no_checkpoint_knows() -> None:
    assert Steps({"one": None}).governor.report()["rungs"]["one"]["found"] == RECALL


# Whole steps by each rung and without forecasts


class Played:
    """Decode steps that take 4 s without forecasts, half of it waiting for two experts, and `ratios` times as long by
    each rung, which hides 4/5 of the copies; with noise and disturbances.

    Args:
        noise: relative standard deviation of a step.
        rungs: ways to forecast: what forecasts cost, in seconds, by which the governor expects more or less of them.
    """

    def __init__(self, noise: float, rungs: Mapping[str, float] | None = None, seed: int = 0) -> None:
        self._costs = {"only": 1e-6} if rungs is None else rungs
        self._steps, self._random, self._noise = Steps(dict.fromkeys(self._costs, 0.9)), Random(seed), noise
        self._steps.know(list(self._costs.values()))
        self.lost_s = self.total_s = 0.0
        """Expected seconds beyond those of the best kind, and of all steps."""

    def run(self, count: int, *ratios: float) -> list[str | None]:
        """Run so many steps; return for each what made its forecast."""
        made, of, costs = [], dict(zip(self._costs, ratios, strict=True)), list(self._costs.values())
        for _ in range(count):
            governor = self._steps.start()
            name = self._steps.chosen(1)
            made.append(name)
            if governor.rung is not None and name is not None:
                self._steps.flow.forecast(1, governor.rung, costs[governor.rung])
            governor.requested(1, 2 * (name is None), 2 * (name is not None))
            mean = 1.0 if name is None else of[name]
            disturbed = 5.0 if self._random.random() < 0.02 else 1.0
            factor = disturbed * self._random.lognormvariate(0.0, self._noise)
            self._steps.link.spend(4 * mean * factor)
            self._steps.residency.waited_s += factor * (2.0 if name is None else 0.4)
            governor.end()
            self.lost_s += mean - min(1.0, *ratios)
            self.total_s += mean
        return made

    @property
    def report(self) -> Json:
        return self._steps.governor.report()


@pytest.mark.parametrize(
    ("ratio", "noise"),
    [(1 / 1.3, 0.05), (1 / 1.3, 0.2), (0.97, 0.0), (1.0, 0.05), (1.0, 0.2), (1.03, 0.0), (1.3, 0.05), (1.3, 0.2)],
)
def test_the_better_kind_of_step_is_run(ratio: float, noise: float) -> None:
    """5,000 steps lose at most 1.5% of their time, and from the thousandth on 92% are of the better kind."""
    played = Played(noise)
    made = played.run(5000, ratio)
    assert played.lost_s <= 0.015 * played.total_s
    if ratio != 1.0:
        assert sum((own is not None) == (ratio < 1.0) for own in made[1000:]) >= 0.92 * 4000


@pytest.mark.parametrize("costs", [(0.1, 0.2, 0.4), (0.01, 0.01, 0.01), (0.5, 0.6, 1.2)])
@pytest.mark.parametrize("ratios", [(0.8, 0.9, 1.2), (0.9, 0.8, 1.0), (1.0, 0.9, 0.8), (1.05, 1.1, 1.2)])
def test_the_best_rung_is_found_whatever_it_is_expected_to_save(
    ratios: tuple[float, float, float], costs: tuple[float, float, float]
) -> None:
    """Of one rung after another, and of none."""
    played = Played(0.08, dict(zip(("first", "second", "third"), costs, strict=True)))
    made = played.run(3000, *ratios)
    best = min([(1.0, None), *zip(ratios, ("first", "second", "third"), strict=True)], key=lambda each: each[0])[1]
    assert sum(own == best for own in made[1000:]) >= 0.75 * 2000
    assert played.lost_s <= 0.02 * played.total_s


@pytest.mark.parametrize("seed", range(4))
def test_a_change_is_followed_within_64_steps(seed: int) -> None:
    """Forecasts that lose from the start, then win, then lose: 5 steps in a row are of the better kind soon."""
    played = Played(0.05, seed=seed)
    for ratio in (1.3, 1 / 1.3, 1.3):
        right = [(own is not None) == (ratio < 1.0) for own in played.run(1000, ratio)]
        assert any(all(right[first : first + 5]) for first in range(64))
    assert played.lost_s <= 0.02 * played.total_s


def test_the_best_kind_follows_the_times() -> None:
    """Forecasts lose, win, and lose once more; what trials of it lost is in the report."""
    played = Played(0.05)
    for ratio, best in ((1.3, "none"), (1 / 1.3, "only"), (1.3, "none")):
        played.run(3000, ratio)
        assert played.report["best"] == best
    report = played.report
    assert 0 < report["lost_s"] <= 0.01 * report["seconds"]
    assert report["takes"] == {"only": pytest.approx(1.3, rel=0.25)}
    assert report["left_out"]["steps without forecasts are faster"] > 2000


def test_steps_that_forecast_nothing_say_nothing_of_forecasts(two: Steps) -> None:
    """Everything is there: no step is tried without forecasts."""
    for _ in range(100):
        governor = two.start()
        governor.requested(1, 0, 0)
        assert two.chosen(1) is None
        two.link.spend(1.0)
        governor.end()
    report = two.governor.report()
    assert (report["best"], report["trials"], report["lost_s"]) == ("cheap", 0, 0.0)


def test_the_report_has_plain_values(two: Steps) -> None:
    two.know([0.5, 1.0])
    two.governor.requested(1, 0, 0)
    two.chosen(1)
    report = two.flow.forecasts_report()["forecasts"]
    assert json.loads(json.dumps(report)) == report
    assert report["1"]["rungs"] == {
        "cheap": {"made": 8, "cost_ms": pytest.approx(500.0), "found": 0.5},
        "dear": {"made": 8, "cost_ms": pytest.approx(1000.0), "found": 0.9},
    }
    rest = {name: value for name, value in report["1"].items() if name != "rungs"}
    assert rest == {
        "left_out": {"nothing is missing": 1}, "best": "cheap", "takes": {}, "trials": 0, "lost_s": 0.0, "seconds": 0.0,
    }  # fmt: skip


def test_a_step_that_traces_blocks_tells_nothing_of_costs(two: Steps) -> None:
    two.know([0.5, 1.0])
    governor = two.start()
    before = governor.report()
    governor.requested(1, 1, 0)
    for target, compared in ((1, True), (2, False)):
        governor.made(target, 0, 90.0, compared=compared)
    two.link.spend(180.0)
    governor.end()
    after = governor.report()
    assert after["rungs"]["cheap"]["cost_ms"] == before["rungs"]["cheap"]["cost_ms"]
    assert (after["best"], after["takes"]) == (before["best"], before["takes"])


def test_batches_have_a_governor_of_their_own(two: Steps) -> None:
    """One for each power of two: what forecasts cost depends on how many sequences there are."""
    alone = two.governor
    alone.requested(1, 0, 0)
    three = two.start(3)
    assert three is not alone
    assert two.chosen(1) == "cheap"
    assert two.start(2) is three
    assert two.start(1) is alone
    assert set(two.flow.forecasts_report()["forecasts"]) == {"1", "2"}


# The engine with each choice of forecasts


def forecasts_made(offloaded: OffloadedModel) -> Counter[str]:
    """By rung, over all numbers of sequences."""
    made: Counter[str] = Counter()
    for governor in offloaded.stats.as_dict()["forecasts"].values():
        made.update({name: rung["made"] for name, rung in governor["rungs"].items()})
    return made


def inputs(model: PreTrainedModel, sequences: int) -> dict[str, Tensor]:
    """Random texts of six tokens."""
    ids = torch.randint(model.config.vocab_size, (sequences, 6), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("forecasts", FORECASTS)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_no_choice_changes_bits(family: str, forecasts: str, sequences: int) -> None:
    """Only `auto` weighs forecasts, for that number of sequences."""
    model = tiny_model(family)
    given = inputs(model, sequences)
    expected = greedy(model, given, tokens=12)
    with offload(model, slots=8, predictor="next_norm", bandwidth=1e7, forecasts=forecasts) as offloaded:
        assert_same(greedy(model, given, tokens=12), expected)
        chosen = offloaded.stats.as_dict().get("forecasts", {})
    assert set(chosen) == ({str(1 << (sequences.bit_length() - 1))} if forecasts == "auto" else set())


@pytest.fixture(scope="module")
def estimator(reference_model: PreTrainedModel) -> Predictor:
    """Untrained."""
    view = find_moe_layers(reference_model)
    return Estimator(EstimatorConfig(width=8), view.shape).eval().bind(view)


@pytest.mark.parametrize("sequences", [1, 3])
def test_rungs_of_an_estimator(reference_model: PreTrainedModel, estimator: Predictor, sequences: int) -> None:
    given = inputs(reference_model, sequences)
    expected = greedy(reference_model, given, tokens=6)
    with offload(reference_model, slots=192, predictor=estimator, bandwidth=2e8) as offloaded:
        assert_same(greedy(reference_model, given, tokens=6), expected)
        made = forecasts_made(offloaded)
        assert offloaded.stats.total.prefetched > 0
    assert set(made) == {"quasi_hidden", "linear", "estimator"}
    assert made.total() > 0


@pytest.mark.parametrize("sequences", [4, 16])
@pytest.mark.parametrize("forecasts", ["auto", "always"])
def test_a_batch_traces_no_programs(
    reference_model: PreTrainedModel, estimator: Predictor, sequences: int, forecasts: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A trace takes as long as fifty forecasts, and each batch size would need its own. One sequence is padded."""
    given, traces = inputs(reference_model, sequences), Counter[str]()
    given["attention_mask"][0, 0] = 0

    def counted(*args: Any, **kwargs: Any) -> object:
        traces["all"] += 1
        return traced(*args, **kwargs)

    with offload(reference_model, slots=192, predictor=estimator, bandwidth=2e8, forecasts=forecasts) as offloaded:
        monkeypatch.setattr(early_attention, "traced", counted)
        monkeypatch.setattr(traced_forecasts, "traced", counted)
        greedy(reference_model, given, tokens=6)
        assert offloaded.stats.total.prefetched > 0
    assert not traces


def test_what_is_learned_lasts_from_one_text_to_the_next(reference_model: PreTrainedModel) -> None:
    """The second text's 5 x 11 decisions are added to those of the first."""
    given, decisions = inputs(reference_model, 1), []
    with offload(reference_model, slots=192, predictor="next_norm", bandwidth=2e8) as offloaded:
        for _ in range(2):
            greedy(reference_model, given, tokens=6)
            report = offloaded.stats.as_dict()["forecasts"]["1"]
            decisions.append(report["rungs"]["next_norm"]["made"] + sum(report["left_out"].values()))
    assert decisions == [55, 110]


@pytest.mark.parametrize(("rung", "same"), [(None, "exact"), (0, "exact"), (2, "always")])
@pytest.mark.parametrize("layers", [None, (1, 4, 7)])
def test_layers_execute_the_forecasts_of_the_predictor_itself_where_the_governor_makes_them(
    reference_model: PreTrainedModel, one: dict[str, Tensor], estimator: Predictor, rung: int | None, same: str,
    layers: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Those of a cheaper rung are hints: executed, they would be other tokens."""
    mode = {"mode": "speculate"} if layers is None else {"mode": "hybrid", "layers": layers}
    given = {"slots": 192, "predictor": estimator, "bandwidth": 2e8}
    expected = {}
    for name, fields in {"exact": {}, "always": {**mode, "forecasts": "always"}}.items():
        with offload(reference_model, **given, **fields):
            expected[name] = greedy(reference_model, one, tokens=6)
    assert not torch.equal(expected["exact"][1][-1], expected["always"][1][-1])
    monkeypatch.setattr(ForecastGovernor, "choose", lambda _self, _target: rung)
    with offload(reference_model, **given, **mode):
        assert_same(greedy(reference_model, one, tokens=6), expected[same])


@pytest.mark.parametrize("forecasts", ["auto", "always"])
def test_a_draft_executes_the_forecasts(
    reference_model: PreTrainedModel, one: dict[str, Tensor], estimator: Predictor, forecasts: str
) -> None:
    """Those of an untrained predictor are mostly wrong, and drafts teach the governor of single steps nothing."""
    given = {"slots": 192, "predictor": estimator, "bandwidth": 2e8, "forecasts": forecasts}
    with offload(reference_model, **given, draft="speculate") as offloaded:
        offloaded.generate(**one, max_new_tokens=6, do_sample=False, draft="speculate", draft_length=2)
        found = offloaded.stats.as_dict()
    assert found["drafts"]["by_draft"]["speculate"]["mismatch"] > 0.2
    assert not found.get("forecasts")


@pytest.mark.parametrize("forecasts", ["auto", "never"])
def test_without_a_governor_executed_forecasts_are_always_made(
    reference_model: PreTrainedModel, one: dict[str, Tensor], estimator: Predictor, forecasts: str
) -> None:
    """Over a link that copies in the model's thread, and where no others are wanted."""
    found = []
    for name in ("always", forecasts):
        given = {"slots": 192, "predictor": estimator, "link": "instant", "forecasts": name}
        with offload(reference_model, **given, mode="hybrid", layers=(1, 4, 7)):
            found.append(greedy(reference_model, one, tokens=6))
    assert_same(found[0], found[1])


EVERY = set(range(1, 12))


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({"forecasts": "always"}, EVERY),
        ({"forecasts": "always", "link": "instant"}, EVERY),
        ({"forecasts": "never"}, set()),
        ({"forecasts": "never", "policies": Policies(eviction="importance")}, set()),
        ({"forecasts": "never", "mode": "hybrid", "layers": (5,), "speculate_prefill": True}, {5}),
        ({"link": "instant"}, set()),
        ({"link": "instant", "mode": "hybrid", "layers": (5,)}, {5}),
        ({"link": "instant", "policies": Policies(eviction="importance")}, EVERY),
        ({"link": "instant", "policies": Policies(pre_eviction="gap")}, EVERY),
    ],
)
def test_layers_whose_experts_come_early(
    reference_model: PreTrainedModel, one: dict[str, Tensor], fields: dict[str, Any], layers: set[int]
) -> None:
    """With `auto`, a link that copies in the model's thread brings none early, unless a policy reads forecasts."""
    link = {} if "link" in fields else {"bandwidth": 2e8}
    with offload(reference_model, slots=192, predictor="next_norm", **link, **fields) as offloaded:
        greedy(reference_model, one, tokens=8)
        counts = offloaded.stats.layers
    assert {layer for layer, count in enumerate(counts) if count.prefetched} == layers
