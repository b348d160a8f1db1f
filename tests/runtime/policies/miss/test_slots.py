"""What lies in the slots after a run whose misses came in several precisions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from expertcast.runtime import EmulatedLink, OffloadedModel, offload
from expertcast.runtime.policies import Policies
from expertcast.runtime.storage.layout import FULL
from expertcast.runtime.storage.slots import SlotState
from tests.families.models import tiny_model


def _expected(offloaded: OffloadedModel, key: int, precision: str) -> Tensor:
    """uint8 [block_bytes]: the expert's block in full, or expanded from its copy."""
    store = offloaded.store
    if precision == FULL:
        return store.block(key)
    block = torch.zeros(store.layout.block_bytes, dtype=torch.uint8)
    packed = store.copies(precision)
    packed.layout.expand(packed.block(key), block)
    return block


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "phimoe"])
@pytest.mark.parametrize("miss", ["fetch_lowest:levels=int2", "fetch_priority", "cascade", "drop_cascade"])
@pytest.mark.parametrize("cache", [True, False])
def test_slots_hold_what_the_books_say(family: str, miss: str, cache: bool) -> None:
    """Every expert in a slot is its full block, or the expansion of its copy, in the precision that is on the books.

    Forecasts' copies (in full) and misses' (in any precision) arrive in any order, are dropped, promoted, and noticed
    by a wait or a sweep; prefill runs in chunks.
    """
    model = tiny_model(family)
    link = EmulatedLink(2e9, jitter=2e-4, seed=3)
    seen: dict[str, int] = {}
    with offload(
        model, predictor="router_input", slots=7, link=link, cache=cache, policies=Policies(miss=miss)
    ) as offloaded:
        residency, pool, layout = offloaded.residency, offloaded.pool, offloaded.store.layout
        model.generate(torch.arange(1, 20)[None], max_new_tokens=6, do_sample=False)
        for step in range(8):
            model.generate(torch.tensor([[7 * step + 1, 3 * step + 2]]), max_new_tokens=4, do_sample=False)
            for layer in range(offloaded.store.layers):
                for expert, precision in residency.held(layer).items():
                    key = layer * offloaded.store.experts + expert
                    slot = pool.slots[key]
                    if pool.state(slot) is SlotState.LOADING:
                        continue
                    seen[precision] = seen.get(precision, 0) + 1
                    expected = _expected(offloaded, key, precision)
                    for field in layout.fields:
                        part = slice(field.offset, field.offset + field.nbytes)
                        assert torch.equal(pool.block(slot)[part], expected[part]), (key, precision, field.name)
        if cache:  # without a cache a slot is free for every miss, and fetch_priority sees no pressure
            assert link.bytes_moved < link.copies * layout.block_bytes, "no copy was packed"
            assert len(seen) > 1, seen
