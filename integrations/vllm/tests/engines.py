"""Engines of vLLM for tests, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertcast_vllm.settings import VARIABLE
from one_run import RESULT

REFERENCE = str(Path(__file__).parents[3] / "checkpoints" / "reference")
PROMPTS = [
    "It is a truth universally acknowledged, that", "The sea was", "Once upon a time there was a", "def main():",
    "He said to her that", "In the beginning", "The theorem of Pythagoras", "London in winter is",
]  # fmt: skip
_SECONDS = 180


@dataclass(frozen=True)
class Ran:
    """What an engine gave."""

    tokens: list[list[int]]
    layers: list[str]
    """Names of the classes of the model's modules; empty where they are in another process."""
    workers: list[dict[str, Any]]
    memory: dict[str, int]
    """Bytes of the process that are no file's: before the model, the most while it was loaded, and at the end."""
    log: str


def run(
    options: Mapping[str, object] | None = None,
    *,
    engine: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    model: str = REFERENCE,
    tokens: int = 24,
) -> Ran:
    """Greedy tokens of eight prompts at once; `options` of expertcast, None without it.

    Raises:
        RuntimeError: it failed; the message is its log.
    """
    if options is not None:
        environment = {VARIABLE: json.dumps(options), **(environment or {})}
    counted = options is not None or bool((engine or {}).get("additional_config"))
    asked = {
        "model": model, "engine": dict(engine or {}), "environment": dict(environment or {}), "prompts": PROMPTS,
        "tokens": tokens, "counted": counted,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("one_run.py"))], input=json.dumps(asked), capture_output=True,
        text=True, timeout=_SECONDS, env={key: value for key, value in os.environ.items() if key != VARIABLE},
    )  # fmt: skip
    log = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(log)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    given = json.loads(line.removeprefix(RESULT))
    return Ran(given["tokens"], given.get("layers", []), given.get("workers", []), given["memory"], log)


def both(options: Mapping[str, object], **kwargs: Any) -> tuple[Ran, Ran]:
    """What :func:`run` gives without expertcast and with it, side by side in time."""
    with ThreadPoolExecutor(2) as pool:
        resident, offloaded = pool.submit(run, **kwargs), pool.submit(run, options, **kwargs)
        return resident.result(), offloaded.result()
