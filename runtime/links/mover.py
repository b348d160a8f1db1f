"""Blocks from host memory to host memory, for links that have no device."""

from __future__ import annotations

import ctypes

from expertcast.runtime.storage.precision import FULL
from expertcast.runtime.storage.slots import SlotPool
from expertcast.runtime.storage.store import ExpertStore

_SMALL_COPY = 1 << 16
"""Bytes that move in less time than another thread takes to hand the interpreter's lock back."""

_memmove_locked = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


class HostMover:
    """memmove between two tensors in host memory, with the interpreter's lock released unless the copy is small.

    `Tensor.copy_` would start a second team of OpenMP threads in the copying thread and take cores from compute.
    """

    def __init__(self, store: ExpertStore, pool: SlotPool) -> None:
        self._store = store
        self._size = store.layout.block_bytes
        self._experts = store.experts
        self._sources = [store.block(layer * store.experts).data_ptr() for layer in range(store.layers)]
        self._target = pool.block(0).data_ptr()

    def move(self, key: int, slot: int, start: int = 0, end: int | None = None, precision: str = FULL) -> None:
        """Copy bytes of a block to the same place in its slot.

        Args:
            key: the expert.
            slot: where its block goes.
            start: of the bytes within the block.
            end: behind the last of them; None: all that follow.
            precision: of the block that is copied.
        """
        if precision == FULL:
            size = self._size
            layer, expert = divmod(key, self._experts)
            source = self._sources[layer] + expert * size
        else:
            packed = self._store.copies(precision)
            size = packed.block_bytes
            source = packed.address + key * size
        target = self._target + slot * self._size
        count = (size if end is None else end) - start
        (_memmove_locked if count <= _SMALL_COPY else ctypes.memmove)(target + start, source + start, count)
