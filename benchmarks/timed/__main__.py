"""Benefit of forecasts on a simulated CUDA device: the real link, engine and cache with assumed times.

    python -m benchmarks timed --jobs 2

For five published shapes, four links, forecast accuracies from 0.8 to 1, cache sizes from 0 to 45% of the experts, and
a host that takes 650, 300 or 100 us to launch a layer, it computes overlap efficiency and time over the bound.
The constants are published, estimated or measured on a CPU: docs/timed-device.md has their sources.
--small runs one shape with two layers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product

import torch

from benchmarks.results import ResultFile, markdown, result_parser
from benchmarks.timed.costs import LAUNCH_S, LINKS, MEMORY_BANDWIDTH, DriverCosts, step_costs
from benchmarks.timed.run import TimedCase, compare
from expertcast.predictors.messages import Json

SHAPES = ("qwen3-30b-a3b", "gpt-oss-20b", "gpt-oss-120b", "olmoe-1b-7b", "mixtral-8x7b")
ACCURACIES = (1.0, 0.95, 0.9, 0.8)
CAPACITIES = (0.0, 0.1, 0.25, 0.45)
HOST_US = (650.0, 300.0, 100.0)
"""Host time per layer including forecasts, in microseconds."""


@dataclass(frozen=True, slots=True)
class Group:
    """Unit of work of one process: all accuracies of one case, which share its on-demand run."""

    shape: str
    layers: int | None
    link: str
    capacity: float
    host_us: float


def rows(group: Group) -> list[Json]:
    """Return the results of a group, one row per accuracy."""
    cached, bandwidth, found = group.capacity > 0, LINKS[group.link], []
    for accuracy in ACCURACIES:
        values = compare(TimedCase(
            shape=group.shape, layers=group.layers, bandwidth=bandwidth, accuracy=accuracy, capacity=group.capacity,
            step=step_costs(group.shape).with_host(group.host_us * 1e-6), warm_up=10 if cached else 1,
            steps=3 if cached else 2,
        ))  # fmt: skip
        own = {**asdict(group), "bandwidth": bandwidth, "accuracy": accuracy}
        del own["layers"]
        found.append(own | {name: round(each, 4) if isinstance(each, float) else each for name, each in values.items()})
    return found


def groups(small: bool) -> Iterator[Group]:
    """Yield all cases, those with most layers first."""
    if small:
        yield from (
            Group("olmoe-1b-7b", 2, "pcie4", capacity, host) for capacity in (0.0, 0.5) for host in (300.0, 100.0)
        )
        return
    for shape, link, capacity, host in product(SHAPES, LINKS, CAPACITIES, HOST_US):
        yield Group(shape, None, link, capacity, host)


def page(results: list[Json]) -> str:
    """Return a row for each shape, link and cache: time over the bound (overlap efficiency) by the host's time, with
    forecasts that are always right, then with those that are right nine times in ten."""
    found = {(row["shape"], row["link"], row["capacity"], row["host_us"], row["accuracy"]): row for row in results}
    hosts = sorted({row["host_us"] for row in results}, reverse=True)
    lines = []
    for shape, link, capacity in dict.fromkeys(key[:3] for key in found):
        cells = [
            "; ".join(
                f"{each['tpot_over_bound']:.2f} ({each['efficiency']:.2f})"
                for each in (found[shape, link, capacity, host, accuracy] for accuracy in (1.0, 0.9))
            )
            for host in hosts
        ]
        lines.append([f"{shape}, {link}", f"{capacity:.0%}", *cells])
    return markdown(["shape, link", "cache", *(f"{host:.0f} us" for host in hosts)], lines)


def main(argv: list[str] | None = None) -> int:
    """Run the simulation; return the exit status."""
    parser = result_parser("timed-device", __doc__)
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    parser.add_argument("--small", action="store_true", help="two layers of one shape")
    args = parser.parse_args(argv)
    file = ResultFile(args, {"small": args.small})
    file.values |= {
        "note": "simulated, not measured on a GPU; sources of the constants: docs/timed-device.md",
        "constants": {
            "driver": asdict(DriverCosts()),
            "step": {shape: asdict(step_costs(shape)) for shape in SHAPES},
            "launch_s": LAUNCH_S,
            "links": LINKS,
            "memory_bandwidth": MEMORY_BANDWIDTH,
        },
        "results": [],
    }
    with ProcessPoolExecutor(args.jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for made in pool.map(rows, groups(args.small)):
            file.values["results"] += made
            print(f"{len(file.values['results'])} rows", file=sys.stderr, flush=True)
    file.write()
    print(page(file.values["results"]))
    return 0
