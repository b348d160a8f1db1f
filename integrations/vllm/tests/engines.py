"""vLLM engines for tests, each in a separate process forked from one that has imported vLLM.

The import takes as long as the rest of a short run.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import one_run
from expertcast_vllm.settings import VARIABLE
from one_run import QUIET, RESULT

REFERENCE = str(Path(__file__).parents[3] / "checkpoints" / "reference")
PROMPTS = [
    "It is a truth universally acknowledged, that", "The sea was", "Once upon a time there was a", "def main():",
    "He said to her that", "In the beginning", "The theorem of Pythagoras", "London in winter is",
]  # fmt: skip
LOADING = "Loading safetensors"
"""Line of vLLM's log when it reads weights."""
_SECONDS = 180
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker"])


@dataclass(frozen=True)
class Ran:
    """Results of an engine."""

    tokens: list[list[int]]
    layers: list[str]
    """Class names of the model's modules; empty if they are in another process."""
    workers: list[dict[str, Any]]
    memory: dict[str, int]
    """Bytes of the process without files: before loading, at the peak while loading, and at the end."""
    log: str


def run(
    options: Mapping[str, object] | None = None,
    *,
    engine: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    model: str = REFERENCE,
    tokens: int = 24,
) -> Ran:
    """Generate greedily from eight prompts at once.

    Args:
        options: options of expertcast; None without expertcast.
        engine: options of vLLM.
        environment: additional environment variables.
        model: the model.
        tokens: tokens per prompt.

    Raises:
        RuntimeError: the engine failed; the message is its log.
    """
    if options is not None:
        environment = {VARIABLE: json.dumps(options), **(environment or {})}
    counted = options is not None or bool((engine or {}).get("additional_config"))
    asked = {
        "model": model, "engine": dict(engine or {}), "environment": dict(environment or {}), "prompts": PROMPTS,
        "tokens": tokens, "counted": counted,
    }  # fmt: skip
    _start_forks()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "log"
        process = _FORKS.Process(target=_run_there, args=(json.dumps(asked), str(file)))
        process.start()
        process.join(_SECONDS)
        ended = process.exitcode
        if ended is None:
            process.kill()
            process.join()
        log = file.read_text()
    if ended != 0:
        raise RuntimeError(log)
    (line,) = [line for line in log.splitlines() if line.startswith(RESULT)]
    given = json.loads(line.removeprefix(RESULT))
    return Ran(given["tokens"], given.get("layers", []), given.get("workers", []), given["memory"], log)


def both(options: Mapping[str, object], **kwargs: Any) -> tuple[Ran, Ran]:
    """Run without and with expertcast at the same time."""
    with ThreadPoolExecutor(2) as pool:
        resident, offloaded = pool.submit(run, **kwargs), pool.submit(run, options, **kwargs)
        return resident.result(), offloaded.result()


def _start_forks() -> None:
    """Start the process that is forked; its environment is that of every later process."""
    os.environ.pop(VARIABLE, None)
    os.environ.update(QUIET)
    forkserver.ensure_running()


def _run_there(asked: str, log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.stdin = io.StringIO(asked)
    one_run.main()
