"""The files of a checkpoint: its tensors by name, each read when it is needed, with `pread`.

Of a mapped file every page that was looked at would count as this process's memory.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from pathlib import Path
from types import EllipsisType
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.core_model_loading import dot_natural_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from expertcast.data.models import first_line
from expertcast.predictors.errors import ExpertcastError

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
