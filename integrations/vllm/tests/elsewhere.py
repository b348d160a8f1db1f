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
    return _recall(traces, asked["predictor"], asked["prompts"])


def _recall(traces: Any, name: str, prompts: dict[str, int]) -> dict[int, float]:
    """Return the recall by target layer, as the monitor of decode steps computes it.

    Args:
        traces: traces of documents that ran together from the first generated token on.
        name: name of an untrained predictor, or a checkpoint.
        prompts: number of prompt tokens by document hash.
    """
    from expertcast.data.batch import TraceBatch
    from expertcast.runtime.engine.drift import BLOCK, MEMORY, FadingMean
    from expertcast.runtime.forecasters import resolve_predictor

    view = traces.view
    predictor, _ = resolve_predictor(name, view)
    batch = TraceBatch.cat(list(traces.batches("all", 100_000)))
    prompt_of = {document.index: prompts[document.hash] for document in traces.documents}
    # The prompts run in the first forward pass, and the n-th generated token in pass n + 1.
    forward_T = [
        position - prompt_of[document] + 2
        for document, position in zip(batch.document_T.tolist(), batch.position_T.tolist(), strict=True)
    ]
    full = (max(forward_T) + 1) // BLOCK
    found = {}
    for source in range(len(view) - 1):
        routed_TK = batch.state(view, source + 1).topk_ids_TK
        forecast_TK = predictor.forecast(batch.state(view, source)).topk_ids_TK
        hit_T = (forecast_TK[:, :, None] == routed_TK[:, None]).any(dim=1).float().mean(dim=1).tolist()
        running = FadingMean(MEMORY)
        for block in range(full):
            own = [
                hit for hit, number in zip(hit_T, forward_T, strict=True) if number >= 2 and number // BLOCK == block
            ]
            running.add(sum(own) / len(own))
        found[source + 1] = running.mean
    return found


if __name__ == "__main__":
    print(json.dumps(do(json.load(sys.stdin))))
