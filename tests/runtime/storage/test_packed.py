"""Copies in lower precision: what they weigh, how far they are from the weights, and how they come back."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from expertcast.data.moe_layers import find_moe_layers
from expertcast.predictors.messages import ExpertcastError
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.layout import PRECISIONS, BlockLayout, Field
from expertcast.runtime.storage.packed import PackedLayout, dequantise, dequantise_plain
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore
from tests.families.models import CONFIGS, tiny_model

BITS = {"int8": 8, "int4": 4, "int2": 2}


def _store(family: str = "gpt_oss", dtype: torch.dtype = torch.bfloat16) -> ExpertStore:
    view = find_moe_layers(tiny_model(family, dtype))
    store = ExpertStore(view)
    store.pack(view)
    return store


def _packed(layout: BlockLayout, precision: str, **weights: Tensor) -> tuple[PackedLayout, Tensor]:
    """Packed blocks [N, block_bytes] of parameters [N, ...]."""
    packed = PackedLayout.of(layout, precision)
    blocks = torch.zeros(len(next(iter(weights.values()))), packed.block_bytes, dtype=torch.uint8)
    packed.pack(weights, blocks)
    return packed, blocks


def _error(found: Tensor, weights: Tensor) -> float:
    return float((found.float() - weights.float()).norm() / weights.float().norm())


def test_layout_of_a_packed_block() -> None:
    """gpt_oss with hidden 32 and intermediate 16: gate_up [32, 32] and down [16, 32], biases [32] and [32].

    1536 weights make 24 rows of 64. int4: 24 x (32 + 4) = 864 bytes, then each bias (bf16, 64 bytes) at the next
    multiple of 256: 1024 and 1280; 1536 in all. int8: 24 x 72 = 1728, biases at 1792 and 2048. int2: 24 x 20 = 480.
    """
    layout = _store().layout
    for name, rows_nbytes, offsets, size in (
        ("int8", 1728, [1792, 2048], 2304),
        ("int4", 864, [1024, 1280], 1536),
        ("int2", 480, [512, 768], 1024),
    ):
        packed = PackedLayout.of(layout, name)
        assert (packed.group, packed.rows, packed.rows_nbytes) == (64, 24, rows_nbytes)
        assert [(field.name, offset) for field, offset in packed.kept] == list(
            zip(("gate_up_proj_bias", "down_proj_bias"), offsets, strict=True)
        )
        assert packed.block_bytes == size < layout.block_bytes


def _layout(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> BlockLayout:
    fields = [Field(name=f"w{i}", shape=shape, dtype=dtype, offset=i * 65536) for i, shape in enumerate(shapes)]
    return BlockLayout(fields=tuple(fields), block_bytes=len(fields) * 65536)


def test_groups() -> None:
    """64 weights in a row where that divides all, else 32; what neither divides stays."""
    assert PackedLayout.of(_layout((4, 16), (2, 64)), "int4").group == 64
    views = {"w0": torch.randn(3, 4, 16), "w1": torch.randn(3, 3, 32), "w2": torch.randn(3, 5, 7)}
    narrow, blocks = _packed(_layout((4, 16), (3, 32), (5, 7)), "int4", **views)
    assert (narrow.group, narrow.rows) == (32, 5)
    assert [field.name for field, _ in narrow.kept] == ["w2"]
    full = torch.zeros(3 * 65536, dtype=torch.uint8)
    narrow.expand(blocks[2], full)
    found = narrow.full.views(full)
    assert torch.equal(found["w2"][0], views["w2"][2])
    assert _error(found["w1"][0], views["w1"][2]) < 0.12


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_plain_operations_give_what_torchs_own_operator_gives(precision: str, scale: float) -> None:
    """Bit for bit, for every code that can occur."""
    bits = BITS[precision]
    layout = _layout((500, 64))
    weights = torch.randn(1, 500, 64, generator=torch.Generator().manual_seed(bits)) * scale
    packed, blocks = _packed(layout, precision, w0=weights)
    rows = blocks[0, : packed.rows_nbytes].view(500, -1)
    operator = getattr(torch.ops.quantized, f"embedding_bag_{'byte' if bits == 8 else f'{bits}bit'}_unpack")
    assert torch.equal(dequantise_plain(rows, bits), operator(rows))
    assert torch.equal(dequantise(rows, bits), operator(rows))


@pytest.mark.parametrize(("precision", "most"), [("int8", 0.006), ("int4", 0.085), ("int2", 0.34)])
def test_errors_on_normal_weights(precision: str, most: float) -> None:
    """Rows of 64 normal weights. Spanning each row's whole range leaves 0.090 with int4 and 0.45 with int2."""
    weights = torch.randn(64, 64, 64, generator=torch.Generator().manual_seed(1))
    packed, blocks = _packed(_layout((64, 64)), precision, w0=weights)
    found = [dequantise(block[: packed.rows_nbytes].view(64, -1), packed.bits) for block in blocks]
    assert _error(torch.stack(found), weights) < most


def test_rows_without_spread() -> None:
    """Constant rows, zeros, and one weight far off come back (nearly) as they are in the least precision."""
    weights = torch.zeros(1, 4, 64)
    weights[0, 1] = 0.5
    weights[0, 2, 17] = 1000.0
    weights[0, 3, ::2] = -2.0
    packed, blocks = _packed(_layout((4, 64)), "int2", w0=weights)
    found = dequantise(blocks[0, : packed.rows_nbytes].view(4, -1), 2)
    assert found == pytest.approx(weights[0], rel=1e-3, abs=1e-3)


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, torch.bfloat16) for family in sorted(CONFIGS)), ("gpt_oss", torch.float32)]
)
def test_expanded_in_its_own_slot(family: str, dtype: torch.dtype) -> None:
    """A packed block in a slot's first bytes becomes the full block: near the weights, biases exact, no neighbour
    touched; each parameter is torch's own unpacking, cast."""
    store = _store(family, dtype)
    store.add_copies(PRECISIONS)
    pool = SlotPool(store.layout, 3, torch.device("cpu"))
    key = 2 * store.experts + 5
    errors = []
    for precision in PRECISIONS:
        packed = store.copies(precision)
        pool.block(0).fill_(1)
        pool.block(2).fill_(2)
        pool.block(1)[: packed.block_bytes] = packed.block(key)
        pool.expand(1, packed)
        assert bool((pool.block(0) == 1).all())
        assert bool((pool.block(2) == 2).all())
        layout = packed.layout
        kept = {field.name for field, _ in layout.kept}
        rows = packed.block(key)[: layout.rows_nbytes].view(layout.rows, -1)
        flat = dequantise_plain(rows, layout.bits).flatten()
        for name, view in pool.views.items():
            weights = store.views(2)[name][5]
            if name in kept:
                assert torch.equal(view[1], weights)
            else:
                expected, flat = flat[: weights.numel()], flat[weights.numel() :]
                assert torch.equal(view[1].flatten(), expected.to(dtype))
        assert not flat.numel()
        errors.append(_error(pool.views["down_proj"][1], store.views(2)["down_proj"][5]))
    assert [error < most for error, most in zip(errors, (0.006, 0.1, 0.4), strict=True)] == [True] * 3
    assert errors == sorted(errors)


def test_copies_of_a_disk_store_lie_in_memory(tmp_path: Path) -> None:
    view = find_moe_layers(tiny_model("olmoe"))
    disk = DiskStore(view, tmp_path)
    disk.pack(view)
    disk.add_copies(("int4",))
    memory = _store("olmoe")
    memory.add_copies(("int4",))
    assert torch.equal(disk.copies("int4").block(13), memory.copies("int4").block(13))
    assert disk.copies("int4")._memory.bytes.nbytes == 32 * disk.copies("int4").block_bytes
    assert [path.name for path in tmp_path.iterdir()] == ["experts.safetensors"]
    disk.close()
    assert not disk.packed


def test_copies_are_made_once_and_freed() -> None:
    store = _store()
    store.add_copies(("int8",))
    made = store.copies("int8")
    store.add_copies(("int8", "int2"))
    assert store.copies("int8") is made
    assert list(store.packed) == ["int8", "int2"]
    gone = weakref.ref(made._memory.bytes)
    block = store.block(3).clone()
    store.unpack()
    assert not store.packed
    gc.collect()
    assert gone() is None
    assert made._memory.bytes.nbytes == 0
    assert block.any()


def test_what_is_refused() -> None:
    store = _store()
    with pytest.raises(ExpertcastError, match="unknown precision 'int3': choose from int8, int4, int2"):
        store.add_copies(("int4", "int3"))
    assert not store.packed, "all or nothing"
    with pytest.raises(ExpertcastError, match="holds no 'int4' copies of the experts: choose from full, or call"):
        store.copies("int4")
    store.add_copies(("int8",))
    with pytest.raises(ExpertcastError, match="choose from full, int8, or call"):
        store.copies("int4")
    with pytest.raises(ExpertcastError, match=r"int8 copies of these experts take .* choose a lower precision"):
        PackedLayout.of(_layout((910, 64), dtype=torch.float8_e4m3fn), "int8")
