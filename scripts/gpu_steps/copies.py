"""Link rates, each link's time for a layer's misses, and small transfers behind queued copies of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from expertcast.data.discovery import find_moe_layers
from expertcast.data.models import load_model
from expertcast.runtime import CudaLink, EmulatedLink, InstantLink, Link
from expertcast.runtime.benchmarking.shapes import build_shape
from expertcast.runtime.links.driver import CudaDevice
from expertcast.runtime.links.exchange import Readback, Upload
from expertcast.runtime.links.kernel import KernelLink
from expertcast.runtime.links.speed import link_speed, misses_s
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from gpu_steps.timing import device_s, host_us, once_us

SHAPE = "qwen3-30b-a3b"
SLOTS = 64
LARGE, SMALL = 256 << 20, 4096
QUEUED = (0, 2, 8)
"""Copies of experts in front of a small transfer."""
EMULATED = 2e9
"""Bytes per second of the small form's link."""


@contextmanager
def experts(device: torch.device) -> Iterator[tuple[ExpertStore, SlotPool]]:
    """One layer's experts in host memory, page-locked for CUDA, and slots: blocks of 9.4 MB there, small on the CPU."""
    model = build_shape(SHAPE, layers=1, device=device) if device.type == "cuda" else load_model("reference")
    view = find_moe_layers(model)
    store = ExpertStore(view, pinned=device.type == "cuda")
    store.pack(view)
    try:
        yield store, SlotPool(store.layout, min(SLOTS, store.experts), store.device)
    finally:
        store.unpack()
        store.close()


@contextmanager
def attached(link: Link, store: ExpertStore, pool: SlotPool) -> Iterator[Link]:
    """The link, for a while."""
    link.attach(store, pool)
    try:
        yield link
    finally:
        link.close()


def links(device: torch.device) -> tuple[Callable[[], Link], ...]:
    """Both that move experts here."""
    return (CudaLink if device.type == "cuda" else (lambda: EmulatedLink(EMULATED))), KernelLink


def rates(store: ExpertStore, pool: SlotPool) -> dict[str, float]:
    """Bytes per second and microseconds of one copy among others back to back."""
    device, size = pool.device, store.layout.block_bytes
    found: dict[str, float] = {"block_bytes": size}
    if device.type != "cuda":
        with attached(InstantLink(), store, pool) as link:
            speed = link_speed(link, store)
        return found | {"h2d_block_bytes_per_s": speed.rate, "h2d_block_us": speed.copy_s * 1e6}
    cuda = CudaDevice(device)
    host = torch.ones(LARGE, dtype=torch.uint8, pin_memory=True)
    there = torch.ones(LARGE, dtype=torch.uint8, device=device)
    for name, nbytes in (("large", LARGE), ("block", size), ("small", SMALL)):
        ways: dict[str, Callable[[torch.cuda.Stream], None]] = {
            "h2d": lambda stream, nbytes=nbytes: cuda.to_device(there.data_ptr(), host.data_ptr(), nbytes, stream),
            "d2h": lambda stream, nbytes=nbytes: cuda.to_host(host.data_ptr(), there.data_ptr(), nbytes, stream),
        }
        for way, queue in ways.items():
            seconds = device_s(queue, device)
            found |= {f"{way}_{name}_bytes_per_s": nbytes / seconds, f"{way}_{name}_us": seconds * 1e6}
    loose = torch.ones(LARGE, dtype=torch.uint8)
    seconds = device_s(lambda stream: cuda.to_device(there.data_ptr(), loose.data_ptr(), LARGE, stream), device, 2)
    return found | {"h2d_pageable_bytes_per_s": LARGE / seconds}


def misses(kind: Callable[[], Link], store: ExpertStore, pool: SlotPool) -> dict[str, float]:
    """From a layer's ids to its experts in slots, over a link; checks the bytes that arrive.

    Raises:
        RuntimeError: they are others.
    """
    with attached(kind(), store, pool) as link:
        found = {"misses_us": misses_s(link, store, pool) * 1e6}
        if not isinstance(link, KernelLink):
            found["submit_host_us"] = host_us(lambda: link.submit(0, 0, urgent=True), pool.device, 32)
        return found


def behind_copies(store: ExpertStore, pool: SlotPool) -> dict[str, Any]:
    """Microseconds until a small upload (on a stream of its own) or readback is through, by the number of expert copies
    queued before it."""
    device = pool.device
    numbers, ids_TK = list(range(64)), torch.arange(8, device=device).unsqueeze(0)
    readback, send = Readback(None), partial(torch.tensor, numbers)
    if device.type == "cuda":
        cuda = CudaDevice(device)
        readback, send = Readback(cuda), partial(_uploaded, cuda, Upload(cuda, cuda.new_stream()), numbers)
    found: dict[str, Any] = {"upload_us": {}, "readback_us": {}}
    with attached(links(device)[0](), store, pool) as link:
        for count in QUEUED:

            def queue(count: int = count) -> None:
                for copy in [link.submit(key, key, urgent=True) for key in range(count)]:
                    link.poll(copy)

            for name, call in (("upload_us", send), ("readback_us", lambda: readback.start(ids_TK).tolist())):
                found[name][str(count)] = once_us(call, queue, device)
    return found


def _uploaded(cuda: CudaDevice, upload: Upload, numbers: list[int]) -> None:
    """Send, and wait until what is launched on the current stream could read them."""
    upload.send(numbers).take()
    arrived = cuda.new_event()
    arrived.record(cuda.current_stream())
    arrived.synchronize()
