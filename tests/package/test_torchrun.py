"""The README's torchrun commands: two ranks share the work, one writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from expertcast.checkpoints.checkpoint import PredictorCheckpoint
from expertcast.data.traces import TraceDataset


def two_ranks(*arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, "-m", "expertcast.cli", *arguments],
        capture_output=True, text=True, timeout=300, check=False, env=environment,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.slow
def test_collect_and_train_with_two_ranks(tmp_path: Path) -> None:
    traces, checkpoint, result = (str(tmp_path / name) for name in ("traces", "checkpoint", "result.json"))
    two_ranks("collect", "reference", "--data", "reference", "--tokens", "6000", "--out", traces)
    dataset = TraceDataset.open(traces)
    rows = list(dataset.batches("all", 1000))
    places = {(int(d), int(p)) for batch in rows for d, p in zip(batch.document_T, batch.position_T, strict=True)}
    assert len(places) == sum(map(len, rows)) == dataset.token_count("all")
    settings = ["steps=6", "step_tokens=128", "parameters=80000"]
    text = two_ranks(
        "train", traces, "--predictor", "estimator", "--out", checkpoint, "--json", result, "--set", *settings
    )
    assert text.count("wrote ") == 1
    assert PredictorCheckpoint.open(checkpoint).config["training"]["ranks"] == 2
    assert json.loads(Path(result).read_text())["recall_at_k"]["estimator"]["mean"] > 0.5
