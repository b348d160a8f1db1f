"""The child's side of `children.run`. It imports the standard library only: a peer's interpreter has nothing else."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def begin() -> dict[str, Any]:
    """Read the run's description and join its control groups."""
    spec: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    for group in spec["groups"]:
        (Path(group) / "cgroup.procs").write_text("0")
    return spec


def ready() -> None:
    """Report that everything is loaded, and wait until the limits are set."""
    print("ready", flush=True)
    if sys.stdin.readline() != "go\n":
        raise SystemExit(1)


def follow(
    spec: dict[str, Any], step: Callable[[int, int], tuple[float, int]], warmed: Callable[[], None]
) -> dict[str, Any]:
    """Read a text: the prompt at once, then token by token. All sides read the same tokens, not their own output.

    Args:
        spec: the run's description.
        step: reads the tokens from one position to another; returns the seconds and the likeliest next token.
        warmed: called before the timed steps.

    Returns:
        Times, bytes read from disks, page faults included, and the likeliest tokens.
    """
    length, warm, timed, steps = spec["prompt"], spec["warm"], spec["timed"], []
    before = _bytes_read()
    ttft_s, _ = step(0, length)
    prompt_bytes = _bytes_read() - before
    for place in range(length, length + warm + timed):
        if place == length + warm:
            warmed()
            before = _bytes_read()
        steps.append(step(place, place + 1))
    steps_s = [seconds for seconds, _ in steps[warm:]]
    return {
        "ttft_s": ttft_s, "prompt_bytes_read": prompt_bytes, "steps_s": steps_s, "tpot_s": statistics.median(steps_s),
        "bytes_read": (_bytes_read() - before) / timed, "largest": [token for _, token in steps],
    }  # fmt: skip


def reader(model: Any, text: list[int]) -> Callable[[int, int], tuple[float, int]]:
    """Return the `step` of :func:`follow` for a model of transformers and a text, with a cache of its own."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)

    def step(first: int, last: int) -> tuple[float, int]:
        start = time.perf_counter()
        ids = torch.tensor([text[first:last]])
        found = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        largest = int(found.logits[0, -1].argmax())
        return time.perf_counter() - start, largest

    return step


def end(spec: dict[str, Any], found: dict[str, Any]) -> None:
    """Write the results with this process's peak resident memory."""
    peak = 1024 * _status("/proc/self/status", "VmHWM:")
    Path(spec["out"]).write_text(json.dumps({**found, "peak_resident_bytes": peak}))


def _bytes_read() -> int:
    return _status("/proc/self/io", "read_bytes:")


def _status(path: str, name: str) -> int:
    lines = Path(path).read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])
