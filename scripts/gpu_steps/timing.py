"""Clocks of the machine's step: device time between events, host time per call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

ROUNDS = 5


def synchronize(device: torch.device) -> None:
    """Wait for everything that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_us(call: Callable[[], object], device: torch.device, calls: int = 200) -> float:
    """Microseconds of the host per call, the median of a few rounds; the device is idle when each begins.

    Args:
        call: what is timed.
        device: that it launches on.
        calls: per round; fewer than a stream's queue holds, so that the host never waits for room.
    """
    call()
    rounds = []
    for _ in range(ROUNDS):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        rounds.append((time.perf_counter() - start) / calls * 1e6)
    synchronize(device)
    return statistics.median(rounds)


def once_us(call: Callable[[], object], prepare: Callable[[], object], device: torch.device, times: int = 20) -> float:
    """Microseconds of one call behind something, the median.

    Args:
        call: what is timed; it returns when its result is there.
        prepare: what comes before each call and is not timed.
        device: idle when `prepare` begins.
        times: how often.
    """
    found = []
    for _ in range(times):
        synchronize(device)
        prepare()
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e6)
    synchronize(device)
    return statistics.median(found)


def event(device: torch.device) -> torch.cuda.Event:
    """One with a clock."""
    assert device.type == "cuda"
    return torch.cuda.Event(enable_timing=True)


def device_s(queue: Callable[[torch.cuda.Stream], object], device: torch.device, times: int = 8) -> float:
    """Seconds on the device of one of several back to back, of the round that was disturbed least.

    Args:
        queue: puts one into a stream.
        device: where.
        times: per round.
    """
    stream = torch.cuda.Stream(device)
    queue(stream)  # what is set up once
    rounds = []
    for _ in range(ROUNDS):
        begun, end = event(device), event(device)
        begun.record(stream)
        for _ in range(times):
            queue(stream)
        end.record(stream)
        end.synchronize()
        rounds.append(begun.elapsed_time(end) / 1e3 / times)
    return min(rounds)
