"""The constants of the timed device, by their names in `runtime/timed/costs.py` and with the unit; and what the host
spends on the runtime's own small transfers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from expertcast.runtime.links.driver import CudaDevice
from expertcast.runtime.links.exchange import Readback
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from gpu_steps.timing import event, host_us

WAIT_CYCLES = 20_000_000
"""Of a kernel that only waits: 10 ms at 2 GHz, in which the host can queue what is then timed on the device."""
CALLS = 200
TIMES = 50
SMALL = 4096
LARGE = 1 << 30


def host_costs(store: ExpertStore, pool: SlotPool) -> dict[str, float]:
    """By name; what only a CUDA device has is left out on the CPU."""
    device = pool.device
    number, ids_TK = torch.zeros(1, device=device), torch.arange(8, device=device).unsqueeze(0)
    readback = Readback(CudaDevice(device) if device.type == "cuda" else None)
    found = {
        "kernel_launch_us": host_us(lambda: number.add_(1), device),
        "readback_round_trip_us": host_us(lambda: readback.start(ids_TK).tolist(), device),
    }
    if device.type == "cuda":
        found |= {**calls(store, pool), **waits(device), **on_device(store, pool), **back_to_back(device)}
        found["launch_us"] = found["record_to_query_us"] - sum(
            found[name] for name in ("record_us", "query_us", "stream_entry_us")
        )
        found["wake_us"] = found["record_to_synchronize_us"] - sum(
            found[name] for name in ("record_us", "launch_us", "stream_entry_us")
        )
    return found


def calls(store: ExpertStore, pool: SlotPool) -> dict[str, float]:
    """Host: calls that return before the device has done anything."""
    device = pool.device
    cuda, stream = CudaDevice(device), torch.cuda.Stream(device)
    plain, timed, pending = torch.cuda.Event(), event(device), torch.cuda.Event()
    target, source, size = pool.block(0), store.block(0), store.layout.block_bytes
    to, off = target.data_ptr(), source.data_ptr()
    found = {
        "record_us": host_us(lambda: plain.record(stream), device),
        "record_timed_us": host_us(lambda: timed.record(stream), device),
        "wait_us": host_us(lambda: stream.wait_event(plain), device),
        "copy_call_us": host_us(lambda: cuda.to_device(to, off, SMALL, stream), device),
        "copy_call_block_us": host_us(lambda: cuda.to_device(to, off, size, stream), device, calls=32),
        "tensor_copy_us": host_us(lambda: target.copy_(source, non_blocking=True), device, calls=32),
        "event_create_us": host_us(lambda: torch.cuda.Event(enable_timing=True).record(stream), device),
        "current_stream_us": host_us(lambda: torch.cuda.current_stream(device), device),
        "synchronize_idle_us": host_us(lambda: torch.cuda.synchronize(device), device),
    }
    with torch.cuda.stream(stream):
        torch.cuda._sleep(WAIT_CYCLES)
        pending.record(stream)
    start = time.perf_counter()
    for _ in range(CALLS):
        pending.query()
    found["query_us"] = (time.perf_counter() - start) / CALLS * 1e6
    torch.cuda.synchronize(device)
    return found


def waits(device: torch.device) -> dict[str, float]:
    """From the call that records an event in an idle stream to a query that sees it, and to the end of a wait."""
    stream, done = torch.cuda.Stream(device), torch.cuda.Event()

    def queried() -> None:
        done.record(stream)
        while not done.query():
            pass

    def waited() -> None:
        done.record(stream)
        done.synchronize()

    return {"record_to_query_us": _median_us(queried), "record_to_synchronize_us": _median_us(waited)}


def on_device(store: ExpertStore, pool: SlotPool) -> dict[str, float]:
    """Device: entries of a stream, launched while it is held up, so that the gaps are its own."""
    device = pool.device
    cuda, one, other = CudaDevice(device), torch.cuda.Stream(device), torch.cuda.Stream(device)
    to, off = pool.block(0).data_ptr(), store.block(0).data_ptr()
    number = torch.zeros(1, device=device)
    events = [(torch.cuda.Event(), torch.cuda.Event()) for _ in range(CALLS)]

    def hand_over(turn: int) -> None:
        there, back = events[turn]
        there.record(one)
        other.wait_event(there)
        back.record(other)
        one.wait_event(back)

    return {
        "stream_entry_us": _held_up_us(one, hand_over) / 4,
        "copy_setup_us": _held_up_us(one, lambda _turn: cuda.to_device(to, off, 4, one)),
        "kernel_us": _held_up_us(one, lambda _turn: number.add_(1)),
    }


def back_to_back(device: torch.device) -> dict[str, float]:
    """Bytes per second that the device reads and writes of its own memory."""
    source, target = (torch.ones(LARGE, dtype=torch.uint8, device=device) for _ in range(2))
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    us = _held_up_us(stream, lambda _turn: target.copy_(source), 20)
    return {"memory_bandwidth_bytes_per_s": 2 * LARGE / (us / 1e6)}


def _held_up_us(stream: torch.cuda.Stream, queue: Callable[[int], object], count: int = CALLS) -> float:
    """Microseconds on the device of one of several entries of a stream, which is the current one meanwhile.

    Args:
        stream: where they are queued.
        queue: queues one, told which.
        count: how many.
    """
    begun, end = event(stream.device), event(stream.device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(WAIT_CYCLES)
        begun.record(stream)
        for turn in range(count):
            queue(turn)
        end.record(stream)
        end.synchronize()
    return begun.elapsed_time(end) * 1e3 / count


def _median_us(call: Callable[[], object]) -> float:
    found = []
    for _ in range(TIMES):
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e6)
    return statistics.median(found)
