"""Child process of one offloaded side, started by `children.run`.

It joins its control groups before it loads torch, loads its side, prints `ready`, waits until the limits are set, and
reads a text with every step timed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from benchmarks.child import begin, end, follow, reader, ready

SPEC = begin()  # before torch is loaded, so that torch's pages count

# ruff: noqa: E402
import torch
from torch import Tensor

from expertcast import OffloadConfig, OffloadedModel, load_offloaded
from expertcast.predictors.messages import Json
from expertcast.predictors.view import MoELayer


@torch.no_grad()
def measured(offloaded: OffloadedModel, spec: Json) -> Json:
    """Run an offloaded model over the text; return times, counters, the likeliest tokens and the routing."""
    model, tokens, length, timed = offloaded.model, spec["tokens"], spec["prompt"], spec["timed"]
    stats, link = offloaded.stats, offloaded.link

    # the hooks take 3% of a token's time: one run has them
    with recorded_routing([] if spec["routed"] else [*offloaded.view]) as routing:
        found = follow(spec, reader(model, tokens), offloaded.reset_stats)
    if not spec["routed"]:
        found["routing"] = routing()
    found |= {"hit_rate": stats.hit_rate, "waited_s": stats.waited_s / timed}
    found |= {"link_bytes": link.bytes_moved / timed, "slots": offloaded.pool.count}
    again = reader(model, tokens[:length][::-1] + tokens[length:])
    offloaded.reset_stats()
    found["again_s"], _ = again(0, length)
    found["again_bytes"] = link.bytes_moved
    offloaded.reset_stats()
    for place in range(length, length + timed):
        again(place, place + 1)
    return {**found, "again_hit_rate": stats.hit_rate}


@contextmanager
def recorded_routing(view: Sequence[MoELayer]) -> Iterator[Callable[[], Any]]:
    """Record the routing; yield a function that returns the ids of each pass: for each, by layer, rows of K."""
    seen: list[Tensor] = []
    handles = [layer.router.register_forward_hook(lambda _m, _i, out: seen.append(out[2].clone())) for layer in view]

    def ids() -> Any:
        return [[each.tolist() for each in seen[at : at + len(view)]] for at in range(0, len(seen), len(view))]

    yield ids
    for handle in handles:
        handle.remove()


def main() -> None:
    """Load, run, and write the results."""
    torch.set_num_threads(SPEC["threads"])
    warnings.filterwarnings("ignore", message=".*is rebuilt.*")
    config = replace(OffloadConfig.from_dict(SPEC["options"]), predictor=SPEC["predictor"])
    with load_offloaded(SPEC["model"], config, device="cpu") as offloaded:
        ready()
        end(SPEC, measured(offloaded, SPEC))


if __name__ == "__main__":
    main()
