"""Triton kernels of the device-side link. Imported only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: disable-error-code="import-not-found,untyped-decorator"


@triton.jit
def copy_blocks(  # type: ignore[no-untyped-def]
    addresses, keys, slots, moved, pool, N: tl.constexpr, WORDS: tl.constexpr, WIDTH: tl.constexpr, TURNS: tl.constexpr
):
    """Copy block `keys[n]` of the store into slot `slots[n]` for each n with `moved[n]`.

    Every program takes its share of every block: a few programs for the whole copy, whatever N is, leave the
    multiprocessors to the kernels that compute meanwhile.

    Args:
        addresses: int64, where each block of the store begins.
        pool: int64 words of the slots, WORDS per slot.
        WIDTH, TURNS: words that a program moves at a time, and how often.
    """
    first = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    step = tl.num_programs(0) * WIDTH
    for n in range(N):
        if tl.load(moved + n):
            source = tl.load(addresses + tl.load(keys + n)).to(tl.pointer_type(tl.int64))
            source = tl.multiple_of(source, 16)  # so that 16 bytes are read at a time
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
    """One call of `DeviceResidency.bring` (or `.expect`, with FORECAST) in one program: what some forty kernels do.

    Args:
        ids: int64 [N], the experts that are asked for.
        slot_of, key_of, used_at, unused, tick, counts: the tables of `DeviceResidency`.
        keys_out, slots_out, moved_out: [N], the moves to make.
        layer: whose experts they are, E of them.
        room: misses and hits that a forecast may hold at most.
        N, PADDED_N, S, PADDED_S: ids and slots, and the powers of two that hold them; COLUMNS: of `counts`.
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
    tl.debug_barrier()  # what was stored above is loaded below by other threads
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
