"""What is done with traces and checkpoints where transformers is new enough for it: in the project's own environment.

As a script it does what standard input asks for, and writes the result on standard output.
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
"""Of the project's environment."""


def elsewhere(**asked: Any) -> Any:
    """The result of :func:`do` there."""
    return json.loads(_run([__file__], json.dumps(asked)).splitlines()[-1])


def train(traces: Path, predictor: str, out: Path, *settings: str, default_vectors: Path | None = None) -> None:
    """`expertcast train` there."""
    options = ["--set", *settings] if settings else []
    options += [] if default_vectors is None else ["--default-vectors", str(default_vectors)]
    command("train", str(traces), "--predictor", predictor, "--out", str(out), *options)


def command(*words: str) -> None:
    """A command of expertcast there."""
    _run(["-m", "expertcast.cli", *words])


def _run(arguments: list[str], given: str = "") -> str:
    if not PYTHON.exists():
        pytest.skip(f"no {PYTHON}: make the project's environment (make test), or set EXPERTCAST_PYTHON")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(PYTHON), *arguments], input=given, capture_output=True, text=True, timeout=300, env=environment
    )
    assert not done.returncode, done.stderr
    return done.stdout


def do(asked: dict[str, Any]) -> Any:
    """The fingerprints of models, or of those of traces, or the recall of a predictor's forecasts on traces."""
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
    """By target layer, as a monitor of decode steps has it.

    Args:
        traces: whose documents, run together from the first token they generated on, are looked at.
        name: of a predictor that is not trained, or a checkpoint.
        prompts: by a document's hash, how many of its tokens are the prompt's.
    """
    from expertcast.data.batch import TraceBatch
    from expertcast.runtime.engine.drift import BLOCK, MEMORY
    from expertcast.runtime.engine.refit import FadingMean
    from expertcast.runtime.forecasters import resolve_predictor

    view = traces.view
    predictor, _ = resolve_predictor(name, view)
    batch = TraceBatch.cat(list(traces.batches("all", 100_000)))
    prompt_of = {document.index: prompts[document.hash] for document in traces.documents}
    # the first forward is of the prompts: a generated token's is the second, and so on
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
