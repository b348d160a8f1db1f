"""Where a model comes from: a folder, a hub id or a GGUF file, with what `from_pretrained` takes beside."""

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
"""Routers of older releases do not all return their logits, weights and ids, nor are all experts decorated."""


def check_release(doing: str) -> None:
    """Say that a `transformers` model cannot be worked on with what is installed.

    Args:
        doing: what is about to be done, as a line begins with it.

    Raises:
        ExpertcastError: this release is too old.
    """
    here = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if here < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise ExpertcastError(
            f"{doing} a transformers model needs transformers {needed} or newer, here is {transformers.__version__}: "
            "pip install -U transformers"
        )


# Quantised weights, as the configuration describes them; no weight is read

FP8, MXFP4 = "fp8", "mxfp4"
GPTQ, AWQ, COMPRESSED, BITSANDBYTES, GGUF = "gptq", "awq", "compressed-tensors", "bitsandbytes", "gguf"
_FORMATS = {
    GPTQ: ("gptq", "gptq_v2"),
    AWQ: ("gemm",),
    COMPRESSED: ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision"),
}
"""By method: layouts of the packed tensors that are read."""
_NUMBERS = {("int", 2), ("int", 4), ("int", 8), ("float", 8)}
"""Of compressed-tensors, types and bits."""
_BITS = {GPTQ: (2, 4, 8), AWQ: (4,)}
_REMEDY = (
    "load a checkpoint in bf16, fp16, fp32, FP8, MXFP4, GPTQ, AWQ, bitsandbytes, compressed-tensors (integers or FP8) "
    "or GGUF"
)


@dataclass(frozen=True)
class Quantised:
    """A quantised form that is dequantised while it is loaded."""

    method: str
    """As configurations name it, or `gguf`."""
    kind: str
    """In words."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The configuration's section."""

    @property
    def codec(self) -> str | None:
        """The codec that moves such experts as they are shipped; None: there is none."""
        if self.method in (FP8, MXFP4):
            return self.method
        floats = self.method == COMPRESSED and all(weights["type"] == "float" for weights in _groups(self.settings))
        return FP8 if floats else None


def quantised_form(config: PretrainedConfig, name: str) -> Quantised | None:
    """The form in which a model's checkpoint lies; None: its weights are plain floats.

    Args:
        config: the model's.
        name: of the model, for the refusal.

    Raises:
        ExpertcastError: it is quantised in a way that is not read; the line names it.
    """
    settings = quantisation_settings(config)
    if settings is None:
        return None
    method, kind = _method(settings), _kind(settings)
    if not _is_read(method, settings):
        raise ExpertcastError(f"{name!r} is quantised ({kind}): {_REMEDY}")
    return Quantised(method, kind, settings)


def quantisation_settings(config: PretrainedConfig) -> dict[str, Any] | None:
    """The configuration's section on quantisation, looked for where transformers looks; None: there is none."""
    for each in (config, config.get_text_config()):
        for name in ("quantization_config", "compression_config"):  # the latter in old compressed-tensors checkpoints
            found = getattr(each, name, None)
            if found is not None:
                return dict(found if isinstance(found, Mapping) else found.to_dict())
    return None


def forget_quantisation(config: PretrainedConfig) -> None:
    """Take the section out: what is made of the configuration from now on is not quantised."""
    for each in (config, config.get_text_config()):
        for name in ("quantization_config", "compression_config"):
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
    """What else compressed-tensors has done to the weights, in words."""
    done = str(settings.get("quantization_status") or "compressed")
    words = [] if done == "compressed" else [done]
    words += ["sparse"] * ((settings.get("sparsity_config") or {}).get("format", "dense") != "dense")
    return words + ["transformed"] * bool((settings.get("transform_config") or {}).get("config_groups"))


def _format(method: str, settings: Mapping[str, Any]) -> str:
    """The layout of the packed tensors; where a configuration leaves it open, what transformers takes."""
    if method == GPTQ:
        return str(settings.get("checkpoint_format") or settings.get("format") or GPTQ)
    if method == AWQ:
        return str(settings.get("format") or settings.get("version") or "gemm").lower()
    return str(settings.get("format") or "")


def _groups(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What compressed-tensors says of the weights of each group of modules; a group's preset name is none of them."""
    groups = (settings.get("config_groups") or {}).values()
    return [
        {"type": "int", "num_bits": 8, **((group.get("weights") if isinstance(group, Mapping) else None) or {})}
        for group in groups
    ]


def _layout(group: object, settings: Mapping[str, Any]) -> str:
    """How one group of compressed-tensors is stored."""
    if not isinstance(group, Mapping) or not group.get("weights"):
        return ""
    return str(group.get("format") or settings.get("format") or "")


def _method(settings: Mapping[str, Any]) -> str:
    """As configurations name it; bitsandbytes' old ones do not."""
    old = settings.get("load_in_4bit") or settings.get("load_in_8bit")
    return str(settings.get("quant_method") or (BITSANDBYTES if old else "no method is named"))


def _kind(settings: Mapping[str, Any]) -> str:
    """A form in words: method, bits, and the layout where it is not the usual one."""
    method = _method(settings)
    bits = settings.get("bits") or (settings.get("load_in_4bit") and 4) or (settings.get("load_in_8bit") and 8)
    words = [method]
    if method == COMPRESSED:
        words += [*_beside(settings), _format(COMPRESSED, settings)]
        found = sorted({str(weights["num_bits"]) for weights in _groups(settings)})
        bits = " and ".join(found)
    elif method in _FORMATS and _format(method, settings) != _FORMATS[method][0]:
        words.append(_format(method, settings))
    if bits:
        words.append(f"{bits} bits")
    return ", ".join(word for word in words if word)


_FILES = ("revision", "token", "cache_dir", "local_files_only", "force_download", "proxies", "subfolder")
"""Options of `from_pretrained` that say where files are found."""
_CONFIG = ("trust_remote_code", "code_revision", "gguf_file")
_MODEL = ("attn_implementation", "experts_implementation")
SOURCE_OPTIONS = (*_FILES, *_CONFIG, *_MODEL)
"""Options of `from_pretrained` that are passed on."""
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""The name of one part of a split GGUF file."""
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

    def gguf(self) -> list[str]:
        """The path of its GGUF file, or of every part of a split one, in order; empty: it is no GGUF file.

        Raises:
            ExpertcastError: a file is not there, or another part than the first is named.
        """
        name = self.options.get("gguf_file")
        if name is None:
            return []
        names, split = [str(name)], _SPLIT.fullmatch(str(name))
        if split is not None:
            stem, number, count = split.groups()
            names = [f"{stem}-{part + 1:05}-of-{count}.gguf" for part in range(int(count))]
            if int(number) != 1:
                raise ExpertcastError(f"{self.name!r} is part {int(number)} of {int(count)}: give {names[0]}")
        paths = [path for path in map(self.file, names) if path is not None]
        if len(paths) < len(names):
            missing = next(each for each in names if self.file(each) is None)
            raise ExpertcastError(f"cannot load model {self.name!r}: it has no file {missing}")
        return paths
