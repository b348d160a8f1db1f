"""Benefit of forecasts on a simulated CUDA device: the real link, engine and cache with assumed times.

    python -m benchmarks timed --jobs 2

For two models with recorded routing, four links, forecasts that are right always or nine times in ten, cache sizes from
0 to 45% of the experts, and a host that takes 650, 300 or 100 us to launch a layer, it computes overlap efficiency and
time over the bound.
The constants are published, estimated or measured on a CPU: docs/timed-device.md has their sources.
--small runs one shape with two layers.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product

import torch

from benchmarks.results import ResultFile, markdown, result_parser
from benchmarks.timed.costs import LINKS, step_costs
from benchmarks.timed.routing import RECORDINGS
from benchmarks.timed.run import TimedCase, compare
from expertcast.predictors.messages import Json

ACCURACIES = (1.0, 0.9)
CAPACITIES = (0.0, 0.1, 0.25, 0.45)
HOST_US = (650.0, 300.0, 100.0)
"""Host time per layer including forecasts, in microseconds."""
KEYS = ("shape", "layers", "link", "capacity", "host_us")


def measured(*values: str | float | None) -> list[Json]:
    """Return one row per accuracy for values of `KEYS`; the accuracies share a run on demand."""
    row = dict(zip(KEYS, values, strict=True))
    case = TimedCase(
        shape=row["shape"], layers=row["layers"], bandwidth=LINKS[row["link"]], capacity=row["capacity"],
        step=step_costs(row["shape"]).with_host(row["host_us"] * 1e-6), warm_up=10 if row["capacity"] else 1,
        steps=3 if row["capacity"] else 2,
    )  # fmt: skip
    return [{**row, "accuracy": accuracy, **compare(replace(case, accuracy=accuracy))} for accuracy in ACCURACIES]


def page(runs: list[Json]) -> str:
    """Return a row for each shape, link and cache: time over the bound (overlap efficiency) by the host's time, with
    forecasts that are always right, then with those that are right nine times in ten."""
    found = {(row["shape"], row["link"], row["capacity"], row["host_us"], row["accuracy"]): row for row in runs}
    hosts = sorted({row["host_us"] for row in runs}, reverse=True)
    lines = []
    for shape, link, capacity in dict.fromkeys(key[:3] for key in found):
        cells = [
            "; ".join(
                f"{each['tpot_over_bound']:.2f} ({each['efficiency']:.2f})"
                for each in (found[shape, link, capacity, host, accuracy] for accuracy in ACCURACIES)
            )
            for host in hosts
        ]
        lines.append([f"{shape}, {link}", f"{capacity:.0%}", *cells])
    return markdown(["shape, link", "cache", *(f"{host:.0f} us" for host in hosts)], lines)


def main(argv: list[str] | None = None) -> int:
    """Simulate what the result lacks, and print the table."""
    parser = result_parser("timed-device", __doc__)
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="two layers of one shape over one link")
    args = parser.parse_args(argv)
    file = ResultFile(args, {"small": args.small})
    runs, shapes, links = file.values["runs"], list(RECORDINGS), list(LINKS)
    settings = product(shapes[:1], [2], links[:1], [0.0, 0.5], HOST_US[1:]) if args.small else product(
        shapes, [None], links, CAPACITIES, HOST_US
    )  # fmt: skip
    known = {tuple(row[name] for name in KEYS) for row in runs}
    due = [values for values in settings if values not in known]
    with ProcessPoolExecutor(args.jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for made in pool.map(measured, *zip(*due, strict=True)):
            runs += made
            file.write()
            print(f"{len(runs)} rows", file=sys.stderr, flush=True)
    file.publish("Time over the bound", page(runs))
    return 0
