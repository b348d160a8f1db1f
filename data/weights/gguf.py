"""A GGUF file's tensors under the model's names and shapes, each read and dequantised when it is needed.

Names, layouts and arithmetic are transformers' own, so that the weights are those of `from_pretrained(gguf_file=)`:
newer architectures go through weight converters (`integrations/gguf`, torch), older ones through
`modeling_gguf_pytorch_utils` (gguf-py's numpy). No call here reads the whole file.
"""

from __future__ import annotations

import copy
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, WeightConverter, __version__
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.integrations.gguf import get_gguf_conversion_mapping, is_gguf_arch_supported
from transformers.integrations.gguf.dequant import GGML_BLOCK
from transformers.integrations.gguf.kernels import dequantize_blocks
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
from transformers.utils import is_gguf_available

from expertcast.data import ggml
from expertcast.data.machine import native_dtype
from expertcast.data.packed_experts import Piece
from expertcast.data.source import GGUF, Quantised, damaged
from expertcast.data.weights.files import ComputedTensor, FileTensor, Part, TensorFile, WeightFiles
from expertcast.predictors.messages import ExpertcastError, install_command

_UNMAPPED = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Sizes in a file's metadata that transformers does not read, with the configuration's fields."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """One tensor of the file."""

    name: str
    rows: TensorFile
    """Rows of numbers, or of bytes that are blocks of codes and scales."""
    kind: Any
    """gguf's quantisation type."""


@dataclass(frozen=True, slots=True)
class _Parameter:
    """A parameter of the model, with the tensors of the file that make it up."""

    stored: list[_Stored]
    read: Callable[[_Stored, Part], Tensor]
    """Dequantises one of them."""
    convert: Callable[[list[Tensor]], Tensor]
    """Joins the tensors' weights, or their blocks."""
    dtype: torch.dtype | None = None
    """Dtype of the weights; None: as they are read."""

    def weights(self, part: Part) -> Tensor:
        made = self.convert([self.read(tensor, part) for tensor in self.stored])
        return made if self.dtype is None else made.to(self.dtype)

    def pieces(self) -> tuple[Piece, ...] | None:
        """Return the types of the parameter's rows; None if they are not rows of the file."""
        given = [(tensor.kind.name, tensor.rows.get_shape()[-2:][0]) for tensor in self.stored]
        order, types = self._order(), {kind for kind, _ in given}
        if order is None or not ggml.TYPES.keys() >= types:
            return None
        if len(types) == 1:
            return (Piece(types.pop(), len(order)),)
        kinds = list(chain.from_iterable([kind] * rows for kind, rows in given))
        return tuple(Piece(kind, len(list(rows))) for kind, rows in groupby(kinds[row] for row in order.tolist()))

    def _order(self) -> Tensor | None:
        """Return the row of the file for each row of the parameter; None if the conversion does more than order rows.

        Rows of several tensors, or of one expert of each, are numbered one after another.
        """
        shapes = [tensor.rows.get_shape() for tensor in self.stored]
        if any(len(shape) not in (2, 3) for shape in shapes):
            return None
        probe = torch.arange(2 * sum(shape[-2] for shape in shapes), dtype=torch.float32).view(-1, 2)
        parts = torch.split(probe, [shape[-2] for shape in shapes])
        try:
            made = self.convert(
                [part if len(shape) == 2 else part[None] for part, shape in zip(parts, shapes, strict=True)]
            )
        except (IndexError, RuntimeError, ValueError):  # it orders columns
            return None
        order = (made.flatten()[::2] / 2).long()
        right = made.shape[-2:] == probe.shape and torch.equal(order.sort().values, torch.arange(len(probe)))
        return order if right and torch.equal(made.view(-1, 2), probe[order]) else None

    def blocks(self, part: Part) -> Tensor:
        """Read some rows of a matrix, or of some experts' matrices, as blocks."""
        first = self.stored[0].rows
        if len(first.get_shape()) == 2:
            order = self._order()
            assert order is not None
            ordered = torch.equal(order, torch.arange(len(order)))
            return _octets(first[part]) if ordered else _octets(first[...])[order[part]]
        read = [_octets(tensor.rows[part]) for tensor in self.stored]
        longest = max(rows.shape[-1] for rows in read)
        return self.convert([nn.functional.pad(rows, (0, longest - rows.shape[-1])) for rows in read])


def _octets(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)


class GgufFile(WeightFiles):
    """The tensors of a GGUF file.

    Args:
        paths: path of the file, or of each part.
        model: the model without weights.
        dtype: the dtype to load; None: transformers' choice, the file's for plain floats of a newer architecture, else
            float32.

    Raises:
        ExpertcastError: the file lacks a parameter, or transformers maps no tensor to one.
    """

    def __init__(self, paths: list[str], model: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
        super().__init__(paths)
        stored: dict[str, _Stored] = {}
        for path in paths:
            stored |= self._read(path)
        architecture = _metadata(paths[0])["general.architecture"]
        kinds = {each.kind.name for each in stored.values()}
        newer = is_gguf_arch_supported(architecture)
        plain = next((ggml.FLOATS[kind] for kind in ("BF16", "F16", "F32") if kind in kinds), torch.float32)
        self._dtype = dtype or (plain if newer and kinds <= set(ggml.FLOATS) else torch.float32)
        made = _converted(stored, model, architecture, self._dtype) if newer else _mapped(stored, model, architecture)
        self._made = made
        state = model.state_dict()
        self.tensors: dict[str, TensorFile] = {
            name: ComputedTensor(state[name].shape, "F32", each.weights, each.pieces, each.blocks)
            for name, each in made.items()
            if name in state
        }
        tied = getattr(model, "all_tied_weights_keys", {})
        if missing := sorted(set(state) - set(self.tensors) - set(tied)):
            self.close()
            raise ExpertcastError(
                f"{paths[0]} gives {missing[0]} no weights: it is incomplete, or transformers {__version__} does not "
                f"map all of architecture {architecture!r}; load the model from safetensors"
            )

    def _read(self, path: str) -> dict[str, _Stored]:
        file = self.enter_context(Path(path).open("rb"))  # noqa: SIM115
        return {each.name: _Stored(each.name, _rows(file, each), each.tensor_type) for each in _header(path).tensors}

    def quantised(self, name: str) -> bool:
        return any(each.kind.name not in ggml.FLOATS for each in self._made[name].stored)

    def _in_files(self) -> Iterator[FileTensor]:
        rows = (each.rows for made in self._made.values() for each in made.stored)
        return (tensor for tensor in rows if isinstance(tensor, FileTensor))

    def stored(self, name: str) -> list[TensorFile]:
        return [each.rows for each in self._made[name].stored]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model if the caller names none."""
        return self._dtype


def _rows(file: BinaryIO, tensor: Any) -> TensorFile:
    return FileTensor(file, int(tensor.data_offset), tensor.data.shape, getattr(torch, tensor.data.dtype.name))


_LONG = 1024
"""Arrays of a header with more elements are a vocabulary's."""
_COUNT = 4
"""Place of the number of an array's elements among the parts of its field in gguf."""


def _header(path: str | Path) -> Any:
    """Return gguf's reader of a file without the vocabulary; each file is read once per process.

    Raises:
        ExpertcastError: the file is cut off or damaged.
    """
    try:
        file = os.stat(path)
        return _read_header(str(path), file.st_size, file.st_mtime_ns)
    except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
        raise damaged(path, error) from error


@lru_cache(maxsize=64)
def _read_header(path: str, size: int, changed: int) -> Any:
    from gguf import GGUFValueType
    from gguf.gguf_reader import GGUFReader  # the name in `gguf` is replaced meanwhile

    class HeaderReader(GGUFReader):  # type: ignore[misc]
        """Repeats the first element of a vocabulary's arrays, which gguf would read by a million calls of Python."""

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            kind, count = struct.unpack_from("<IQ", self.data, orig_offs) if raw_type == GGUFValueType.ARRAY else (0, 0)
            if count <= _LONG or self.byte_order != "I":
                found: tuple[int, list[Any], list[int], list[Any]] = super()._get_field_parts(orig_offs, raw_type)
                return found
            first = orig_offs + 12
            nbytes, parts, places, types = super()._get_field_parts(first, kind)
            end = first + nbytes * count
            if kind == GGUFValueType.STRING:
                octets, end = memoryview(self.data), first
                for _ in range(count):
                    end += 8 + struct.unpack_from("<Q", octets, end)[0]
            head = [np.array([kind], np.uint32), np.array([count], np.uint64)]
            return end - orig_offs, head + parts, [2 + places[0]] * count, [GGUFValueType.ARRAY, *types]

        def _push_field(self, field: Any, skip_sum: bool = False) -> int:
            if len(field.data) > _LONG:
                field = field._replace(data=field.data[:1])
            return int(super()._push_field(field, skip_sum))

    return HeaderReader(path)


@contextmanager
def light_headers(paths: Iterable[str] = ()) -> Iterator[None]:
    """Let transformers read headers of GGUF files by `_header`, and make gguf's map of names once.

    Its own code reads the vocabulary and makes the map anew for each module: 85 s for a model of 48 layers.

    Raises:
        ExpertcastError: one of the files, `paths`, is cut off or damaged.
    """
    import gguf

    for path in paths:
        _header(path)
    with patch.object(gguf, "GGUFReader", _header), patch.object(gguf, "get_tensor_name_map", _name_map()):
        yield


@cache
def _name_map() -> Any:
    import gguf

    return lru_cache(maxsize=4)(gguf.get_tensor_name_map)


def _metadata(path: str) -> dict[str, Any]:
    """Return the single values of a file's metadata."""
    return {name: field.contents() for name, field in _header(path).fields.items() if len(field.data) == 1}


def gguf_form(paths: list[str], name: str) -> Quantised:
    """Return a GGUF file's form in words, from its metadata.

    Raises:
        ExpertcastError: parts of the file are missing.
    """
    from gguf import LlamaFileType

    metadata = _metadata(paths[0])
    if (parts := int(metadata.get("split.count", 1))) != len(paths):
        raise ExpertcastError(
            f"{name!r} is one of {parts} parts: join them with llama-gguf-split --merge, or give the first one by the "
            f"name that ends in -00001-of-{parts:05}.gguf"
        )
    kinds = {int(kind): kind.name for kind in LlamaFileType}
    kind = kinds.get(metadata.get("general.file_type", -1), "").removeprefix("MOSTLY_").removeprefix("ALL_")
    return Quantised(GGUF, f"{GGUF}, {kind}" if kind else GGUF)


def complete_config(config: PretrainedConfig, paths: list[str]) -> None:
    """Complete the configuration that transformers makes of a GGUF file, or of its first part.

    Quantised files have no dtype of their own: bf16 is faster where the processor multiplies in it, and takes half the
    memory.
    """
    if config.dtype is None and {tensor.tensor_type.name for tensor in _header(paths[0]).tensors} - ggml.FLOATS.keys():
        config.dtype = native_dtype()
    metadata, tokens = _metadata(paths[0]), _header(paths[0]).fields.get("tokenizer.ggml.tokens")
    if tokens is not None and f"{metadata['general.architecture']}.vocab_size" not in metadata:
        config.vocab_size = int(tokens.parts[_COUNT][0])
    for end, name in _UNMAPPED.items():
        size = metadata.get(f"{metadata['general.architecture']}.{end}")
        if size is not None and hasattr(config, name):
            setattr(config, name, int(size))
    if any(tensor.name == "output.weight" for path in paths[1:] for tensor in _header(path).tensors):
        config.tie_word_embeddings = False


def check_package(name: str) -> None:
    """Raise ExpertcastError if the package gguf, which reads GGUF files, is not installed."""
    if not is_gguf_available():
        raise ExpertcastError(f"{name!r} is a GGUF file, which takes a package: {install_command('gguf')}")


def _converted(
    stored: dict[str, _Stored], model: PreTrainedModel, architecture: str, dtype: torch.dtype
) -> dict[str, _Parameter]:
    """Return the source of each parameter, by transformers' weight converters for the architecture."""
    mapping = get_gguf_conversion_mapping(architecture, model.config)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    sources: dict[str, list[tuple[str | None, _Stored]]] = {}
    for name, tensor in stored.items():
        target, pattern = rename_source_key(name, renamings, converters)
        sources.setdefault(target, []).append((pattern, tensor))

    def weights(tensor: _Stored, part: Part) -> Tensor:
        read = tensor.rows[part]
        if tensor.kind.name in ggml.FLOATS:
            return read.view(ggml.FLOATS[tensor.kind.name])
        block, octets = GGML_BLOCK[int(tensor.kind)]
        columns = read.shape[-1] // octets * block
        flat = read.reshape(-1, read.shape[-1])
        made: Tensor = dequantize_blocks(flat, int(tensor.kind), len(flat), columns, dtype)
        return made.reshape(*read.shape[:-1], columns)

    def convert(target: str, read: list[Tensor]) -> Tensor:
        patterns = [pattern for pattern, _ in sources[target]]
        if patterns[0] is None:
            return read[0]
        converter = copy.deepcopy(by_pattern[patterns[0]])
        for pattern, tensor in zip(patterns, read, strict=True):
            converter.add_tensor(target, target, pattern, lambda tensor=tensor: tensor)
        made = converter.convert(target, model=model, config=model.config)[target]
        joined: Tensor = made[0] if isinstance(made, list) else made
        return joined

    return {
        target: _Parameter([tensor for _, tensor in found], weights, partial(convert, target), dtype)
        for target, found in sources.items()
    }


def _mapped(stored: dict[str, _Stored], model: PreTrainedModel, architecture: str) -> dict[str, _Parameter]:
    """Return the source of each parameter, by transformers' names and processors of the older architectures."""
    from gguf import dequantize

    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    with light_headers():
        names = get_gguf_hf_weights_map(model, processor)
    sources: dict[str, list[str]] = {}
    for name in stored:
        target = names.get(name) or names.get(name.removesuffix(".weight"))
        if target is not None:
            sources.setdefault(target, []).append(name)

    def weights(tensor: _Stored, part: Part) -> Tensor:
        return torch.from_numpy(dequantize(tensor.rows[part].numpy(), tensor.kind))

    def convert(target: str, read: list[Tensor]) -> Tensor:
        parsed: dict[str, dict[str, Tensor]] = {"tensors": {}}
        for name, tensor in zip(sources[target], read, strict=True):
            result = processor.process(
                weights=tensor.numpy(), name=name, tensor_key_mapping=names, parsed_parameters=parsed
            )
            if result.name is not None:
                parsed["tensors"][target] = torch.from_numpy(result.weights.copy())
        return parsed["tensors"][target]

    return {
        target: _Parameter([stored[name] for name in found], weights, partial(convert, target))
        for target, found in sources.items()
    }
