"""Fitting on real traces: every predictor, what it learns from, and how good it comes out."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from expertcast.checkpoints.checkpoint import load_predictor, save_predictor
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError, ModelShape, PredictorConfig, names, predictor_class
from expertcast.predictors.baselines import QuasiInput
from expertcast.predictors.estimator import Estimator, EstimatorConfig
from expertcast.predictors.hybrid import SUFFICIENT, Hybrid, HybridConfig
from expertcast.predictors.linear import Linear, LinearConfig, default_inputs
from expertcast.training import scoring
from expertcast.training.estimator import LOSSES, MapChange, boundary_weight
from expertcast.training.evaluation import evaluate
from expertcast.training.fit import fit, select_hybrid
from expertcast.training.linear import pairs_at_once
from expertcast.training.loop import warm_cosine
from expertcast.training.scoring import FitOptions, Fitted, mask_previous, pooled, validation_recall
from tests.training.synthetic import Rows, random_batch, tiny_view


@pytest.fixture(scope="module")
def rows() -> Rows:
    view = tiny_view()
    return Rows(view, random_batch(view, 900).with_previous())


@pytest.fixture(scope="module")
def recall(fitted_predictors: dict[str, Fitted], reference_traces: TraceDataset) -> dict[str, Any]:
    """recall@k on the test split of all eight predictors."""
    predictors = {name: fitted.predictor for name, fitted in fitted_predictors.items()}
    batches = reference_traces.batches("test", 4096)
    scores = evaluate(predictors, batches, reference_traces.view, chained=False).as_dict()
    values: dict[str, Any] = scores["recall_at_k"]
    return values


def test_all_eight_are_there_and_ranked_as_expected(recall: dict[str, Any]) -> None:
    assert list(recall) == names()[:9]
    mean = {name: value["mean"] for name, value in recall.items()}
    assert mean["frequency"] < mean["router_input"] < mean["quasi_hidden"] < mean["early_attention"]
    assert mean["early_attention"] - 2e-3 < mean["linear"] <= mean["estimator"] + 2e-3


def test_estimator_is_nowhere_far_below_linear(recall: dict[str, Any]) -> None:
    for estimator, linear in zip(recall["estimator"]["per_layer"], recall["linear"]["per_layer"], strict=True):
        assert estimator > linear - 0.01


def test_strength_is_the_best_on_validation_and_never_worse_than_the_router_itself(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("POOLED", "MARGIN", "ONE_DOCUMENT"):
        monkeypatch.setattr(f"expertcast.training.scoring.{name}", 0)
    several, *single = (
        fit("linear", rows, config=LinearConfig(strengths=strengths, inputs=["quasi_hidden"], steps=0)).report
        for strengths in ([1e-4, 1e2], [1e-4], [1e2])
    )
    recall = [report["distances"]["1"]["validation_recall"] for report in (several, *single)]
    assert recall[0] == [max(pair) for pair in zip(*recall[1:], strict=True)]
    untrained = fit("quasi_hidden", rows).predictor
    assert min(torch.tensor(recall[0]) - validation_recall({"it": untrained}, rows, 1, FitOptions())["it"]) > -1e-6


def test_few_validation_tokens_choose_for_all_layers_together() -> None:
    view = tiny_view()
    recall_CP = torch.tensor([[0.9, 0.9, 0.9], [0.91, 0.7, 0.7]])
    source = Rows(view, random_batch(view, 180_000))
    for tokens, best in ((60, [0, 0, 0]), (60_000, [1, 0, 0])):
        assert pooled(recall_CP, source, FitOptions(validation_tokens=tokens)).argmax(dim=0).tolist() == best


@pytest.mark.parametrize(("document_tokens", "best"), [(600, [1, 1, 1]), (120_000, [0, 0, 0])])
def test_what_one_document_taught_must_gain_more(document_tokens: int, best: list[int]) -> None:
    view = tiny_view()
    recall_CP = torch.tensor([[0.9, 0.9, 0.9], [0.902, 0.902, 0.902]])
    source = Rows(view, random_batch(view, 180_000, document_tokens=document_tokens))
    assert pooled(recall_CP, source, FitOptions()).argmax(dim=0).tolist() == best


def test_fewer_tokens_are_the_first_ones(rows: Rows) -> None:
    fitted = fit("frequency", rows, options=FitOptions(tokens=500))
    ids_TK, _ = rows.view[2].route(rows.batch.logits_TLE[:500, 2])
    assert torch.equal(fitted.predictor.get_buffer("count_LE")[2], ids_TK.flatten().bincount(minlength=8))
    assert (fitted.report["tokens"], fitted.report["traces"]) == (500, "rows")


def test_network_that_does_not_pay_leaves_plain_ridge(rows: Rows) -> None:
    """A learning rate that wrecks the network: training stops, and the estimator is `linear`."""
    config = EstimatorConfig(
        inputs=["quasi_hidden"], width=8, steps=12, step_tokens=64, learning_rate=30.0, patience=3
    )  # fmt: skip
    fitted = fit("estimator", rows, config=config)
    linear = fit("linear", rows, config=LinearConfig(inputs=["quasi_hidden"], steps=12, step_tokens=64)).predictor
    report = fitted.report["distances"]["1"]
    assert set(report["gates"]) == {0.0}
    assert len(report["history"]) <= 4
    for layer in (0, 2):
        state = rows.batch[:256].state(rows.view, layer)
        torch.testing.assert_close(
            fitted.predictor.forecast(state).logits_TE, linear.forecast(state).logits_TE, rtol=1e-3, atol=1e-3
        )


def test_network_is_kept_where_it_gains_more_than_the_margin(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EstimatorConfig(inputs=["quasi_hidden"], strengths=[1e3], width=16, steps=40, step_tokens=128)
    for name in ("POOLED", "MARGIN", "ONE_DOCUMENT"):
        monkeypatch.setattr(f"expertcast.training.scoring.{name}", 0)
    for margin in (0.0, 0.5):
        monkeypatch.setattr("expertcast.training.scoring.MARGIN", margin)
        fitted = fit("estimator", rows, config=config)
        report = fitted.report["distances"]["1"]
        before = report["linear"]["validation_recall"]
        gains = [best - linear for best, linear in zip(report["validation_recall"], before, strict=True)]
        assert [gate > 0 for gate in report["gates"]] == [gain > 0 for gain in gains]
        heads = fitted.predictor.network(1).head_PWE  # type: ignore[operator]
        assert [bool(head.any()) for head in heads] == [gate > 0 for gate in report["gates"]]
        assert (max(gains) > 0) == (margin == 0.0)


def test_learning_rate_warms_up_and_falls_to_two_percent() -> None:
    rates = [warm_cosine(step, 105) for step in (0, 4, 5, 55, 105)]
    assert rates == pytest.approx([0.2, 1.0, 1.0, 0.51, 0.02])


def test_unknown_previous_tokens_are_the_mean_of_training_tokens(rows: Rows) -> None:
    config = EstimatorConfig(inputs=["quasi_hidden", "previous"], width=8, steps=1, step_tokens=64)
    predictor = fit("estimator", rows, config=config, options=FitOptions(tokens=300)).predictor
    logits_TLE = rows.batch.logits_TLE[:300]
    expected_LE = (logits_TLE - logits_TLE.mean(dim=2, keepdim=True)).mean(dim=0)
    torch.testing.assert_close(predictor.get_buffer("usual_LE"), expected_LE)


@pytest.mark.parametrize("name", ["linear", "hybrid"])
def test_without_validation_nothing_is_chosen(rows: Rows, name: str) -> None:
    empty = Rows(rows.view, rows.batch)
    empty.rows = {"train": slice(0, len(rows.batch)), "validation": slice(0, 0)}
    config = HybridConfig(candidates=["next_norm", "router_input"]) if name == "hybrid" else None
    with pytest.raises(ExpertcastError, match="the validation split is empty"):
        fit(name, empty, config=config)


def test_estimator_works_without_a_previous_token(
    fitted_predictors: dict[str, Fitted], reference_traces: TraceDataset
) -> None:
    """A whole prompt at once: no state, or a row of NaN, gives the same forecast; training leaves such gaps."""
    estimator = fitted_predictors["estimator"].predictor
    batch = next(reference_traces.batches("test", 200))
    known = batch.state(reference_traces.view, 2)
    assert known.previous_logits_TLE is not None
    unknown = replace(known, previous_logits_TLE=None)
    gaps = replace(known, previous_logits_TLE=torch.full_like(known.previous_logits_TLE, float("nan")))
    logits_TE = estimator.forecast(unknown).logits_TE
    assert torch.isfinite(logits_TE).all()
    torch.testing.assert_close(logits_TE, estimator.forecast(gaps).logits_TE)
    assert not torch.allclose(logits_TE, estimator.forecast(known).logits_TE)
    previous_TLE = mask_previous(batch).previous_TLE
    assert previous_TLE is not None
    assert previous_TLE[::10].isnan().all()
    assert torch.equal(previous_TLE[1], known.previous_logits_TLE[1])


SHAPES = {
    "Qwen3-30B-A3B": ModelShape(layers=48, experts=128, top_k=8, hidden=2048),
    "Qwen3-Next-80B-A3B": ModelShape(layers=48, experts=512, top_k=10, hidden=2048),
    "Mixtral-8x7B": ModelShape(layers=32, experts=8, top_k=2, hidden=4096),
    "gpt-oss-20b": ModelShape(layers=24, experts=32, top_k=4, hidden=2880),
    "gpt-oss-120b": ModelShape(layers=36, experts=128, top_k=4, hidden=2880),
    "DeepSeek-V2-Lite": ModelShape(layers=26, experts=64, top_k=6, hidden=2048),
    "DeepSeek-V3": ModelShape(layers=58, experts=256, top_k=8, hidden=7168),
    "OLMoE-1B-7B": ModelShape(layers=16, experts=64, top_k=8, hidden=2048),
    "GLM-4.5": ModelShape(layers=89, experts=160, top_k=8, hidden=5120),
    "Granite-3.1-3B-A800M": ModelShape(layers=32, experts=40, top_k=8, hidden=1536),
}
SUM_GB = 4


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("name", names()[:9])
def test_every_default_predictor_is_made_and_trained_at_life_size(name: str, model: str) -> None:
    """Without memory for its tensors; a step of a few tokens has gradients of every weight."""
    shape = SHAPES[model]
    config = predictor_class(name).config_class()
    if isinstance(config, LinearConfig):
        config = replace(config, inputs=default_inputs(shape), stand_in_rank=8)
    elif name == "hybrid":
        best = {"ahead": 1, "predictor": "linear", "recall": {"linear": 1.0}}
        choices, own = [best | {"layer": at} for at in range(1, shape.layers)], {"linear": LinearConfig().as_dict()}
        config = HybridConfig(candidates=["linear"], choices=choices, member_configs=own)
    with torch.device("meta"):
        predictor = predictor_class(name)(config, shape)
        if not isinstance(predictor, Linear):
            return
        assert predictor.inputs == ["early", "routing", "previous"]
        weight_PFE, bias_PE = predictor.map_of(1)
        network: torch.nn.Module = MapChange(*weight_PFE.shape)
        if isinstance(predictor, Estimator):
            network = predictor.network(1)
        x_PTF = torch.empty(len(bias_PE), 3, weight_PFE.shape[1])
        z_PTE = torch.baddbmm(bias_PE[:, None], x_PTF, weight_PFE) + network(x_PTF)
        loss = LOSSES["kl"](torch.empty_like(z_PTE), z_PTE, boundary_weight(torch.empty_like(z_PTE), shape.top_k))
        loss.backward()
    assert all(parameter.grad is not None for parameter in network.parameters())
    sums = pairs_at_once(shape, weight_PFE.shape[1], 5) * 4 * weight_PFE.shape[1] ** 2
    assert sums < SUM_GB * 1e9


def test_few_tokens_of_a_large_model_are_in_memory_at_once(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a split is scored."""
    shape, options = rows.view.shape, FitOptions(progress=False)
    monkeypatch.setattr(scoring, "BATCH_BYTES", 20 * shape.layers * (shape.hidden + shape.experts))
    found = [scoring.train_batches(rows, options, ""), scoring.validation_batches(rows, options)]
    found.append(scoring.scored_batches(rows, "validation"))
    assert [max(map(len, batches)) for batches in found] == [5, 5, 5]


def test_further_distances(rows: Rows) -> None:
    """Recall falls with distance, and each distance forecasts its own layers."""
    linear = fit("linear", rows, config=LinearConfig(ahead=(1, 2, 3), steps=0)).predictor
    recall = [validation_recall({"linear": linear}, rows, ahead, FitOptions())["linear"] for ahead in (1, 2, 3)]
    assert list(map(len, recall)) == [3, 2, 1]
    means = [float(recall_P.mean()) for recall_P in recall]
    assert means[0] > means[1] > means[2]


class TestHybrid:
    def test_choices_are_honoured_and_in_the_config(
        self, fitted_predictors: dict[str, Fitted], reference_traces: TraceDataset
    ) -> None:
        hybrid = fitted_predictors["hybrid"].predictor
        assert isinstance(hybrid, Hybrid)
        choices = hybrid.config.as_dict()["choices"]
        assert [choice["layer"] for choice in choices] == list(range(1, reference_traces.view.shape.layers))
        batch = next(reference_traces.batches("test", 128))
        for choice in choices:
            state = batch.state(reference_traces.view, choice["layer"] - 1)
            own = fitted_predictors[choice["predictor"]].predictor.forecast(state)
            assert torch.equal(hybrid.forecast(state).logits_TE, own.logits_TE)
            assert choice["recall"][choice["predictor"]] == max(choice["recall"].values())
        executed, order = (
            hybrid.executed(),
            sorted(hybrid.members, key=lambda name: hybrid.config.cost_ms.get(name, 1e9)),
        )
        order.sort(key=lambda name: hybrid.member(name).uses_early)
        assert isinstance(executed, Hybrid)
        for choice in choices:
            used = executed.chosen[1, choice["layer"]]
            sufficient = [name for name in order if choice["recall"][name] >= SUFFICIENT]
            assert used == (sufficient[0] if sufficient else choice["predictor"])
            assert hybrid.chosen[1, choice["layer"]] == choice["predictor"]
        assert executed.chosen != hybrid.chosen
        moved = copy.deepcopy(hybrid).double()
        assert {each.dtype for each in moved.buffers() if each.is_floating_point()} == {torch.float64}

    def test_linear_beside_an_estimator_does_without_early_attention(self, reference_traces: TraceDataset) -> None:
        """The estimator has the maps with it."""
        short = {"linear": {"steps": 0}, "estimator": {"steps": 1, "width": 8}}
        config = HybridConfig(candidates=list(short), member_configs=short)
        hybrid = fit("hybrid", reference_traces, config=config, options=FitOptions(tokens=300, validation_tokens=99))
        assert isinstance(hybrid.predictor, Hybrid)
        inputs = {name: member["inputs"] for name, member in hybrid.predictor.config.member_configs.items()}
        assert "early" in inputs["estimator"]
        assert inputs.get("linear", ["quasi_hidden"])[0] == "quasi_hidden"

    def test_threshold_keeps_the_cheaper_one(
        self, fitted_predictors: dict[str, Fitted], reference_traces: TraceDataset
    ) -> None:
        members = {name: fitted_predictors[name].predictor for name in ("quasi_hidden", "linear", "estimator")}
        chosen = {}
        for threshold in (0.0, 1.0):
            config = HybridConfig(candidates=list(members), threshold=threshold)
            hybrid = select_hybrid(members, reference_traces, config, FitOptions()).predictor
            assert isinstance(hybrid, Hybrid)
            chosen[threshold] = set(hybrid.chosen.values())
        assert chosen[1.0] == {"quasi_hidden"}
        assert chosen[0.0] != {"quasi_hidden"}

    def test_early_attention_is_dearer_than_what_does_without(
        self, fitted_predictors: dict[str, Fitted], reference_traces: TraceDataset
    ) -> None:
        """Traces have no attention that could be timed."""
        members = {name: fitted_predictors[name].predictor for name in ("early_attention", "quasi_hidden")}
        config = HybridConfig(candidates=list(members), threshold=1.0)
        hybrid = select_hybrid(members, reference_traces, config, FitOptions()).predictor
        assert isinstance(hybrid, Hybrid)
        assert set(hybrid.chosen.values()) == {"quasi_hidden"}

    @pytest.mark.parametrize(
        ("costs", "dropped"),
        [
            ({"frequency": 1.0, "quasi_hidden": 2.0, "linear": 3.0}, set()),
            ({"frequency": 2.0, "quasi_hidden": 1.0, "linear": 3.0}, {"frequency"}),
            ({"frequency": 2.8, "quasi_hidden": 2.9, "linear": 3.0}, {"frequency"}),
            ({"frequency": 3.0, "quasi_hidden": 2.0, "linear": 1.0}, {"frequency"}),
        ],
    )
    def test_keeps_what_no_other_beats_in_recall_and_cost(
        self, costs: dict[str, float], dropped: set[str], fitted_predictors: dict[str, Fitted],
        reference_traces: TraceDataset, monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        """Costs are given here, for those that are measured differ from run to run."""
        monkeypatch.setattr("expertcast.training.fit.forecast_seconds", lambda *_: costs)
        members = {name: fitted_predictors[name].predictor for name in costs}
        config = HybridConfig(candidates=list(costs))
        hybrid = select_hybrid(members, reference_traces, config, FitOptions()).predictor.bind(reference_traces.view)
        assert isinstance(hybrid, Hybrid)
        chosen = set(hybrid.chosen.values())
        assert "linear" in chosen
        last = "linear" if chosen == {"linear"} else "hybrid"
        kept = sorted((costs.keys() - dropped | chosen) - {last}, key=lambda name: costs[name])
        assert list(hybrid.rungs()) == [*kept, last]

    def test_checkpoint_keeps_every_member_as_it_is(
        self, fitted_predictors: dict[str, Fitted], reference_traces: TraceDataset, tmp_path: Path
    ) -> None:
        view = reference_traces.view
        save_predictor(fitted_predictors["hybrid"].predictor, tmp_path / "hybrid", view=view)
        state_of_random = torch.random.get_rng_state()
        hybrid = load_predictor(tmp_path / "hybrid", view)
        assert torch.equal(torch.random.get_rng_state(), state_of_random), "sampling with a seed would differ"
        *kept, last = hybrid.rungs().items()
        assert last[1] is (hybrid if last[0] == "hybrid" else hybrid.get_submodule(f"members.{last[0]}"))
        state = next(reference_traces.batches("test", 32)).state(view, 3)
        for name, member in kept:
            own, got = fitted_predictors[name].predictor.forecast(state), member.forecast(state)
            assert torch.equal(got.logits_TE, own.logits_TE)
            assert got.log_odds == own.log_odds
        readers = [member for _, member in hybrid.rungs().items() if isinstance(member, QuasiInput)]
        assert all(member.expert_LED is readers[0].expert_LED for member in readers)

    def test_fits_its_own_candidates(self, rows: Rows) -> None:
        config = HybridConfig(candidates=["next_norm", "quasi_hidden"], ahead=(1, 2))
        fitted = fit("hybrid", rows, config=config)
        assert isinstance(fitted.predictor, Hybrid)
        assert len(fitted.predictor.chosen) == 3 + 2
        assert set(fitted.report["candidates"]) == {"next_norm", "quasi_hidden"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearConfig(strengths=[0.0]), "strengths="),
        (lambda: EstimatorConfig(inputs=["routing"]), "name one of early"),
        (lambda: EstimatorConfig(inputs=["quasi_hidden", "routing", "routing"]), "each once"),
        (lambda: EstimatorConfig(width=0), "width=0"),
        (lambda: HybridConfig(candidates=["hybrid"]), "other than hybrid"),
        (lambda: HybridConfig(threshold=-1.0), "threshold=-1"),
        (lambda: FitOptions(tokens=0), "tokens=0"),
    ],
)
def test_bad_settings_are_named(make: Any, message: str) -> None:
    with pytest.raises(ExpertcastError, match=message):
        make()


def test_bad_requests_are_named(rows: Rows) -> None:
    with pytest.raises(ExpertcastError, match="needs a LinearConfig"):
        fit("linear", rows, config=PredictorConfig())
    with pytest.raises(ExpertcastError, match="at most 3"):
        fit("next_norm", rows, config=PredictorConfig(ahead=(4,)))
