"""Where a model comes from: a folder, a hub id or a GGUF file, with what `from_pretrained` takes beside."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.utils.hub import cached_file

from expertcast.checkpoints.bundled import resolve_model
from expertcast.predictors.errors import ExpertcastError, first_line

_FILES = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies", "subfolder")
"""Options of `from_pretrained` that say where files are found."""
_CONFIG = ("trust_remote_code", "code_revision", "gguf_file")
_MODEL = ("attn_implementation", "experts_implementation")
SOURCE_OPTIONS = (*_FILES, *_CONFIG, *_MODEL)
"""Options of `from_pretrained` that are passed on."""
_SO_ANYWAY = ("use_safetensors", "low_cpu_mem_usage", "weights_only")
"""Options that, when true, ask for what is done in any case."""
_OTHERWISE = {
    "torch_dtype": "say dtype",
    "device_map": "say device, for where the model computes; its experts lie in host memory or on disk",
    "max_memory": "say memory, for what the experts' slots take",
    "offload_folder": "say store='disk' and store_folder",
    "quantization_config": "what a checkpoint's own configuration says is dequantised, see `expertcast inspect`",
    "state_dict": "load the model with transformers and call expertcast.offload",
    "key_mapping": "load the model with transformers and call expertcast.offload",
    "adapter_kwargs": "load the model, then its adapter",
    "variant": "give the folder of those files",
    "tp_plan": "a model is offloaded to one device",
    "tp_size": "a model is offloaded to one device",
    "device_mesh": "a model is offloaded to one device",
    "distributed_config": "a model is offloaded to one device",
    **dict.fromkeys(_SO_ANYWAY, "weights are read from safetensors, tensor by tensor: leave it out"),
}
"""Options that cannot be passed on, and what to do instead."""


@dataclass(frozen=True)
class ModelSource:
    """A model's files, wherever they lie."""

    name: str
    """As the user gave it."""
    path: str
    """Folder or hub id."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `SOURCE_OPTIONS`, those that were given."""

    @classmethod
    def of(cls, name: str | Path, options: Mapping[str, Any] | None = None) -> ModelSource:
        """Of a folder, a hub id, `reference` or a GGUF file's path; nothing is read.

        Raises:
            ExpertcastError: an option that `from_pretrained` takes and this does not, or no such GGUF file.
        """
        given = {key: value for key, value in (options or {}).items() if not (key in _SO_ANYWAY and value)}
        for key in given:
            if key in _OTHERWISE:
                raise ExpertcastError(f"{key} is not passed on to from_pretrained: {_OTHERWISE[key]}")
            if key not in SOURCE_OPTIONS:
                raise ExpertcastError(f"unknown option {key!r}: choose from {', '.join(SOURCE_OPTIONS)}")
        given = {key: value for key, value in given.items() if value is not None}
        if not isinstance(name, str | os.PathLike):
            raise ExpertcastError(
                f"a {type(name).__name__} is no folder, hub id or GGUF file: give a loaded model to expertcast.offload"
            )
        file = Path(name)
        if file.suffix == ".gguf":
            if "gguf_file" in given:
                raise ExpertcastError(
                    f"{name} and gguf_file both name a file: give its folder or hub id with gguf_file"
                )
            if not file.is_file():
                raise ExpertcastError(f"there is no file {name}: give a hub id's with gguf_file=")
            return cls(str(name), str(file.parent), {**given, "gguf_file": file.name})
        return cls(str(name), resolve_model(str(name)), given)

    @staticmethod
    def split(fields: Mapping[str, object], others: Sequence[str]) -> tuple[dict[str, object], dict[str, object]]:
        """Options of `from_pretrained` (passed on, or refused by :meth:`of`), and other fields.

        Args:
            fields: by name.
            others: names of the latter.

        Raises:
            ExpertcastError: a name that is neither.
        """
        for name in fields:
            if name not in others and name not in SOURCE_OPTIONS and name not in _OTHERWISE:
                raise ExpertcastError(
                    f"unknown option {name!r}: choose from {', '.join(others)}, or of from_pretrained's from "
                    f"{', '.join(SOURCE_OPTIONS)}"
                )
        own = {name: value for name, value in fields.items() if name not in others}
        return own, {name: value for name, value in fields.items() if name in others}

    @property
    def files(self) -> dict[str, Any]:
        """The options with which a file is found."""
        return {key: value for key, value in self.options.items() if key in _FILES}

    @property
    def config(self) -> dict[str, Any]:
        """The options with which a configuration or a tokenizer is loaded."""
        return {key: value for key, value in self.options.items() if key not in _MODEL}

    @property
    def model(self) -> dict[str, Any]:
        """The options with which a model is made of its configuration."""
        kept = (*_MODEL, "trust_remote_code", "code_revision")
        return {key: value for key, value in self.options.items() if key in kept}

    def failure(self, error: Exception, what: str = "cannot load model") -> ExpertcastError:
        """What went wrong in a line; that there is no such folder comes before what the hub says."""
        reason = first_line(error)
        if not os.path.exists(self.path):
            try:
                validate_repo_id(self.path)
                reason = f"no such folder, and from the hub: {reason}" if isinstance(error, OSError) else reason
            except HFValidationError:
                reason = "no such folder; give the folder of a model, or its hub id"
        return ExpertcastError(f"{what} {self.name!r}: {reason}")

    def file(self, name: str) -> str | None:
        """The path of one of its files, downloaded where it has to be; None: there is none.

        Raises:
            ExpertcastError: no such folder or hub id, or it cannot be reached.
        """
        try:
            found: str | None = cached_file(self.path, name, _raise_exceptions_for_missing_entries=False, **self.files)
        except (OSError, ValueError) as error:
            raise self.failure(error) from error
        return found

    def gguf(self) -> str | None:
        """The path of its GGUF file; None: it is none.

        Raises:
            ExpertcastError: the file is not there.
        """
        name = self.options.get("gguf_file")
        if name is None:
            return None
        if (path := self.file(str(name))) is None:
            raise ExpertcastError(f"cannot load model {self.name!r}: it has no file {name}")
        return path
