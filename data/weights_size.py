"""What a checkpoint's weights will take in memory, by the headers of its files: asked before any of them is read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PretrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from expertcast.data.memory import available_memory
from expertcast.predictors.errors import ExpertcastError
from expertcast.predictors.plain import Json

_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
"""Of plain floats, which take the model's dtype; others are taken for dequantised."""
_PACKED = {"U8": 2}
"""Values in one element of a quantised checkpoint."""


def check_room(model_id: str, path: str, config: PretrainedConfig, dtype: torch.dtype | None) -> None:
    """Say that a model does not fit, before the system ends the process that loads it.

    Args:
        model_id, path: as it is called, and where it lies.
        config: of the model.
        dtype: it is loaded in; None: the configuration's.

    Raises:
        ExpertcastError: its weights need more memory than there is.
    """
    available = available_memory()
    needed = None if available is None else loaded_bytes(path, dtype or getattr(config, "dtype", None))
    if available is not None and needed is not None and needed > available:
        raise ExpertcastError(
            f"{model_id!r} needs {needed} bytes of memory and {available} are available: offload it by --memory and "
            "--store-folder (in Python load_offloaded with store='disk')"
        )


def loaded_bytes(path: str, dtype: torch.dtype | None) -> int | None:
    """Bytes of a checkpoint's weights once they are loaded; None where its files are not at hand.

    Args:
        path: folder or hub id; of the latter, what was downloaded before.
        dtype: of the model; None: plain floats stay as they are.
    """
    total = 0
    for header in _headers(path):
        if header is None:
            return None
        for name, entry in header.items():
            if name != "__metadata__" and not (entry["dtype"] == "U8" and name.endswith("_scales")):  # mxfp4's: they go
                total += math.prod(entry["shape"]) * _bits(entry["dtype"], dtype) // 8
    return total or None


def _bits(stored: str, dtype: torch.dtype | None) -> int:
    """Of one stored element, loaded."""
    loaded = 16 if dtype is None else 8 * dtype.itemsize
    if stored in _BITS:
        return _BITS[stored] if dtype is None else loaded
    if stored.startswith("F8_E8M0"):  # scales: they go
        return 0
    return loaded * _PACKED.get(stored, 1) if stored.startswith("F8") or stored in _PACKED else 64


def _headers(path: str) -> Iterator[Json | None]:
    """Of every file of weights; None for one that is not at hand."""
    single = _local(path, SAFE_WEIGHTS_NAME)
    if single is not None:
        yield _header(single)
        return
    index = _local(path, SAFE_WEIGHTS_INDEX_NAME)
    try:
        shards = [] if index is None else sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError):  # whoever loads it says what is wrong
        shards = []
    for shard in shards:
        file = _local(path, shard)
        yield None if file is None else _header(file)


def _local(path: str, name: str) -> Path | None:
    try:
        found = cached_file(
            path, name, local_files_only=True, _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False, _raise_exceptions_for_gated_repo=False,
        )  # fmt: skip
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found)


def _header(path: Path) -> Json | None:
    """A safetensors file's own; None for a damaged one, of which whoever loads it says what is wrong."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > path.stat().st_size:
                return None
            header: Json = json.loads(file.read(length))
            return header
    except (OSError, ValueError):
        return None
