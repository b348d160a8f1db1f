"""Products with matrices in ggml's block types, by the kernels of llama.cpp: the binding of package `libggml-python`.

    bytes of a matrix [N, I]    uint8 [N, row bytes]: rows of blocks, as a GGUF file has them

Memory of torch is used in place: a graph of ggml refers to the matrices where they lie, its inputs and outputs to
memory of the calling thread. Graphs are built once per matrix and number of rows. ggml ends the process if a graph is
wrong, so types, sizes and ids are checked here first.

Matrices of some types may lie interleaved: blocks of eight rows side by side, whose products take .6 of the time on
x86 processors. The order is ggml's own, made by :func:`interleave` and undone by :func:`separate`.

E matrices (experts or slots), N outputs, I inputs, T tokens, K matrices of a token, A inputs of a token: 1 or K.
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import threading
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, byref, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_uint32, c_void_p
from functools import cache, partial
from itertools import accumulate, takewhile
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from expertcast.predictors.messages import ExpertcastError, install_command

VERSION = "0.20"
"""Releases of ggml whose functions and types are those declared here."""
FOLDER = "EXPERTCAST_GGML"
"""Environment variable: a folder with another build of ggml's libraries."""


class BlockType(NamedTuple):
    """One of ggml's types of numbers."""

    number: int
    """Value of `ggml_type`."""
    elements: int
    """Numbers in a block."""
    nbytes: int
    """Bytes of a block."""


TYPES = {
    "F32": BlockType(0, 1, 4), "F16": BlockType(1, 1, 2), "BF16": BlockType(30, 1, 2),
    "Q4_0": BlockType(2, 32, 18), "Q4_1": BlockType(3, 32, 20), "Q5_0": BlockType(6, 32, 22),
    "Q5_1": BlockType(7, 32, 24), "Q8_0": BlockType(8, 32, 34), "MXFP4": BlockType(39, 32, 17),
    "Q2_K": BlockType(10, 256, 84), "Q3_K": BlockType(11, 256, 110), "Q4_K": BlockType(12, 256, 144),
    "Q5_K": BlockType(13, 256, 176), "Q6_K": BlockType(14, 256, 210), "IQ1_S": BlockType(19, 256, 50),
    "IQ1_M": BlockType(29, 256, 56), "IQ2_XXS": BlockType(16, 256, 66), "IQ2_XS": BlockType(17, 256, 74),
    "IQ2_S": BlockType(22, 256, 82), "IQ3_XXS": BlockType(18, 256, 98), "IQ3_S": BlockType(21, 256, 110),
    "IQ4_NL": BlockType(20, 32, 18), "IQ4_XS": BlockType(23, 256, 136),
}  # fmt: skip
"""Types by their names in GGUF files."""
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types that are not quantised, with torch's."""
KINDS = {dtype: kind for kind, dtype in FLOATS.items()}
"""Names of torch's types of floats."""


def row_bytes(kind: str, inputs: int) -> int:
    """Return the bytes of a row of `inputs` numbers, whole blocks."""
    own = TYPES[kind]
    return inputs // own.elements * own.nbytes


# The library

_MOST_THREADS = 512
_OBJECT = 32
"""Bytes of `struct ggml_object`, which precedes a tensor."""


class _InitParams(Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class _PoolParams(Structure):
    _fields_ = (
        ("cpumask", c_bool * _MOST_THREADS), ("n_threads", c_int), ("prio", c_int), ("poll", c_uint32),
        ("strict_cpu", c_bool), ("paused", c_bool),
    )  # fmt: skip


class _Tensor(Structure):
    """`struct ggml_tensor`."""

    _fields_ = (
        ("type", c_int), ("buffer", c_void_p), ("ne", c_int64 * 4), ("nb", c_size_t * 4), ("op", c_int),
        ("op_params", c_int * 16), ("flags", c_int), ("src", c_void_p * 10), ("view_src", c_void_p),
        ("view_offs", c_size_t), ("data", c_void_p), ("name", ctypes.c_char * 64), ("extra", c_void_p),
        ("padding", c_int64),
    )  # fmt: skip


class _Traits(Structure):
    _fields_ = (
        ("type_name", c_char_p), ("blck_size", c_int64), ("blck_size_interleave", c_int64), ("type_size", c_size_t),
        ("is_quantized", c_bool), ("to_float", ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_int64)),
        ("from_float_ref", c_void_p),
    )  # fmt: skip


_BASE: dict[str, tuple[Any, ...]] = {
    "ggml_version": (c_char_p,),
    "ggml_type_size": (c_size_t, c_int),
    "ggml_blck_size": (c_int64, c_int),
    "ggml_get_type_traits": (POINTER(_Traits), c_int),
    "ggml_quantize_chunk": (c_size_t, c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p),
    "ggml_init": (c_void_p, _InitParams),
    "ggml_free": (None, c_void_p),
    "ggml_tensor_overhead": (c_size_t,),
    "ggml_graph_overhead_custom": (c_size_t, c_size_t, c_bool),
    "ggml_new_tensor_1d": (c_void_p, c_void_p, c_int, c_int64),
    "ggml_new_tensor_3d": (c_void_p, c_void_p, c_int, c_int64, c_int64, c_int64),
    "ggml_view_3d": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_size_t, c_size_t, c_size_t),
    "ggml_nbytes": (c_size_t, c_void_p),
    "ggml_reshape_2d": (c_void_p, c_void_p, c_void_p, c_int64, c_int64),
    "ggml_view_2d": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_size_t, c_size_t),
    "ggml_mul_mat": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_mul_mat_id": (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_add": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_mul": (c_void_p, c_void_p, c_void_p, c_void_p),
    "ggml_swiglu": (c_void_p, c_void_p, c_void_p),
    "ggml_cast": (c_void_p, c_void_p, c_void_p, c_int),
    "ggml_concat": (c_void_p, c_void_p, c_void_p, c_void_p, c_int),
    "ggml_rms_norm": (c_void_p, c_void_p, c_void_p, c_float),
    "ggml_new_graph_custom": (c_void_p, c_void_p, c_size_t, c_bool),
    "ggml_build_forward_expand": (None, c_void_p, c_void_p),
    "ggml_backend_cpu_buffer_from_ptr": (c_void_p, c_void_p, c_size_t),
    "ggml_backend_buffer_free": (None, c_void_p),
    "ggml_backend_tensor_alloc": (c_int, c_void_p, c_void_p, c_void_p),
    "ggml_backend_view_init": (c_int, c_void_p),
    "ggml_backend_tensor_set": (None, c_void_p, c_void_p, c_size_t, c_size_t),
    "ggml_backend_buft_name": (c_char_p, c_void_p),
    "ggml_backend_buft_alloc_buffer": (c_void_p, c_void_p, c_size_t),
    "ggml_backend_buffer_get_base": (c_void_p, c_void_p),
    "ggml_backend_reg_dev_get": (c_void_p, c_void_p, c_size_t),
    "ggml_backend_reg_get_proc_address": (c_void_p, c_void_p, c_char_p),
    "ggml_log_set": (None, c_void_p, c_void_p),
    "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
    "ggml_backend_free": (None, c_void_p),
    "ggml_threadpool_params_init": (None, POINTER(_PoolParams), c_int),
}
"""Result and arguments of the functions of ggml's base library that are called here."""
_CPU: dict[str, tuple[Any, ...]] = {
    "ggml_backend_cpu_init": (c_void_p,),
    "ggml_backend_cpu_reg": (c_void_p,),
    "ggml_backend_cpu_set_n_threads": (None, c_void_p, c_int),
    "ggml_backend_cpu_set_threadpool": (None, c_void_p, c_void_p),
    "ggml_threadpool_new": (c_void_p, POINTER(_PoolParams)),
    "ggml_threadpool_free": (None, c_void_p),
}
"""Result and arguments of those of its library for processors."""


class _Library:
    """Functions of ggml by their names without `ggml_`.

    Raises:
        ExpertcastError: ggml is not installed, or another release.
    """

    def __init__(self) -> None:
        folder = _folder()
        try:
            base = ctypes.CDLL(str(_file(folder, "ggml-base")))  # first, since the other needs it
            cpu = ctypes.CDLL(str(_file(folder, "ggml-cpu")))
            for library, declared in ((base, _BASE), (cpu, _CPU)):
                for name, (result, *arguments) in declared.items():
                    function = getattr(library, name)
                    function.restype, function.argtypes = result, arguments
                    self.__dict__[name.removeprefix("ggml_")] = function
        except (OSError, AttributeError) as error:
            raise ExpertcastError(
                f"ggml in {str(folder)!r} cannot be used ({error}): {install_command('ggml')}"
            ) from error
        version = self.version().decode()
        sizes = (
            all(
                (self.blck_size(number), self.type_size(number)) == (elements, nbytes)
                for number, elements, nbytes in TYPES.values()
            )
            and self.tensor_overhead() == ctypes.sizeof(_Tensor) + _OBJECT
        )
        if not version.startswith(f"{VERSION}.") or not sizes:
            raise ExpertcastError(f"ggml {version} in {str(folder)!r} is not {VERSION}: {install_command('ggml')}")
        # a function that does nothing: ggml would print a line for each matrix that it interleaves
        self.log_set(ctypes.cast(base.ggml_type_size, c_void_p), None)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)


def _folder() -> Path:
    given = os.environ.get(FOLDER)
    if given:
        return Path(given)
    spec = importlib.util.find_spec("libggml")
    if spec is None or not spec.submodule_search_locations:
        raise ExpertcastError(f"packed experts run on ggml, which is not installed: {install_command('ggml')}")
    return Path(spec.submodule_search_locations[0])


def _file(folder: Path, name: str) -> Path:
    for pattern in (f"lib{name}.so", f"lib{name}.dylib", f"{name}.dll", f"lib{name}.so.*"):
        for found in folder.rglob(pattern):
            return found
    raise OSError(f"no library {name}")


_library = cache(_Library)
_Made = TypeVar("_Made")


def check() -> None:
    """Check that ggml is there.

    Raises:
        ExpertcastError: it is not; the message names the remedy.
    """
    _library()


# Interleaved rows

TOGETHER = 8
"""Rows whose blocks lie side by side."""
_ORDERS = {"Q4_0": ("<u2", 0x88), "IQ4_NL": ("<u2", 0), "MXFP4": ("u1", 0)}
"""Types that are interleaved as fast as they are copied: the scale of a block, and what its codes are xored with. Q4_K
takes seven times as long, more than its products gain where experts are read: they take .81 of the time."""


@cache
def _interleaved() -> dict[str, tuple[int, int]]:
    """Return buffer and traits of ggml's interleaved tensors, by the types that have such kernels on this processor."""
    library, found = _library(), dict[str, tuple[int, int]]()
    registry = library.backend_cpu_reg()
    listed = library.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    if not listed:
        return found
    kinds = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(listed)(library.backend_reg_dev_get(registry, 0))
    for memory in takewhile(bool, kinds):
        for kind in _ORDERS if library.backend_buft_name(memory) == b"CPU_REPACK" else ():
            graph = Graph(kind, 0, 1)
            tensor = graph.record(kind, 8 * TYPES[kind].elements, TOGETHER)
            buffer = library.backend_buft_alloc_buffer(memory, 1 << 14)
            start = library.backend_buffer_get_base(buffer)
            library.backend_tensor_alloc(buffer, ctypes.addressof(tensor), start)
            if tensor.extra and tensor.data == start:
                found[kind] = buffer, tensor.extra
    return found


@cache
def _is_known(kind: str) -> bool:
    """Return whether ggml has kernels for interleaved rows of a type on this processor, in the order known here."""
    if kind not in _ORDERS or kind not in _interleaved():
        return False
    rows = torch.randint(256, (TOGETHER, 3 * TYPES[kind].nbytes), dtype=torch.uint8, generator=torch.Generator())
    made = torch.empty_like(rows)
    interleave(kind, rows.shape[1], rows.data_ptr(), made.data_ptr(), rows.numel())
    return torch.equal(separate(kind, made, torch.empty_like(rows)), rows)


def interleaves(kind: str, outputs: int) -> bool:
    """Return whether N rows of a type lie interleaved on this processor."""
    return outputs % TOGETHER == 0 and _is_known(kind)


def interleave(kind: str, width: int, given: int, place: int, nbytes: int) -> None:
    """Write rows of blocks interleaved to other memory.

    Threads that read a disk call it: operations of torch would each let go of Python's lock and wait for it.

    Args:
        kind: type of the blocks.
        width: bytes of a row.
        given, place: addresses of the rows and of the other memory.
        nbytes: bytes of the rows, a multiple of those of `TOGETHER` rows.
    """
    rows, inputs = nbytes // width, width // TYPES[kind].nbytes * TYPES[kind].elements

    def make() -> tuple[Graph, _Tensor]:
        graph = Graph(kind, 0, 1)
        matrix = Matrices(kind, place, 1, nbytes, rows, inputs, interleaved=True)
        return graph, _Tensor.from_address(graph.weights(matrix))

    _, record = kept(("interleave", kind, width, nbytes), make)
    record.data = place
    _library().backend_tensor_set(ctypes.addressof(record), given, 0, nbytes)


def separate(kind: str, octets: Tensor, rows: Tensor) -> Tensor:
    """Write interleaved rows of blocks, contiguous uint8 [N, row bytes], one after another to other memory of this
    shape, and return it."""
    assert rows.shape == octets.shape
    assert rows.is_contiguous()
    scale, mask = _ORDERS[kind]
    fields = [("scale", scale), ("low", "<u8"), ("high", "<u8")]
    groups = octets.view(len(octets) // TOGETHER, -1).numpy().view([(*each, TOGETHER) for each in fields])
    blocks = rows.view(len(groups), TOGETHER, -1).numpy().view(fields)
    for (name, _), code in zip(fields, (0, mask, mask), strict=True):
        number = blocks[name].dtype.type(code * 0x0101010101010101)
        np.bitwise_xor(groups[name].transpose(0, 2, 1), number, out=blocks[name])
    return rows


# Rows to blocks and back


def quantise(kind: str, weights: Tensor) -> Tensor:
    """Round weights [..., I] of any float dtype, on the CPU; return uint8 [..., row bytes]."""
    own, inputs = TYPES[kind], weights.shape[-1]
    assert weights.device.type == "cpu"
    assert inputs % own.elements == 0
    rows = weights.detach().float().contiguous()
    blocks = torch.empty(*rows.shape[:-1], row_bytes(kind, inputs), dtype=torch.uint8)
    if rows.numel():
        count = rows.numel() // inputs
        _library().quantize_chunk(own.number, rows.data_ptr(), blocks.data_ptr(), 0, count, inputs, None)
    return blocks


def dequantise(kind: str, blocks: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the numbers of rows of blocks, contiguous uint8 [..., row bytes] on the CPU, as float32 [..., I].

    Args:
        kind, blocks: the blocks and their type.
        out: contiguous memory for the numbers; None: new memory.
    """
    own = TYPES[kind]
    assert blocks.device.type == "cpu"
    assert blocks.is_contiguous()
    shape = *blocks.shape[:-1], blocks.shape[-1] // own.nbytes * own.elements
    if out is None:
        out = torch.empty(shape, dtype=torch.float32)
    assert out.shape == shape
    assert out.is_contiguous()
    if kind == "F32":
        out.copy_(blocks.view(torch.float32))
    elif out.numel():
        traits = _library().get_type_traits(own.number).contents
        traits.to_float(blocks.data_ptr(), out.data_ptr(), out.numel())
    return out


# Products

_GRAPHS = 4096
"""Most graphs of a thread: some for each layer and number of rows that comes again."""
_NUMBERS = {dtype: TYPES[kind].number for dtype, kind in KINDS.items()} | {torch.int32: 26}
"""Values of `ggml_type` of torch's types."""
_NODES = 12
"""Most tensors of a product's graph."""
_LARGE = 1 << 27
"""Products of more weights by numbers, about 5 ms, run on all threads: then those wait for each other for little."""
_LATEST, _LATEST_TRIED = 0.1, 0.5
"""Weight of the latest product in the mean time of its size, for the faster number of threads and for the other."""
_TRIED = 0.02
"""Largest share of the time that is spent on trying the slower number of threads."""
_ROWS = 256
"""Rows of which :func:`swiglu` is computed at once."""
AT_ONCE = 4
"""Rows that an interleaved matrix multiplies together; each one's bits are those of a row alone."""
_ALIGNED = 32
"""Alignment in bytes of memory that ggml takes."""


class _Team:
    """Chooses one thread or all for products of about one size, by their measured times.

    Threads of ggml spin where they wait for each other. Beside a busy process, one that has no processor then keeps the
    others waiting for some milliseconds, so that all threads together take ten times as long as one.
    """

    def __init__(self) -> None:
        self._seconds = [0.0, 0.0]
        """Mean per weight with all threads and with one; 0: not tried yet."""
        self._faster, self._longer = True, math.inf
        """Whether one thread is faster, and what a trial of the other number takes longer, per weight."""
        self._since = 0.0
        """Seconds of products since the slower number was tried."""
        self._failed = 0
        """Trials of that number."""

    def alone(self, work: int) -> bool:
        """Return whether the next product, of so many weights, runs on one thread.

        A trial is expected to take as long as its mean, but at first at most twice as long as the other number: the
        mean may be of a product that stood still, such as beside the reads of a prompt.
        """
        trial = self._since * _TRIED > self._longer * work
        return self._faster != trial

    def took(self, alone: bool, seconds: float, work: int) -> None:
        """Count a product."""
        latest, mean, other = seconds / work, self._seconds[alone], self._seconds[not alone]
        trial = mean > other > 0
        won = trial and latest < other
        self._seconds[alone] += (latest - mean) * (1 if won or not mean else _LATEST_TRIED if trial else _LATEST)
        self._since = 0.0 if trial else self._since + seconds
        changed = (self._seconds[alone] > other > 0) != trial
        self._failed = 0 if changed else self._failed + trial
        all_threads, one = self._seconds
        if all_threads and one:
            self._faster = one <= all_threads
            self._longer = min(abs(one - all_threads), min(one, all_threads) * 2.0 ** min(self._failed, 30))
        else:
            self._faster = not one


class _Backend:
    """ggml's backend for processors, with a pool of threads that sleep between two graphs."""

    def __init__(self, threads: int) -> None:
        library = _library()
        self.threads, self._library = threads, library
        params = _PoolParams()
        library.threadpool_params_init(byref(params), threads)
        params.poll = 0  # threads that spin would take the processors that torch computes on
        self._pool = library.threadpool_new(byref(params))
        self._backend, self._threads = library.backend_cpu_init(), 0
        library.backend_cpu_set_threadpool(self._backend, self._pool)
        self._teams: dict[object, _Team] = {}

    def team(self, kind: str, work: int) -> _Team | None:
        """Return what chooses the threads for products of `work` weights of a type; None: all threads."""
        if self.threads == 1 or work > _LARGE:
            return None
        return self._teams.setdefault((kind, work.bit_length()), _Team())

    def compute(self, graph: int, threads: int) -> None:
        """Compute a graph."""
        if threads != self._threads:
            self._library.backend_cpu_set_n_threads(self._backend, threads)
            self._threads = threads
        status = self._library.backend_graph_compute(self._backend, graph)
        if status:
            raise ExpertcastError(f"ggml has no memory for a product (status {status}): give fewer tokens at once")

    def __del__(self) -> None:
        if self._pool is not None:
            self._library.backend_free(self._backend)
            self._library.threadpool_free(self._pool)

    def forget(self) -> None:
        """Leave the threads to a parent process, whose they are."""
        self._pool, self.threads = None, 0


class Matrices(NamedTuple):
    """Some matrices of one type in memory, at equal distances."""

    kind: str
    """A name of `TYPES`."""
    address: int
    """Address of the first matrix."""
    experts: int
    """E"""
    stride: int
    """Bytes from one matrix to the next."""
    outputs: int
    """N"""
    inputs: int
    """I"""
    interleaved: bool = False
    """Whether the rows of each matrix are interleaved."""

    @classmethod
    def of(
        cls, kind: str, octets: Tensor, start: int, outputs: int, inputs: int, interleaved: bool = False
    ) -> Matrices:
        """Return the matrices that begin at byte `start` of each row of uint8 [E, bytes], on the CPU.

        The caller keeps the memory.
        """
        (count, nbytes), (stride, step) = octets.shape, octets.stride()
        assert octets.dtype == torch.uint8
        assert octets.device.type == "cpu"
        assert step == 1
        assert start + outputs * row_bytes(kind, inputs) <= nbytes
        return cls(kind, octets.data_ptr() + start, count, stride, outputs, inputs, interleaved)

    def at(self, expert: int) -> Matrices:
        """Return one of the matrices."""
        return self._replace(address=self.address + expert * self.stride, experts=1)


class Graph:
    """Operations of ggml over memory of torch, built once and computed any number of times.

    Tensors are addresses of ggml's own records. Shapes are ggml's: torch's, reversed.

    Args:
        kind, work: type and number of the weights that are multiplied, as for `_Backend.team`.
        nodes: most tensors.
    """

    def __init__(self, kind: str, work: int, nodes: int) -> None:
        self._library = library = _library()
        self._kind, self._work = kind, work
        self._backend: _Backend | None = None
        self._team: _Team | None = None
        self._buffers: list[int] = []
        self._held = list[Tensor]()
        self._between: list[tuple[int, int]] = []
        """Views and results without memory, each with its bytes, 0 for a view: placed before the first run."""
        overhead = library.graph_overhead_custom(nodes, False) + nodes * library.tensor_overhead()
        self._context = library.init(_InitParams(overhead, None, True))
        self._graph = library.new_graph_custom(self._context, nodes, False)

    def tensor(self, memory: Tensor) -> int:
        """Return a tensor over contiguous memory of at most 3 dimensions, which the graph keeps."""
        self._held.append(memory)
        sizes = (*reversed(memory.shape), 1, 1)[:3]
        made: int = self._library.new_tensor_3d(self._context, _NUMBERS[memory.dtype], *sizes)
        return self._place(made, memory.data_ptr(), memory.nbytes)

    def weights(self, matrices: Matrices) -> int:
        """Return the tensor [I, N, E] of some matrices."""
        kind, address, count, stride, outputs, inputs, interleaved = matrices
        (number, elements, nbytes), width, library = TYPES[kind], row_bytes(kind, inputs), self._library
        if interleaved:  # no buffer that ggml makes of given memory has interleaved tensors
            made = self.record(kind, inputs, outputs, count)
            (made.buffer, made.extra), made.data, made.nb[2] = _interleaved()[kind], address, stride
            return ctypes.addressof(made)
        start = address % _ALIGNED  # memory that ggml takes is aligned, a view of it need not be
        blocks = -(-(start + (count - 1) * stride + outputs * width) // nbytes)
        whole = library.new_tensor_1d(self._context, number, blocks * elements)
        self._place(whole, address - start, blocks * nbytes)
        return self.view("view_3d", whole, inputs, outputs, count, width, stride, start)

    def record(self, kind: str, *sizes: int) -> _Tensor:
        """Return a new tensor of at most 3 dimensions without memory; `data` is the address of contiguous numbers."""
        made = self._library.new_tensor_3d(self._context, TYPES[kind].number, *(*sizes, 1, 1)[:3])
        return _Tensor.from_address(made)

    def given(self, dtype: torch.dtype, *sizes: int) -> tuple[_Tensor, int]:
        """Return a tensor whose address is set before each run, and a copy of its numbers in float32."""
        record = self.record(KINDS[dtype], *sizes)
        return record, self.cast(ctypes.addressof(record), torch.float32)

    def numbers(self, memory: Tensor) -> int:
        """Return the numbers of contiguous memory in float32, read in each run; the graph keeps the memory."""
        self._held.append(memory.detach())
        record, made = self.given(memory.dtype, *reversed(memory.shape))
        record.data = memory.data_ptr()
        return made

    def cast(self, tensor: int, dtype: torch.dtype, out: Tensor | None = None) -> int:
        """Add a copy of a tensor in a dtype, and return it; `out` as for :meth:`apply`."""
        return self.apply("cast", tensor, _NUMBERS[dtype], out=out)

    def taken(self, tensor: int, dtype: torch.dtype) -> _Tensor:
        """Add a copy of a tensor in a dtype; its address is set before each run."""
        made = self._library.cast(self._context, tensor, _NUMBERS[dtype])
        self._library.build_forward_expand(self._graph, made)
        return _Tensor.from_address(made)

    def view(self, name: str, *arguments: object) -> int:
        """Return a view of a tensor by a function of ggml."""
        made: int = getattr(self._library, name)(self._context, *arguments)
        self._between.append((made, 0))
        return made

    def apply(self, name: str, *arguments: object, out: Tensor | None = None) -> int:
        """Add an operation by its name without `ggml_`; return its result, in `out` (contiguous) or shared memory."""
        made: int = getattr(self._library, name)(self._context, *arguments)
        self._library.build_forward_expand(self._graph, made)
        nbytes = self._library.nbytes(made)
        if out is None:
            self._between.append((made, nbytes))
            return made
        assert out.nbytes == nbytes
        self._held.append(out)
        return self._place(made, out.data_ptr(), nbytes)

    def _place(self, tensor: int, address: int, nbytes: int) -> int:
        buffer = self._library.backend_cpu_buffer_from_ptr(address, nbytes)
        self._buffers.append(buffer)
        self._library.backend_tensor_alloc(buffer, tensor, address)
        return tensor

    def _place_between(self) -> None:
        """Give views their places, and results without memory a part of what all graphs of the thread share."""
        sizes = [-(-nbytes // _ALIGNED) * _ALIGNED for _, nbytes in self._between]
        (memory,) = _THREAD.take(("between", (sum(sizes),), torch.uint8))
        self._held.append(memory)
        for (tensor, nbytes), start in zip(self._between, accumulate(sizes, initial=memory.data_ptr()), strict=False):
            if nbytes:
                self._place(tensor, start, nbytes)
            else:
                self._library.backend_view_init(tensor)
        self._between.clear()

    def run(self) -> None:
        """Compute the operations, in the order in which they were added."""
        backend, threads = self._backend, torch.get_num_threads()
        if backend is None or backend.threads != threads:
            if self._between:
                self._place_between()
            backend = self._backend = _THREAD.backend_of(threads)
            self._team = backend.team(self._kind, self._work)
        team = self._team
        if team is None:
            backend.compute(self._graph, threads)
            return
        alone = team.alone(self._work)
        start = perf_counter()
        backend.compute(self._graph, 1 if alone else threads)
        team.took(alone, perf_counter() - start, self._work)

    def __del__(self) -> None:
        for buffer in self._buffers:
            self._library.backend_buffer_free(buffer)
        self._library.free(self._context)


class Product(Graph):
    """One product, or two with SwiGLU between them.

    Args:
        matrices: of the first product.
        dtype, sizes: of the rows, T, A and I.
        ids: int32 [T, K], contiguous.
        output: [T, K, N], contiguous.
        down: matrices of the second product; None: there is none.
    """

    def __init__(
        self, matrices: Matrices, dtype: torch.dtype, sizes: tuple[int, ...], ids: Tensor, output: Tensor,
        down: Matrices | None = None,
    ) -> None:  # fmt: skip
        each = matrices.outputs * matrices.inputs + (0 if down is None else down.outputs * down.inputs)
        super().__init__(matrices.kind, ids.numel() * each, _NODES)
        self._ids, self._output, self._count = ids, output, matrices.experts
        self._numbers = (c_uint32 * ids.numel()).from_address(ids.data_ptr())
        numbers, out = self.tensor(ids), output if output.dtype == torch.float32 else None
        self._rows, made = self.given(dtype, *reversed(sizes))
        if down is not None:
            made = self.apply("swiglu", self.apply("mul_mat_id", self.weights(matrices), made, numbers))
        made = self.apply("mul_mat_id", self.weights(down or matrices), made, numbers, out=out)
        if out is None:
            self.cast(made, output.dtype, output)

    def multiply(self, rows: Tensor, ids: Tensor | None, numbers: Sequence[int] | None = None) -> Tensor:
        """Return the output for some rows, and other ids unless they are None; `numbers`: the ids, if known."""
        rows = rows.contiguous()
        self._rows.data = rows.data_ptr()
        if ids is not None:
            if numbers is None:
                self._ids.copy_(ids)
                inside = max(self._numbers) < self._count  # negative ones are large
            else:
                inside = min(numbers) >= 0 and max(numbers) < self._count
                self._numbers[:] = list(numbers) if inside else [0] * len(self._numbers)
            if not inside:
                raise ExpertcastError(f"an expert's number is out of range: there are {self._count}")
        self.run()
        return self._output


class _Rows(Graph):
    """Product of P rows with one interleaved matrix of a shape, whichever it is."""

    def __init__(self, matrix: Matrices, rows: int) -> None:
        super().__init__(matrix.kind, rows * matrix.outputs * matrix.inputs, _NODES)
        self._rows, self._output = _THREAD.take(
            ("rows", (rows, matrix.inputs), torch.float32), ("output", (rows, matrix.outputs), torch.float32)
        )
        self._matrix = _Tensor.from_address(self.weights(matrix))
        self.apply("mul_mat", ctypes.addressof(self._matrix), self.tensor(self._rows), out=self._output)

    def multiply(self, address: int, rows: Tensor) -> Tensor:
        """Return the output for some rows and a matrix."""
        self._matrix.data = address
        self._rows.copy_(rows)
        self.run()
        return self._output


class _Thread(threading.local):
    """Backend, graphs and their memory of one thread."""

    def __init__(self) -> None:
        self.backend: _Backend | None = None
        self.graphs: dict[tuple[object, ...], object] = {}
        self.memory: dict[str, Tensor] = {}

    def backend_of(self, threads: int) -> _Backend:
        """Return the backend with so many threads."""
        if self.backend is None or self.backend.threads != threads:
            self.backend = None
            self.backend = _Backend(threads)
        return self.backend

    def take(self, *needed: tuple[str, tuple[int, ...], torch.dtype]) -> list[Tensor]:
        """Return memory by name, shape and dtype, which all graphs of the thread share."""
        sizes = {name: dtype.itemsize * math.prod(shape) for name, shape, dtype in needed}
        with torch.inference_mode(False):
            for name, nbytes in sizes.items():
                if name not in self.memory or self.memory[name].numel() < nbytes:
                    self.graphs.clear()  # they refer to the former memory
                    self.memory[name] = torch.empty(max(nbytes * 5 // 4, 1 << 20), dtype=torch.uint8)
            return [self.memory[name][: sizes[name]].view(dtype).view(shape) for name, shape, dtype in needed]


_THREAD = _Thread()


def _after_fork() -> None:
    if _THREAD.backend is not None:
        _THREAD.backend.forget()
    _THREAD.backend = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def scratch(*needed: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
    """Return memory of this thread by shape and dtype; the next call returns it again.

    New memory for each of many matrices would be given back to the system, and cleared by it again, each time.
    """
    return _THREAD.take(*((f"scratch {number}", *each) for number, each in enumerate(needed)))


def kept(key: tuple[object, ...], make: Callable[[], _Made]) -> _Made:
    """Return this thread's object of a key, from `make` where there is none, or its memory has moved since."""
    graphs = _THREAD.graphs
    found = graphs.get(key)
    if found is None:
        found = make()
        graphs[key] = found
        if len(graphs) > _GRAPHS:
            del graphs[next(iter(graphs))]  # the oldest
    return cast(_Made, found)


def product(
    matrices: Matrices, rows: Tensor, ids: Tensor | None = None, down: Matrices | None = None,
    numbers: Sequence[int] | None = None, dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Multiply rows by matrices; a row's result does not depend on the other rows, or on the number of threads.

    Args:
        matrices: the matrices.
        rows: [T, A, I], or [T, I] for A = 1, of any float dtype, on the CPU.
        ids: numbers of the matrices of each token, [T, K]; None: the first one, K = 1.
        down: matrices by which :func:`swiglu` of the products is multiplied; None: there are none.
        numbers: `ids`, flat, where they are known.
        dtype: of the result, one of `KINDS`.

    Returns:
        [T, K, N], in memory that this thread's next product overwrites.

    Raises:
        ExpertcastError: ids out of range, or ggml is not installed.
    """
    top_k, last = 1 if ids is None else ids.shape[1], down or matrices

    def made() -> Product:
        tokens, given, inputs = rows.shape if rows.dim() == 3 else (len(rows), 1, rows.shape[1])
        assert given in (1, top_k)
        assert ids is None or len(ids) == tokens
        assert inputs == matrices.inputs
        assert inputs % TYPES[matrices.kind].elements == 0
        assert down is None or (down.inputs * 2, down.experts) == (matrices.outputs, matrices.experts)
        assert rows.device.type == "cpu"
        numbers, output = _THREAD.take(
            ("zeros" if ids is None else "ids", (tokens, top_k), torch.int32),
            ("output", (tokens, top_k, last.outputs), dtype),
        )
        if ids is None:
            numbers.zero_()
        return Product(matrices, rows.dtype, (tokens, given, inputs), numbers, output, down)

    if not (len(rows) and top_k and last.outputs and matrices.experts):
        return torch.empty(len(rows), top_k, last.outputs, dtype=dtype)
    rows = rows.detach() if rows.requires_grad else rows
    rows = rows if rows.dtype in KINDS else rows.float()
    if ids is None and matrices.interleaved and len(rows) >= AT_ONCE:
        key = "rows", *matrices._replace(address=0, experts=1, stride=0), len(rows)
        many = kept(key, lambda: _Rows(matrices.at(0), len(rows)))
        return many.multiply(matrices.address, rows.squeeze(1)).unsqueeze(1)
    this = matrices, down, rows.dtype, dtype, rows.shape, top_k, ids is None
    return kept(this, made).multiply(rows, ids, numbers)


class _Gate(Graph):
    """SwiGLU of rows, float32 [P, 2 I]; the output is [P, I]."""

    def __init__(self, rows: int, inner: int) -> None:
        super().__init__("swiglu", 2 * rows * inner, _NODES)
        self.rows, self.output = _THREAD.take(
            ("gate", (rows, 2 * inner), torch.float32), ("gated", (rows, inner), torch.float32)
        )
        self.apply("swiglu", self.tensor(self.rows), out=self.output)


def swiglu(rows: Tensor) -> Tensor:
    """Return silu(first half) x second half of each row of float32 [P, 2 I], new [P, I].

    A row's bits are those between the two products of :func:`product`, however many rows there are.
    """
    inner = rows.shape[1] // 2
    output = torch.empty(len(rows), inner, dtype=torch.float32)
    for some, made in zip(torch.split(rows, _ROWS), torch.split(output, _ROWS), strict=True):
        if len(some):
            gate = kept(("swiglu", some.shape), partial(_Gate, len(some), inner))
            gate.rows.copy_(some)
            gate.run()
            made.copy_(gate.output)
    return output
