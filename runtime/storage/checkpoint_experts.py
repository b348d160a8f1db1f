"""Which tensors of a checkpoint make up which experts, and reading them one expert at a time.

Names and conversions are transformers' own (its conversion mapping and weight converters), so that checkpoints with
one tensor per expert, fused ones and those of older layouts load as `from_pretrained` loads them.

E routed experts per layer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.integrations.mxfp4 import Mxfp4Dequantize
from transformers.quantizers.base import HfQuantizer

from expertcast.data.machine import usable_processors
from expertcast.data.packed_experts import (
    Coded,
    Coding,
    Forms,
    at_once,
    form_for,
    matrices,
    packed_matrices,
    write_packed,
)
from expertcast.data.source import FP8, MXFP4
from expertcast.data.weights.blocks import CODINGS, coded_mxfp4
from expertcast.data.weights.files import ComputedTensor, Part, TensorFile, WeightFiles
from expertcast.data.weights.packed import Fp8Tensor
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import MoEView
from expertcast.runtime.storage.layout import expert_parameters

_MOST_READERS = 4
"""Threads that read and convert experts, at most."""
Read = Callable[[TensorFile, Part], Tensor]


@dataclass(slots=True)
class Group:
    """Checkpoint tensors that one conversion turns into one or more of a layer's parameters."""

    target: str
    """Full name of the (first) parameter."""
    converter: WeightConverter | None
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Checkpoint names by the converter's pattern, in order."""

    @property
    def mxfp4(self) -> bool:
        """Whether the tensors are blocks and scales in MXFP4."""
        return self.converter is not None and isinstance(self.converter.operations[0], Mxfp4Dequantize)


class ExpertSources:
    """The experts of a checkpoint.

    Args:
        model: the model without weights (meta device), in the dtype to load.
        view: its MoE layers.
        files: the checkpoint.
        quantizer: of a quantised checkpoint, set to dequantise.

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
        """The experts' parameters (meta tensors [E, ...]) by full name."""
        self._local: list[dict[str, str]] = []
        for layer in view:
            names = {f"{layer.experts_name}.{name}": name for name in expert_parameters(layer.experts, self._experts)}
            self._local.append(names)
            self.parameters.update({full: getattr(layer.experts, name) for full, name in names.items()})
        self.others: list[str] = []
        """Checkpoint tensors that belong to no expert."""
        self._groups: dict[str, Group] = {}
        self.coded = False
        """Whether codes and scales are read, for experts that are packed."""
        self._assign(get_model_conversion_mapping(self._model, hf_quantizer=quantizer))

    def _assign(self, mapping: list[WeightConverter | WeightRenaming]) -> None:
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        prefix, state = self._model.base_model_prefix, self._model.state_dict()
        for name in self._files.tensors:
            target, pattern = rename_source_key(name, renamings, converters, prefix, state)
            if target not in state and name in state:  # as transformers does: the name needs no change
                target, pattern = rename_source_key(name, [], [], prefix, state)
            if target not in self.parameters:
                self.others.append(name)
                continue
            converter = None if pattern is None else by_pattern[pattern]
            group = self._groups.setdefault(target, Group(target, converter))
            group.sources.setdefault(target if pattern is None else pattern, []).append(name)
        check_complete({name for name, group in self._groups.items() if group.mxfp4 and len(group.sources) < 2})

    def read_layer(self, layer: int, views: dict[str, Tensor]) -> None:
        """Fill one layer's parameters [E, ...], given by their names in the experts module.

        Raises:
            ExpertcastError: weights are missing or of the wrong shape.
        """
        local = self._local[layer]
        jobs = [
            partial(self._convert, layer, group, experts, views)
            for group in self.groups(layer)
            for experts in self._portions(group)
        ]
        missing = set(local)
        with _converters() as pool:
            for written in pool.map(lambda job: job(), jobs):
                missing -= written
        check_complete(missing)

    def _portions(self, group: Group) -> list[slice | None]:
        """Split a layer into the experts that are converted at once; one portion, None, where they are inseparable."""
        if not self.separable(group):
            return [None]
        step = at_once(self.parameters[group.target]) if self.coded else 1
        return [slice(first, min(first + step, self._experts)) for first in range(0, self._experts, step)]

    def forms(self) -> Forms:
        """Packed forms of the checkpoint's codes and scales, by the parameter's name: one form for all layers.

        Raises:
            ExpertcastError: a matrix's codes cannot be read, or the kernel takes no such matrix.
        """
        codings: dict[str, list[Coding]] = {}
        for layer, experts in enumerate(self._modules):
            for name in matrices(experts, self._experts):
                full = next(full for full, own in self._local[layer].items() if own == name)
                groups = [self._groups[full]] if full in self._groups else self.groups(layer)
                codings.setdefault(name, []).append(Coding.over(map(self._coding, groups)))
        return {
            name: form_for(self._modules[0], matrices(self._modules[0], self._experts)[name], *Coding.over(found))
            for name, found in codings.items()
        }

    def _coding(self, group: Group) -> Coding:
        if group.mxfp4:
            return CODINGS["MXFP4"]
        files = self.files_of(group)
        codings = [file.coding for file in files if isinstance(file, ComputedTensor) and file.coding is not None]
        if len(codings) < len(files):
            raise ExpertcastError(
                f"experts='packed' takes codes of 4 and 8 bits as a checkpoint ships them, and {group.target} is not "
                "shipped so: give experts='expanded', 'int4' or 'int8'"
            )
        return Coding.over(codings)

    def local(self, layer: int) -> dict[str, str]:
        """Full names of one layer's parameters, with their names in the experts module."""
        return self._local[layer]

    def groups(self, layer: int) -> list[Group]:
        """What makes one layer's parameters."""
        return [self._groups[name] for name in self._local[layer] if name in self._groups]

    def files_of(self, group: Group) -> list[TensorFile]:
        """All tensors of a group."""
        return [self._files.tensors[name] for names in group.sources.values() for name in names]

    def separable(self, group: Group) -> bool:
        """Whether converting expert by expert gives the same as all at once."""
        counts = {len(names) for names in group.sources.values()}
        fused = all(file.get_shape()[:1] == [self._experts] for file in self.files_of(group))
        if group.converter is None:
            return counts == {1} and fused
        first, *rest = group.converter.operations
        if group.mxfp4:
            return counts == {1} and fused and not rest
        merged = isinstance(first, MergeModulelist) and first.dim == 0 and counts == {self._experts}
        return merged and all(isinstance(step, Concatenate) and step.dim > 0 for step in rest)

    def made(self, group: Group, experts: slice | None, read: Read | None = None) -> dict[str, Tensor]:
        """Convert some experts (None: all); parameters [n, ...] by full name.

        Args:
            group: one of :meth:`groups`; a separable one where experts are given.
            experts: their numbers in the layer.
            read: what is converted of a tensor; None: the tensor, in the dtype to load.
        """
        read = read or partial(_read, dtype=self.parameters[group.target].dtype)
        converter = copy.deepcopy(group.converter)
        for pattern, names in group.sources.items():
            part: Part = ...
            if experts is not None and len(names) == 1:
                part = experts
            elif experts is not None:
                names = names[experts]
            for name in names:
                if converter is None:
                    return {group.target: read(self._files.tensors[name], part)}
                converter.add_tensor(group.target, name, pattern, partial(read, self._files.tensors[name], part))
        assert converter is not None
        made = converter.convert(group.target, model=self._model, config=self._model.config)
        return {full: value[0] if isinstance(value, list) else value for full, value in made.items()}

    def _convert(self, layer: int, group: Group, experts: slice | None, views: dict[str, Tensor]) -> set[str]:
        """Convert and write some experts (None: all); the names that were written."""
        first, last, _ = (experts or slice(None)).indices(self._experts)
        local, module = self._local[layer], self._modules[layer]
        packed = packed_matrices(module)
        coded = self.coded and local.get(group.target) in packed
        made = self._made_coded(group, experts) if coded else self.made(group, experts)
        for full, matrices_EDF in made.items():
            shape = [last - first, *self.parameters[full].shape[1:]] if full in local else None
            if shape != list(matrices_EDF.shape):
                raise ExpertcastError(
                    f"the checkpoint's {full} is {list(matrices_EDF.shape)}, the model's is "
                    f"{'not among its experts' if shape is None else shape}: it belongs to another model"
                )
            if local[full] in packed:
                write_packed(module, local[full], matrices_EDF, views, first)
            else:
                views[local[full]][first:last].copy_(cast(Tensor, matrices_EDF))
        return set(made)

    def _made_coded(self, group: Group, experts: slice | None) -> Mapping[str, Coded]:
        """As :meth:`made`, from codes and scales: each goes through the conversion."""
        if group.mxfp4:
            octets, exponents = (file[experts or ...] for file in self.files_of(group))
            return {group.target: coded_mxfp4(octets, exponents).mT}
        coding = self._coding(group)
        held: dict[int, Coded] = {}

        def read(field: str, file: TensorFile, part: Part) -> Tensor:
            assert isinstance(file, ComputedTensor)
            assert file.coded is not None
            if id(file) not in held:
                held[id(file)] = file.coded(part).fitted(coding)
            found: Tensor = getattr(held[id(file)], field)
            return found

        codes, scales = (self.made(group, experts, partial(read, field)) for field in ("codes", "scales"))
        zeros = {} if coding.symmetric else self.made(group, experts, partial(read, "zeros"))
        return {full: Coded(coding.bits, codes[full], scales[full], zeros.get(full)) for full in codes}


@contextmanager
def _converters() -> Iterator[ThreadPoolExecutor]:
    """Yield threads whose tensor operations take one processor each: operations on one expert are short."""
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(
            min(_MOST_READERS, usable_processors()), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)  # a thread's number is also that of all threads to come


def check_complete(missing: set[str]) -> None:
    """That no parameter is missing, by full names.

    Raises:
        ExpertcastError: one is.
    """
    if missing:
        raise ExpertcastError(f"the checkpoint has no weights for {sorted(missing)[0]}: it is incomplete")


def _read(tensor: TensorFile, part: Part, dtype: torch.dtype) -> Tensor:
    """In the dtype to load, as transformers casts: before any conversion, floating tensors only."""
    read = tensor[part]
    return read.to(dtype) if read.is_floating_point() else read


# Experts as a quantised checkpoint ships them: codes and scales, for the codecs that move these.
#
# R rows and C columns of a matrix as the model holds it.

Shipped = tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]
"""Of one expert: codes and scales of each matrix, and the other parameters as they are, both by name."""


class ShippedExperts:
    """The experts of a checkpoint whose matrices all lie in one quantised form.

    Args:
        sources: the checkpoint's experts, with FP8 weights as :class:`Fp8Tensor`.
        layers: L
        form: `fp8` or `mxfp4`; also the name of the codec.

    Raises:
        ExpertcastError: a matrix lies in another form, cannot be taken apart by experts, or a layer has no experts.
    """

    def __init__(self, sources: ExpertSources, layers: int, form: str) -> None:
        self._sources, self._form = sources, form
        self._blocks: set[tuple[int, int]] = set()
        for layer in range(layers):
            groups = sources.groups(layer)
            if not groups:
                check_complete(set(sources.local(layer)))
            for group in groups:
                self._check(group)

    @property
    def codec(self) -> str:
        """The codec's text: FP8 with the largest blocks of which those of every matrix consist."""
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
                made = self._sources.made(group, one, cast(Read, Fp8Tensor.codes))
                grids = self._sources.made(group, one, cast(Read, Fp8Tensor.scales))
                shipped |= {local[full]: (made[full][0], grids[full][0]) for full in made}
            else:
                kept |= {local[full]: value[0] for full, value in self._sources.made(group, one).items()}
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
            f"codec {self._form!r} moves experts as they are shipped, and those of {full} {why}: choose codec 'raw'"
        )


def _form(group: Group, sources: ExpertSources) -> str | None:
    """In which form all tensors of a group lie; None: in plain floats, or in several forms."""
    if group.mxfp4:
        return MXFP4
    return FP8 if all(isinstance(file, Fp8Tensor) for file in sources.files_of(group)) else None
