"""What a measurement ran on, as plain JSON values."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from expertcast.data.memory import usable_processors
from expertcast.predictors.plain import Json


def hardware() -> Json:
    """Processor, cores, threads, memory and GPU (None without one)."""
    found: Json = {
        "machine": platform.machine(),
        "cpu": _cpu_name(),
        "cores": usable_processors(),
        "threads": torch.get_num_threads(),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpu": None,
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = {
            "name": properties.name,
            "memory": properties.total_memory,
            "capability": [properties.major, properties.minor],
            "cuda": torch.version.cuda,
        }
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
