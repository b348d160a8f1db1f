"""Helpers of the GPU tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from expertcast.data.moe_layers import find_moe_layers
from expertcast.runtime.links.base import Link
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from tests.families.models import tiny_model

MARKS = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LONG = 200_000_000
"""Clock cycles of a kernel that only waits: at least a tenth of a second on any device."""


def cuda_model(family: str = "qwen3_moe", dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Return a tiny model with the experts kernel that can be captured everywhere."""
    model = tiny_model(family, dtype).to("cuda")
    model.set_experts_implementation("batched_mm")
    return model


def attached(link: Link, *, slots: int = 12, pinned: bool = True) -> tuple[ExpertStore, SlotPool]:
    """Return a link between a tiny model's experts and zeroed slots on the device."""
    view = find_moe_layers(cuda_model())
    store = ExpertStore(view, pinned=pinned)
    store.pack(view)
    pool = SlotPool(store.layout, slots, torch.device("cuda"))
    link.attach(store, pool)
    return store, pool


def holds(pool: SlotPool, store: ExpertStore, slot: int, key: int) -> bool:
    """Return whether the slot has the expert's bytes, after all launched work."""
    torch.cuda.synchronize()
    return torch.equal(pool.block(slot).cpu(), store.block(key))


def prompt(*ids: int) -> dict[str, Any]:
    return {"input_ids": torch.tensor([list(ids)], device="cuda")}
