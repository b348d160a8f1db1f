"""Location of a model: a folder, a hub id or a GGUF file, with options of `from_pretrained`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PretrainedConfig
from transformers.utils import cached_file

from expertcast.checkpoints.bundled import resolve_model
from expertcast.predictors.messages import ExpertcastError, first_line

# Releases of transformers

OLDEST = (5, 23)
"""Oldest supported release. Older routers do not all return logits, weights and ids, and some experts lack the
decorator."""


def check_release(doing: str) -> None:
    """Raise an error if the installed `transformers` is too old.

    Args:
        doing: first word of the error message, such as "loading".

    Raises:
        ExpertcastError: the release is too old.
    """
    here = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if here < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise ExpertcastError(
            f"{doing} a transformers model needs transformers {needed} or newer, found {transformers.__version__}: "
            "pip install -U transformers"
        )


# Quantised formats, as configurations describe them; no weight is read

CONFIG_SECTION = "quantization_config"
"""Section of config.json that describes a quantised checkpoint."""
FP8, MXFP4 = "fp8", "mxfp4"
GPTQ, AWQ, COMPRESSED, BITSANDBYTES, GGUF = "gptq", "awq", "compressed-tensors", "bitsandbytes", "gguf"
_FORMATS = {
    GPTQ: ("gptq", "gptq_v2"),
    AWQ: ("gemm",),
    COMPRESSED: ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision"),
}
"""Supported layouts of packed tensors, by method."""
_NUMBERS = {("int", 2), ("int", 4), ("int", 8), ("float", 8)}
"""Supported types and bits of compressed-tensors."""
_BITS = {GPTQ: (2, 4, 8), AWQ: (4,)}
_REMEDY = (
    "load a checkpoint in bf16, fp16, fp32, FP8, MXFP4, GPTQ, AWQ, bitsandbytes, compressed-tensors (integers or FP8) "
    "or GGUF"
)


@dataclass(frozen=True)
class Quantised:
    """A quantised format that is dequantised on loading."""

    method: str
    """Name in configurations, or `gguf`."""
    kind: str
    """Description for messages."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Quantisation section of the configuration."""


def quantised_form(config: PretrainedConfig, name: str) -> Quantised | None:
    """Return the quantised format of a checkpoint; None for plain floats.

    Args:
        config: the model's configuration.
        name: name of the model, for the error message.

    Raises:
        ExpertcastError: the format is not supported.
    """
    settings = quantisation_settings(config)
    if settings is None:
        return None
    method, kind = _method(settings), _kind(settings)
    if not _is_read(method, settings):
        raise ExpertcastError(f"{name!r} is quantised ({kind}): {_REMEDY}")
    return Quantised(method, kind, settings)


def quantisation_settings(config: PretrainedConfig) -> dict[str, Any] | None:
    """Return the quantisation section of a configuration, in the places where transformers looks; None without one."""
    for each in (config, config.get_text_config()):
        for name in (CONFIG_SECTION, "compression_config"):  # the second in old compressed-tensors checkpoints
            found = getattr(each, name, None)
            if found is not None:
                return dict(found if isinstance(found, Mapping) else found.to_dict())
    return None


def forget_quantisation(config: PretrainedConfig) -> None:
    """Delete the quantisation section, so that the configuration builds a plain model."""
    for each in (config, config.get_text_config()):
        for name in (CONFIG_SECTION, "compression_config"):
            if getattr(each, name, None) is not None:
                delattr(each, name)


def _is_read(method: str, settings: Mapping[str, Any]) -> bool:
    if method in (FP8, MXFP4):
        return True
    if method == BITSANDBYTES:
        return bool(settings.get("load_in_4bit") or settings.get("load_in_8bit"))
    if method not in _FORMATS or _format(method, settings) not in _FORMATS[method]:
        return False
    if method in _BITS:
        return settings.get("bits") in _BITS[method]
    groups = _groups(settings)
    return (
        not _beside(settings)
        and bool(groups)
        and all((weights["type"], weights["num_bits"]) in _NUMBERS for weights in groups)
        and all(_layout(group, settings) in _FORMATS[COMPRESSED] for group in settings["config_groups"].values())
    )


def _beside(settings: Mapping[str, Any]) -> list[str]:
    """Return further transformations of the weights by compressed-tensors, by name."""
    done = str(settings.get("quantization_status") or "compressed")
    words = [] if done == "compressed" else [done]
    words += ["sparse"] * ((settings.get("sparsity_config") or {}).get("format", "dense") != "dense")
    return words + ["transformed"] * bool((settings.get("transform_config") or {}).get("config_groups"))


def _format(method: str, settings: Mapping[str, Any]) -> str:
    """Return the layout of the packed tensors; by default the one that transformers assumes."""
    if method == GPTQ:
        return str(settings.get("checkpoint_format") or settings.get("format") or GPTQ)
    if method == AWQ:
        return str(settings.get("format") or settings.get("version") or "gemm").lower()
    return str(settings.get("format") or "")


def _groups(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the weight settings of each group of compressed-tensors, with defaults filled in."""
    groups = (settings.get("config_groups") or {}).values()
    return [
        {"type": "int", "num_bits": 8, **((group.get("weights") if isinstance(group, Mapping) else None) or {})}
        for group in groups
    ]


def _layout(group: object, settings: Mapping[str, Any]) -> str:
    """Return the storage layout of a group of compressed-tensors."""
    if not isinstance(group, Mapping) or not group.get("weights"):
        return ""
    return str(group.get("format") or settings.get("format") or "")


def _method(settings: Mapping[str, Any]) -> str:
    """Return the method's name; old bitsandbytes configurations omit it."""
    old = settings.get("load_in_4bit") or settings.get("load_in_8bit")
    return str(settings.get("quant_method") or (BITSANDBYTES if old else "unknown method"))


def _kind(settings: Mapping[str, Any]) -> str:
    """Describe a format: method, bits, and the layout if it is not the usual one."""
    method = _method(settings)
    bits = settings.get("bits") or (settings.get("load_in_4bit") and 4) or (settings.get("load_in_8bit") and 8)
    words = [method]
    if method == COMPRESSED:
        words += [*_beside(settings), _format(COMPRESSED, settings)]
        found = sorted({str(weights["num_bits"]) for weights in _groups(settings)})
        bits = " and ".join(found)
    elif method in _FORMATS and _format(method, settings) != _FORMATS[method][0]:
        words.append(_format(method, settings))
    if method in _BITS and not bits:
        words.append(f"without bits in its {CONFIG_SECTION}")
    if bits:
        words.append(f"{bits} bits")
    return ", ".join(word for word in words if word)


ADAPTER = "adapter_config.json"
_FILES = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies", "subfolder")
"""Options of `from_pretrained` that locate files."""
_CONFIG = ("trust_remote_code", "code_revision", "gguf_file")
_MODEL = ("attn_implementation", "experts_implementation")
SOURCE_OPTIONS = (*_FILES, *_CONFIG, *_MODEL)
"""Options of `from_pretrained` that are supported."""
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""Name of a part of a split GGUF file."""
_SO_ANYWAY = ("use_safetensors", "low_cpu_mem_usage", "weights_only")
"""Options whose true value is the only behaviour here."""
_OTHERWISE = {
    "torch_dtype": "use dtype",
    "device_map": "use device, for the model's computation; experts are in host memory or on disk",
    "max_memory": "use memory, which limits the experts' slots",
    "offload_folder": "use store='disk' and store_folder",
    "quantization_config": "a checkpoint's own quantisation is dequantised, see `expertcast inspect`",
    "state_dict": "load the model with transformers and call expertcast.offload",
    "key_mapping": "load the model with transformers and call expertcast.offload",
    "adapter_kwargs": "load the model, then its adapter",
    "variant": "use the folder of those files",
    "tp_plan": "a model is offloaded to one device",
    "tp_size": "a model is offloaded to one device",
    "device_mesh": "a model is offloaded to one device",
    "distributed_config": "a model is offloaded to one device",
    **dict.fromkeys(_SO_ANYWAY, "weights are read from safetensors, tensor by tensor: leave it out"),
}
"""Unsupported options of `from_pretrained`, with the remedy."""


@dataclass(frozen=True)
class ModelSource:
    """Location of a model's files."""

    name: str
    """Name as the user wrote it."""
    path: str
    """Folder or hub id."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options out of `SOURCE_OPTIONS`."""

    @classmethod
    def of(cls, name: str | Path, options: Mapping[str, Any] | None = None) -> ModelSource:
        """Resolve a folder, a hub id, `reference` or the path of a GGUF file, without reading weights.

        Raises:
            ExpertcastError: an option is unsupported or unknown, or the GGUF file does not exist.
        """
        chosen = {key: value for key, value in (options or {}).items() if not (key in _SO_ANYWAY and value)}
        for key in chosen:
            if key in _OTHERWISE:
                raise ExpertcastError(f"{key} is not supported: {_OTHERWISE[key]}")
            if key not in SOURCE_OPTIONS:
                raise ExpertcastError(f"unknown option {key!r}: choose from {', '.join(SOURCE_OPTIONS)}")
        chosen = {key: value for key, value in chosen.items() if value is not None}
        if not isinstance(name, str | os.PathLike):
            raise ExpertcastError(
                f"a {type(name).__name__} is not a folder, hub id or GGUF file: pass a loaded model to "
                "expertcast.offload"
            )
        file = Path(name)
        if file.suffix != ".gguf" and os.path.isfile(name):
            gguf = (
                "rename or link it to a name that ends in .gguf" if _starts(file, b"GGUF") else "give a model's folder"
            )
            raise ExpertcastError(f"{name} is a file, and only GGUF files whose names end in .gguf are read: {gguf}")
        if file.suffix == ".gguf":
            if "gguf_file" in chosen:
                raise ExpertcastError(f"{name} and gguf_file both name a file: use its folder or hub id with gguf_file")
            if not file.is_file():
                raise ExpertcastError(
                    f"no such file: {name}; download a file of a hub repository, or name it in Python by gguf_file="
                )
            return cls(str(name), str(file.parent), {**chosen, "gguf_file": file.name})
        return cls(str(name), resolve_model(str(name)), chosen)

    @staticmethod
    def split(fields: Mapping[str, object], others: Sequence[str]) -> tuple[dict[str, object], dict[str, object]]:
        """Split keyword arguments into options of `from_pretrained` and other fields.

        Args:
            fields: arguments by name.
            others: names of the other fields.

        Raises:
            ExpertcastError: a name is neither.
        """
        for name in fields:
            if name not in others and name not in SOURCE_OPTIONS and name not in _OTHERWISE:
                raise ExpertcastError(
                    f"unknown option {name!r}: choose from {', '.join(others)}, or from_pretrained's "
                    f"{', '.join(SOURCE_OPTIONS)}"
                )
        own = {name: value for name, value in fields.items() if name not in others}
        return own, {name: value for name, value in fields.items() if name in others}

    @property
    def files(self) -> dict[str, Any]:
        """Options that locate a file."""
        return {key: value for key, value in self.options.items() if key in _FILES}

    @property
    def config(self) -> dict[str, Any]:
        """Options that load a configuration or a tokenizer."""
        return {key: value for key, value in self.options.items() if key not in _MODEL}

    @property
    def model(self) -> dict[str, Any]:
        """Options that build a model from its configuration."""
        kept = (*_MODEL, "trust_remote_code", "code_revision")
        return {key: value for key, value in self.options.items() if key in kept}

    @property
    def generation(self) -> dict[str, Any]:
        """Options that load a generation config and code for it, complete."""
        own = {key: self.options.get(key) for key in (*_FILES, "trust_remote_code")}
        return {**own, "subfolder": own["subfolder"] or ""}

    def failure(self, error: Exception, what: str = "cannot load model") -> ExpertcastError:
        """Describe a failure in one line; a missing folder precedes the hub's message."""
        reason, folder = first_line(error), Path(self.path, self.options.get("subfolder", ""))
        if os.path.isdir(folder) and not (folder / "config.json").exists() and "gguf_file" not in self.options:
            ggufs = sorted(path.name for path in folder.glob("*.gguf"))
            if ggufs:
                reason = f"the folder has no config.json, but a GGUF file: use {folder / ggufs[0]}"
            elif (folder / ADAPTER).exists():
                reason = f"the folder has an adapter ({ADAPTER}) and no model: load its base model, then the adapter"
            else:
                reason = "the folder has no config.json; use the folder of a model"
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", self.options.get("gguf_file", "")):
            if _starts(folder / name, _POINTER):
                reason = str(damaged(folder / name, error))
        if not os.path.exists(self.path):
            try:
                validate_repo_id(self.path)
                reason = f"no such folder, and the hub reports: {reason}" if isinstance(error, OSError) else reason
            except HFValidationError:
                reason = "no such folder; use the folder of a model, or its hub id"
        return ExpertcastError(f"{what} {self.name!r}: {reason}")

    def file(self, name: str) -> str | None:
        """Return the path of one of the model's files, downloaded if needed; None if it does not exist.

        Raises:
            ExpertcastError: the folder or hub id does not exist or is unreachable.
        """
        try:
            found: str | None = cached_file(self.path, name, _raise_exceptions_for_missing_entries=False, **self.files)
        except (OSError, ValueError) as error:
            raise self.failure(error) from error
        return found

    def gguf(self) -> list[str]:
        """Return the path of the GGUF file, or of all parts of a split one in order; empty for other models.

        Raises:
            ExpertcastError: a file is missing, or the name is that of a later part.
        """
        name = self.options.get("gguf_file")
        if name is None:
            return []
        names, split = [str(name)], _SPLIT.fullmatch(str(name))
        if split is not None:
            stem, number, count = split.groups()
            names = [f"{stem}-{part + 1:05}-of-{count}.gguf" for part in range(int(count))]
            if int(number) != 1:
                raise ExpertcastError(f"{self.name!r} is part {int(number)} of {int(count)}: use {names[0]}")
        paths = [path for path in map(self.file, names) if path is not None]
        if len(paths) < len(names):
            missing = next(each for each in names if self.file(each) is None)
            raise ExpertcastError(f"cannot load model {self.name!r}: it has no file {missing}")
        return paths


_POINTER = b"version https://git-lfs"


def _starts(file: str | Path, octets: bytes) -> bool:
    try:
        with open(file, "rb") as opened:
            return opened.read(len(octets)) == octets
    except OSError:  # it is none, or may not be read
        return False


def damaged(path: str | Path, error: Exception) -> ExpertcastError:
    """Return the error for a file that cannot be read."""
    if not os.path.isfile(path):
        return ExpertcastError(f"{path} is missing, or no file: download it")
    if _starts(path, _POINTER):
        return ExpertcastError(f"{path} is a git LFS pointer, not the file itself: run git lfs pull, or download it")
    return ExpertcastError(f"cannot read {path}, which is cut off or damaged ({first_line(error)}): download it again")
