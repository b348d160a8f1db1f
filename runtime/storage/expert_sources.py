"""Which tensors of a checkpoint make up which experts, and reading them one expert at a time.

Names and conversions are transformers' own (its conversion mapping and weight converters), so that checkpoints with
one tensor per expert, fused ones and those of older layouts load as `from_pretrained` loads them. Files are read with
`pread`: of a mapped one every page that was looked at would count as this process's memory.

E routed experts per layer.
"""

from __future__ import annotations

import copy
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.integrations.mxfp4 import Mxfp4Dequantize
from transformers.quantizers.base import HfQuantizer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from expertcast.data.models import first_line
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.view import MoEView
from expertcast.runtime.storage.layout import expert_parameters

_MOST_READERS = 4
"""Threads that read and convert; more do not read faster, and on few cores they are in each other's way."""
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Part = slice | EllipsisType
"""Rows of a tensor, or all of it."""


class TensorFile(Protocol):
    """One tensor of a checkpoint, as `safe_open(...).get_slice` returns it; read when indexed, each time anew."""

    def get_shape(self) -> list[int]:
        """Its sizes."""

    def get_dtype(self) -> str:
        """As safetensors names it."""

    def __getitem__(self, part: Part) -> Tensor: ...


class SafetensorsFiles(ExitStack):
    """All tensors of one checkpoint (folder or hub id) by name; a context manager, since files stay open.

    Raises:
        ExpertcastError: no safetensors there, or damaged ones.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.paths = _weight_files(path)
        tensors: dict[str, TensorFile] = {}
        try:
            for file in self.paths:
                opened = self.enter_context(safe_open(file, framework="pt", device="cpu", backend="pread"))
                tensors.update({name: opened.get_slice(name) for name in opened.keys()})  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            self.close()
            raise ExpertcastError(f"cannot read the weights of {path!r}: {error}") from error
        self.tensors = {name: tensors[name] for name in sorted(tensors, key=dot_natural_key)}
        """In the order in which transformers reads them."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the first floating tensor."""
        names = (tensor.get_dtype() for tensor in self.tensors.values())
        return next((_FLOATS[name] for name in names if name in _FLOATS), torch.float32)

    def fingerprint(self) -> str:
        """SHA-256 over the files' names, sizes, times of change and headers: cheap, and other after any change."""
        digest = hashlib.sha256()
        for path in map(Path, self.paths):
            status = path.stat()
            digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
            with path.open("rb") as file:
                digest.update(file.read(int.from_bytes(file.read(8), "little")))
        return digest.hexdigest()


@dataclass(slots=True)
class _Group:
    """Checkpoint tensors that one conversion turns into one or more of a layer's parameters."""

    target: str
    """Full name of the (first) parameter."""
    converter: WeightConverter | None
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Checkpoint names by the converter's pattern, in order."""


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
        self, model: PreTrainedModel, view: MoEView, files: SafetensorsFiles, quantizer: HfQuantizer | None = None
    ) -> None:
        self._model = model
        self._files = files
        self._experts = view.shape.experts
        self.parameters: dict[str, Tensor] = {}
        """The experts' parameters (meta tensors [E, ...]) by full name."""
        self._local: list[dict[str, str]] = []
        for layer in view:
            names = {f"{layer.experts_name}.{name}": name for name in expert_parameters(layer.experts, self._experts)}
            self._local.append(names)
            self.parameters.update({full: getattr(layer.experts, name) for full, name in names.items()})
        self.others: list[str] = []
        """Checkpoint tensors that belong to no expert."""
        self._groups: dict[str, _Group] = {}
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
            group = self._groups.setdefault(target, _Group(target, converter))
            group.sources.setdefault(target if pattern is None else pattern, []).append(name)

    def read_layer(self, layer: int, views: dict[str, Tensor]) -> None:
        """Fill one layer's parameters [E, ...], given by their names in the experts module.

        Raises:
            ExpertcastError: weights are missing or of the wrong shape.
        """
        local = self._local[layer]
        groups = [self._groups[name] for name in local if name in self._groups]
        jobs = [
            partial(self._convert, group, expert, local, views)
            for group in groups
            for expert in (range(self._experts) if self._separable(group) else [None])
        ]
        missing = set(local)
        with ThreadPoolExecutor(max(1, min(_MOST_READERS, (os.cpu_count() or 1) - 1))) as pool:
            for written in pool.map(lambda job: job(), jobs):
                missing -= written
        if missing:
            raise ExpertcastError(f"the checkpoint has no weights for {sorted(missing)[0]}: it is incomplete")

    def _separable(self, group: _Group) -> bool:
        """Whether converting expert by expert gives the same as all at once."""
        counts = {len(names) for names in group.sources.values()}
        shapes = [self._files.tensors[name].get_shape() for names in group.sources.values() for name in names]
        fused = all(shape[:1] == [self._experts] for shape in shapes)
        if group.converter is None:
            return counts == {1} and fused
        first, *rest = group.converter.operations
        if isinstance(first, Mxfp4Dequantize):
            return counts == {1} and fused and not rest
        merged = isinstance(first, MergeModulelist) and first.dim == 0 and counts == {self._experts}
        return merged and all(isinstance(step, Concatenate) and step.dim > 0 for step in rest)

    def _convert(self, group: _Group, expert: int | None, local: dict[str, str], views: dict[str, Tensor]) -> set[str]:
        """Convert and write one expert (None: all); the names that were written."""
        dtype = self.parameters[group.target].dtype
        made: dict[str, Tensor | list[Tensor]] = {}
        converter = copy.deepcopy(group.converter)
        for pattern, names in group.sources.items():
            part: Part = ...
            if expert is not None and len(names) == 1:
                part = slice(expert, expert + 1)
            elif expert is not None:
                names = names[expert : expert + 1]
            for name in names:
                read = partial(_read, self._files.tensors[name], part, dtype)
                if converter is None:
                    made[group.target] = read()
                else:
                    converter.add_tensor(group.target, name, pattern, read)
        if converter is not None:
            made = converter.convert(group.target, model=self._model, config=self._model.config)
        for full, value in made.items():
            tensor = value[0] if isinstance(value, list) else value
            view = views[local[full]] if full in local else None
            rows = None if view is None else view if expert is None else view[expert : expert + 1]
            if rows is None or rows.shape != tensor.shape:
                raise ExpertcastError(
                    f"the checkpoint's {full} is {list(tensor.shape)}, the model's is "
                    f"{'not among its experts' if rows is None else list(rows.shape)}: it belongs to another model"
                )
            rows.copy_(tensor)
        return set(made)


def _read(tensor: TensorFile, part: Part, dtype: torch.dtype) -> Tensor:
    """In the dtype to load, as transformers casts: before any conversion, floating tensors only."""
    read = tensor[part]
    return read.to(dtype) if read.is_floating_point() else read


def _weight_files(path: str) -> list[str]:
    """The one file, or the shards that the index names; a hub id's files are downloaded into the hub's cache."""
    try:
        single = cached_file(path, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
        if single is not None:
            return [single]
        index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
        if index is not None:
            files, _ = get_checkpoint_shard_files(path, index)
            return list(files)
    except (OSError, ValueError, KeyError) as error:
        raise ExpertcastError(f"cannot find the weights of {path!r}: {first_line(error)}") from error
    raise ExpertcastError(
        f"{path!r} has no {SAFE_WEIGHTS_NAME}: load it with transformers and save it once with save_pretrained"
    )
