"""Two ranks under torchrun collect and read what one process does; training is Lightning DDP, both ranks end with one
predictor."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from expertcast.data.batch import TraceBatch
from expertcast.data.collect import collect
from expertcast.data.text import load_documents
from expertcast.data.traces import TraceDataset
from expertcast.training.fit import fit
from expertcast.training.loop import read_state
from expertcast.training.scoring import FitOptions
from tests.families.models import tiny_model
from tests.training.ranks import CONFIGS, ESTIMATOR, SETTINGS, TOKENS_PER_BATCH, two_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that two ranks wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    done = two_ranks(folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def merged(ranks: Path) -> TraceDataset:
    return TraceDataset.open(ranks / "traces")


@pytest.fixture(scope="module")
def reports(ranks: Path) -> list[dict[str, Any]]:
    """Return what each rank read and how it trained."""
    return [json.loads((ranks / f"reports-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def single(reference_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> TraceDataset:
    """The same collection by this process alone."""
    folder, documents = tmp_path_factory.mktemp("single") / "traces", load_documents("reference")[:200]
    return collect(tiny_model("qwen2_moe"), reference_tokenizer, documents, folder, **SETTINGS)


def test_merged_traces_are_the_single_processes(merged: TraceDataset, single: TraceDataset) -> None:
    assert len({path.name.split("-")[1] for path in merged.folder.glob("data-*.arrow")}) == 2
    ours, theirs = next(merged.batches("all", 2500)), next(single.batches("all", 2500))
    assert torch.equal(ours.document_T, theirs.document_T)
    assert torch.equal(ours.position_T, theirs.position_T)
    # batches are composed differently where the shares meet, so bf16 forwards differ in their last bits there
    same = (ours.residual_TLD[:, 0] == theirs.residual_TLD[:, 0]).all(-1)
    assert same.float().mean() > 0.9
    assert merged.info["splits"] == single.info["splits"]
    assert merged.info["settings"]["text"] == single.info["settings"]["text"]
    together, alone = merged.defaults, single.defaults
    assert together.token_count == alone.token_count == single.token_count("train")
    assert torch.equal(together.count_LE, alone.count_LE)
    torch.testing.assert_close(together.expert_LED, alone.expert_LED, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(together.shared_LD, alone.shared_LD)


@pytest.mark.parametrize("source", ["traces", "online"])
def test_ranks_read_their_own_documents_in_step(
    reports: list[dict[str, Any]], single: TraceDataset, source: str
) -> None:
    """Default vectors of a running model are merged too."""
    first, second = ([tuple(token) for token in report[source]["seen"]] for report in reports)
    assert len({*first}) == len(first) == len(second) == len({*second}), "a token was read twice"
    assert len(first) > 2 * TOKENS_PER_BATCH
    assert not {document for document, _ in first} & {document for document, _ in second}
    train = TraceBatch.cat(list(single.batches("train", 512)))
    assert {*first, *second} <= {*zip(train.document_T.tolist(), train.position_T.tolist(), strict=True)}
    expected = single.defaults.expert_LED.sum(-1)
    for report in reports:
        assert report[source]["count"] == single.defaults.count_LE.tolist()
        torch.testing.assert_close(torch.tensor(report[source]["defaults"]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_both_ranks_end_with_the_same_predictor(ranks: Path, name: str) -> None:
    one, other = (load_file(ranks / f"{name}-{rank}.safetensors") for rank in range(2))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_ranks_share_layer_pairs_and_find_the_maps_of_one_process(ranks: Path, merged: TraceDataset) -> None:
    """The ridge regression of a pair reads all tokens, on whichever rank."""
    config = replace(CONFIGS["linear"], steps=0)
    alone = fit("linear", merged, config=config, options=FitOptions(validation_tokens=200))
    reports = [
        json.loads((ranks / f"reports-{rank}.json").read_text())["linear"]["distances"]["1"] for rank in range(2)
    ]
    assert reports[0]["strengths"] == reports[1]["strengths"]
    for rank in range(2):
        saved = load_file(ranks / f"linear-{rank}.safetensors")
        for pair, gate in enumerate(reports[rank]["distillation"]["gates"]):
            if not gate and reports[rank]["strengths"][pair] == alone.report["distances"]["1"]["strengths"][pair]:
                own = alone.predictor.get_buffer("weight_PFE_1")[pair]
                torch.testing.assert_close(saved["weight_PFE_1"][pair], own, rtol=1e-4, atol=1e-5)
    count_LE = load_file(ranks / "frequency-0.safetensors")["count_LE"]
    tokens = int(count_LE[0].sum()) // merged.view.shape.top_k
    assert 0.7 * merged.token_count("train") < tokens <= merged.token_count("train"), "whole batches of each share"


def test_estimator_trains_in_step(reports: list[dict[str, Any]]) -> None:
    first, second = (report["estimator"]["distances"]["1"] for report in reports)
    assert first == second
    assert reports[0]["estimator"]["ranks"] == 2
    assert first["history"][-1]["step"] == ESTIMATOR.steps


@pytest.mark.slow
def test_a_killed_rank_and_the_other_go_on(merged: TraceDataset, tmp_path: Path) -> None:
    """One of two ranks is killed; started again, both go on where the first one saved."""
    traces, killed, whole = merged.folder, tmp_path / "killed", tmp_path / "whole"
    for folder in (killed, whole):
        folder.mkdir()
    state = tmp_path / "states" / "ahead1.ckpt"
    assert two_ranks(traces, killed, state.parent, ESTIMATOR.steps + 9).returncode != 0
    assert 6 <= read_state(state)["global_step"] <= 9
    resumed = two_ranks(traces, killed, state.parent, -1)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "resuming at step" in resumed.stderr
    alone = two_ranks(traces, whole, tmp_path / "others", -1)
    assert alone.returncode == 0, alone.stderr[-3000:]
    for rank in range(2):
        one, other = (load_file(folder / f"estimator-{rank}.safetensors") for folder in (killed, whole))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
