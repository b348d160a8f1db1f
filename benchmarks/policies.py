"""Hits of every eviction policy on the bundled model's routing and on recorded routing of two large models.

    python -m benchmarks policies --page benchmarks/policies.md

The runtime's own policies replay the routing: no prefetching, one cache for all layers, a layer of a token as one
event. Traces of the bundled model are collected first, unless --traces names a folder of them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill

from benchmarks.conditions import ROOT, described
from benchmarks.results import ResultFile, markdown, result_parser, write_section
from expertcast.cli import main as command_line
from expertcast.commands.routing_file import memories, open_routing, replayed_rows, routing_policies
from expertcast.commands.simulate import swept_evictions
from expertcast.data.traces import TraceDataset
from expertcast.predictors.messages import Json
from expertcast.runtime.policies import Policies
from expertcast.runtime.simulation.machine import Case, Machine, constant_times
from expertcast.runtime.simulation.sweep import BELADY, slots_of, sweep
from expertcast.runtime.simulation.trace import SequenceSelection, load_trace
from expertcast.runtime.storage.layout import BlockLayout

BUNDLED = "bundled model"
RECORDED = {"gpt-oss-120b": "gpt-oss-120b-k2.parquet", "Qwen3-30B-A3B": "qwen3-30b-a3b-k6.parquet"}
CAPACITIES = (0.05, 0.1, 0.25)
COSTS = ("Qwen3-30B-A3B", 0.25)
"""Routing and share of the experts whose seconds are shown."""
BANDWIDTH = 1.8e9
"""Bytes per second of the link whose seconds are shown: a fast SSD."""
_SMALLEST = {"gpt-oss-120b": 0.1, "Qwen3-30B-A3B": 0.1}
"""One token's experts take more than 5% of these models' experts, so that every policy has no hits there."""


def bundled_rows(folder: Path, tokens: int) -> Iterator[Json]:
    """Yield hits and seconds of every policy, and of Belady's bound, on the traces of a folder."""
    traces = TraceDataset.open(folder)
    shape = traces.view.shape
    machine = Machine(
        times=constant_times(shape.layers, 1e-3), block_bytes={"full": BlockLayout.of(traces.view).block_bytes},
        bandwidth=25e9,
    )  # fmt: skip
    trace = load_trace(traces, SequenceSelection(tokens=tokens))
    cases = [
        Case(policies=Policies(eviction=name, prefetch="none"), slots=slots_of(share, shape), machine=machine)
        for name in (*swept_evictions(), BELADY) for share in CAPACITIES
    ]  # fmt: skip
    for row in sweep(trace, cases, processes=1, progress=True)["results"]:
        yield {"routing": BUNDLED, "policy": row["eviction"], "capacity": row["capacity"], "hits": row["hit_rate"],
               "policy_s": row["policy_s"], "tokens": trace.steps}  # fmt: skip


def recorded_rows(name: str, file: str) -> Iterator[Json]:
    """Yield hits and seconds of every policy that needs routing alone, and of Belady's, on a routing file."""
    routing, total = open_routing(ROOT / "benchmarks" / "routing" / file, None, None)
    shares = [share for share in CAPACITIES if share >= _SMALLEST[name]]
    sizes = memories(routing, total, (), shares, ())
    cases = [(policy, "global") for policy in (*routing_policies(), BELADY)]
    for row in replayed_rows(routing, total, cases, sizes, bandwidth=BANDWIDTH, latency=0.0):
        share = min(shares, key=lambda each: abs(each - row["capacity"]))
        yield {"routing": name, "policy": row["policy"].partition(":")[0], "capacity": share, "hits": row["hits"],
               "policy_s": row["policy_s"], "copy_s": row["copy_s"], "tokens": row["steps"]}  # fmt: skip


def page(result: Json) -> str:
    """Return the tables and their conditions."""
    rows: Sequence[Json] = result["results"]
    near = {(row["routing"], round(row["capacity"], 2), row["policy"]): row for row in rows}
    places = list(dict.fromkeys(key[:2] for key in near))
    best = {place: max(near[*place, p]["hits"] for *at, p in near if tuple(at) == place and p != BELADY)
            for place in places}  # fmt: skip
    lines = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        found = [near.get((*place, policy)) for place in places]
        cells = ["" if row is None else f"{row['hits']:.1%}" for row in found]
        cells = [f"**{cell}**" if row is not None and row["hits"] == best[place] else cell
                 for cell, row, place in zip(cells, found, places, strict=True)]  # fmt: skip
        own = near.get((*COSTS, policy))
        costs = [] if own is None else [own["copy_s"], own["policy_s"]]
        lines.append([f"`{policy}`", *cells, *([f"{1e3 * cost:.1f}" for cost in costs] or ["", ""])])
    head = ["policy", *(f"{routing}, {capacity:.0%}" for routing, capacity in places), "copies, ms", "policy, ms"]
    tokens = {row["routing"]: row["tokens"] for row in rows}
    recorded = ", ".join(f"{name}: {tokens[name]} decoded tokens" for name in RECORDED)
    note = f"""Hits of decoded tokens by the share of all experts in the cache; bold: best policy that does not know the
future. {BUNDLED}: {tokens[BUNDLED]} decode steps of held-out bundled text after prompts of 64; {recorded}
([routing/NOTICE](routing/NOTICE)), too few to resolve a point. Milliseconds per token of {COSTS[0]} with
{COSTS[1]:.0%} of the experts: copies at {BANDWIDTH / 1e9:.1f} GB/s without overlap, and processor time of the
policy and the cache's own lists, in Python. Policies that read router scores cannot replay recorded routing."""
    return "\n\n".join([
        markdown(head, lines), fill(" ".join(note.split()), 140), f"    {result['command']}",
        fill(f"Conditions, {result['date']}: {described(result['conditions'])}", 140),
    ])  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay all routing and write the page."""
    parser = result_parser("policies", __doc__)
    parser.add_argument("--traces", type=Path, help="traces of the bundled model (default: collected anew)")
    parser.add_argument("--tokens", type=int, default=1500, help="tokens of the test split (default: %(default)s)")
    parser.add_argument("--page", type=Path, help="page whose section of results is written")
    args = parser.parse_args(arguments)
    file = ResultFile(args, {"tokens": args.tokens, "capacities": CAPACITIES})
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.traces or Path(scratch) / "traces"
        if args.traces is None:
            words = ["collect", "reference", "--data", "reference", "--tokens", "20000", "--out", str(folder)]
            if command_line([*words, "--early-rank", "none"]):
                return 2
        rows = list(bundled_rows(folder, args.tokens))
    for name, routing in RECORDED.items():
        rows += recorded_rows(name, routing)
    file.values["results"] = rows
    file.write()
    text = page(file.values)
    print(text)
    if args.page is not None:
        write_section(args.page, "Hits by policy", text)
    return 0
