"""Microseconds of the host for what a layer's orchestration is made of: the constants of a model of the device."""

from __future__ import annotations

import statistics
import time

import torch

from expertcast.runtime.links.driver import CudaDevice
from expertcast.runtime.links.exchange import Readback, Upload
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from gpu_steps.timing import event, host_us, synchronize

WAIT_CYCLES = 2_000_000
"""Of a kernel that only waits: a millisecond at 2 GHz."""


def host_costs(store: ExpertStore, pool: SlotPool) -> dict[str, float]:
    """By name, with the unit; what only a CUDA device has is left out on the CPU."""
    device = pool.device
    number, ids_TK = torch.zeros(1, device=device), torch.arange(8, device=device).unsqueeze(0)
    readback, upload = Readback(device), Upload(device)
    found = {
        "kernel_launch_us": host_us(lambda: number.add_(1), device),
        "readback_round_trip_us": host_us(lambda: readback.start(ids_TK).tolist(), device),
        "upload_us": host_us(lambda: upload.send(range(16)), device, calls=48),
    }
    if device.type != "cuda":
        return found
    cuda, stream = CudaDevice(device), torch.cuda.Stream(device)
    plain, timed, done = torch.cuda.Event(), event(device), torch.cuda.Event()
    done.record(stream)
    plain.record(stream)
    synchronize(device)
    target, source, size = pool.block(0), store.block(0), store.layout.block_bytes
    found |= {
        "submitted_copy_us": host_us(
            lambda: cuda.to_device(target.data_ptr(), source.data_ptr(), size, stream), device, calls=32
        ),
        "tensor_copy_us": host_us(lambda: target.copy_(source, non_blocking=True), device, calls=32),
        "event_create_timed_us": host_us(lambda: torch.cuda.Event(enable_timing=True).record(stream), device),
        "event_record_us": host_us(lambda: plain.record(stream), device),
        "event_record_timed_us": host_us(lambda: timed.record(stream), device),
        "event_query_us": host_us(done.query, device),
        "event_synchronize_passed_us": host_us(done.synchronize, device),
        "stream_wait_event_us": host_us(lambda: stream.wait_event(plain), device),
        "current_stream_us": host_us(lambda: torch.cuda.current_stream(device), device),
        "synchronize_idle_us": host_us(lambda: torch.cuda.synchronize(device), device),
        "wake_up_us": wake_up_us(device),
    }
    found["kernel_back_to_back_device_us"] = _kernel_us(number, device)
    return found


def wake_up_us(device: torch.device) -> float:
    """From the end of a kernel on the device to the host's return from waiting for it; the launch is in it."""
    found = []
    for _ in range(20):
        begun, end = event(device), event(device)
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        begun.record()
        torch.cuda._sleep(WAIT_CYCLES)
        end.record()
        end.synchronize()
        found.append((time.perf_counter() - start) * 1e6 - begun.elapsed_time(end) * 1e3)
    return statistics.median(found)


def _kernel_us(number: torch.Tensor, device: torch.device, launches: int = 200) -> float:
    """On the device, per kernel of next to no work, launched while the device is held up: the gaps are its own."""
    begun, end = event(device), event(device)
    torch.cuda._sleep(10 * WAIT_CYCLES)
    begun.record()
    for _ in range(launches):
        number.add_(1)
    end.record()
    end.synchronize()
    return begun.elapsed_time(end) * 1e3 / launches
