"""The early column: the oracle's values, on disk and online; predictors that read it, and traces without it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from expertcast.checkpoints.checkpoint import PredictorCheckpoint, load_predictor, save_predictor
from expertcast.cli import main
from expertcast.commands.predictors import evaluated
from expertcast.data import trace_format as layout
from expertcast.data.batch import TraceBatch
from expertcast.data.capture import ActivationStream, EarlyRun, try_early
from expertcast.data.collect import collect
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.online import OnlineTraces
from expertcast.data.plan import make_plan
from expertcast.data.stand_in import with_rank
from expertcast.data.text import Document
from expertcast.data.trace_writer import write_stand_in
from expertcast.data.traces import TraceDataset, TraceSource
from expertcast.predictors import ExpertcastError
from expertcast.predictors.early_attention import EarlyAttention, StandIn
from expertcast.predictors.estimator import Estimator, EstimatorConfig
from expertcast.predictors.hybrid import Hybrid, HybridConfig
from expertcast.predictors.linear import INPUTS
from expertcast.training.evaluation import evaluate
from expertcast.training.fit import fit
from expertcast.training.report import write_report
from tests.data.early_oracle import oracle
from tests.families.models import CONFIGS, tiny_model
from tests.sealed import edit_json

SETTINGS: dict[str, Any] = {"tokens": 600, "window": 32, "batch_size": 4, "early_rank": 2}
SMALL: dict[str, Any] = {"width": 8, "steps": 4, "step_tokens": 64}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("qwen2_moe", torch.float32)


@pytest.fixture(scope="module")
def parts(reference_tokenizer: Any, text: list[Document]) -> tuple[Any, Any]:
    return reference_tokenizer, text


@pytest.fixture(scope="module")
def traces(model: PreTrainedModel, parts: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> TraceDataset:
    return collect(model, *parts, tmp_path_factory.mktemp("early") / "traces", **SETTINGS)


@pytest.fixture(scope="module")
def without(model: PreTrainedModel, parts: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> TraceDataset:
    folder = tmp_path_factory.mktemp("without") / "traces"
    return collect(model, *parts, folder, **{**SETTINGS, "early_rank": None})


def rows(source: TraceSource, split: str = "all") -> TraceBatch:
    return TraceBatch.cat(list(source.batches(split, 100)))


def early(batch: TraceBatch) -> Tensor:
    assert batch.early_TLD is not None
    return batch.early_TLD


def test_the_column_is_the_oracles_and_a_running_models(
    model: PreTrainedModel, parts: tuple[Any, Any], traces: TraceDataset
) -> None:
    online = OnlineTraces(model, *parts, **SETTINGS)
    batch = rows(traces)
    assert torch.equal(early(batch), early(rows(online)))
    assert online.stand_in is not None
    assert traces.stand_in is not None
    for name, tensor in traces.stand_in.state_dict().items():
        assert torch.equal(tensor, online.stand_in.state_dict()[name])
    start = 0
    for window in online.plan.windows_of(online.plan.documents)[:3]:
        for length in (1, len(window.token_ids)):
            given = torch.from_numpy(window.token_ids[:length]).long()[None]
            for source, wanted in enumerate(oracle(model, online.view, traces.stand_in, given)):
                found = early(batch)[start + length - 1, source].float()
                assert float((found - wanted[0]).norm()) < 2e-2 * float(wanted.norm()), "8 bits"
        start += len(window.token_ids)


def test_traces_without_the_column_are_as_before(without: TraceDataset, traces: TraceDataset) -> None:
    batch = rows(without)
    assert batch.early_TLD is None
    assert without.stand_in is None
    assert not (without.folder / layout.STAND_IN_FILE).exists()
    assert without.info["settings"]["early_rank"] is None
    assert torch.equal(batch.residual_TLD, rows(traces).residual_TLD)
    fitted = fit("estimator", without, config=EstimatorConfig(**SMALL)).predictor
    assert isinstance(fitted, Estimator)
    assert list(fitted.inputs) == [name for name in INPUTS if name != "early"]
    for name in ("early_attention", "estimator"):
        config = EstimatorConfig(inputs=["quasi_hidden", "early"], **SMALL) if name == "estimator" else None
        with pytest.raises(ExpertcastError, match=r"no early attention.*collect again without") as raised:
            fit(name, without, config=config)
        assert "\n" not in str(raised.value)
    predictor = EarlyAttention(fit("early_attention", traces).predictor.config, traces.view.shape).bind(traces.view)
    with pytest.raises(ExpertcastError, match="collect them again without --early-rank none"):
        predictor.forecast(batch.state(without.view, 0))


def test_predictors_that_read_it_come_back_from_a_folder(traces: TraceDataset, tmp_path: Path) -> None:
    batch = rows(traces, "test")
    made = {"early_attention": fit("early_attention", traces).predictor,
            "estimator": fit("estimator", traces, config=EstimatorConfig(**SMALL)).predictor}  # fmt: skip
    assert list(made["estimator"].inputs) == list(INPUTS)  # type: ignore[arg-type]
    for name, predictor in made.items():
        save_predictor(predictor, tmp_path / name, view=traces.view)
        again = load_predictor(tmp_path / name, traces.view)
        assert again.uses_early
        assert again.config.as_dict()["stand_in_rank"] == 2
        assert PredictorCheckpoint.open(tmp_path / name).config["tap_point"].endswith("; early attention")
        for layer in range(len(traces.view) - 1):
            state = batch.state(traces.view, layer)
            assert torch.equal(again.stand_in(state), predictor.stand_in(state))
            assert torch.equal(again.forecast(state).logits_TE, predictor.forecast(state).logits_TE)
        state = batch.state(traces.view, 0)
        state.early_TD = -state.early_TD  # type: ignore[operator]
        assert not torch.equal(
            again.forecast(state).logits_TE, predictor.forecast(batch.state(traces.view, 0)).logits_TE
        )
    explicit = fit("estimator", traces, config=EstimatorConfig(inputs=["quasi_hidden", "routing"], **SMALL)).predictor
    assert not explicit.uses_early
    assert explicit.config.as_dict()["stand_in_rank"] is None


def test_a_checkpoint_is_not_scored_on_early_attention_of_another_stand_in(
    model: PreTrainedModel, parts: tuple[Any, Any], traces: TraceDataset, tmp_path: Path
) -> None:
    """Of two collections each fits a stand-in of its own."""
    other = collect(model, *parts, tmp_path / "other", **{**SETTINGS, "seed": 1})
    without = collect(model, *parts, tmp_path / "without", **{**SETTINGS, "early_rank": None})
    for name, config in (("early_attention", None), ("hybrid", HybridConfig(candidates=["early_attention"]))):
        save_predictor(fit(name, traces, config=config).predictor, tmp_path / name, view=traces.view)
        assert list(evaluated([str(tmp_path / name)], traces)) == [name]
        with pytest.raises(ExpertcastError, match=f"{name} reads early attention with.*--stand-in .*{name}"):
            evaluated([str(tmp_path / name)], other)
        with pytest.raises(ExpertcastError, match=f"{name} reads early attention with.*--stand-in"):
            evaluated([str(tmp_path / name)], without)
        own = collect(model, *parts, tmp_path / f"for {name}", **SETTINGS | {"seed": 1}, stand_in=traces.stand_in)
        assert list(evaluated([str(tmp_path / name)], own)) == [name]
        assert own.info["id"] != other.info["id"]
        write_stand_in(own.folder, StandIn(traces.view.shape, 2))
        edit_json(own.folder / layout.TRACE_FILE, lambda info: info.update(complete=False))
        with pytest.raises(ExpertcastError, match="begun with another stand-in"):
            collect(model, *parts, own.folder, **SETTINGS | {"seed": 1}, stand_in=traces.stand_in)


def test_early_attention_is_its_layers_router_on_the_column(traces: TraceDataset) -> None:
    batch, predictor = rows(traces, "test"), fit("early_attention", traces).predictor
    for layer in range(len(traces.view) - 1):
        following = traces.view[layer + 1]
        wanted = following.router_logits(following.router_input(early(batch)[:, layer].float()))
        torch.testing.assert_close(predictor.forecast(batch.state(traces.view, layer)).logits_TE, wanted)


def test_a_hybrid_asks_for_it_where_it_is_read(traces: TraceDataset) -> None:
    choices: Any = [
        {"ahead": 1, "layer": layer, "predictor": "early_attention" if layer == 2 else "next_norm", "recall": {}}
        for layer in range(1, len(traces.view))
    ]
    config = HybridConfig(
        candidates=["next_norm", "early_attention"], choices=choices,
        member_configs={"next_norm": {"ahead": [1]}, "early_attention": {"ahead": [1], "stand_in_rank": 2}},
    )  # fmt: skip
    hybrid = Hybrid(config, traces.view.shape).bind(traces.view)
    assert hybrid.uses_early
    assert [hybrid.wants_early(layer, 1) for layer in range(len(traces.view) - 1)] == [False, True, False]
    fitted = fit("hybrid", traces, config=HybridConfig(candidates=["router_input", "early_attention"])).predictor
    assert isinstance(fitted, Hybrid)
    assert set(fitted.chosen.values()) <= {"router_input", "early_attention"}


def test_chained_scores_are_left_out_of_tables(traces: TraceDataset, tmp_path: Path) -> None:
    predictors = {name: fit(name, traces).predictor for name in ("early_attention", "next_norm")}
    evaluation = evaluate(predictors, traces.batches("test", 100, max_tokens=60), traces.view)
    values = evaluation.as_dict()
    assert set(values["recall_at_k"]) >= set(predictors)
    assert "early_attention" not in values["recall_at_k_chained"]
    assert "next_norm" in values["recall_at_k_chained"]
    write_report(tmp_path / "report", values, chosen="next_norm")
    assert "early_attention" in (tmp_path / "report" / "index.html").read_text()


def test_other_ranks_are_other_traces(model: PreTrainedModel, parts: tuple[Any, Any], traces: TraceDataset) -> None:
    for rank in (0, None):
        with pytest.raises(ExpertcastError, match=f"has early_rank=2, not {rank}"):
            collect(model, *parts, traces.folder, **{**SETTINGS, "early_rank": rank})


def test_layers_where_it_is_refused_are_noted_and_not_mixed(
    model: PreTrainedModel, parts: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A block that gives another result when it is tried; in a later process it gives the same."""
    own, calls = find_moe_layers(model)[2].decoder.self_attn.forward, [0]

    def drifting(*args: Any, **kwargs: Any) -> Any:
        calls[0] += kwargs.get("past_key_values") is not None
        output, *rest = own(*args, **kwargs)
        return (output * (1000 if calls[0] == 2 else 1), *rest)

    with monkeypatch.context() as patched:
        patched.setattr(find_moe_layers(model)[2].decoder.self_attn, "forward", drifting)
        traces = collect(model, *parts, tmp_path / "traces", **SETTINGS)
    assert traces.info["settings"]["not_early"] == [2]
    assert main(["inspect", str(traces.folder)]) == 0
    assert "not_early     [2]" in capsys.readouterr().out
    with pytest.raises(ExpertcastError, match=r"has not_early=\[2\], not \[\]"):
        collect(model, *parts, traces.folder, **SETTINGS)


def test_a_layer_that_it_stops_at_ends_a_run(model: PreTrainedModel, parts: tuple[Any, Any]) -> None:
    view = find_moe_layers(model)
    plan = with_rank(make_plan(parts[1], parts[0], **SETTINGS), view)
    early_attention, _ = try_early(model, view, plan)
    assert early_attention is not None
    early_run = EarlyRun(early_attention, StandIn(view.shape, 0), dict(early_attention.refused))
    batches = iter(ActivationStream(model, view, plan.windows_of(plan.documents), early=early_run))
    next(batches)
    early_attention.refused[2] = "its cache cannot be read"
    with pytest.raises(ExpertcastError, match="stopped half-way at layer 2: its cache cannot be read: collect again"):
        next(batches)


def test_a_model_that_cannot_gets_no_column(
    parts: tuple[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = copy.deepcopy(CONFIGS["qwen3_moe"])
    config.decoder_sparse_step = 2
    made = AutoModelForCausalLM.from_config(config).eval()
    traces = collect(made, *parts, tmp_path / "traces", **SETTINGS)
    reason = "no early attention at layer 1: another layer is between it and the MoE layer before it"
    assert capsys.readouterr().err.count(reason) == 1
    assert rows(traces).early_TLD is None
    assert traces.stand_in is None
    assert OnlineTraces(made, *parts, **SETTINGS).stand_in is None


def test_inspect_says_so(traces: TraceDataset, without: TraceDataset, tmp_path: Path, capsys: Any) -> None:
    assert main(["inspect", str(traces.folder)]) == main(["inspect", str(without.folder)]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if "early_rank" in line] == ["2", "none"]
    config = copy.deepcopy(CONFIGS["qwen3_moe"])
    for step, expected in ((1, "at 3 of 4 layers"), (2, "at 0 of 2 layers")):
        config.decoder_sparse_step = step
        folder = tmp_path / str(step)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        assert main(["inspect", str(folder), "--json", str(tmp_path / "report.json")]) == 0
        shown = capsys.readouterr().out
        assert expected in shown
        report = json.loads((tmp_path / "report.json").read_text())
        assert ("no early attention at layer 1: another layer is between" in shown) == bool(report["not_early"])
        assert bool(report["not_early"]) == (step == 2)
    save_predictor(fit("early_attention", traces).predictor, tmp_path / "made", view=traces.view)
    assert main(["inspect", str(tmp_path / "made")]) == 0
    assert "reads input of the norm before the router" in (out := capsys.readouterr().out)
    assert out.rstrip().endswith("early attention")
