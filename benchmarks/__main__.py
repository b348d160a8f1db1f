"""Run a benchmark by name: `python -m benchmarks NAME [OPTIONS]`; without a name, list them."""

from __future__ import annotations

import importlib
import signal
import sys
from types import ModuleType

from expertcast.predictors import ExpertcastError

NAMES = ("disk", "fidelity", "forecasts", "life_size", "misses", "overhead", "packed", "predictors", "serving", "timed")


def _module(name: str) -> ModuleType:
    return importlib.import_module("benchmarks.timed.__main__" if name == "timed" else f"benchmarks.{name}")


def main(words: list[str]) -> int:
    """Run the named benchmark; return its exit status, or 2 after one line on standard error."""
    if not words or words[0] not in NAMES:
        print("usage: python -m benchmarks NAME [OPTIONS]; each has --help\n")
        for name in NAMES:
            lines = (_module(name).__doc__ or "").splitlines()
            print(f"  {name:10} {lines[0]}")
        return 0 if not words else 2
    sys.argv = ["python -m benchmarks", *words]  # the command that results name
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # children, groups and readahead are undone
    try:
        return int(_module(words[0]).main(words[1:]))
    except ExpertcastError as error:
        print(f"benchmarks {words[0]}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
