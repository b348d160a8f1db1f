"""Misses that the host computes, in virtual time: copies, the host and `misses="auto"` against the split's own bound.

Qwen3-30B-A3B in bf16, a quarter of the experts cached, recorded routing, Python and launches of `step_costs`. A host
takes the time of reading an expert's weights.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from benchmarks.results import ResultFile, markdown, result_parser
from benchmarks.timed.costs import KERNEL_S, LAUNCH_S, LINKS, step_costs
from benchmarks.timed.device import TimedDevice
from benchmarks.timed.run import TimedCase, TimedRun, decode_timed
from torch import Tensor, nn

from expertcast.predictors.messages import Json
from expertcast.runtime.offloading import OffloadedModel

HOSTS = {"slow": 20e9, "middle": 60e9, "fast": 240e9}
"""Bytes per second at which a host reads weights. [estimates: of 51 GB/s of two channels of DDR4-3200, a laptop; of 96
of two channels of DDR5-6000, a desktop; of 461 of twelve channels of DDR5-4800, a server]"""
CHOICE_S = 15e-6
"""Python time of the choice in a layer that lacks experts. [estimate: two fifths of `_POLICY_S`, measured beside it on
a machine that was not idle]"""
JOIN_LAUNCHES = 8
"""Launches that a layer takes beyond those of its experts if the host computes some: 17 against 9 operators."""
SHAPE, MODES = "qwen3-30b-a3b", ("copy", "host", "auto")
CASE = TimedCase(shape=SHAPE, capacity=0.25, prompt=28, warm_up=16, steps=9, step=step_costs(SHAPE))
"""The prompt is longer than what the host would compute, so it fills slots."""


def take_time(offloaded: OffloadedModel, device: TimedDevice, *, expert_s: float, lacking: list[list[int]]) -> None:
    """Make the host take its time, `expert_s` for each expert, and note each layer's misses until each pass."""
    host, residency = offloaded.flow.host, offloaded.residency
    if host is None:
        return
    start_pass, choose, run_pairs = host.start_pass, host.choose, host.run_pairs

    def started() -> None:
        lacking.append([layer.misses for layer in offloaded.stats.layers])
        start_pass()

    def chosen(keys: Sequence[int]) -> list[int]:
        if not all(residency.holds(key) and key not in residency.copies for key in keys):
            device.spend(CHOICE_S)
        return choose(keys)

    def computed(module: nn.Module, hidden_TD: Tensor, top_k: int, pairs: Tensor, experts: Tensor) -> Tensor:
        device.spend(expert_s * len(experts.unique()) + JOIN_LAUNCHES * LAUNCH_S)
        device.launch(JOIN_LAUNCHES * KERNEL_S, name="join")
        return run_pairs(module, hidden_TD, top_k, pairs, experts)

    host.start_pass, host.choose, host.run_pairs = started, chosen, computed  # type: ignore[method-assign]


def split_s(case: TimedCase, copy_s: float, expert_s: float, lacking: Sequence[Sequence[int]]) -> float:
    """Return the least mean seconds of tokens by each layer's misses until each pass, whoever serves which miss.

    From one layer's routing to the next one's the thread decides, launches the experts and the next attention, and
    computes n of m missing experts; beside it m - n are copied, then the device computes the experts and the attention.
    Driver calls, readbacks and the joining of both parts are not counted.
    """
    step = case.step

    def layer_s(missing: int) -> float:
        choice_s = CHOICE_S if missing else 0.0
        thread_s = step.policy_host_s + choice_s + step.experts_host_s + step.attention_host_s
        device_s = step.policy_host_s / 2 + choice_s + step.experts_device_s + step.attention_device_s
        ways = ((own * expert_s, (missing - own) * copy_s) for own in range(missing + 1))
        return min(max(thread_s + host_s, copies_s + (device_s if copies_s else 0.0)) for host_s, copies_s in ways)

    around_s = step.token_before_host_s + step.token_after_host_s
    return around_s + statistics.fmean(
        sum(layer_s(now - then) for now, then in zip(after, before, strict=True)) for before, after in pairwise(lacking)
    )


def measured(link: str, case: TimedCase = CASE) -> list[Json]:
    """Return a row for each host: milliseconds per token by mode, and the bound of `auto`."""
    torch.set_num_threads(1)
    case, rows = replace(case, bandwidth=LINKS[link]), []
    copy = decode_timed(case)
    for name, bandwidth in HOSTS.items():
        row, expert_s = {"link": link, "host": name, "copy_ms": mean_ms(copy)}, copy.block_bytes / bandwidth
        for mode in MODES[1:]:
            lacking = list[list[int]]()
            host = partial(take_time, expert_s=expert_s, lacking=lacking)
            row[f"{mode}_ms"] = mean_ms(decode_timed(replace(case, misses=mode, host=host)))
            copy_s = copy.block_bytes / case.bandwidth
            row["bound_ms"] = 1e3 * split_s(case, copy_s, expert_s, lacking[-case.steps :])
        rows.append(row)
    return rows


def mean_ms(run: TimedRun) -> float:
    """Return the mean milliseconds of a token; the misses of the last one are not known."""
    assert not run.races, run.races
    return 1e3 * statistics.fmean(run.seconds[1:-1])


def table(found: Sequence[Json]) -> str:
    """Return the rows as Markdown."""
    lines = []
    for row in found:
        better_ms = min(row["copy_ms"], row["host_ms"])
        lines.append([
            row["link"], f"{row['host']}, {HOSTS[row['host']] / 1e9:.0f} GB/s",
            *(f"{row[f'{name}_ms']:.1f}" for name in (*MODES, "bound")),
            f"{row['auto_ms'] / row['bound_ms']:.2f}", f"{row['auto_ms'] / better_ms:.2f}",
        ])  # fmt: skip
    return markdown(["link", "host", *MODES, "bound", "auto / bound", "auto / better mode"], lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate all links, and print the table."""
    parser = result_parser("timed-misses", __doc__)
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    args = parser.parse_args(arguments)
    file = ResultFile(args, {})
    with ProcessPoolExecutor(args.jobs) as pool:
        file.values["runs"] = [row for rows in pool.map(measured, list(LINKS)[:3]) for row in rows]
    file.write()
    file.publish("Misses on the host", table(file.values["runs"]))


if __name__ == "__main__":
    main()
