"""Step 1: what the machine is, and the constants that a model of it needs. Units are in the keys."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib import metadata
from typing import Any

import torch

from gpu_steps import wheels
from gpu_steps.beside import beside
from gpu_steps.copies import behind_copies, experts, links, misses, rates
from gpu_steps.day import Day
from gpu_steps.host_costs import host_costs
from gpu_steps.memory import memory


def run(day: Day) -> bool:
    """Measure one thing after another, each kept as it is found; one that fails does not hinder the others."""
    device = torch.device(day.device, 0) if day.device == "cuda" else torch.device("cpu")
    day.save(packages=wheels.look().found, triton=_triton())
    passed = [_measured(day, "memory", lambda: memory(device))]
    with experts(device) as (store, pool):
        day.save(page_locked_experts=all(store.pinned_layers))
        passed += [
            _measured(day, "link", lambda: rates(store, pool)),
            _measured(day, "host", lambda: host_costs(store, pool)),
            _measured(day, "behind_copies", lambda: behind_copies(store, pool)),
        ]
        for kind in links(device):
            name = kind().name
            passed += [
                _measured(day, f"misses_{name}", lambda kind=kind: misses(kind, store, pool)),
                _measured(day, f"beside_{name}", lambda kind=kind: beside(kind, store, pool)),
            ]
    return all(passed)


def _measured(day: Day, name: str, measure: Callable[[], dict[str, Any]]) -> bool:
    def kept() -> bool:
        day.save(**{name: measure()})
        return True

    return day.attempt(name, kept)


def _triton() -> str | None:
    return metadata.version("triton") if importlib.util.find_spec("triton") else None
