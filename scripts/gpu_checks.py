"""The whole GPU job in one call: checks, then the benchmark of the runtime; on a machine without one, its small form.

    python scripts/gpu_checks.py --out benchmarks/results/gpu.json

With CUDA: the tests marked `gpu`, and decoding over the real link. Without: the runtime's test of bit-identity, and
decoding over the emulated link. Writes what was measured with date, hardware and versions; exits 1 if a check failed.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from expertcast.checkpoints.provenance import provenance
from expertcast.data.models import load_model, load_tokenizer
from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.bench import benchmark

ROOT = Path(__file__).resolve().parent.parent
CPU_TEST = "tests/runtime/test_exact.py"
PROMPT = "It is a truth universally acknowledged, that a single man in possession of a good fortune,"


def main(argv: list[str] | None = None) -> int:
    """Run checks and benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference", help="model to decode with (default: %(default)s)")
    parser.add_argument("--slots", type=int, default=192, help="(default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--skip-tests", action="store_true", help="the benchmark only")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    try:
        result = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "hardware": hardware(),
            **provenance(),
            "checks": None if args.skip_tests else run_checks(cuda),
            "benchmark": decode(args, "cuda" if cuda else "cpu"),
        }
    except ExpertcastError as error:
        print(f"gpu_checks: {error}", file=sys.stderr)
        return 2
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"checks": result["checks"], "out": str(args.out)}, indent=1))
    return 0 if args.skip_tests or result["checks"]["passed"] else 1


def hardware() -> dict[str, Any]:
    """What it ran on."""
    found: dict[str, Any] = {"machine": platform.machine(), "threads": torch.get_num_threads(), "gpu": None}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = {"name": properties.name, "memory": properties.total_memory, "cuda": torch.version.cuda}
    return found


def run_checks(cuda: bool) -> dict[str, Any]:
    """Run the tests that belong to this machine in a process of their own."""
    selection = ["-m", "gpu", "tests"] if cuda else [CPU_TEST]
    command = [sys.executable, "-m", "pytest", "-q", *selection]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = run.stdout.strip().splitlines()
    return {"command": " ".join(["pytest", *selection]), "passed": run.returncode == 0, "tail": lines[-15:]}


def decode(args: argparse.Namespace, device: str) -> dict[str, Any]:
    """On-demand loading against prefetching and speculation, with a predictor that needs no training."""
    model, tokenizer = load_model(args.model, device=device), load_tokenizer(args.model)
    runs: dict[str, dict[str, Any]] = {
        "on_demand_no_cache": {"cache": False, "slots": None},
        "exact_no_cache": {"cache": False, "slots": None, "predictor": "next_norm"},
        "on_demand": {},
        "exact": {"predictor": "next_norm"},
        "speculate": {"predictor": "next_norm", "mode": "speculate"},
    }
    return benchmark(
        model, tokenizer, PROMPT, runs=runs, slots=args.slots, new_tokens=args.new_tokens, repetitions=args.repetitions
    )


if __name__ == "__main__":
    raise SystemExit(main())
