"""Host memory without over-allocation, page-locked where driver and machine allow it.

torch's caching allocator rounds page-locked memory up to a power of two (58 GB become 77). This module instead
registers one anonymous mapping, rounded up to whole pages, with the driver. Pages are committed when they are first
written or locked.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import resource
import sys
import threading
import warnings
import weakref

import torch
from torch import Tensor

from expertcast.data.machine import available_memory, mapped

_PORTABLE_AND_MAPPED = 3
"""cudaHostRegisterPortable | cudaHostRegisterMapped: page-locked for every context, and readable by kernels."""
_LEFT_TO_THE_SYSTEM = 2**30
"""Bytes of available memory that the default budget of :class:`PageLock` leaves unlocked."""
_THRESHOLDS = (-1, -3)
"""glibc's `M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD`. Until they are set, glibc raises them as tensors are freed."""
_KEPT_FREE = 32 << 20
"""Bytes to which these thresholds are set: glibc then keeps at most so much freed memory. With 1 MB a prompt of 512
tokens through 48 layers of 128 experts took 3.8 million page faults more, 8 s of the system's time of 25."""
_POPULATE_WRITE = 23
"""Linux's `MADV_POPULATE_WRITE` (5.14): commits pages and leaves their contents."""
_PIECE = 16 << 20
"""Bytes committed by one call, for which other threads wait that map memory: with 256 MB loading waited for seconds."""


class Driver:
    """Page-locks memory by torch's cudaHostRegister. Pointers and sizes are multiples of the page size.

    Args:
        device: the CUDA device whose context is used: no other GPU gets one.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device

    def register(self, pointer: int, nbytes: int) -> str | None:
        """Page-lock a range. Returns None, or the driver's reason for refusing it."""
        torch.cuda.init()  # type: ignore[no-untyped-call]
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self._device):
            code = runtime.cudaHostRegister(pointer, nbytes, _PORTABLE_AND_MAPPED)
            if int(code) == 0:
                return None
            self._forget_error()
        return str(runtime.cudaGetErrorString(code))

    def unregister(self, pointer: int) -> None:
        """Unlock the range that starts at `pointer`."""
        with torch.cuda.device(self._device):
            if int(torch.cuda.cudart().cudaHostUnregister(pointer)) != 0:  # type: ignore[no-untyped-call]
                self._forget_error()

    @staticmethod
    def _forget_error() -> None:
        """Clear the CUDA runtime's last error by a kernel launch; otherwise the next launch would raise it."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda").add_(1)


class PageLock:
    """Page-locks mappings until the budget is used up or the driver refuses one; later mappings stay pageable.

    Args:
        budget: bytes that may be locked. None: the memory available now minus 1 GiB. Locked pages can be neither
            swapped nor reclaimed, so locking without a limit could starve the machine.
    """

    def __init__(self, budget: int | None = None, driver: Driver | None = None) -> None:
        if budget is None:
            available = available_memory()
            budget = sys.maxsize if available is None else max(0, available - _LEFT_TO_THE_SYSTEM)
        self._left = budget
        self._driver = driver or Driver()
        self._refused = False
        self.locked_bytes = 0

    def lock(self, pointer: int, nbytes: int) -> bool:
        """Page-lock a range and return whether it is locked. The first failure warns."""
        if self._refused:
            return False
        if nbytes > self._left:
            return self._refuse(f"{self._left} bytes may still be locked")
        refusal = self._driver.register(pointer, nbytes)
        if refusal is not None:
            return self._refuse(f"the driver refused {nbytes} bytes: {refusal}{_lock_limit()}")
        self._left -= nbytes
        self.locked_bytes += nbytes
        return True

    def unlock(self, pointer: int, nbytes: int) -> None:
        """Unlock a range that :meth:`lock` locked; later mappings may take its bytes."""
        self._driver.unregister(pointer)
        self._left += nbytes
        self.locked_bytes -= nbytes
        self._refused = False

    def _refuse(self, reason: str) -> bool:
        self._refused = True
        warnings.warn(
            f"only {self.locked_bytes} bytes of the experts are page-locked ({reason}); the rest stays pageable, and "
            "its copies are slower",
            stacklevel=2,
        )
        return False


class HostMemory:
    """Page-aligned zeroed memory of `nbytes` bytes. `lock`, if given, page-locks it where possible.

    Raises:
        ExpertcastError: the system cannot map that many bytes.
    """

    def __init__(self, nbytes: int, lock: PageLock | None = None) -> None:
        self.bytes: Tensor = mapped(nbytes)[0]
        """uint8 [nbytes]; a tensor that views it keeps the mapping alive."""
        pointer, size = self.bytes.data_ptr(), -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.pinned = lock is not None and lock.lock(pointer, size)
        self._unlock: weakref.finalize[[int, int], HostMemory] | None = None
        if lock is not None and self.pinned:
            self._unlock = weakref.finalize(self, lock.unlock, pointer, size)
            self._unlock.atexit = False  # the driver may have shut down by then; the system frees the pages

    def release(self) -> None:
        """Unlock the memory now. The system gets it back when no tensor views it any more."""
        if self._unlock is not None:
            self._unlock()
        self.pinned = False
        self.bytes = torch.empty(0, dtype=torch.uint8)


def commit(memory: Tensor) -> None:
    """Commit the pages of fresh memory, of uint8 and all zero, on a thread while the caller goes on; Linux only.

    Some GB take seconds. Threads that read a disk into pages that are not committed take longer still. Memory of one
    piece is left alone: its first use commits it at once. At exit Python waits for the thread, for one piece at most: a
    daemon thread could free the tensor while Python ends, which crashes.
    """
    if sys.platform == "linux" and memory.numel() > _PIECE:
        threading.Thread(target=_commit, args=(weakref.ref(memory),), name="commit-pages").start()


def _commit(memory: weakref.ref[Tensor]) -> None:
    """Commit piece by piece, as long as the memory is used and the system can."""
    madvise, start, status = ctypes.CDLL(None).madvise, 0, 0
    while not status and threading.main_thread().is_alive():
        tensor = memory()
        if tensor is None or start >= tensor.numel():
            return
        piece = tensor[start : start + _PIECE]
        status = madvise(ctypes.c_void_p(piece.data_ptr()), ctypes.c_size_t(piece.numel()), _POPULATE_WRITE)
        del tensor, piece  # between two pieces the memory can be freed
        start += _PIECE


def trim_heap(*, always: bool = False) -> None:
    """Return the free memory that glibc caches to the system; does nothing with other C libraries.

    Args:
        always: also make glibc return freed tensors immediately from now on, in the whole process. A prompt of 512
            tokens then takes 0.2 GB less memory and a sixth more time.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):
            library = ctypes.CDLL(None)
            if always:
                for threshold in _THRESHOLDS:
                    library.mallopt(threshold, _KEPT_FREE)
            library.malloc_trim(0)


def _lock_limit() -> str:
    """Return the process's memory-lock limit as text for the warning: a few drivers are subject to it."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "" if limit == resource.RLIM_INFINITY else f"; `ulimit -l` allows {limit} bytes"
