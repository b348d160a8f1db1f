"""A grouped matrix product beside copies of experts, over each link: what one does to the other.

D hidden size, F output features, S slots (groups), P token-expert pairs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch

from expertcast.runtime import Link
from expertcast.runtime.links.carve_out import CarveOut
from expertcast.runtime.links.kernel import KernelLink
from expertcast.runtime.links.tables import Moves
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from gpu_steps.copies import attached
from gpu_steps.timing import event, synchronize

D, F = 2048, 1536
"""Gate and up projection of an expert of Qwen3-30B-A3B."""
SMALL_D, SMALL_F = 64, 64
S, P = 64, 8
MOST, ALONE = 1000, 100
"""Products: at most beside copies (fewer than a stream's queue holds), and by themselves."""
TOGETHER = 8
"""Blocks of one call of the kernel's link."""

CARVE_OUTS = (8, 16, 32, 64)
"""Multiprocessors."""

_Span = tuple[Any, Any]
"""Begin and end of something: events of a device, or seconds of the host."""


def beside(kind: Callable[[], Link], store: ExpertStore, pool: SlotPool) -> dict[str, Any]:
    """Microseconds of one product and bytes per second of a link's copies, each alone and both together."""
    device = pool.device
    product = grouped_product(device)
    for _ in range(3):
        product()
    found: dict[str, Any] = {"grouped_mm_alone_us": _median_us([_timed(product, device) for _ in range(ALONE)])}
    with attached(kind(), store, pool) as link:
        together(link, pool, None)  # compiles what there is to compile
        found["copies_alone_bytes_per_s"] = together(link, pool, None)["copies_bytes_per_s"]
        found |= together(link, pool, product)
        if isinstance(link, KernelLink):
            found["by_sm_carveout"] = by_carve_out(link, pool, product)
    return found


def by_carve_out(link: Link, pool: SlotPool, product: Callable[[], object]) -> dict[str, Any]:
    """The same with products told to leave multiprocessors to the copies' kernel.

    Args:
        link: attached.
        pool: its slots.
        product: what is computed.
    """
    found = {}
    for count in CARVE_OUTS:
        with CarveOut(count):
            found[str(count)] = together(link, pool, product)
    return found


def grouped_product(device: torch.device) -> Callable[[], object]:
    """One product of P rows over S groups, most of them empty, as a decode step makes it."""
    functional = torch.nn.functional
    grouped_mm = getattr(functional, "grouped_mm", None) or torch._grouped_mm
    d, f = (D, F) if device.type == "cuda" else (SMALL_D, SMALL_F)
    rows_PD = torch.randn(P, d, device=device, dtype=torch.bfloat16)
    weight_SDF = torch.randn(S, f, d, device=device, dtype=torch.bfloat16).transpose(1, 2)
    # each time other slots have a row: the weights of eight would stay in the device's cache
    turns = [((torch.arange(S, device=device) + S // P - turn) // (S // P)).to(torch.int32) for turn in range(S // P)]
    ends_S = cycle(turns)
    return lambda: grouped_mm(rows_PD, weight_SDF, offs=next(ends_S))


def together(link: Link, pool: SlotPool, product: Callable[[], object] | None) -> dict[str, Any]:
    """Copy a block into every slot, and compute all the while.

    Args:
        link: attached.
        pool: its slots.
        product: what is computed; None for copies alone.
    """
    device = pool.device
    synchronize(device)
    span, finished = _copies(link, pool, device)
    spans: list[_Span] = []
    while product is not None and len(spans) < MOST and not finished():
        spans.append(_timed(product, device))
    outlasted = not finished()
    found: dict[str, Any] = {"copies_bytes_per_s": pool.count * pool.layout.block_bytes / (_us(span()) / 1e6)}
    if product is not None:
        found |= {"grouped_mm_us": _median_us(spans) if spans else None, "products": len(spans)}
        found["copies_outlasted_products"] = outlasted
    synchronize(device)
    link.progress()
    return found


def _copies(link: Link, pool: SlotPool, device: torch.device) -> tuple[Callable[[], _Span], Callable[[], bool]]:
    """Start a copy into every slot: (its span once it is over, whether it is over)."""
    if device.type != "cuda":
        begun = time.perf_counter()
        copies = _start(link, pool, device)
        ended: list[float] = []

        def over() -> bool:
            done = all(link.poll(copy) for copy in copies)
            if done and not ended:
                ended.append(time.perf_counter())
            return done

        def span() -> _Span:
            while not over():
                time.sleep(1e-4)
            return begun, ended[0]

        return span, over
    side, begun_event, end = torch.cuda.Stream(device), event(device), event(device)
    with torch.cuda.stream(side):  # what waits for the copies waits here: the products' stream goes on
        begun_event.record(side)
        copies = _start(link, pool, device)
        for copy in copies:
            link.wait(copy)
        if isinstance(link, KernelLink):
            link.join(link.ticket())
        end.record(side)
    return (lambda: (begun_event, end)), end.query


def _start(link: Link, pool: SlotPool, device: torch.device) -> list[Any]:
    if not isinstance(link, KernelLink):
        return [link.submit(slot, slot, urgent=True) for slot in range(pool.count)]
    all_moved = torch.ones(TOGETHER, dtype=torch.bool, device=device)
    numbers = torch.arange(pool.count, device=device)
    for part in numbers.split(TOGETHER):
        link.move(Moves(part, part, all_moved[: len(part)]), 0)
    return []


def _timed(product: Callable[[], object], device: torch.device) -> _Span:
    if device.type != "cuda":
        start = time.perf_counter()
        product()
        return start, time.perf_counter()
    begun, end = event(device), event(device)
    begun.record()
    product()
    end.record()
    return begun, end


def _us(span: _Span) -> float:
    begun, end = span
    if isinstance(begun, float):
        return float((end - begun) * 1e6)
    end.synchronize()
    return float(begun.elapsed_time(end) * 1e3)


def _median_us(spans: list[_Span]) -> float:
    return statistics.median(map(_us, spans))
