"""Reads the experts of a checkpoint, one expert at a time where the checkpoint can be split by experts.

Names and conversions come from transformers' conversion mapping and weight converters. So checkpoints with one tensor
per expert, with fused tensors, and of older layouts load as with `from_pretrained`.

E routed experts per layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby

import torch
from torch import Tensor
from transformers import Concatenate, PreTrainedModel
from transformers.quantizers import HfQuantizer

from expertcast.data import ggml
from expertcast.data.machine import run_alone, usable_processors
from expertcast.data.packed_experts import (
    BlockForm,
    Forms,
    OrderedRows,
    Piece,
    at_once,
    matrices,
    packed_matrices,
    sizes_of,
    write_packed,
)
from expertcast.data.weights.blocks import mxfp4_blocks
from expertcast.data.weights.files import ComputedTensor, Part, TensorFile, WeightFiles, check_complete
from expertcast.data.weights.groups import Group, grouped
from expertcast.predictors.messages import ExpertcastError
from expertcast.predictors.view import MoEView
from expertcast.runtime.storage.layout import BlockLayout, expert_parameters

_MOST_READERS = 4
"""Maximum number of threads that read and convert experts."""
_MOST_PIECES = 4
"""Largest number of types of neighbouring rows in a matrix; each is a product of its own."""
_REMEDY = "give experts='expanded', 'int4' or 'int8'"
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
        self.as_shipped = False
        """Whether packed weights are the checkpoint's blocks, instead of rounded weights."""
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

    def ordered(self, layer: int, layout: BlockLayout) -> list[OrderedRows]:
        """Return the rows of a layer's block whose order in memory is not that of files."""
        forms = {own.name: own.form for own in packed_matrices(self._modules[layer]).values()}
        fields = [field for field in layout.fields_of(layer) if field.name in forms]
        return [rows for field in fields for rows in forms[field.name].ordered(field.offset)]

    def _portions(self, group: Group) -> list[slice | None]:
        """Split a layer into ranges of experts to convert at a time; [None] if the group is inseparable."""
        if not self.separable(group):
            return [None]
        step = at_once(self.parameters[group.target]) if packed_matrices(self._modules[0]) else 1
        return [slice(first, min(first + step, self._experts)) for first in range(0, self._experts, step)]

    def forms(self) -> list[Forms]:
        """Return the packed form of each matrix of a quantised checkpoint, by layer and by the parameter's name.

        Raises:
            ExpertcastError: the weights are plain floats, no type of ggml holds them, or the experts of one layer have
                different forms.
        """
        names = matrices(self._modules[0], self._experts)
        found: list[Forms] = [{name: self._form_of(layer, name) for name in names} for layer in range(len(self._local))]
        if not any(piece.kind not in ggml.FLOATS for own in found for form in own.values() for piece in form.pieces):
            raise self._in_floats(next(iter(self.parameters)))
        return found

    def _form_of(self, layer: int, name: str) -> BlockForm:
        full = next(full for full, own in self._local[layer].items() if own == name)
        module = self._modules[layer]
        outputs, inputs = sizes_of(module, matrices(module, self._experts)[name])
        groups = [self._groups[full]] if full in self._groups else self.groups(layer)
        check_complete([] if groups else [full])
        kinds = next((found[full] for group in groups if full in (found := self._kinds(group))), None)
        pieces = [Piece(kind, len(list(rows))) for kind, rows in groupby(kinds or ())]
        if kinds is None or len(kinds) != outputs or len(pieces) > _MOST_PIECES:
            raise self._without_blocks(full)
        return BlockForm(tuple(pieces), inputs)

    def _kinds(self, group: Group) -> dict[str, list[str]]:
        """Return the type of each row of an expert's matrices by the parameter's full name.

        Numbers of types go through the conversion in place of rows.
        """
        if group.mxfp4:
            return {group.target: ["MXFP4"] * self.files_of(group)[0].get_shape()[1]}
        kinds = list(ggml.TYPES)

        def read(file: TensorFile, part: Part) -> Tensor:
            pieces = file.pieces() if isinstance(file, ComputedTensor) else None
            if pieces is None:
                raise self._without_blocks(group.target) if self.quantised else self._in_floats(group.target)
            rows = torch.cat([torch.full((outputs, 1), kinds.index(kind)) for kind, outputs in pieces])
            return rows if len(file.get_shape()) == 2 else rows.expand(self._experts, -1, -1)

        found = {}
        for full, number_EN1 in self.convert(group, None, read).items():
            if bool((number_EN1 != number_EN1[:1]).any()):
                raise ExpertcastError(f"experts of {full} are shipped in different forms: {_REMEDY}")
            found[full] = [kinds[number] for number in number_EN1[0].flatten().tolist()]
        return found

    @staticmethod
    def _without_blocks(full: str) -> ExpertcastError:
        return ExpertcastError(f"no blocks of ggml hold {full} as it is shipped: {_REMEDY}")

    @staticmethod
    def _in_floats(full: str) -> ExpertcastError:
        return ExpertcastError(f"experts='packed' needs quantised weights, but {full} is shipped in floats: {_REMEDY}")

    @property
    def quantised(self) -> bool:
        """Whether the checkpoint has any quantised expert weight."""
        groups = [group for layer in range(len(self._modules)) for group in self.groups(layer)]
        names = [name for group in groups for own in group.sources.values() for name in own]
        return any(group.mxfp4 for group in groups) or any(map(self._files.quantised, names))

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
        if self.as_shipped and local.get(group.target) in packed:
            blocks = self._convert_blocks(group, experts, packed[local[group.target]].form)
            for full, rows in blocks.items():
                matrix = packed[local[full]]
                matrix.form.put(rows, views[matrix.name][first:last])
            return set(blocks)
        made = self.convert(group, experts)
        for full, matrices_EDF in made.items():
            self._check_shape(local, full, list(matrices_EDF.shape), last - first)
            if local[full] in packed:
                write_packed(module, local[full], views, matrices_EDF, first)
            else:
                views[local[full]][first:last].copy_(matrices_EDF)
        return set(made)

    def _check_shape(self, local: Mapping[str, str], full: str, found: list[int], experts: int) -> None:
        shape = [experts, *self.parameters[full].shape[1:]] if full in local else None
        if shape != found:
            raise ExpertcastError(
                f"the checkpoint's {full} is {found}, the model's is "
                f"{'not among its experts' if shape is None else shape}: it belongs to another model"
            )

    def _convert_blocks(self, group: Group, experts: slice | None, form: BlockForm) -> dict[str, Tensor]:
        """Convert like :meth:`convert`, but rows of blocks, uint8 [n, N, bytes of the longest], instead of weights."""
        if group.mxfp4:
            codes, exponents = (file[experts or ...] for file in self.files_of(group))
            return {group.target: mxfp4_blocks(codes, exponents)}

        def read(file: TensorFile, part: Part) -> Tensor:
            assert isinstance(file, ComputedTensor)
            assert file.blocks is not None
            blocks = file.blocks(part)
            if blocks.shape[-1] not in (ggml.row_bytes(kind, form.inputs) for kind, _ in form.pieces):
                raise ExpertcastError(f"the checkpoint's {group.target} has rows of another length than the model's")
            return torch.nn.functional.pad(blocks, (0, form.row_bytes - blocks.shape[-1]))

        return self.convert(group, experts, read)


def _converters() -> ThreadPoolExecutor:
    """Return a thread pool that runs torch without gradients, and with one thread per operation: these are short."""

    def start() -> None:
        run_alone()
        torch.set_grad_enabled(False)  # holds for one thread

    return ThreadPoolExecutor(min(_MOST_READERS, usable_processors()), initializer=start)


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


def _read(tensor: TensorFile, part: Part, dtype: torch.dtype) -> Tensor:
    """Read a part of a tensor and cast it to `dtype` if it is floating, before any conversion, as transformers does."""
    read = tensor[part]
    return read.to(dtype) if read.is_floating_point() else read
