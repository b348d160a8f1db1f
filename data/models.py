"""Loading models, and what may be said of dtypes and devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    FineGrainedFP8Config,
    Mxfp4Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from expertcast.data.quantisation import FP8, MXFP4, shipped_form
from expertcast.data.weights_size import check_room
from expertcast.predictors.errors import ExpertcastError

_DEQUANTISED = {FP8: FineGrainedFP8Config, MXFP4: Mxfp4Config}
"""Told to dequantise, they have transformers load plain floats."""
REFERENCE = "reference"


def resolve_model(model_id: str) -> str:
    """`reference` becomes the path of the bundled model; anything else is returned unchanged."""
    if model_id == REFERENCE and not Path(model_id).exists():
        from expertcast import checkpoints

        return str(Path(str(checkpoints.__file__)).resolve().parent / REFERENCE)
    return model_id


def load_model(model_id: str, *, dtype: str = "auto", device: str = "cpu") -> PreTrainedModel:
    """A causal LM (or one that reads images beside text) in eval mode, from a local folder or the hub.

    What is shipped in FP8 or MXFP4 is dequantised.

    Raises:
        ExpertcastError: the folder or hub id cannot be loaded, is quantised otherwise, or needs more memory than there
            is; the line carries the reason.
    """
    path = resolve_model(model_id)
    try:
        config = AutoConfig.from_pretrained(path)
        form = shipped_form(config, model_id)
        check_room(model_id, path, config, torch_dtype(dtype))
        plain = {} if form is None else {"quantization_config": _DEQUANTISED[form](dequantize=True)}
        model = auto_class(config).from_pretrained(path, config=config, dtype=torch_dtype(dtype) or "auto", **plain)
    except ExpertcastError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:  # missing or damaged
        raise ExpertcastError(f"cannot load model {model_id!r}: {first_line(error)}") from error
    if form == FP8 and (wanted := torch_dtype(dtype)) is not None:
        for parameter in model.parameters():  # transformers leaves what was not in FP8 as it was
            if parameter.dtype == config.dtype:
                parameter.data = parameter.data.to(wanted)
    model.config._name_or_path = model_id
    loaded: PreTrainedModel = model.to(torch.device(device)).eval()
    return loaded


def load_tokenizer(model_id: str) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model.

    Raises:
        ExpertcastError: there is none.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(resolve_model(model_id))
    except (OSError, ValueError, KeyError) as error:
        raise ExpertcastError(f"no tokenizer for {model_id!r}: {first_line(error)}") from error
    return tokenizer


def load_config(model_id: str) -> PretrainedConfig:
    """A model's configuration, from a local folder or the hub; no weight is read.

    Raises:
        ExpertcastError: no config there.
    """
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(resolve_model(model_id))
    except Exception as error:  # a config that is not right fails in whatever way its family's classes fail
        raise ExpertcastError(f"cannot load model {model_id!r}: {first_line(error)}") from error
    return config


def meta_model(model: str | PretrainedConfig, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """A model's modules without weights (meta device), from its config alone: that in a folder, of a hub id, or given.

    Its parameters have the config's dtype where none is named.

    Raises:
        ExpertcastError: no config there, or none that makes a model.
    """
    config = load_config(model) if isinstance(model, str) else model
    try:
        with torch.device("meta"):
            made: PreTrainedModel = auto_class(config).from_config(config, dtype=dtype or config.dtype)
    except Exception as error:  # a config that is not right fails in whatever way its family's classes fail
        raise ExpertcastError(f"cannot load model {str(model)!r}: {first_line(error)}") from error
    if isinstance(model, str):
        made.config._name_or_path = model
    return made.eval()


def auto_class(config: PretrainedConfig) -> Any:
    """The class of `transformers` that loads the model of a configuration: the causal LM's, or, for a family that has
    none, that of models that read images too."""
    choices = (AutoModelForCausalLM, AutoModelForImageTextToText)
    return next((cls for cls in choices if type(config) in cls._model_mapping), AutoModelForCausalLM)


def torch_dtype(name: str) -> torch.dtype | None:
    """`bf16`, `fp16` and `fp32` as torch names them; None for `auto`, which is the weights' own.

    Raises:
        ExpertcastError: another name.
    """
    names = {"auto": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if name not in names:
        raise ExpertcastError(f"unknown dtype {name!r}: choose from {', '.join(names)}")
    return names[name]


def torch_device(device: str | torch.device | None) -> torch.device:
    """The device of that name, with its number; None is the current CUDA device where there is one, else the CPU.

    Raises:
        ExpertcastError: an unknown device, or one that is not there.
    """
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        raise ExpertcastError(f"unknown device {device!r}: write 'cpu', 'cuda' or 'cuda:0'") from None
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ExpertcastError(f"device {str(chosen)!r} is not available here: use 'cpu'")
    if chosen.type not in ("cpu", "cuda"):
        raise ExpertcastError(f"device {str(chosen)!r} is not supported: use 'cpu' or 'cuda'")
    return with_index(chosen)


def with_index(device: str | torch.device) -> torch.device:
    """`cuda` as the CUDA device that is current now, any other as it is: torch takes `cuda` and `cuda:0` for two."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def first_line(error: Exception) -> str:
    """What an error says, in one line; its kind where it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
