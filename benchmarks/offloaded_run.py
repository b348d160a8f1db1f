"""Child process of one offloaded side, started by `children.run`.

It joins its control groups before it loads torch, loads its side, prints `ready`, waits until the limits are set, and
reads a text: the prompt at once, then token by token with every step timed. All sides read the same tokens, not their
own output.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any


def begin() -> dict[str, Any]:
    """Read the run's description and join its control groups."""
    spec: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    for group in spec["groups"]:
        (Path(group) / "cgroup.procs").write_text("0")
    return spec


SPEC = begin()  # before torch is loaded, so that torch's pages count

# ruff: noqa: E402
import torch
from torch import Tensor
from transformers import DynamicCache

from expertcast import OffloadConfig, OffloadedModel, load_offloaded
from expertcast.predictors import MoEView
from expertcast.predictors.messages import Json


def ready() -> None:
    """Report that everything is loaded, and wait until the limits are set."""
    print("ready", flush=True)
    if sys.stdin.readline() != "go\n":
        raise SystemExit(1)


def bytes_read() -> int:
    """Return the bytes that this process has read from disks so far, including page faults."""
    return _status("/proc/self/io", "read_bytes:")


def _status(path: str, name: str) -> int:
    lines = Path(path).read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


@torch.no_grad()
def follow(offloaded: OffloadedModel, spec: Json) -> Json:
    """Run an offloaded model over the text; return times, bytes per token, the likeliest tokens and the routing."""
    model, length, timed, tokens = offloaded.model, spec["prompt"], spec["timed"], spec["tokens"]
    cache, before = DynamicCache(config=model.config), bytes_read()

    def step(ids: list[int]) -> tuple[float, int]:
        start = time.perf_counter()
        found = model(input_ids=torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        largest = int(found.logits[0, -1].argmax())
        return time.perf_counter() - start, largest

    with recorded_routing(offloaded.view) as routing:
        ttft_s, _ = step(tokens[:length])
        prompt_bytes, steps_s, largest = bytes_read() - before, [], []
        for number, token in enumerate(tokens[length : length + spec["warm"] + timed]):
            if number == spec["warm"]:
                before = bytes_read()
                offloaded.reset_stats()
            seconds, likeliest = step([token])
            steps_s.append(seconds)
            largest.append(likeliest)
        read, counted = bytes_read() - before, _counted(offloaded, timed)
        ids = routing()
    start = time.perf_counter()
    if spec["again"]:
        model(input_ids=torch.tensor([tokens[:length][::-1]]), logits_to_keep=1)
    again_s = time.perf_counter() - start if spec["again"] else None
    steps_s = steps_s[spec["warm"] :]
    return {
        "ttft_s": ttft_s, "prompt_bytes_read": prompt_bytes, "steps_s": steps_s, "tpot_s": statistics.median(steps_s),
        "bytes_read": read / timed, "largest": largest, "again_s": again_s,
        "routing": ids, **counted,
    }  # fmt: skip


def _counted(offloaded: OffloadedModel, tokens: int) -> Json:
    """Return the offload's counters for the timed steps."""
    stats: dict[str, Any] = offloaded.stats.as_dict()
    return {
        "hit_rate": stats["hit_rate"],
        "waited_s": stats["waited_s"] / tokens,
        "link_bytes": offloaded.link.bytes_moved / tokens,
        "slots": offloaded.pool.count,
    }


@contextmanager
def recorded_routing(view: MoEView) -> Iterator[Callable[[], Any]]:
    """Record the routing; yield a function that returns the ids of each pass: for each, by layer, rows of K."""
    seen: list[Tensor] = []
    handles = [layer.router.register_forward_hook(lambda _m, _i, out: seen.append(out[2].clone())) for layer in view]

    def ids() -> Any:
        return [[each.tolist() for each in seen[at : at + len(view)]] for at in range(0, len(seen), len(view))]

    yield ids
    for handle in handles:
        handle.remove()


def main() -> None:
    """Run, and write the results with this process's peak resident memory."""
    torch.set_num_threads(SPEC["threads"])
    warnings.filterwarnings("ignore", message=".*is rebuilt.*")
    # the slots leave room for all that a run without a limit took: the plan need not keep memory for the text again
    options = {"context": 1, "store_folder": SPEC["store_folder"], **SPEC["options"]}
    config = replace(OffloadConfig.from_dict(options), predictor=SPEC["predictor"])
    with load_offloaded(SPEC["model"], config, device="cpu", dtype=SPEC["dtype"]) as offloaded:
        ready()
        found = follow(offloaded, SPEC)
    peak = _status("/proc/self/status", "VmHWM:") * 1024
    Path(SPEC["out"]).write_text(json.dumps({**found, "peak_resident_bytes": peak}))


if __name__ == "__main__":
    main()
