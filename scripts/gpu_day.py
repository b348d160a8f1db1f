"""Run the GPU tests and the decoding benchmarks on a machine with a GPU, with a result file per step.

    python scripts/gpu_day.py --out benchmarks/results/gpu-DATE

    OUT/
      gpu_day.json     date, versions, hardware, and for each step its command, exit status and seconds
      tests.txt        output of pytest -m gpu
      NAME.txt         output of a step
      NAME.json        results of a step, if its command writes any

A step that fails or exceeds its time limit does not stop the others. A second call skips the steps that succeeded. Exit
status 0, or 1 if a step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from expertcast.checkpoints.provenance import provenance
from expertcast.data.machine import hardware

ROOT = Path(__file__).resolve().parents[1]
EXPERTCAST = [sys.executable, "-m", "expertcast.cli"]
SHAPE = "qwen3-30b-a3b"


def commands(out: Path) -> dict[str, list[str]]:
    """Return the commands by step, in order."""
    bench = [*EXPERTCAST, "bench", SHAPE, "--device", "cuda", "--layers", "12", "--cache", "both"]
    found = {
        "tests": [sys.executable, "-m", "pytest", "-m", "gpu", "-v"],
        "reference": [*EXPERTCAST, "bench", "reference", "--device", "cuda"],
        "drafts": [*EXPERTCAST, "bench", "reference", "--device", "cuda", "--slots", "192", "--draft", "auto", "int4"],
        "shape": [*bench, "--accuracy", "0.9"],
        "shape-right": [*bench, "--accuracy", "1"],
        "advice": [*EXPERTCAST, "advise", SHAPE, "--device", "cuda", "--layers", "12"],
    }
    return {
        name: command if name == "tests" else [*command, "--json", str(out / f"{name}.json")]
        for name, command in found.items()
    }


def run(command: list[str], log: Path, seconds: float) -> dict[str, Any]:
    """Run one command from the root of the checkout; return its command, exit status (None: timeout) and seconds."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    begin = time.monotonic()
    with log.open("wb") as output:
        try:
            status = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=seconds
            ).returncode
        except subprocess.TimeoutExpired:
            status = None
    return {"command": " ".join(command[1:]), "status": status, "seconds": round(time.monotonic() - begin, 1)}


def main() -> int:
    """Run all steps; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="folder for the results")
    parser.add_argument("--steps", nargs="+", metavar="NAME", help="run only these (default: all)")
    parser.add_argument("--seconds", type=float, default=480, help="time limit of one step (default: %(default)s)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "gpu_day: torch sees no CUDA device: run it on a machine with a GPU\n")
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    steps = commands(out)
    if unknown := set(args.steps or ()) - steps.keys():
        parser.exit(2, f"gpu_day: unknown step {sorted(unknown)[0]!r}: choose from {', '.join(steps)}\n")
    file = out / "gpu_day.json"
    done = json.loads(file.read_text())["steps"] if file.is_file() else {}
    for name, command in steps.items():
        if (args.steps is not None and name not in args.steps) or done.get(name, {}).get("status") == 0:
            continue
        print(f"{name}: {' '.join(command[1:])}", flush=True)
        done[name] = run(command, out / f"{name}.txt", args.seconds)
        print(f"{name}: exit status {done[name]['status']} after {done[name]['seconds']} s", flush=True)
        record = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **provenance()}
        record |= {"hardware": hardware(), "steps": done}
        file.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(step["status"] != 0 for step in done.values()))


if __name__ == "__main__":
    raise SystemExit(main())
