"""Reads the experts of a checkpoint, one expert at a time where the checkpoint can be split by experts.

Names and conversions come from transformers' conversion mapping and weight converters. So checkpoints with one tensor
per expert, with fused tensors, and of older layouts load as with `from_pretrained`.

E routed experts per layer.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor
from transformers import Concatenate, PreTrainedModel
from transformers.quantizers import HfQuantizer

from expertcast.data.machine import run_alone, usable_processors
from expertcast.data.packed_experts import (
    Coded,
    Coding,
    Forms,
    PackedForm,
    ShippedForm,
    at_once,
    matrices,
    packed_matrices,
    sizes_of,
    write_packed,
)
from expertcast.data.source import FP8, MXFP4
from expertcast.data.weights.blocks import CODINGS, coded_mxfp4
from expertcast.data.weights.files import (
    ComputedTensor,
    HeldTensor,
    Part,
    ShippedWeight,
    TensorFile,
    WeightFiles,
    check_complete,
    dtype_named,
)
from expertcast.data.weights.groups import Group, grouped
from expertcast.data.weights.packed import Fp8Tensor
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import MoEView
from expertcast.runtime.storage.layout import expert_parameters

_MOST_READERS = 4
"""Maximum number of threads that read and convert experts."""
_ALIGNED = 64
"""Alignment in bytes of the tensors of a :class:`ShippedMatrix`; a multiple of the size of every dtype."""
Read = Callable[[TensorFile, Part], Tensor]
"""Reads a part of one checkpoint tensor."""


class ExpertSources:
    """Finds the experts' tensors in a checkpoint and converts them to a layer's parameters.

    Args:
        model: the model without weights (meta device), in the dtype to load.
        view: its MoE layers.
        files: the checkpoint.
        quantizer: quantizer of a quantised checkpoint, configured to dequantise.

    Raises:
        ExpertcastError: the checkpoint lacks an expert's weights.
    """

    def __init__(
        self, model: PreTrainedModel, view: MoEView, files: WeightFiles, quantizer: HfQuantizer | None = None
    ) -> None:
        self._model = model
        self._files = files
        self._experts = view.shape.experts
        self._modules = [layer.experts for layer in view]
        self.parameters: dict[str, Tensor] = {}
        """Meta tensors [E, ...] of the experts' parameters, by full name."""
        self._local: list[dict[str, str]] = []
        for layer in view:
            names = {f"{layer.experts_name}.{name}": name for name in expert_parameters(layer.experts, self._experts)}
            self._local.append(names)
            self.parameters.update({full: getattr(layer.experts, name) for full, name in names.items()})
        self.others: list[str] = []
        """Checkpoint tensors that belong to no expert."""
        self.unconverted: dict[str, str] = {}
        """Names of such tensors that no conversion changes, by the parameter's full name."""
        self._groups: dict[str, Group] = {}
        self.coded = False
        """Whether packed weights are codes and scales as shipped, instead of packing dequantised weights."""
        self._assign(grouped(model, files, quantizer))

    def _assign(self, groups: Mapping[str, Group]) -> None:
        for target, group in groups.items():
            if target in self.parameters:
                self._groups[target] = group
                continue
            names = [name for names in group.sources.values() for name in names]
            self.others += names
            if group.converter is None:
                self.unconverted[target] = names[-1]
        for local in self._local:
            own = [self._groups[full].converter for full in local if full in self._groups]
            whole = any(converter is not None and len(converter.target_patterns) > 1 for converter in own)
            check_complete([] if whole else [full for full in local if full not in self._groups])

    def read_layer(self, layer: int, views: dict[str, Tensor]) -> None:
        """Fill `views`, one layer's parameters [E, ...] by their names in the experts module.

        Raises:
            ExpertcastError: weights are missing or of the wrong shape.
        """
        local = self._local[layer]
        jobs = [
            partial(self._convert_into, layer, group, experts, views)
            for group in self.groups(layer)
            for experts in self._portions(group)
        ]
        missing = set(local)
        with _converters() as pool:
            for written in pool.map(lambda job: job(), jobs):
                missing -= written
        check_complete(missing)

    def read_expert(self, layer: int, expert: int, views: dict[str, Tensor]) -> None:
        """Fill one expert's row of `views`, one layer's parameters [E, ...], in this thread.

        Raises:
            ExpertcastError: weights are missing or of the wrong shape.
        """
        missing = set(self._local[layer])
        for group in self.groups(layer):
            missing -= self._convert_into(layer, group, slice(expert, expert + 1), views)
        check_complete(missing)

    def file_parts(self, layer: int) -> list[list[tuple[TensorFile, Part]]]:
        """Return the tensors of the files that make up each expert of a layer, each with the rows of this expert.

        Raises:
            ExpertcastError: the experts cannot be converted one by one.
        """
        parts: list[list[tuple[TensorFile, Part]]] = [[] for _ in range(self._experts)]
        for group in self.groups(layer):
            if not self.separable(group):
                raise ExpertcastError(f"{group.target} is not stored expert by expert, so it cannot be read in place")
            for names in group.sources.values():
                for expert, own in enumerate(parts):
                    for file in self._files.stored(names[expert] if group.by_expert else names[0]):
                        fused = not group.by_expert and file.get_shape()[:1] == [self._experts]
                        own.append((file, slice(expert, expert + 1) if fused else ...))
        return parts

    def _portions(self, group: Group) -> list[slice | None]:
        """Split a layer into ranges of experts to convert at a time; [None] if the group is inseparable."""
        if not self.separable(group):
            return [None]
        step = at_once(self.parameters[group.target]) if packed_matrices(self._modules[0]) else 1
        return [slice(first, min(first + step, self._experts)) for first in range(0, self._experts, step)]

    def forms(self) -> list[Forms]:
        """Return the packed form of each matrix of a quantised checkpoint, by layer and by the parameter's name.

        Each layer has its own form, one that the packed kernel supports. If there is no such form for a matrix in any
        layer, all layers keep the matrix in the form of the checkpoint.

        Raises:
            ExpertcastError: the weights are plain floats, or the experts of one layer have different forms.
        """
        found = {name: self._forms_of(name) for name in matrices(self._modules[0], self._experts)}
        return [{name: forms[layer] for name, forms in found.items()} for layer in range(len(self._modules))]

    def _forms_of(self, name: str) -> list[PackedForm] | list[ShippedForm]:
        groups = [self._groups_of(layer, name) for layer in range(len(self._modules))]
        codings = [[coding for group in own for coding in self._codings(group)] for own in groups]
        module = self._modules[0]
        outputs, inputs = sizes_of(module, matrices(module, self._experts)[name])
        if not any(None in own for own in codings):
            with contextlib.suppress(ExpertcastError):  # the kernel does not support the shape
                found = [Coding.over(coding for coding in own if coding is not None) for own in codings]
                return [PackedForm(coding, outputs, inputs) for coding in found]
        shipped = [self._shipped(own[0]) for own in groups]
        transposed = bool(getattr(module, "is_transposed", False))
        return [ShippedForm(outputs, inputs, each.nbytes, transposed, each) for each in shipped]

    @property
    def quantised(self) -> bool:
        """Whether the checkpoint has any quantised expert weight."""
        groups = [group for layer in range(len(self._modules)) for group in self.groups(layer)]
        names = [name for group in groups for own in group.sources.values() for name in own]
        return any(group.mxfp4 for group in groups) or any(self._files.shipped(name) for name in names)

    def _groups_of(self, layer: int, name: str) -> list[Group]:
        full = next(full for full, own in self._local[layer].items() if own == name)
        return [self._groups[full]] if full in self._groups else self.groups(layer)

    def _codings(self, group: Group) -> list[Coding | None]:
        if group.mxfp4:
            return [CODINGS["MXFP4"]]
        return [file.coding() if isinstance(file, ComputedTensor) else None for file in self.files_of(group)]

    def _shipped(self, group: Group) -> ShippedMatrix:
        if group.mxfp4 or not self.separable(group):
            raise ExpertcastError(f"{group.target} cannot be kept in its shipped form: give experts='expanded'")
        sizes = [_sizes(self._shipped_tensors(group, expert)) for expert in range(self._experts)]
        if any(each != sizes[0] for each in sizes):
            raise ExpertcastError(f"experts of {group.target} are shipped in different forms: give experts='expanded'")
        weights = list(self._shipped_weights(group, 0))
        return ShippedMatrix(self._model, group, weights, sizes[0], self.parameters[group.target].dtype)

    def _shipped_weights(self, group: Group, expert: int) -> Iterator[tuple[str, str, ShippedWeight]]:
        """Yield pattern, name and weight of each tensor that makes up an expert's matrix."""
        for pattern, names in group.sources.items():
            for name in names if len(names) == 1 else names[expert : expert + 1]:
                if (shipped := self._files.shipped(name)) is None:
                    raise ExpertcastError(
                        f"experts='packed' needs quantised weights, but {name} is shipped in floats: give "
                        "experts='expanded', 'int4' or 'int8'"
                    )
                yield pattern, name, shipped

    def _shipped_tensors(self, group: Group, expert: int) -> list[tuple[TensorFile, Part]]:
        """Return the file tensors that make up an expert's matrix, each with the rows of this expert."""
        files = [file for _, _, weight in self._shipped_weights(group, expert) for file in weight.tensors.values()]
        if group.by_expert:
            return [(file, ...) for file in files]
        if any(file.get_shape()[:1] != [self._experts] for file in files):
            raise ExpertcastError(
                f"{group.target} cannot be split by experts in its shipped form: give experts='expanded'"
            )
        return [(file, slice(expert, expert + 1)) for file in files]

    def local(self, layer: int) -> dict[str, str]:
        """Map the full names of one layer's parameters to their names in the experts module."""
        return self._local[layer]

    def groups(self, layer: int) -> list[Group]:
        """Return the groups of one layer's parameters."""
        return [self._groups[name] for name in self._local[layer] if name in self._groups]

    def files_of(self, group: Group) -> list[TensorFile]:
        """Return all checkpoint tensors of a group."""
        return [self._files.tensors[name] for names in group.sources.values() for name in names]

    def separable(self, group: Group) -> bool:
        """Whether a group may be converted expert by expert, with the same result as all at once."""
        counts = {len(names) for names in group.sources.values()}
        fused = all(file.get_shape()[:1] == [self._experts] for file in self.files_of(group))
        if group.converter is None:
            return counts == {1} and fused
        first, *rest = group.converter.operations
        if group.mxfp4:
            return counts == {1} and fused and not rest
        merged = group.by_expert and getattr(first, "dim", 0) == 0 and counts == {self._experts}
        return merged and all(isinstance(step, Concatenate) and step.dim > 0 for step in rest)

    def convert(self, group: Group, experts: slice | None, read: Read | None = None) -> dict[str, Tensor]:
        """Convert some experts and return their parameters [n, ...] by full name.

        Args:
            group: one of :meth:`groups`; a separable one if `experts` is not None.
            experts: range of the experts in the layer; None: all.
            read: reads the tensors to convert; None: read them in the dtype to load.
        """
        read = read or partial(_read, dtype=self.parameters[group.target].dtype)
        reads: list[tuple[str, str, Callable[[], Tensor]]] = []
        for pattern, names in group.sources.items():
            part: Part = ...
            if experts is not None and group.by_expert:
                names = names[experts]
            elif experts is not None:
                part = experts
            reads += [(pattern, name, partial(read, self._files.tensors[name], part)) for name in names]
        return _run_converter(self._model, group, reads)

    def _convert_into(self, layer: int, group: Group, experts: slice | None, views: dict[str, Tensor]) -> set[str]:
        """Convert some experts (None: all) and write them to `views`. Returns the full names written."""
        first, last, _ = (experts or slice(None)).indices(self._experts)
        local, module = self._local[layer], self._modules[layer]
        packed = packed_matrices(module)
        form = packed[local[group.target]].form if self.coded and local.get(group.target) in packed else None
        if isinstance(form, ShippedForm):
            matrix, octets = cast(ShippedMatrix, form.parameter), packed[local[group.target]].parts(views)[0]
            for expert in range(first, last):
                matrix.write(self._shipped_tensors(group, expert), octets[expert])
            if first == 0:  # all experts have the same sizes
                self._check_shape(local, group.target, [1, *matrix(octets[0]).shape], 1)
            return {group.target}
        made = self.convert(group, experts) if form is None else self._convert_coded(group, experts, form.coding)
        for full, matrices_EDF in made.items():
            self._check_shape(local, full, list(matrices_EDF.shape), last - first)
            if local[full] in packed:
                write_packed(module, local[full], matrices_EDF, views, first)
            else:
                views[local[full]][first:last].copy_(cast(Tensor, matrices_EDF))
        return set(made)

    def _check_shape(self, local: Mapping[str, str], full: str, found: list[int], experts: int) -> None:
        shape = [experts, *self.parameters[full].shape[1:]] if full in local else None
        if shape != found:
            raise ExpertcastError(
                f"the checkpoint's {full} is {found}, the model's is "
                f"{'not among its experts' if shape is None else shape}: it belongs to another model"
            )

    def _convert_coded(self, group: Group, experts: slice | None, coding: Coding) -> Mapping[str, Coded]:
        """Convert like :meth:`convert`, but codes, scales and zeros separately instead of weights."""
        if group.mxfp4:
            octets, exponents = (file[experts or ...] for file in self.files_of(group))
            return {group.target: coded_mxfp4(octets, exponents).mT}
        held: dict[int, Coded] = {}

        def read(field: str, file: TensorFile, part: Part) -> Tensor:
            assert isinstance(file, ComputedTensor)
            assert file.coded is not None
            if id(file) not in held:
                held[id(file)] = file.coded(part).fitted(coding)
            found: Tensor = getattr(held[id(file)], field)
            return found

        codes, scales = (self.convert(group, experts, partial(read, field)) for field in ("codes", "scales"))
        zeros = {} if coding.symmetric else self.convert(group, experts, partial(read, "zeros"))
        return {full: Coded(coding.bits, codes[full], scales[full], zeros.get(full)) for full in codes}


@contextmanager
def _converters() -> Iterator[ThreadPoolExecutor]:
    """Yield a thread pool that runs torch without gradients, and with one thread per operation: these are short."""

    def start() -> None:
        run_alone()
        torch.set_grad_enabled(False)  # holds for one thread

    with ThreadPoolExecutor(min(_MOST_READERS, usable_processors()), initializer=start) as pool:
        yield pool


def _run_converter(
    model: PreTrainedModel, group: Group, reads: Iterable[tuple[str, str, Callable[[], Tensor]]]
) -> dict[str, Tensor]:
    """Run a group's converter and return the parameters by full name.

    Args:
        model: the model, for transformers' conversions.
        group: the group.
        reads: pattern, name and reading function of each tensor.
    """
    converter = copy.deepcopy(group.converter)
    for pattern, name, read in reads:
        if converter is None:
            return {group.target: read()}
        converter.add_tensor(group.target, name, pattern, read)
    assert converter is not None
    made = converter.convert(group.target, model=model, config=model.config)
    return {full: value[0] if isinstance(value, list) else value for full, value in made.items()}


class _Piece(NamedTuple):
    """Place of one tensor in an expert's bytes."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def of(self, octets: Tensor) -> Tensor:
        return octets[self.start : self.start + self.nbytes].view(self.dtype).view(self.shape)


def _sizes(tensors: Sequence[tuple[TensorFile, Part]]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of the part that is read of each tensor."""
    sizes = []
    for file, part in tensors:
        shape = file.get_shape()
        sizes.append((tuple(shape if part is ... else [1, *shape[1:]]), dtype_named(file.get_dtype())))
    return sizes


class ShippedMatrix:
    """Shipped form of one matrix of an expert: the bytes of its checkpoint tensors, one after another.

    A call with these bytes, uint8 [nbytes], returns the weights [N, I], converted as in the expanded model.

    Args:
        model: the model without weights.
        group: group of the matrix.
        weights: pattern, name and weight of each tensor of the first expert.
        sizes: shape and dtype of each file tensor of these weights, in order.
        dtype: the model's dtype.
    """

    def __init__(
        self, model: PreTrainedModel, group: Group, weights: Sequence[tuple[str, str, ShippedWeight]],
        sizes: Sequence[tuple[tuple[int, ...], torch.dtype]], dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._model, self._group, self._weights, self._dtype = model, group, weights, dtype
        self._pieces: list[_Piece] = []
        self.nbytes = 0
        """Bytes of one expert."""
        for shape, each in sizes:
            self._pieces.append(_Piece(self.nbytes, shape, each))
            self.nbytes = -(-(self.nbytes + self._pieces[-1].nbytes) // _ALIGNED) * _ALIGNED

    def write(self, tensors: Sequence[tuple[TensorFile, Part]], octets: Tensor) -> None:
        """Write one expert's tensors into `octets`, uint8 [nbytes]."""
        octets.zero_()
        for piece, (file, part) in zip(self._pieces, tensors, strict=True):
            piece.of(octets).copy_(file[part])

    def __call__(self, octets: Tensor) -> Tensor:
        pieces, reads = iter(self._pieces), []
        for pattern, name, weight in self._weights:
            joined = weight.join({own: HeldTensor(next(pieces).of(octets)) for own in weight.tensors})
            reads.append((pattern, name, partial(_read, joined, ..., self._dtype)))
        return _run_converter(self._model, self._group, reads)[self._group.target][0]


def _read(tensor: TensorFile, part: Part, dtype: torch.dtype) -> Tensor:
    """Read a part of a tensor and cast it to `dtype` if it is floating, before any conversion, as transformers does."""
    read = tensor[part]
    return read.to(dtype) if read.is_floating_point() else read


# Codes and scales of a quantised checkpoint, unconverted, for the codecs that store these.
#
# R rows and C columns of a matrix as the model holds it.

Shipped = tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]
"""One expert: codes and scales of each matrix by name, and the unquantised parameters by name."""


class ShippedExperts:
    """Reads the experts of a checkpoint in which all expert matrices have the same quantised form.

    Args:
        sources: the checkpoint's experts, with FP8 weights as :class:`Fp8Tensor`.
        layers: L
        form: `fp8` or `mxfp4`; also the name of the codec.

    Raises:
        ExpertcastError: a matrix has another form or cannot be split by experts, or a layer has no experts.
    """

    def __init__(self, sources: ExpertSources, layers: int, form: str) -> None:
        self._sources, self._form = sources, form
        self._blocks: set[tuple[int, int]] = set()
        for layer in range(layers):
            for group in sources.groups(layer):
                self._check(group)

    @property
    def codec(self) -> str:
        """Text of the codec. For FP8 with the largest block size that divides the blocks of every matrix."""
        if self._form != FP8:
            return self._form
        rows, columns = (math.gcd(*sizes) for sizes in zip(*self._blocks, strict=True))
        return f"{FP8}:rows={rows},columns={columns}"

    def expert(self, layer: int, expert: int) -> Shipped:
        """Read one expert.

        Raises:
            ExpertcastError: weights are missing.
        """
        local = self._sources.local(layer)
        shipped: dict[str, tuple[Tensor, Tensor]] = {}
        kept: dict[str, Tensor] = {}
        for group in self._sources.groups(layer):
            form = _form(group, self._sources)
            one = slice(expert, expert + 1)
            if form == MXFP4:
                blocks, scales = (file[one][0] for file in self._sources.files_of(group))
                shipped[local[group.target]] = blocks, scales
            elif form == FP8:
                made = self._sources.convert(group, one, cast(Read, Fp8Tensor.codes))
                grids = self._sources.convert(group, one, cast(Read, Fp8Tensor.scales))
                shipped |= {local[full]: (made[full][0], grids[full][0]) for full in made}
            else:
                kept |= {local[full]: value[0] for full, value in self._sources.convert(group, one).items()}
        check_complete({full for full, name in local.items() if name not in shipped and name not in kept})
        return shipped, kept

    def _check(self, group: Group) -> None:
        parameters = self._sources.parameters
        if not self._sources.separable(group):
            raise self._refused(group.target, "are not stored expert by expert")
        form = _form(group, self._sources)
        if form != self._form:
            if form is not None or parameters[group.target].dim() > 2:
                raise self._refused(group.target, f"are not shipped in {self._form}")
            return
        if form != FP8:
            return
        files = [file for file in self._sources.files_of(group) if isinstance(file, Fp8Tensor)]
        if len({file.block for file in files}) > 1 or not all(file.whole for file in files):
            raise self._refused(group.target, f"have scales for blocks of {sorted({file.block for file in files})}")
        self._blocks.add(files[0].block)

    def _refused(self, full: str, why: str) -> ExpertcastError:
        return ExpertcastError(
            f"codec {self._form!r} needs experts in this form, but those of {full} {why}: choose codec 'raw'"
        )


def _form(group: Group, sources: ExpertSources) -> str | None:
    """Return the quantised form of all tensors of a group; None: plain floats, or several forms."""
    if group.mxfp4:
        return MXFP4
    return FP8 if all(isinstance(file, Fp8Tensor) for file in sources.files_of(group)) else None
