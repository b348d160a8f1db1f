"""Words from planes: all ways give the same, the Triton kernel interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from expertcast.runtime.storage.codecs.merge import has_triton, merge, merge_host, merge_plain

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize("count", [1, 128, (1 << 16), (1 << 18) - 1, (1 << 18) + 128])
def test_host_and_reference(count: int) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).repeat(-(-count // (1 << 16)))[:count]
    low, high = (plane.contiguous() for plane in every.view(torch.uint8).view(-1, 2).unbind(1))
    for way in (merge_plain, merge_host, merge):
        words = torch.zeros_like(every)
        way(low, high, words)
        assert torch.equal(words, every)


@pytest.mark.skipif(not has_triton(), reason="triton comes with CUDA builds of torch only")
def test_interpreted_kernel_does_what_the_reference_does() -> None:
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    command = [sys.executable, "-m", "tests.runtime.storage.codecs.merge_script"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "same"
