"""Copies of experts whose keys and slots only the device knows.

N entries of one call; see :class:`expertcast.runtime.links.tables.Moves`.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from expertcast.predictors.errors import ExpertcastError
from expertcast.runtime.links.driver import CudaDevice
from expertcast.runtime.links.tables import Moves
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore

_WORD = 8
_WIDTH = 2048
_WARPS = 8
_PROGRAMS = 16
"""A quarter of a megabyte on its way, 16 x 2,048 words, as 64 bytes (four loads of 16) a thread.

By Little's law a link needs rate times latency: PCIe 5 (55 GB/s) 55 to 110 kB at 1 to 2 us a read (an estimate),
so that it stays full while programs store what has come. Few programs, for each keeps a persistent matmul off a
multiprocessor; see :mod:`expertcast.runtime.links.carve_out`.
"""
_SHARE = 4
"""A device gives up one multiprocessor in so many at most."""


def has_triton() -> bool:
    """Whether Triton is installed: torch's CUDA builds bring it on Linux."""
    return importlib.util.find_spec("triton") is not None


class BlockCopier(ABC):
    """Copies the blocks of some moves from the store into their slots."""

    programs = 0
    """Multiprocessors that it takes from the kernels that compute meanwhile."""

    @abstractmethod
    def copy(self, moves: Moves) -> None:
        """On the current stream; entries that are not moved cost next to nothing."""


class HostCopier(BlockCopier):
    """The reference, and what runs where a slot is host memory too."""

    def __init__(self, store: ExpertStore, pool: SlotPool) -> None:
        self._store, self._pool = store, pool

    def copy(self, moves: Moves) -> None:
        for key, slot, moved in zip(*(tensor.tolist() for tensor in moves), strict=True):
            if moved:
                self._pool.block(slot).copy_(self._store.block(key))


class KernelCopier(BlockCopier):
    """A Triton kernel that reads the store's page-locked memory where it lies.

    Args:
        addresses: int64 [L * E], the device's address of each block.
        programs: of the kernel at most.
    """

    def __init__(self, addresses: Tensor, pool: SlotPool, programs: int = _PROGRAMS) -> None:
        from expertcast.runtime.links.triton_kernels import copy_blocks

        self._kernel = copy_blocks
        self._addresses = addresses
        self._pool_words = pool.block(0).view(torch.int64)
        self._words = pool.layout.block_bytes // _WORD
        chunks = -(-self._words // _WIDTH)
        self.programs = min(programs, chunks)
        self._turns = -(-chunks // self.programs)

    def copy(self, moves: Moves) -> None:
        self._kernel[(self.programs,)](
            self._addresses, *moves, self._pool_words,
            N=moves.keys_N.shape[0], WORDS=self._words, WIDTH=_WIDTH, TURNS=self._turns, num_warps=_WARPS,
        )  # fmt: skip


def block_copier(store: ExpertStore, pool: SlotPool) -> BlockCopier:
    """The copier of the pool's device.

    Raises:
        ExpertcastError: no Triton, or blocks that the device cannot read where they lie.
    """
    if pool.device.type != "cuda":
        return HostCopier(store, pool)
    if not has_triton():
        raise ExpertcastError("link 'kernel' needs the package triton: install it, or use link 'cuda'")
    device = CudaDevice(pool.device)
    addresses = []
    for key in range(store.layers * store.experts):
        address = device.address_of(store.block(key).data_ptr())
        if address is None:
            raise ExpertcastError(
                f"link 'kernel' reads page-locked memory only, and expert {key} of the store lies elsewhere: use link "
                "'cuda', or free memory for the page lock"
            )
        addresses.append(address)
    multiprocessors = torch.cuda.get_device_properties(pool.device).multi_processor_count
    programs = max(1, min(_PROGRAMS, multiprocessors // _SHARE))
    return KernelCopier(torch.tensor(addresses, device=pool.device), pool, programs)
