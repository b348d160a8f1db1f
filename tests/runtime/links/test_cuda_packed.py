"""Packed copies on a CUDA device: moved by the real link, expanded by real kernels."""

from __future__ import annotations

import pytest
import torch

from expertcast.runtime import CudaLink
from expertcast.runtime.storage.layout import PRECISIONS
from expertcast.runtime.storage.packed import dequantise, dequantise_plain
from tests.runtime.links.cuda_helpers import LONG, MARKS, attached

pytestmark = MARKS


@pytest.mark.parametrize(("precision", "bits"), [("int8", 8), ("int4", 4), ("int2", 2)])
def test_the_devices_weights_are_the_hosts(precision: str, bits: int) -> None:
    """Products of 4 or 2 bits and a half-precision scale are exact; one of 8 bits is rounded once, or twice."""
    store, _ = attached(CudaLink())
    store.add_copies((precision,))
    packed = store.copies(precision)
    rows = packed.block(3)[: packed.layout.rows_nbytes].view(packed.layout.rows, -1)
    found, expected = dequantise_plain(rows.cuda(), bits).cpu(), dequantise(rows, bits)
    torch.testing.assert_close(found, expected, rtol=1e-6 if bits == 8 else 0, atol=1e-7 if bits == 8 else 0)


def test_packed_copies_become_blocks_while_compute_is_behind() -> None:
    """Expansions are launched at once and run when their copies have arrived; the next copy into a slot waits."""
    link = CudaLink()
    store, pool = attached(link)
    store.add_copies(PRECISIONS)
    assert all(packed.pinned for packed in store.packed.values())
    torch.cuda._sleep(LONG)  # type: ignore[no-untyped-call]
    for slot, precision in enumerate(PRECISIONS):
        copy = link.submit(5 + slot, slot, urgent=True, precision=precision)
        link.wait(copy)
        link.expand(copy)
    seen = pool.block(0).clone()
    link.mark_read([0])
    link.wait(link.submit(20, 0, urgent=True))
    torch.cuda.synchronize()
    assert torch.equal(pool.block(0).cpu(), store.block(20))
    blocks = [seen.cpu(), pool.block(1).cpu(), pool.block(2).cpu()]
    for slot, (precision, block) in enumerate(zip(PRECISIONS, blocks, strict=True)):
        expected = torch.zeros_like(block)
        packed = store.copies(precision)
        packed.layout.expand(packed.block(5 + slot), expected)
        for name, view in store.layout.views(block).items():
            torch.testing.assert_close(view, store.layout.views(expected)[name])
    link.close()
