"""Distributed ranks: each rank's share of the documents, reductions, and exclusive access to a folder.

A rank's share is a range of consecutive documents with about 1/world of the tokens, so concatenated shares are in the
order of a single process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, distributed

from expertcast.data.plan import PlannedDocument
from expertcast.predictors.messages import ExpertcastError

_TIMEOUT = timedelta(days=1)
"""Longest wait for a slow rank at the end of a collection. A crashed rank is detected at once."""


@dataclass(frozen=True, slots=True)
class Share:
    """Rank `rank` of `world` processes."""

    rank: int = 0
    world: int = 1


def join_ranks() -> Share:
    """Join the process group of torchrun's ranks, if any, and return this process's share.

    Where there is a GPU for every rank of the machine, each rank's current device becomes its own, and tensors on
    devices are exchanged by nccl; all others by gloo.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != 1 and "MASTER_ADDR" in os.environ and distributed.is_available() and not distributed.is_initialized():
        own_gpu = int(os.environ.get("LOCAL_WORLD_SIZE", world)) <= torch.cuda.device_count()
        if own_gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        distributed.init_process_group("cpu:gloo,cuda:nccl" if own_gpu else "gloo", timeout=_TIMEOUT)
    return training_share()


def training_share() -> Share:
    """Return this process's rank in the current process group; rank 0 of 1 without a group."""
    if distributed.is_available() and distributed.is_initialized():
        return Share(distributed.get_rank(), distributed.get_world_size())
    return Share()


def wait_for_all(share: Share) -> None:
    """Wait until every rank has called this function."""
    sum_over_ranks(share, [torch.zeros(1)])


def sum_over_ranks(share: Share, tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over all ranks, by gloo."""
    if share.world > 1:
        for tensor in tensors:
            total = tensor.cpu()
            distributed.all_reduce(total)
            tensor.copy_(total)


def documents_of(documents: Sequence[PlannedDocument], share: Share) -> list[PlannedDocument]:
    """Return the documents of one rank in order; each document belongs to exactly one rank."""
    total = sum(document.tokens for document in documents)
    own, before = [], 0
    for document in documents:
        middle = before + document.tokens / 2
        if min(int(middle * share.world / max(total, 1)), share.world - 1) == share.rank:
            own.append(document)
        before += document.tokens
    return own


def smallest_share(documents: Sequence[PlannedDocument], world: int) -> int:
    """Return the smallest number of tokens of any rank, which limits the steps of all ranks."""
    return min(sum(d.tokens for d in documents_of(documents, Share(rank, world))) for rank in range(world))


# Exclusive writing of a folder


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on `folder`, creating it if needed; the system releases it if the process dies.

    Under torchrun only rank 0 locks. A folder that was created and stays empty is removed.

    Raises:
        ExpertcastError: another process holds the lock.
    """
    if join_ranks().rank != 0 or (folder.exists() and not folder.is_dir()):
        yield  # the writer reports problems with the folder
        return
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)  # locking the folder itself leaves no lock file behind
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ExpertcastError(f"another process is writing {folder}: wait for it, or use another folder") from None
        yield
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            for path in created:
                path.rmdir()  # fails if anything was written
