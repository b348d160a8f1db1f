"""Run by torchrun in tests: each rank collects and reads traces, fits on its share of them and saves what came out.

Arguments: output folder, in which traces are collected; or trace folder, output folder, then the folder of the
checkpoints of training and the batches before rank 1 is killed (-1: never), to fit the estimator alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from expertcast.data.batch import TraceBatch
from expertcast.data.collect import collect
from expertcast.data.models import load_tokenizer
from expertcast.data.online import OnlineTraces
from expertcast.data.processes import training_share
from expertcast.data.text import load_documents
from expertcast.data.traces import TraceDataset, TraceSource
from expertcast.predictors import PredictorConfig
from expertcast.predictors.estimator import EstimatorConfig
from expertcast.predictors.linear import LinearConfig
from expertcast.training.fit import fit
from expertcast.training.scoring import FitOptions
from tests.families.models import tiny_model

SETTINGS: dict[str, Any] = {"tokens": 2500, "window": 64, "batch_size": 4}
TOKENS_PER_BATCH = 128
ESTIMATOR = EstimatorConfig(width=8, steps=12, step_tokens=64, patience=12)
CONFIGS: dict[str, PredictorConfig | None] = {
    "frequency": None,
    "linear": LinearConfig(inputs=["quasi_hidden", "routing"], steps=12, step_tokens=64),
    "estimator": ESTIMATOR,
}


class Dying(TraceDataset):
    """Its process is killed in the middle of training."""

    left = -1

    def batches(self, split: str, batch_size: int, **options: Any) -> Iterator[TraceBatch]:
        for batch in super().batches(split, batch_size, **options):
            if options.get("shuffle") and self.left >= 0 and training_share().rank == 1:
                if self.left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                self.left -= 1
            yield batch


def two_ranks(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run this module on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", __name__]
    return subprocess.run(
        [*command, *map(str, arguments)], cwd=Path(__file__).parents[2], env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300, capture_output=True, text=True, check=False,
    )  # fmt: skip


def seen(source: TraceSource) -> dict[str, Any]:
    """Return what a rank reads: its share of the train split, and the default vectors."""
    batches = list(source.batches("train", TOKENS_PER_BATCH, shuffle=True, share=training_share()))
    return {
        "seen": [each for b in batches for each in zip(b.document_T.tolist(), b.position_T.tolist(), strict=True)],
        "defaults": source.defaults.expert_LED.sum(-1).tolist(),
        "count": source.defaults.count_LE.tolist(),
    }


def fit_and_save(source: TraceDataset, out: Path, options: FitOptions, names: list[str]) -> dict[str, Any]:
    """Each predictor's report; its tensors are written by rank."""
    reports = {}
    for name in names:
        fitted = fit(name, source, config=CONFIGS[name], options=options)
        reports[name], rank = fitted.report, training_share().rank
        tensors = {key: tensor.clone().contiguous() for key, tensor in fitted.predictor.state_dict().items()}
        save_file(tensors, out / f"{name}-{rank}.safetensors")
    return reports


def collect_and_fit(out: Path) -> None:
    given = tiny_model("qwen2_moe"), load_tokenizer("reference"), load_documents("reference")[:200]
    traces = collect(*given, out / "traces", **SETTINGS, shard_bytes=700 * 371)
    found = {"traces": seen(traces), "online": seen(OnlineTraces(*given, buffer_tokens=512, **SETTINGS))}
    found |= fit_and_save(traces, out, FitOptions(validation_tokens=200), list(CONFIGS))
    (out / f"reports-{training_share().rank}.json").write_text(json.dumps(found))


def go_on(traces: str, out: str, states: str, left: str) -> None:
    Dying.left = int(left)
    options = FitOptions(validation_tokens=200, resume_folder=Path(states))
    fit_and_save(Dying.open(traces), Path(out), options, ["estimator"])


if __name__ == "__main__":
    collect_and_fit(Path(sys.argv[1])) if len(sys.argv) == 2 else go_on(*sys.argv[1:])
