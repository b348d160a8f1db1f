"""Two ranks under torchrun do what one process does; one process at a time writes a folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from expertcast.data.batch import TraceBatch
from expertcast.data.collect import collect
from expertcast.data.processes import exclusive
from expertcast.data.text import Document
from expertcast.data.traces import TraceDataset
from expertcast.predictors import ExpertcastError
from tests.data.two_ranks_script import TOKENS_PER_BATCH

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {"tokens": 2500, "window": 64, "batch_size": 4}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder that two ranks wrote, and what each of them reports."""
    folder = tmp_path_factory.mktemp("ranks")
    settings = {**SETTINGS, "shard_bytes": 700 * 588}
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
         "-m", "tests.data.two_ranks_script", str(folder), json.dumps(settings)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=300, capture_output=True,
    )  # fmt: skip
    return folder, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def single(
    small_model: PreTrainedModel, reference_tokenizer: Any, text: list[Document],
    tmp_path_factory: pytest.TempPathFactory,
) -> TraceDataset:  # fmt: skip
    """The same collection by this process alone."""
    return collect(small_model, reference_tokenizer, text, tmp_path_factory.mktemp("single") / "traces", **SETTINGS)


def test_merged_traces_are_the_single_processes(ranks: tuple[Path, list[dict[str, Any]]], single: TraceDataset) -> None:
    merged = TraceDataset.open(ranks[0] / "traces")
    assert len({path.name.split("-")[1] for path in merged.folder.glob("data-*.arrow")}) == 2
    ours, theirs = next(merged.batches("all", 2500)), next(single.batches("all", 2500))
    assert torch.equal(ours.document_T, theirs.document_T)
    assert torch.equal(ours.position_T, theirs.position_T)
    # batches are composed differently where the shares meet, so bf16 forwards differ in their last bits there
    same = (ours.residual_TLD[:, 0] == theirs.residual_TLD[:, 0]).all(-1)
    assert same.float().mean() > 0.9
    assert merged.info["splits"] == single.info["splits"]
    assert merged.info["settings"]["text"] == single.info["settings"]["text"]


def test_merged_default_vectors_are_the_single_processes(
    ranks: tuple[Path, list[dict[str, Any]]], single: TraceDataset
) -> None:
    merged, alone = TraceDataset.open(ranks[0] / "traces").defaults, single.defaults
    assert merged.token_count == alone.token_count == single.token_count("train")
    assert torch.equal(merged.count_LE, alone.count_LE)
    torch.testing.assert_close(merged.expert_LED, alone.expert_LED, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged.shared_LD, alone.shared_LD)


@pytest.mark.parametrize("source", ["traces", "online"])
def test_ranks_read_their_own_documents_in_step(
    ranks: tuple[Path, list[dict[str, Any]]], single: TraceDataset, source: str
) -> None:
    first, second = ([tuple(token) for token in report[source]["seen"]] for report in ranks[1])
    assert len({*first}) == len(first) == len(second) == len({*second}), "a token was read twice"
    assert len(first) > 2 * TOKENS_PER_BATCH
    assert not {document for document, _ in first} & {document for document, _ in second}
    train = TraceBatch.cat(list(single.batches("train", 512)))
    assert {*first, *second} <= {*zip(train.document_T.tolist(), train.position_T.tolist(), strict=True)}


def test_online_default_vectors_of_two_ranks_are_merged(
    ranks: tuple[Path, list[dict[str, Any]]], single: TraceDataset
) -> None:
    for report in ranks[1]:
        assert report["online"]["count"] == single.defaults.count_LE.tolist()
        torch.testing.assert_close(
            torch.tensor(report["online"]["defaults"]), single.defaults.expert_LED.sum(-1), rtol=1e-4, atol=1e-4
        )


CODE = """
import sys, time
from pathlib import Path
from expertcast.data.processes import exclusive
with exclusive(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(100)
"""


def test_held_by_another_process_until_it_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    other = subprocess.Popen([sys.executable, "-c", CODE, str(folder)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    with pytest.raises(ExpertcastError, match=r"another process is writing .*new: wait for it"), exclusive(folder):
        pass
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    other.stdout.close()
    with exclusive(folder):
        (folder / "file").touch()
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_a_folder_that_was_not_written_is_not_left(tmp_path: Path) -> None:
    with exclusive(tmp_path / "above" / "new"):
        assert (tmp_path / "above" / "new").is_dir()
    assert list(tmp_path.iterdir()) == []
    with exclusive(tmp_path / "above" / "new"):
        (tmp_path / "above" / "file").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["above", "file"]
    (tmp_path / "above" / "file").unlink()
    (tmp_path / "above").rmdir()
    (tmp_path / "old").mkdir()
    with exclusive(tmp_path / "old"), exclusive(tmp_path / "other"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
