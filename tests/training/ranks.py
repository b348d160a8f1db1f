"""Run by torchrun in tests: each rank fits on its share of traces and saves what came out.

Arguments: trace folder, output folder, then the folder of the checkpoints of training and the batches before rank 1 is
killed (-1: never), to fit the estimator alone.
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
from expertcast.data.processes import training_share
from expertcast.data.traces import TraceDataset
from expertcast.predictors import PredictorConfig
from expertcast.predictors.estimator import EstimatorConfig
from expertcast.training.fit import fit
from expertcast.training.scoring import FitOptions

ESTIMATOR = EstimatorConfig(parameters=80_000, steps=12, step_tokens=64, patience=12)
CONFIGS: dict[str, PredictorConfig | None] = {"frequency": None, "linear": None, "estimator": ESTIMATOR}


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


def main(traces: str, out: str, states: str | None = None, left: str = "-1") -> None:
    source = Dying.open(traces)
    Dying.left = int(left)
    options = FitOptions(validation_tokens=300, resume_folder=None if states is None else Path(states))
    reports = {}
    for name in CONFIGS if states is None else ("estimator",):
        fitted = fit(name, source, config=CONFIGS[name], options=options)
        reports[name], rank = fitted.report, training_share().rank
        tensors = {key: tensor.clone().contiguous() for key, tensor in fitted.predictor.state_dict().items()}
        save_file(tensors, Path(out) / f"{name}-{rank}.safetensors")
    (Path(out) / f"reports-{training_share().rank}.json").write_text(json.dumps(reports))


if __name__ == "__main__":
    main(*sys.argv[1:])
