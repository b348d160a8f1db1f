"""Work on traces and checkpoints in the project's own environment, which has a newer transformers.

As a script it reads a request from standard input and writes the result to standard output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("EXPERTCAST_PYTHON", ROOT / ".venv" / "bin" / "python"))
"""Python of the project's environment."""


def elsewhere(**asked: Any) -> Any:
    """Call :func:`do` in that environment."""
    return json.loads(_run([__file__], json.dumps(asked)).splitlines()[-1])


def train(traces: Path, predictor: str, out: Path, *settings: str, default_vectors: Path | None = None) -> None:
    """Run `expertcast train` in that environment."""
    options = ["--set", *settings] if settings else []
    options += [] if default_vectors is None else ["--default-vectors", str(default_vectors)]
    command("train", str(traces), "--predictor", predictor, "--out", str(out), *options)


def command(*words: str) -> None:
    """Run a command of expertcast in that environment."""
    _run(["-m", "expertcast.cli", *words])


def _run(arguments: list[str], given: str = "") -> str:
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is missing: create the project's environment (make test), or set EXPERTCAST_PYTHON")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(PYTHON), *arguments], input=given, capture_output=True, text=True, timeout=300, env=environment
    )
    assert not done.returncode, done.stderr
    return done.stdout


def do(asked: dict[str, Any]) -> Any:
    """Return fingerprints of models or of traces, or the recall of a predictor on traces."""
    from expertcast.data.models import load_model
    from expertcast.data.moe_layers import find_moe_layers
    from expertcast.data.traces import TraceDataset

    if "models" in asked:
        return [find_moe_layers(load_model(model)).fingerprint() for model in asked["models"]]
    if "folders" in asked:
        return [TraceDataset.open(folder).view.fingerprint() for folder in asked["folders"]]
    traces = TraceDataset.open(asked["traces"])
    traces.verify()
    return _recall(traces, asked["predictor"])


def _recall(traces: Any, name: str) -> dict[int, float]:
    """Return the recall by target layer of an untrained predictor or of a checkpoint."""
    from expertcast.data.batch import TraceBatch
    from expertcast.runtime.forecasters import resolve_predictor

    view = traces.view
    predictor, _ = resolve_predictor(name, view)
    batch = TraceBatch.cat(list(traces.batches("all", 100_000)))
    found = {}
    for source in range(len(view) - 1):
        routed_TK = batch.state(view, source + 1).topk_ids_TK
        forecast_TK = predictor.forecast(batch.state(view, source)).topk_ids_TK
        hit_TK = (forecast_TK[:, :, None] == routed_TK[:, None]).any(dim=1)
        found[source + 1] = float(hit_TK.float().mean())
    return found


if __name__ == "__main__":
    print(json.dumps(do(json.load(sys.stdin))))
