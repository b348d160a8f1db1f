"""Experts in ggml's block types: matrices as the bytes of a GGUF file, multiplied by ggml's kernels.

A packed module holds one parameter in place of each matrix `name` [E, N, I]:

    name_blocks     uint8 [E, bytes]: the matrix's rows [N], one after another, each of whole blocks
    name_blocks8    the same in the order of the processor's kernels: blocks of eight rows interleaved

Rows may be of several types, such as those of gates and of up projections: then they are pieces, one after another.
Products are sums in float32 of weights by inputs rounded to 8 bits in blocks, as in llama.cpp. For many rows an
expert is expanded once, and multiplied as the model's own weights are. Biases stay as they are.

E experts (or slots), N outputs, I inputs, P rows, T tokens, K experts of a token, D and F sizes of a row.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn

from expertcast.data import ggml
from expertcast.data.machine import run_alone, usable_processors
from expertcast.predictors.messages import ExpertcastError, Json
from expertcast.predictors.view import MoELayer, MoEView

BLOCKS, INTERLEAVED = "_blocks", "_blocks8"
_ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
WIDE = torch.bfloat16 if _ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32
"""Dtype of products with expanded weights: bf16 where oneDNN multiplies in it, else float32, which rounds less."""
MANY_ROWS = 16 if WIDE.itemsize == 2 else 48
"""Rows of one expert from which expanding its weights takes less time; fixed, since the choice changes bits. Measured
for 1,536 x 2,048 weights: 11 to 20 in bf16; in float32, on a processor with AVX2, 30 to 100."""
_MANY_INTERLEAVED = 64 if WIDE.itemsize == 2 else 256
"""The same for interleaved matrices, which are multiplied with four rows at once; in float32 more than 384."""
_SLOW = ("F16", "Q2_K", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ4_NL", "IQ4_XS")
"""Types that ggml expands slowly: from three times as many rows, measured 40 to 71 in bf16, 110 to 250 in float32."""
_EXPANDED, _MULTIPLIED = 1 << 19, 1 << 23
"""Weights that are expanded at once to float32, in 2 MB, and multiplied at once, in at most 16 MB of bf16. With 32 rows
and 1,536 x 2,048 weights one product takes .65 ms and six take 1.09."""
_PADDED = 64
"""Rows of which products with expanded weights have a multiple: for each number of rows oneDNN keeps .9 MB."""
_REORDERED = 1 << 19
"""Bytes that are interleaved at once: each thread keeps a copy of them."""

# Blocks of one matrix


class Piece(NamedTuple):
    """Neighbouring rows of a matrix that have one type."""

    kind: str
    """A name of :data:`expertcast.data.ggml.TYPES`."""
    outputs: int
    """Number of rows."""


class OrderedRows(NamedTuple):
    """Rows of one type that are interleaved in memory."""

    kind: str
    start: int
    """First byte."""
    end: int
    row_bytes: int

    @property
    def unit(self) -> int:
        """Bytes of rows that are interleaved among themselves."""
        return ggml.TOGETHER * self.row_bytes

    def write(self, given: int, place: int, nbytes: int) -> None:
        """Write some units, at address `given` in the order of files, to address `place` in the order of memory."""
        ggml.interleave(self.kind, self.row_bytes, given, place, nbytes)

    def separate(self, octets: Tensor) -> None:
        """Bring all rows in uint8 [bytes] back into the order of files."""
        rows = octets[self.start : self.end].view(-1, self.row_bytes)
        ggml.separate(self.kind, rows.clone(), rows)


@dataclass(frozen=True, slots=True)
class BlockForm:
    """One matrix of every expert as rows of blocks.

    Raises:
        ExpertcastError: blocks do not divide the rows.
    """

    pieces: tuple[Piece, ...]
    inputs: int
    """I"""
    interleave: bool = False
    """Whether pieces are interleaved whose products the processor then computes faster."""

    def __post_init__(self) -> None:
        for kind, _ in self.pieces:
            if self.inputs % ggml.TYPES[kind].elements:
                raise ExpertcastError(
                    f"a matrix of {self.inputs} inputs cannot be packed as {kind}, in blocks of "
                    f"{ggml.TYPES[kind].elements}: give experts='expanded'"
                )

    def __str__(self) -> str:
        return " and ".join(piece.kind for piece in self.pieces)

    @property
    def outputs(self) -> int:
        """N"""
        return sum(piece.outputs for piece in self.pieces)

    @property
    def nbytes(self) -> int:
        """Bytes of one expert's matrix."""
        return sum(map(self.nbytes_of, self.pieces))

    @property
    def row_bytes(self) -> int:
        """Bytes of the longest row."""
        return max(ggml.row_bytes(piece.kind, self.inputs) for piece in self.pieces)

    @property
    def many_rows(self) -> int:
        """Rows of one expert from which its weights are expanded."""
        if self.interleaved:
            return _MANY_INTERLEAVED
        return MANY_ROWS * (3 if any(piece.kind in _SLOW for piece in self.pieces) else 1)

    @property
    def interleaved(self) -> bool:
        """Whether all pieces are interleaved."""
        return all(map(self.interleaves, self.pieces))

    @property
    def suffix(self) -> str:
        """End of the name of a parameter that holds such matrices."""
        return INTERLEAVED if any(map(self.interleaves, self.pieces)) else BLOCKS

    @property
    def order(self) -> str:
        """The types, and which of them are interleaved: stores in different orders differ in it."""
        return " and ".join(f"{piece.kind}{' x 8' if self.interleaves(piece) else ''}" for piece in self.pieces)

    def interleaves(self, piece: Piece) -> bool:
        """Return whether a piece's rows are interleaved."""
        return self.interleave and ggml.interleaves(*piece)

    def nbytes_of(self, piece: Piece) -> int:
        """Return the bytes of a piece of one expert's matrix."""
        return piece.outputs * ggml.row_bytes(piece.kind, self.inputs)

    def split(self, octets: Tensor) -> list[tuple[Piece, Tensor]]:
        """Return each piece and its rows, uint8 [..., rows, row bytes], of uint8 [..., nbytes]."""
        return [
            (piece, torch.unflatten(octets[..., start : start + self.nbytes_of(piece)], -1, (piece.outputs, -1)))
            for piece, start in self.starts()
        ]

    def starts(self) -> list[tuple[Piece, int]]:
        """Return each piece and its first byte in one expert's matrix."""
        return list(zip(self.pieces, accumulate(map(self.nbytes_of, self.pieces), initial=0), strict=False))

    def put(self, rows: Tensor, octets: Tensor) -> None:
        """Write rows, uint8 [..., N, bytes of the longest], to uint8 [..., nbytes]."""
        first = 0
        for _, own in self.split(octets):
            last = first + own.shape[-2]
            own.copy_(rows[..., first:last, : own.shape[-1]])
            first = last
        for each in octets.unbind() if octets.dim() > 1 else [octets]:
            for some in self.ordered():
                for place in torch.split(each[some.start : some.end], max(1, _REORDERED // some.unit) * some.unit):
                    (given,) = ggml.scratch((place.shape, torch.uint8))
                    some.write(given.copy_(place).data_ptr(), place.data_ptr(), place.numel())

    def ordered(self, first: int = 0) -> list[OrderedRows]:
        """Return the rows of uint8 [nbytes] that are interleaved; `first` is added to their places."""
        return [
            OrderedRows(piece.kind, start, start + self.nbytes_of(piece), ggml.row_bytes(piece.kind, self.inputs))
            for piece, start in ((piece, first + start) for piece, start in self.starts())
            if self.interleaves(piece)
        ]

    def expand(self, octets: Tensor) -> Tensor:
        """Return the weights of uint8 [nbytes], float32 [N, I]."""
        pieces = [expanded(piece.kind, rows, self.interleaves(piece)) for piece, rows in self.split(octets)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def multiply(self, rows_PI: Tensor, octets: Tensor) -> Tensor:
        """Multiply rows [P, I] by the expanded weights of uint8 [nbytes], piece by piece; return float32 [P, N]."""
        here = octets.device.type == "cpu"
        wide, added = (WIDE, -len(rows_PI) % _PADDED) if here else (rows_PI.dtype, 0)
        count, outputs, step = len(rows_PI), [], _whole(_MULTIPLIED // self.inputs)
        rows_PI = nn.functional.pad(rows_PI.to(wide), (0, 0, 0, added))
        for piece, rows in self.split(octets):
            for some in torch.split(rows, step):
                outputs.append((rows_PI @ _widened(piece.kind, some, wide, self.interleaves(piece)).T)[:count])
        return torch.cat(outputs, dim=1).float()


def _widened(kind: str, rows: Tensor, dtype: torch.dtype, interleaved: bool) -> Tensor:
    """Return the weights of rows of blocks, [N, I]; on the CPU in memory that the next call uses again.

    Each of torch's threads expands a part: one alone takes as long as 128 rows' product with 1,536 x 2,048 weights.
    """
    if rows.device.type != "cpu":
        return expanded(kind, rows, interleaved).to(dtype)
    _, elements, nbytes = ggml.TYPES[kind]
    inputs, threads = rows.shape[1] // nbytes * elements, torch.get_num_threads()
    step = min(len(rows), _whole(_EXPANDED // inputs))
    between = ((step, inputs), torch.float32), ((step, rows.shape[1]), torch.uint8)
    weights = ggml.scratch(*between, ((len(rows), inputs), dtype))[2]
    parts = list(zip(torch.split(rows, step), torch.split(weights, step), strict=True))

    def widen(first: int) -> None:
        piece, plain = ggml.scratch(*between)
        for some, made in parts[first::threads]:
            blocks = ggml.separate(kind, some, plain[: len(some)]) if interleaved else some.contiguous()
            if dtype == torch.float32:
                ggml.dequantise(kind, blocks, made)
            else:
                made.copy_(ggml.dequantise(kind, blocks, piece[: len(some)]))

    if threads == 1 or len(parts) == 1:
        widen(0)
    else:
        list(_expanders(threads).map(widen, range(threads)))
    return weights


@cache
def _expanders(count: int) -> ThreadPoolExecutor:
    """Return threads that expand weights beside the calling one."""
    return ThreadPoolExecutor(count, "expand", initializer=run_alone)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_expanders.cache_clear)


def _whole(rows: int) -> int:
    """Return a number of rows that are interleaved among themselves."""
    return max(1, rows // ggml.TOGETHER) * ggml.TOGETHER


def expanded(kind: str, rows: Tensor, interleaved: bool = False) -> Tensor:
    """Return the weights of rows of blocks, float32 [N, I], on their device."""
    if rows.device.type == "cpu":
        rows = ggml.separate(kind, rows, torch.empty_like(rows)) if interleaved else rows.contiguous()
        return ggml.dequantise(kind, rows)
    if interleaved:
        raise _for_the_cpu(rows.device)
    from transformers.integrations.gguf.kernels import dequantize_blocks

    number, elements, nbytes = ggml.TYPES[kind]
    weights: Tensor = dequantize_blocks(rows, number, len(rows), rows.shape[1] // nbytes * elements, torch.float32)
    return weights


def _for_the_cpu(device: torch.device) -> ExpertcastError:
    return ExpertcastError(f"a model that was packed for the CPU cannot run on {device}: load it for that device")


def activation_bytes(layer: MoELayer, itemsize: int) -> int:
    """Return the bytes to reserve for one token's activations: inputs and outputs of each projection in float32, for
    each of its experts, and rows of attention of `itemsize` bytes a number. Rows in parts take less at once, but the C
    library keeps freed ones: .5 GB after 4,200 tokens through 48 layers of 128 experts."""
    shapes = [each.shape for each in matrices(layer.experts, layer.num_experts).values()]
    shapes += [each.shape for each in packed_matrices(layer.experts).values()]  # type: ignore[misc]
    return 4 * layer.top_k * sum(sum(shape[1:]) for shape in shapes) + 16 * itemsize * layer.hidden_size


def for_device(form: BlockForm, device: str) -> BlockForm:
    """Return a form as a type of device computes with it: the CPU by ggml, others by expanding it for each product.

    Raises:
        ExpertcastError: it does not.
    """
    if device == "cpu":
        ggml.check()
        return replace(form, interleave=True)
    from transformers.integrations.gguf.dequant import GGML_BLOCK

    for kind, _ in form.pieces:
        if ggml.TYPES[kind].number not in GGML_BLOCK:
            raise ExpertcastError(f"experts in {kind} are computed on the CPU only: give experts='expanded'")
    return form


# Experts as groups of rows

Groups: TypeAlias = Sequence[tuple[int, int]]
"""(expert, number of its rows), in the order of the rows."""
_AT_ONCE = 4096
"""Rows whose projections are held at once: all of a long prompt would take .9 GB."""
_COMBINED = 1024
"""Tokens whose experts' outputs are weighted at once."""


def run_groups(
    outputs: Callable[[Tensor, Groups, Tensor], Tensor], hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor,
    order_P: Tensor | None = None, ids: Sequence[int] | None = None, at_once: int = _AT_ONCE,
) -> Tensor:  # fmt: skip
    """Return the weighted sum [T, D] of experts' outputs.

    Args:
        outputs: computes [P, D] of rows [P, D], their groups and their experts [P].
        hidden_TD, ids_TK, weights_TK: arguments of transformers' experts functions.
        order_P: order of the token-expert pairs, those of one expert adjacent; None: that of torch's sort, or for one
            token that of its experts.
        ids: `ids_TK`, flat, where the host has them.
        at_once: rows that run together, up to those of one expert more.
    """
    tokens, top_k = ids_TK.shape
    ids_P = ids_TK.reshape(-1)
    if not tokens:
        return torch.empty_like(hidden_TD)
    if tokens == 1 and order_P is None:
        groups = [(expert, 1) for expert in (ids_P.tolist() if ids is None else ids)]
        return combine(outputs(hidden_TD.expand(top_k, -1), groups, ids_P), weights_TK, hidden_TD.dtype)
    if order_P is None:
        order_P = torch.sort(ids_P).indices
    sorted_P = ids_P[order_P]
    groups = [(expert, len(list(rows))) for expert, rows in groupby(sorted_P.tolist())]
    starts = accumulate((count for _, count in groups), initial=0)
    neighbours = groupby(zip(groups, starts, strict=False), lambda each: each[1] // at_once)
    parts = [[group for group, _ in some] for _, some in neighbours]
    rows = [sum(count for _, count in part) for part in parts]
    output_PD = hidden_TD.new_empty(len(ids_P), hidden_TD.shape[1])
    for part, some_P, experts_P in zip(
        parts, order_P.split_with_sizes(rows), sorted_P.split_with_sizes(rows), strict=True
    ):
        output_PD[some_P] = outputs(hidden_TD[some_P // top_k], part, experts_P)
    return combine(output_PD, weights_TK, hidden_TD.dtype)


def products(rows_PI: Tensor, weight_SIN: Tensor, groups: Groups) -> Tensor:
    """Return the products [P, N] of rows with their groups' weights; the rows of a group are adjacent."""
    output_PN = rows_PI.new_empty(rows_PI.shape[0], weight_SIN.shape[-1])
    start = 0
    for slot, count in groups:
        end = start + count
        torch.mm(rows_PI[start:end], weight_SIN[slot], out=output_PN[start:end])
        start = end
    return output_PN


def activated(experts: Any, rows_PN: Tensor) -> Tensor:
    """Apply the gate or activation between the two projections: SwiGLU of packed experts on the CPU by ggml, others by
    the experts' own code."""
    if rows_PN.device.type == "cpu" and is_packed(experts) and _has_swiglu(experts):
        return ggml.swiglu(rows_PN)
    made: Tensor = experts._apply_gate(rows_PN) if experts.has_gate else experts.act_fn(rows_PN)
    return made


def _has_swiglu(experts: Any) -> bool:
    """Whether the gate is transformers' default with SiLU."""
    usual = experts.has_gate and type(experts)._apply_gate.__module__ == "transformers.integrations.moe"
    return usual and type(experts.act_fn).__name__ in ("SiLU", "SiLUActivation")


def combine(output_PD: Tensor, weights_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weighted sum over K with the products and the reduction of transformers' kernels, for some tokens at a
    time."""
    tokens, top_k = weights_TK.shape
    if tokens > _COMBINED:
        parts = zip(torch.split(output_PD, _COMBINED * top_k), torch.split(weights_TK, _COMBINED), strict=True)
        return torch.cat([combine(*part, dtype) for part in parts])
    weighted_PD = output_PD * weights_TK.reshape(-1, 1)
    return weighted_PD.view(tokens, top_k, output_PD.shape[1]).sum(dim=1).to(dtype)


# A module of packed experts


class PackedMatrix:
    """Packed matrices in place of a parameter [E, N, I] or [E, I, N].

    Args:
        own: parameters of the module, of which one holds the blocks.
        name: the replaced parameter's name.
        form: the form of the matrices.
        transposed: whether the parameter was [E, I, N].
        dtype: the parameter's dtype.

    Raises:
        ExpertcastError: the module was packed on another processor, whose kernels take other rows, and then pickled.
    """

    def __init__(
        self, own: Mapping[str, Tensor | None], name: str, form: BlockForm, transposed: bool, dtype: torch.dtype
    ) -> None:
        self.parameters, self.dtype = own, dtype
        self.form, self.transposed, self.many_rows = form, transposed, form.many_rows
        self.few_tokens = MANY_ROWS if form.interleaved else form.many_rows
        """Tokens from which rows are grouped by their experts."""
        self._replaced, self.name = name, name + form.suffix
        """Names of the replaced parameter, and of the one that holds the blocks."""
        if self.name not in own:
            raise ExpertcastError("this model was packed on another processor and pickled: load it again here")
        self.has_one_piece = len(form.pieces) == 1
        self._place, self._matrices = (0, 0, 0), list[ggml.Matrices]()
        self._pieces = [
            (piece.kind, start, (piece.outputs, form.inputs, form.interleaves(piece))) for piece, start in form.starts()
        ]

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle and copy the arguments, not addresses."""
        return PackedMatrix, (self.parameters, self._replaced, self.form, self.transposed, self.dtype)

    @property
    def blocks(self) -> Tensor:
        """The parameter, uint8 [E, bytes]."""
        return cast(Tensor, self.parameters[self.name])

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the replaced parameter."""
        sizes = (self.form.outputs, self.form.inputs)
        return (len(self.blocks), *(sizes[::-1] if self.transposed else sizes))

    @property
    def device(self) -> torch.device:
        """Device of the blocks."""
        return self.blocks.device

    def _places(self) -> list[ggml.Matrices]:
        blocks = self.blocks
        place = blocks.data_ptr(), blocks.shape[0], blocks.stride(0)
        if self._place != place:
            if blocks.device.type != "cpu":
                raise _for_the_cpu(blocks.device)
            self._matrices = [ggml.Matrices.of(kind, blocks, start, *size) for kind, start, size in self._pieces]
            self._place = place
        return self._matrices

    def single(self) -> ggml.Matrices:
        """Return the matrices where they lie now; their form has one piece."""
        (own,) = self._places()
        return own

    def by_ggml(self, rows: Tensor, ids: Tensor | None, expert: int = 0) -> Tensor:
        """Multiply rows [T, 1, I] or [T, K, I] by the matrices `ids` [T, K] (None: that of one expert); return float32
        [T, K, N], which the next product overwrites."""
        pieces = [piece.at(expert) for piece in self._places()] if ids is None else self._places()
        if len(pieces) == 1:
            return ggml.product(pieces[0], rows, ids)
        return torch.cat([ggml.product(piece, rows, ids).clone() for piece in pieces], dim=-1)

    def product(self, rows_P1I: Tensor) -> Tensor:
        """Multiply rows [P, 1, I] by the first matrix; return new [P, 1, N] in the rows' dtype."""
        if len(rows_P1I) < self.many_rows:
            made = self.by_ggml(rows_P1I, None)
        else:
            made = self.form.multiply(rows_P1I.squeeze(1), self.blocks[0]).unsqueeze(1)
        return made.to(rows_P1I.dtype, copy=True)

    def products(self, rows_PI: Tensor, groups: Groups) -> Tensor:
        """Multiply each group's rows by its expert's matrix; return float32 [P, N], which the next product may
        overwrite."""
        most = self.many_rows if rows_PI.device.type == "cpu" else 1
        few = ggml.AT_ONCE if most > 1 and self.form.interleaved else most
        ids_P = _repeated([expert for expert, _ in groups], groups)
        if all(count < few for _, count in groups):
            return self.by_ggml(rows_PI.unsqueeze(1), ids_P.unsqueeze(1)).squeeze(1)
        output_PN = rows_PI.new_empty(len(rows_PI), self.form.outputs, dtype=torch.float32)
        few_F = _repeated([count < few for _, count in groups], groups).nonzero().squeeze(1)
        if len(few_F):
            output_PN[few_F] = self.by_ggml(rows_PI[few_F].unsqueeze(1), ids_P[few_F].unsqueeze(1)).squeeze(1)
        start, blocks = 0, self.blocks
        for expert, count in groups:
            own = slice(start, start := start + count)
            if count >= most:
                output_PN[own] = self.form.multiply(rows_PI[own], blocks[expert])
            elif count >= few:
                output_PN[own] = self.by_ggml(rows_PI[own].unsqueeze(1), None, expert).squeeze(1)
        return output_PN


def _repeated(values: Sequence[int], groups: Groups) -> Tensor:
    """Return each group's value for each of its rows, [P]."""
    return torch.tensor(values).repeat_interleave(torch.tensor([count for _, count in groups]))


Forms = Mapping[str, BlockForm]
"""Forms by the parameter's name."""


def matrices(experts: nn.Module, count: int) -> dict[str, nn.Parameter]:
    """Return a module's matrices [E, N, I] by name."""
    return {
        name: parameter
        for name, parameter in experts.named_parameters(recurse=False)
        if parameter.dim() == 3 and len(parameter) == count and parameter.is_floating_point()
    }


def sizes_of(experts: nn.Module, matrix: Tensor) -> tuple[int, int]:
    """Return the outputs N and inputs I of one of a module's matrices [E, N, I] or [E, I, N]."""
    first, second = matrix.shape[1:]
    return (second, first) if getattr(experts, "is_transposed", False) else (first, second)


def form_for(experts: nn.Module, matrix: Tensor, bits: int, device: str = "cpu", rest: str | None = None) -> BlockForm:
    """Return the form of one of a module's matrices once it is rounded to 4 or 8 bits.

    8 bits are Q8_0; 4 bits Q4_K, or Q4_0 where its blocks do not divide the inputs. `device` is the type of the one
    that computes.

    Args:
        rest: type of matrices that no block of these divides; None: they are refused.

    Raises:
        ExpertcastError: no block divides the inputs.
    """
    outputs, inputs = sizes_of(experts, matrix)
    kinds = ("Q8_0",) if bits == 8 else ("Q4_K", "Q4_0")
    kind = next((kind for kind in kinds if inputs % ggml.TYPES[kind].elements == 0), rest or kinds[-1])
    return for_device(BlockForm((Piece(kind, outputs),), inputs), device)


def down_projection(experts: nn.Module) -> Tensor | PackedMatrix:
    """Return a module's down projection, packed or not."""
    return experts.down_proj  # type: ignore[return-value]


def weight_bits(view: MoEView) -> float:
    """Return the bits per weight of the experts' matrices of all layers, scales included."""
    forms = [matrix.form for layer in view for matrix in packed_matrices(layer.experts).values()]
    if not forms:
        return 8.0 * down_projection(view[0].experts).dtype.itemsize
    return 8 * sum(form.nbytes for form in forms) / sum(form.outputs * form.inputs for form in forms)


def make_packed(experts: nn.Module, count: int, forms: Forms) -> None:
    """Replace a module's matrices by empty packed ones on the same device.

    The module then runs :func:`run_experts` in place of transformers' functions, whichever the model names.
    """
    if forms:
        experts.forward = partial(_run_named, experts)
    transposed = bool(getattr(experts, "is_transposed", False))
    for name, form in forms.items():
        matrix = experts._parameters.pop(name)
        assert matrix is not None
        empty = torch.empty(count, form.nbytes, dtype=torch.uint8, device=matrix.device)
        experts.register_parameter(name + form.suffix, nn.Parameter(empty, requires_grad=False))
        experts.__dict__[name] = PackedMatrix(experts._parameters, name, form, transposed, matrix.dtype)


def forms_noted(view: MoEView) -> list[Json]:
    """Return the forms by layer for trace.json; :func:`forms_in` reads them."""
    found = [{name: own.form for name, own in packed_matrices(layer.experts).items()} for layer in view]
    return [
        {
            name: {"pieces": [{"kind": kind, "outputs": rows} for kind, rows in form.pieces], "inputs": form.inputs}
            for name, form in own.items()
        }
        for own in found
    ]


def forms_in(notes: Sequence[Mapping[str, Json]]) -> list[Forms]:
    """Return the forms by layer that :func:`forms_noted` describes."""
    return [
        {name: BlockForm(tuple(Piece(**each) for each in own["pieces"]), own["inputs"]) for name, own in note.items()}
        for note in notes
    ]


def _run_named(experts: nn.Module, *args: Any) -> Tensor:
    """Run the function that the model names; :func:`run_experts` in place of transformers' own."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    name = vars(experts.config)["_experts_implementation_internal"]  # its property takes 5 to 15 us
    named = ALL_EXPERTS_FUNCTIONS.get_interface(name, run_experts)
    output: Tensor = (run_experts if named.__module__.startswith("transformers.") else named)(experts, *args)
    return output


def run_experts(
    experts: Any, hidden_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor,
    order: Callable[[], Tensor] | None = None, ids: Sequence[int] | None = None, *, grouped: bool = False,
) -> Tensor:  # fmt: skip
    """Return the output [T, D] of experts, or of slots in place of experts.

    Args:
        experts: a module, packed or not; then the products are those of transformers' grouped kernel on the CPU.
        hidden_TD, ids_TK, weights_TK: arguments of transformers' experts functions.
        order: returns the order of the token-expert pairs, those of one expert adjacent; None: that of torch's sort.
        ids: `ids_TK`, flat, where the host has them.
        grouped: compute all rows in this order at once, for observers of inner activations.
    """
    few_PD = None if grouped else of_few(experts, hidden_TD, ids_TK, ids)
    if few_PD is not None:
        return combine(few_PD, weights_TK, hidden_TD.dtype)
    names = _names(experts)
    packed = [experts.__dict__.get(name) for name in names]

    def project(place: int, rows_PI: Tensor, groups: Groups, ids_P: Tensor) -> Tensor:
        name, own = names[place], packed[place]
        if own is not None:
            return _biased(experts, name, own.products(rows_PI, groups), ids_P)
        weight = experts._parameters[name]
        return _biased(
            experts,
            name,
            products(rows_PI, weight if experts.is_transposed else weight.transpose(-2, -1), groups),
            ids_P,
        )

    def outputs(rows_PD: Tensor, groups: Groups, ids_P: Tensor) -> Tensor:
        inner_PI = activated(experts, project(0, rows_PD, groups, ids_P))
        return _normed(experts, project(1, inner_PI, groups, ids_P), hidden_TD.dtype)

    order_P = None if order is None or (len(hidden_TD) == 1 and not grouped) else order()
    at_once = ids_TK.numel() if grouped else _AT_ONCE
    return run_groups(outputs, hidden_TD, ids_TK, weights_TK, order_P, ids, at_once)


def of_few(experts: Any, hidden_TD: Tensor, ids_TK: Tensor, ids: Sequence[int] | None = None) -> Tensor | None:
    """Return the outputs of packed experts on the CPU for so few tokens that none is expanded, in memory that the next
    product overwrites, [T x K, D]; None: these are not such.

    Args:
        experts, hidden_TD, ids_TK, ids: as for :func:`run_experts`.
    """
    names, dtype = _names(experts), hidden_TD.dtype
    up, down = (experts.__dict__.get(name) for name in names)
    if up is None or hidden_TD.device.type != "cpu" or not 0 < len(hidden_TD) < min(up.few_tokens, down.few_tokens):
        return None
    if not experts.has_bias and up.has_one_piece and down.has_one_piece and _has_swiglu(experts):
        made = dtype if dtype in ggml.KINDS and not experts.has_post_expert_norm else torch.float32
        made_TKD = ggml.product(up.single(), hidden_TD, ids_TK, down.single(), ids, made)
        return _normed(experts, made_TKD.flatten(0, 1), dtype)
    ids_P = ids_TK.reshape(-1)
    inner_PN = _biased(experts, names[0], up.by_ggml(hidden_TD.unsqueeze(1), ids_TK).flatten(0, 1), ids_P)
    inner_TKI = activated(experts, inner_PN).view(*ids_TK.shape, -1)
    output_PD = _biased(experts, names[1], down.by_ggml(inner_TKI, ids_TK).flatten(0, 1), ids_P)
    return _normed(experts, output_PD, dtype)


def _names(experts: Any) -> tuple[str, str]:
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def _biased(experts: Any, name: str, output_PN: Tensor, ids_P: Tensor) -> Tensor:
    return output_PN.add_(experts._parameters[f"{name}_bias"][ids_P]) if experts.has_bias else output_PN


def _normed(experts: Any, output_PD: Tensor, dtype: torch.dtype) -> Tensor:
    made: Tensor = experts.post_expert_norm(output_PD) if experts.has_post_expert_norm else output_PD
    return made.to(dtype)


def over_parts(experts: nn.Module, parts: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a module on the CPU, packed or not, that reads these parameters [E, ...] in place of its own."""
    made = type(experts).__new__(type(experts))
    held = {name: None if own is None else parts.get(name, own.data) for name, own in experts._parameters.items()}
    parameters = {
        name: None if part is None else nn.Parameter(part.cpu(), requires_grad=False) for name, part in held.items()
    }
    children = {name: copy.deepcopy(child).cpu() for name, child in experts.named_children()}
    made.__dict__.update(experts.__dict__, _parameters=parameters, _modules=children)
    for name, matrix in packed_matrices(experts).items():
        made.__dict__[name] = own = copy.copy(matrix)
        own.parameters = parameters
    return made


def is_packed(experts: nn.Module) -> bool:
    """Return whether a module's matrices are packed."""
    return isinstance(experts.__dict__.get("down_proj"), PackedMatrix)


def packed_matrices(experts: nn.Module) -> dict[str, PackedMatrix]:
    """Return a module's packed matrices by name; empty for an expanded module."""
    return {name: each for name, each in experts.__dict__.items() if isinstance(each, PackedMatrix)}


def write_packed(experts: nn.Module, name: str, parts: Mapping[str, Tensor], matrices_EDF: Tensor, first: int) -> None:
    """Round matrices of some experts to their packed form.

    Args:
        experts, name: module and name of the matrices.
        parts: parameters of all experts by name, which are written.
        matrices_EDF: [E, N, I] or [E, I, N] as the module has them, in any float dtype, on the CPU.
        first: number of the first expert.
    """
    own = packed_matrices(experts)[name]
    ((kind, _),) = own.form.pieces
    blocks = ggml.quantise(kind, matrices_EDF.mT if own.transposed else matrices_EDF)
    own.form.put(blocks, parts[own.name][first : first + len(blocks)])


def expanded_experts(experts: nn.Module, parts: Mapping[str, Tensor], *names: str) -> dict[str, Tensor]:
    """Return one expert's parameters by name, without the expert dimension and with packed ones expanded; with `names`,
    of the packed ones only these."""
    packed = packed_matrices(experts)
    held = {matrix.name for matrix in packed.values()}
    plain = {name: part for name, part in parts.items() if name not in held}
    for name in names or packed:
        if (matrix := packed.get(name)) is None:
            continue
        weights = matrix.form.expand(parts[matrix.name].cpu()).to(matrix.dtype)
        plain[name] = weights.T if matrix.transposed else weights
    return plain


def pack_module(experts: nn.Module, count: int, bits: int, device: str = "cpu", rest: str | None = None) -> None:
    """Round a module's matrices by :func:`form_for` and hold them packed, one matrix after another.

    Raises:
        ExpertcastError: blocks do not divide one of them, or ggml is not installed; the module is unchanged.
    """
    own = matrices(experts, count)
    forms = {name: form_for(experts, matrix, bits, device, rest) for name, matrix in own.items()}
    ggml.check()
    for name, matrix in own.items():
        make_packed(experts, count, {name: forms[name]})
        parts = {full: each.data for full, each in experts._parameters.items() if each is not None}
        firsts = range(0, count, at_once(matrix))
        chunks = (chunk.cpu() for chunk in torch.split(matrix.detach(), firsts.step))
        with ThreadPoolExecutor(usable_processors()) as threads:
            list(threads.map(partial(write_packed, experts, name, parts), chunks, firsts))


def at_once(matrices_EDF: Tensor) -> int:
    """Return the number of experts packed in one call; larger numbers are no faster and take more memory."""
    return max(1, 2**22 // matrices_EDF[0].numel())


def iterate_plain(experts: nn.Module, count: int, *names: str) -> Iterator[dict[str, Tensor]]:
    """Iterate over the experts' parameters by name; `names` as for :func:`expanded_experts`."""
    own = {
        name: each.detach()
        for name, each in experts.named_parameters(recurse=False)
        if each.dim() and len(each) == count
    }
    for expert in range(count):
        yield expanded_experts(experts, {name: each[expert] for name, each in own.items()}, *names)
