"""Host memory of the exact size, page-locked where driver and machine allow it.

torch's caching allocator rounds page-locked memory up to a power of two (58 GB become 77). Here it is one anonymous
mapping registered with the driver: whole pages, nothing else. Pages are committed when they are first written, or
when they are locked.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import warnings
import weakref

import torch
from torch import Tensor

from expertcast.data.machine import available_memory
from expertcast.predictors.messages import ExpertcastError

_PORTABLE_AND_MAPPED = 3
"""cudaHostRegisterPortable | cudaHostRegisterMapped: page-locked for every context, and readable by kernels."""
_LEFT_TO_THE_SYSTEM = 2**30
_THRESHOLDS = (-1, -3)
"""glibc's `M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD`, which grow with the tensors that are freed until they are set."""
_KEPT_FREE = 1 << 20
"""Bytes of freed memory that glibc keeps with these thresholds."""


class Driver:
    """Locks pages by cudaHostRegister, through torch. Pointers and sizes are multiples of the page size."""

    def register(self, pointer: int, nbytes: int) -> str | None:
        """Lock a range; None, or why it was refused."""
        torch.cuda.init()  # type: ignore[no-untyped-call]
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = runtime.cudaHostRegister(pointer, nbytes, _PORTABLE_AND_MAPPED)
        if int(code) == 0:
            return None
        self._forget_error()
        return str(runtime.cudaGetErrorString(code))

    def unregister(self, pointer: int) -> None:
        """Unlock the range that starts at `pointer`."""
        if int(torch.cuda.cudart().cudaHostUnregister(pointer)) != 0:  # type: ignore[no-untyped-call]
            self._forget_error()

    @staticmethod
    def _forget_error() -> None:
        """A refusal stays behind as the runtime's last error: the next kernel launch would raise it, so launch one."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda").add_(1)


class PageLock:
    """Locks mappings until the budget is used up or the driver refuses; from then on memory stays pageable.

    Args:
        budget: bytes that may be locked. None: the memory available now less 1 GiB. Locked pages can be neither
            swapped nor reclaimed, so that a driver that refuses nothing could starve the machine.
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
        """Whether the range is page-locked now. The first that is not gives one warning."""
        if self._refused:
            return False
        if nbytes > self._left:
            return self._refuse(f"{self._left} bytes of memory are available for it")
        refusal = self._driver.register(pointer, nbytes)
        if refusal is not None:
            return self._refuse(f"the driver refused {nbytes} bytes: {refusal}{_lock_limit()}")
        self._left -= nbytes
        self.locked_bytes += nbytes
        return True

    def unlock(self, pointer: int, nbytes: int) -> None:
        """Unlock what :meth:`lock` locked."""
        self._driver.unregister(pointer)
        self.locked_bytes -= nbytes

    def _refuse(self, reason: str) -> bool:
        self._refused = True
        warnings.warn(
            f"only {self.locked_bytes} bytes of the experts are page-locked ({reason}); the rest stays pageable and "
            "is copied more slowly",
            stacklevel=2,
        )
        return False


class HostMemory:
    """`nbytes` zeroed bytes at the start of a page, page-locked if there is a lock that can.

    Raises:
        ExpertcastError: the system has no address space for it.
    """

    def __init__(self, nbytes: int, lock: PageLock | None = None) -> None:
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        mapping = _map(size)
        self.bytes: Tensor = torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes)
        """uint8 [nbytes]; every tensor that views it keeps the mapping alive."""
        pointer = self.bytes.data_ptr()
        self.pinned = lock is not None and lock.lock(pointer, size)
        self._unlock: weakref.finalize[[int, int], HostMemory] | None = None
        if lock is not None and self.pinned:
            self._unlock = weakref.finalize(self, lock.unlock, pointer, size)
            self._unlock.atexit = False  # the driver may be gone by then; the system frees what is left

    def release(self) -> None:
        """Unlock now. The memory goes back to the system with the last tensor that views it."""
        if self._unlock is not None:
            self._unlock()
        self.pinned = False
        self.bytes = torch.empty(0, dtype=torch.uint8)


def _map(size: int) -> mmap.mmap:
    try:
        if not hasattr(mmap, "MAP_ANONYMOUS"):  # Windows
            return mmap.mmap(-1, size)
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ExpertcastError(f"cannot map {size} bytes of host memory ({error}): use store='disk'") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def give_back_freed(*, at_once: bool = False) -> None:
    """Return freed memory that the C library keeps for later to the system (glibc; other systems: do nothing).

    Args:
        at_once: whether the C library returns freed tensors at once from now on, in the whole process. A prompt of 512
            tokens then takes 0.2 GB less memory, and a sixth more time.
    """
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):
            library = ctypes.CDLL(None)
            if at_once:
                for threshold in _THRESHOLDS:
                    library.mallopt(threshold, _KEPT_FREE)
            library.malloc_trim(0)


def _lock_limit() -> str:
    """Return the shell's limit as text for the warning: most drivers do not count against it, some do."""
    try:
        import resource
    except ImportError:  # Windows
        return ""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "" if limit == resource.RLIM_INFINITY else f"; `ulimit -l` allows {limit} bytes"
