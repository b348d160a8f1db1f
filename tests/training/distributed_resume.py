"""Run by torchrun in tests: two ranks train an estimator; one of them is killed after some batches, if so told.

Arguments: trace folder, output folder, folder of the states, batches before the kill (-1: none).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from expertcast.data.batch import TraceBatch
from expertcast.data.processes import training_share
from expertcast.data.traces import TraceDataset
from expertcast.training.fit import fit
from expertcast.training.scoring import FitOptions
from tests.training.distributed_fit import ESTIMATOR


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


def main(traces: Path, out: Path, states: Path, left: int) -> None:
    source = Dying.open(traces)
    Dying.left = left
    options = FitOptions(validation_tokens=300, resume_folder=states)
    predictor = fit("estimator", source, config=ESTIMATOR, options=options).predictor
    tensors = {key: tensor.clone().contiguous() for key, tensor in predictor.state_dict().items()}
    save_file(tensors, out / f"{training_share().rank}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
