"""One step in a process of its own: `python -m gpu_steps.run`, started by `scripts/gpu_day.py`."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import traceback
from pathlib import Path

from gpu_steps.day import DONE, FAILED, LINES, Day, Step


def main() -> None:
    """Run it and keep what it found, or why it failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("step", help="its fields as JSON")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--command", required=True)
    args = parser.parse_args()
    # a thread of C: it says where the step stands and ends the process, also when a call into CUDA never returns
    faulthandler.dump_traceback_later(args.seconds, exit=True)
    step = Step(**json.loads(args.step))
    day = Day(step, args.out, device=args.device, command=args.command, seconds=args.seconds)
    day.begin({})
    try:
        from expertcast.checkpoints.provenance import provenance
        from expertcast.runtime.benchmarking.hardware import hardware

        day.begin({"hardware": hardware(), **provenance(args.command)})
        passed = importlib.import_module(step.module).run(day)
    except Exception:
        day.finish(FAILED, error=traceback.format_exc().strip().splitlines()[-LINES:])
        raise
    day.finish(DONE, passed=passed)


if __name__ == "__main__":
    main()
