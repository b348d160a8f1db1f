"""What counts as waiting for copies."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from expertcast.runtime.offloading import offload
from expertcast.runtime.recording.recorder import Observer
from tests.families.models import tiny_model


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system keeps what it has read")
def test_copies_in_the_models_thread_are_waited_for(tmp_path: Path) -> None:
    """Their pages come from the disk meanwhile: nothing else says so where a mapped store is read on demand."""

    class Told(Observer):
        def __init__(self) -> None:
            self.copied_s: list[float] = []
            self.waited_s: list[float] = []

        def copied(self, key: int, layer: int, start: float, end: float, urgent: bool) -> None:
            self.copied_s.append(end - start)

        def waited(self, layer: int, seconds: float, in_time: int) -> None:
            self.waited_s.append(seconds)

    told = Told()
    with offload(
        tiny_model("qwen3_moe"), slots=4, store="disk", store_folder=tmp_path, link="instant", observers=[told]
    ) as offloaded:
        with (tmp_path / "experts.safetensors").open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        offloaded.model(input_ids=torch.tensor([[5, 9, 2]]))
        total = offloaded.stats.total
    assert len(told.copied_s) == total.misses + total.prefetched > 8
    waits = Counter(told.waited_s)
    waits.subtract(told.copied_s)
    left = [seconds for seconds, count in waits.items() for _ in range(count)]
    assert min(waits.values()) == 0, "every copy was waited for, for as long as it took"
    assert len(left) == total.chunks, "what is left is the waiting for a chunk's copies, which are there by then"
    assert total.waited_s == pytest.approx(sum(told.copied_s) + sum(left))
    assert sum(told.copied_s) > 0
