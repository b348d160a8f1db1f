"""The whole benchmark of the runtime on one GPU, in less than nine minutes; --small is its form for any machine.

    python scripts/gpu_bench.py --out benchmarks/results/gpu-bench.json

Decodes the shape of Qwen3-30B-A3B with random weights (half of its layers, so that it fits the time) on demand, with
prefetching, speculating and in hybrid mode, with and without cache, over the GPU's own link, and once under
accelerate's offload with as much device memory. The JSON has hardware, versions, date and command. Options after `--`
go to `expertcast bench`, such as `-- --layers 48`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from expertcast.cli import main as bench_main

MINUTES = 6
"""After these no further prompt is begun: the last one, and accelerate, take the rest."""
GPU = ("qwen3-30b-a3b", "--layers", "24", "--device", "cuda", "--prompt-tokens", "1024", "4096", "16384",
       "--new-tokens", "32", "--repetitions", "3")  # fmt: skip
SMALL = ("reference", "--layers", "2", "--device", "cpu", "--prompt-tokens", "8", "16",
         "--new-tokens", "4", "--repetitions", "1")  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny shape over the emulated link, on the CPU")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("bench", nargs="*", metavar="-- OPTION", help="further options of `expertcast bench`")
    args = parser.parse_args(argv)
    chosen = SMALL if args.small else GPU
    return bench_main(["bench", *chosen, "--peer", "--minutes", str(MINUTES), "--json", str(args.out), *args.bench])


if __name__ == "__main__":
    raise SystemExit(main())
