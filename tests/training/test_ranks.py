"""Two ranks under torchrun: sums are added up, training is Lightning DDP, both ranks end with one predictor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from expertcast.data.processes import Share
from expertcast.data.traces import TraceDataset
from expertcast.predictors.linear import Linear, LinearConfig
from expertcast.training.linear import RidgeStatistics
from expertcast.training.loop import read_state
from expertcast.training.scoring import RANK_BATCH
from tests.training.ranks import CONFIGS, ESTIMATOR, two_ranks


@pytest.fixture(scope="module")
def ranks(reference_traces: TraceDataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    done = two_ranks(reference_traces.folder, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", list(CONFIGS))
def test_both_ranks_end_with_the_same_predictor(ranks: Path, name: str) -> None:
    one, other = (load_file(ranks / f"{name}-{rank}.safetensors") for rank in range(2))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_linear_is_fitted_on_both_shares_together(ranks: Path, reference_traces: TraceDataset) -> None:
    """Against the two shares read one after the other by this process."""
    shape, view = reference_traces.view.shape, reference_traces.view
    reader = Linear(LinearConfig(), shape)
    reader.set_defaults(reference_traces.defaults)
    reader.bind(view)
    sums = RidgeStatistics(1, shape.hidden, shape.experts)
    tokens = 0
    for rank in range(2):
        for batch in reference_traces.batches("train", RANK_BATCH, share=Share(rank, 2)):
            sums.update(0, reader.input_vector(batch.state(view, 6), 1), batch.logits_TLE[:, 7])
            tokens += len(batch)
    saved = load_file(ranks / "linear-0.safetensors")
    weight, bias = sums.solve([float(saved["strength_P_1"][6])])
    torch.testing.assert_close(saved["weight_PDE_1"][6], weight[0, 0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(saved["bias_PE_1"][6], bias[0, 0], rtol=1e-3, atol=1e-3)
    count_LE = load_file(ranks / "frequency-0.safetensors")["count_LE"]
    assert count_LE.sum(dim=1).tolist() == [tokens * shape.top_k] * shape.layers
    assert tokens > 0.85 * reference_traces.token_count("train")


def test_estimator_trains_in_step(ranks: Path) -> None:
    reports: list[dict[str, Any]] = [json.loads((ranks / f"reports-{rank}.json").read_text()) for rank in range(2)]
    first, second = (report["estimator"]["distances"]["1"] for report in reports)
    assert first == second
    assert reports[0]["estimator"]["ranks"] == 2
    assert first["history"][-1]["step"] == ESTIMATOR.steps
    assert len({entry["recall"] for entry in first["history"]}) > 1, "the network moves"


@pytest.mark.slow
def test_a_killed_rank_and_the_other_go_on(reference_traces: TraceDataset, tmp_path: Path) -> None:
    """One of two ranks is killed; started again, both go on where the first one saved."""
    traces, killed, whole = reference_traces.folder, tmp_path / "killed", tmp_path / "whole"
    for folder in (killed, whole):
        folder.mkdir()
    state = tmp_path / "states" / "ahead1.ckpt"
    assert two_ranks(traces, killed, state.parent, 9).returncode != 0
    assert 6 <= read_state(state)["global_step"] <= 9
    resumed = two_ranks(traces, killed, state.parent, -1)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "going on at step" in resumed.stderr
    alone = two_ranks(traces, whole, tmp_path / "others", -1)
    assert alone.returncode == 0, alone.stderr[-3000:]
    for rank in range(2):
        one, other = (load_file(folder / f"estimator-{rank}.safetensors") for folder in (killed, whole))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
