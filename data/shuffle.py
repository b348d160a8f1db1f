"""A shuffle buffer: mixes a stream of tokens too long to hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from expertcast.data.batch import TraceBatch


def rebatched(stream: Iterable[TraceBatch], batch_size: int) -> Iterator[TraceBatch]:
    """The same tokens in the same order, `batch_size` at a time; the last batch may be smaller."""
    held: list[TraceBatch] = []
    for batch in stream:
        held.append(batch)
        if sum(map(len, held)) >= batch_size:
            rows = TraceBatch.cat(held)
            full = len(rows) - len(rows) % batch_size
            yield from _cut(rows[:full], batch_size)
            held = [rows[full:]] if full < len(rows) else []
    if held:
        yield TraceBatch.cat(held)


def shuffled(stream: Iterable[TraceBatch], batch_size: int, *, capacity: int, seed: int) -> Iterator[TraceBatch]:
    """Every token once, `batch_size` at a time, mixed with its neighbours within about `capacity` tokens.

    The buffer is filled to `capacity` tokens, shuffled, and half of it given out before it is filled again.

    Args:
        stream: batches of any size.
        batch_size: of those that come out; the last one may be smaller.
        capacity: tokens held at a time (two batches at least).
        seed: what the order is drawn from.
    """
    generator = torch.Generator().manual_seed(seed)
    held: list[TraceBatch] = []

    def mixed() -> TraceBatch:
        rows = TraceBatch.cat(held)
        return rows[torch.randperm(len(rows), generator=generator)]

    for batch in stream:
        held.append(batch)
        if sum(map(len, held)) >= max(capacity, 2 * batch_size):
            rows = mixed()
            out = len(rows) // 2 // batch_size * batch_size
            yield from _cut(rows[:out], batch_size)
            held = [rows[out:]]
    if held:
        yield from _cut(mixed(), batch_size)


def _cut(rows: TraceBatch, batch_size: int) -> Iterator[TraceBatch]:
    for begin in range(0, len(rows), batch_size):
        yield rows[begin : begin + batch_size]
