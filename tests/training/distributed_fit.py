"""Run by torchrun in tests: each rank fits on its share of traces, saves what came out, and says what it saw.

Arguments: trace folder, output folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import save_file

from expertcast.data.processes import training_share
from expertcast.data.traces import TraceDataset
from expertcast.predictors import PredictorConfig
from expertcast.predictors.estimator import EstimatorConfig
from expertcast.training.fit import fit
from expertcast.training.scoring import FitOptions

ESTIMATOR = EstimatorConfig(parameters=80_000, steps=12, step_tokens=64, patience=12)
OPTIONS = FitOptions(validation_tokens=300)
CONFIGS: dict[str, PredictorConfig | None] = {"frequency": None, "linear": None, "estimator": ESTIMATOR}


def main(traces: Path, out: Path) -> None:
    source = TraceDataset.open(traces)
    reports = {}
    for name, config in CONFIGS.items():
        fitted = fit(name, source, config=config, options=OPTIONS)
        reports[name] = fitted.report
        rank = training_share().rank
        tensors = {key: tensor.clone().contiguous() for key, tensor in fitted.predictor.state_dict().items()}
        save_file(tensors, out / f"{name}-{rank}.safetensors")
    (out / f"reports-{training_share().rank}.json").write_text(json.dumps(reports))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
