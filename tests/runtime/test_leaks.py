"""Two hundred times offloaded and closed: no memory, thread or file handle stays."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from expertcast.data.moe_layers import find_moe_layers
from expertcast.runtime import EmulatedLink, offload
from expertcast.runtime.storage.disk_store import DiskStore
from tests.families.models import tiny_model

CYCLES, WARM_UP = 201, 21
MOST_BYTES = 8 << 20
"""Of growth over 180 cycles, in which each takes about 1 MB for its forecasts alone."""


def _held() -> tuple[int, int, int]:
    """Threads and file handles of this process as the system counts them, and Python's threads.

    The least of a second: a thread that was joined is still counted for a moment.
    """
    counts = []
    for _ in range(50):
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), threading.active_count()))
        time.sleep(0.02)
    return min(counts)


def _resident() -> int:
    """Bytes of anonymous memory, after what is free was given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(rows["RssAnon"].split()[0]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts what /proc says")
def test_two_hundred_cycles(tmp_path: Path) -> None:
    """Over a link that copies from a thread, with a predictor whose forecasts are traced.

    From memory, from a temporary disk store, and from a packed one that is opened again every time, as a loaded
    model does it; both have a thread that reads ahead.
    """
    model = tiny_model("qwen3_moe")
    prompt = torch.arange(1, 9)[None]
    expected = model(prompt).logits
    held, resident = [], []
    for cycle in range(CYCLES):
        kept = DiskStore(find_moe_layers(model), tmp_path, fingerprint="a") if cycle % 3 == 2 else None
        store = kept or ("memory", "disk")[cycle % 3]
        with offload(model, store=store, link=EmulatedLink(4e9), predictor="next_norm", slots=20) as offloaded:
            logits = offloaded(prompt).logits
        if kept is not None:
            kept.close()
        del offloaded, store, kept
        if cycle in (WARM_UP, CYCLES - 1):
            assert torch.equal(logits, expected)
            held.append(_held())
            resident.append(_resident())
    assert all(now <= then for then, now in zip(*held, strict=True)), held
    assert resident[1] - resident[0] < MOST_BYTES
