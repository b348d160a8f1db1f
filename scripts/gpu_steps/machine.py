"""Step 1: what the machine is, and the constants that a model of it needs. Units are in the keys."""

from __future__ import annotations

import importlib.util
from importlib import metadata

import torch

from gpu_steps import wheels
from gpu_steps.beside import beside
from gpu_steps.copies import behind_copies, experts, misses, rates
from gpu_steps.day import Day
from gpu_steps.host_costs import host_costs
from gpu_steps.memory import memory


def run(day: Day) -> bool:
    """Measure one thing after another, each kept as it is found."""
    device = torch.device(day.device, 0) if day.device == "cuda" else torch.device("cpu")
    day.save(packages=wheels.look().found, triton=_triton(), memory=memory(device))
    with experts(device) as (store, pool):
        day.save(page_locked_experts=all(store.pinned_layers))
        for name, measure in (
            ("link", rates),
            ("host", host_costs),
            ("misses", misses),
            ("behind_copies", behind_copies),
            ("beside", beside),
        ):
            day.save(**{name: measure(store, pool)})
    return True


def _triton() -> str | None:
    return metadata.version("triton") if importlib.util.find_spec("triton") else None
