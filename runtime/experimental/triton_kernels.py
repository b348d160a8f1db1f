"""Triton kernels of the device-side link. This module is imported only if Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: disable-error-code="import-not-found,untyped-decorator"


@triton.jit
def copy_blocks(  # type: ignore[no-untyped-def]
    addresses, keys, slots, moved, pool, N: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr, TURNS: tl.constexpr
):
    """Copy block `keys[n]` of the store into slot `slots[n]` for each n with `moved[n]`.

    Every program copies its share of every block. A few programs for the whole copy, whatever N is, leave the
    multiprocessors to the compute kernels.

    Args:
        addresses: int64, the start address of each block of the store.
        keys: int64 [N].
        slots: int64 [N].
        moved: bool [N].
        pool: the slots as int64 words, WORDS per slot.
        N: number of candidates.
        WORDS: int64 words per block.
        WIDTH: words that a program copies at a time.
        TURNS: iterations per program and block.
    """
    first = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    step = tl.num_programs(0) * WIDTH
    for n in range(N):
        if tl.load(moved + n):
            source = tl.load(addresses + tl.load(keys + n)).to(tl.pointer_type(tl.int64))
            source = tl.multiple_of(source, 16)  # enables loads of 16 bytes
            target = pool + tl.load(slots + n) * WORDS
            for turn in range(TURNS):
                at = first + turn * step
                inside = at < WORDS
                tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["layer", "room"])
def place(  # type: ignore[no-untyped-def]
    ids, slot_of, key_of, used_at, unused, tick, counts, keys_out, slots_out, moved_out, layer, room,
    N: tl.constexpr, PADDED_N: tl.constexpr, S: tl.constexpr, PADDED_S: tl.constexpr, E: tl.constexpr,
    COLUMNS: tl.constexpr, FORECAST: tl.constexpr,
):  # fmt: skip
    """Run one `DeviceResidency.request` (or, with FORECAST, `.prefetch`) in one program instead of some forty kernels.

    Args:
        ids: int64 [N], the requested experts.
        slot_of, key_of, used_at, unused, tick, counts: the tables of `DeviceResidency`.
        keys_out, slots_out, moved_out: [N], the resulting copies.
        layer: the experts' layer.
        room: with FORECAST, hits and misses at most.
        N, S: ids and slots; PADDED_N, PADDED_S: the same, rounded up to powers of two.
        E: routed experts per layer.
        COLUMNS: columns of `counts`.
    """
    lane = tl.arange(0, PADDED_N)
    ids_N = tl.load(ids + lane, mask=lane < N, other=-1)
    again = (ids_N[:, None] == ids_N[None, :]) & (lane[None, :] < lane[:, None])
    needed = (lane < N) & (tl.max(again.to(tl.int32), axis=1) == 0)
    keys_N = layer.to(tl.int64) * E + ids_N
    slots_N = tl.load(slot_of + keys_N, mask=needed, other=-1)
    hit, missing = needed & (slots_N >= 0), needed & (slots_N < 0)
    if FORECAST:
        missing = missing & (tl.cumsum(missing.to(tl.int32), axis=0) <= room - tl.sum(hit.to(tl.int32)))
    row = counts + layer * COLUMNS
    misses = tl.sum(missing.to(tl.int64))
    if FORECAST:
        tl.store(row + 3, tl.load(row + 3) + misses)
    else:
        fresh = tl.load(unused + slots_N, mask=hit, other=0) != 0
        tl.store(row, tl.load(row) + tl.sum(needed.to(tl.int64)))
        tl.store(row + 1, tl.load(row + 1) + tl.sum(hit.to(tl.int64)))
        tl.store(row + 2, tl.load(row + 2) + misses)
        tl.store(row + 4, tl.load(row + 4) + tl.sum(fresh.to(tl.int64)))
        tl.store(row + 6, tl.load(row + 6) + 1)
    now = tl.load(tick)
    tl.store(used_at + slots_N, now + lane, mask=hit)
    tl.store(keys_out + lane, keys_N, mask=lane < N)
    tl.store(moved_out + lane, missing, mask=lane < N)
    tl.debug_barrier()  # other threads load below what was stored above
    if not FORECAST:
        tl.store(unused + slots_N, tl.zeros_like(hit), mask=hit)
    tl.store(tick, now + N)
    slot = tl.arange(0, PADDED_S)
    age_S = tl.load(used_at + slot, mask=slot < S, other=0x7FFFFFFFFFFFFFFF)
    for n in range(N):
        if tl.sum((missing & (lane == n)).to(tl.int32)) > 0:
            victim = tl.argmin(age_S, axis=0)
            age_S = tl.where(slot == victim, 0x7FFFFFFFFFFFFFFF, age_S)
            key = tl.sum(tl.where(lane == n, keys_N, 0))
            lost = tl.load(key_of + victim)
            if lost >= 0:
                tl.store(slot_of + lost, -1)
            tl.store(slot_of + key, victim)
            tl.store(key_of + victim, key)
            tl.store(used_at + victim, now + n)
            tl.store(unused + victim, FORECAST)
            tl.store(slots_out + n, victim)
