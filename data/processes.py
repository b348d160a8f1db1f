"""Two ranks or more: which documents each takes.

A rank's share is a run of neighbouring documents holding about 1/world of the tokens, so that shares put one after
the other are the single process's order.
"""

from __future__ import annotations

import contextlib
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
"""Ranks wait so long for one that is slower, at the end of a collection. One that has died is noticed at once."""


@dataclass(frozen=True, slots=True)
class Share:
    """Rank `rank` of `world` processes."""

    rank: int = 0
    world: int = 1


def join_ranks() -> Share:
    """Make the process group (gloo) of the ranks that torchrun started, where there is none; this process's rank."""
    started = int(os.environ.get("WORLD_SIZE", "1")) != 1 and "MASTER_ADDR" in os.environ
    if started and distributed.is_available() and not distributed.is_initialized():
        distributed.init_process_group("gloo", timeout=_TIMEOUT)
    return training_share()


def training_share() -> Share:
    """This process's rank in a process group that somebody (Lightning) has made; rank 0 of 1 without one."""
    if distributed.is_available() and distributed.is_initialized():
        return Share(distributed.get_rank(), distributed.get_world_size())
    return Share()


def wait_for_all(share: Share) -> None:
    """Return when every rank has come here."""
    if share.world > 1:
        distributed.barrier()


def sum_over_ranks(share: Share, tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over all ranks, in place."""
    if share.world > 1:
        device = torch.device("cuda" if distributed.get_backend() == "nccl" else "cpu")
        for tensor in tensors:
            total = tensor.to(device)
            distributed.all_reduce(total)
            tensor.copy_(total)


def documents_of(documents: Sequence[PlannedDocument], share: Share) -> list[PlannedDocument]:
    """The documents of one rank, in order; each document belongs to exactly one rank."""
    total = sum(document.tokens for document in documents)
    own, before = [], 0
    for document in documents:
        middle = before + document.tokens / 2
        if min(int(middle * share.world / max(total, 1)), share.world - 1) == share.rank:
            own.append(document)
        before += document.tokens
    return own


def smallest_share(documents: Sequence[PlannedDocument], world: int) -> int:
    """Tokens of the rank with the fewest: what every rank can train on, in step with the others."""
    return min(sum(d.tokens for d in documents_of(documents, Share(rank, world))) for rank in range(world))


# Exclusive writing of a folder

try:
    import fcntl
except ImportError:  # a system without it
    fcntl = None  # type: ignore[assignment]


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Nobody else who asks writes `folder` meanwhile, which is made; a kill gives it back. Under torchrun the first
    rank asks for all of them.

    Raises:
        ExpertcastError: another process is at it.
    """
    if fcntl is None or join_ranks().rank != 0 or (folder.exists() and not folder.is_dir()):
        yield  # whatever is wrong with the folder is said by who writes it
        return
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)  # the lock is the folder's own: no file is left behind
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ExpertcastError(f"another process is writing {folder}: wait for it, or name another folder") from None
        yield
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            for path in made:
                path.rmdir()  # where nothing was written
