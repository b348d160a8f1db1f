"""Compares the interpreted Triton kernels with plain copies. test_kernel.py runs it with TRITON_INTERPRET=1."""

from __future__ import annotations

from typing import Any

import torch

from expertcast.runtime.experimental.kernel_link import (
    DeviceResidency,
    HostCopier,
    KernelCopier,
    KernelResidency,
    Moves,
)
from expertcast.runtime.storage.layout import BlockLayout, Field
from expertcast.runtime.storage.slots import SlotPool
from tests.runtime.blocks import Blocks


def compare(block_bytes: int, seed: int) -> None:
    """Compare the results of random moves."""
    field = Field(name="w", shape=(block_bytes,), dtype=torch.uint8, offset=0)
    layout = BlockLayout(fields=(field,), block_bytes=block_bytes)
    generator = torch.Generator().manual_seed(seed)
    store = Blocks(layout, keys=12, generator=generator)
    pools = [SlotPool(layout, 6, torch.device("cpu")) for _ in range(2)]
    addresses = torch.tensor([store.block(key).data_ptr() for key in range(12)])
    copiers = HostCopier(store, pools[0]), KernelCopier(addresses, pools[1])
    for _ in range(4):
        moves = Moves(
            torch.randint(12, (5,), generator=generator),
            torch.randperm(6, generator=generator)[:5],
            torch.randint(2, (5,), generator=generator).bool(),
        )
        for copier in copiers:
            copier.copy(moves)
        for slot in range(6):
            assert torch.equal(pools[0].block(slot), pools[1].block(slot)), (block_bytes, slot)
    assert any(pools[0].block(slot).any() for slot in range(6))


def compare_tables(seed: int, *, slots: int, device: str = "cpu") -> None:
    """Pass the same requests and prefetches to both tables; compare tables and counters after each."""
    generator = torch.Generator().manual_seed(seed)
    shape: dict[str, Any] = {"layers": 3, "experts": 8, "slots": slots, "device": torch.device(device)}
    torch_ops, kernel = DeviceResidency(**shape), KernelResidency(**shape)
    for step in range(12):
        layer = step % 3
        ids_TK = torch.rand(2, 8, generator=generator).topk(2).indices.to(device)
        forecast = torch.rand(2, 8, generator=generator).topk(3).indices.to(device)
        expected = torch_ops.request(layer, ids_TK), torch_ops.prefetch((layer + 1) % 3, forecast.t(), 4)
        got = kernel.request(layer, ids_TK), kernel.prefetch((layer + 1) % 3, forecast.t(), 4)
        for own, other in zip(got, expected, strict=True):
            assert torch.equal(own.moved_N, other.moved_N)
            assert torch.equal(own.keys_N, other.keys_N)
            assert torch.equal(own.slots_N[own.moved_N], other.slots_N[own.moved_N])
        kernel.finish(layer, keep=step % 5 > 0)
        torch_ops.finish(layer, keep=step % 5 > 0)
        for name, last in (("slot_of", 24), ("key_of", slots), ("used_at", slots), ("_unused", slots), ("counts", 3)):
            assert torch.equal(getattr(kernel, name)[:last], getattr(torch_ops, name)[:last]), (step, name)
    assert slots == 4 or kernel.counts.sum(0)[1:4].all(), "there were hits, misses and forecasts"


if __name__ == "__main__":
    for slots in (4, 6, 9, 24):
        compare_tables(slots, slots=slots)
    turn = 2048 * 8  # bytes per iteration of one of 16 programs
    for size in (256, turn - 256, turn, 16 * turn + 512, 3 * 16 * turn - 256):
        compare(size, size)
    print("same")
