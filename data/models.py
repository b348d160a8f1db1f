"""Loading models, tokenizers and configurations, from a folder, the hub or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    FineGrainedFP8Config,
    GenerationConfig,
    Mxfp4Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from expertcast.data.machine import free_memory, torch_dtype
from expertcast.data.source import (
    BITSANDBYTES,
    FP8,
    GGUF,
    MXFP4,
    ModelSource,
    Quantised,
    check_release,
    forget_quantisation,
    quantised_form,
)
from expertcast.data.weights.files import SafetensorsFiles, TensorFile, WeightFiles
from expertcast.data.weights.gguf import GgufFile, check_package, complete_config, gguf_form
from expertcast.data.weights.packed import join_bnb, join_packed, join_scales
from expertcast.predictors.messages import ExpertcastError, first_line

# Weights in any form


def form_of(config: PretrainedConfig, source: ModelSource) -> Quantised | None:
    """The form in which a model's checkpoint lies; None: its weights are plain floats in safetensors.

    Raises:
        ExpertcastError: a form that is not read; the line names it.
    """
    paths = source.gguf()
    return gguf_form(paths, source.name) if paths else quantised_form(config, source.name)


def open_weights(
    source: ModelSource, form: Quantised | None, model: PreTrainedModel, dtype: torch.dtype | None = None
) -> WeightFiles:
    """A checkpoint's tensors; quantised ones are dequantised when they are read, but for MXFP4's blocks and scales.

    Args:
        source: whose.
        form: what :func:`form_of` says.
        model: without weights; of a GGUF file the tensors get its names.
        dtype: to load; None: the checkpoint's.

    Raises:
        ExpertcastError: no weights there, damaged ones, or quantised ones without their scales.
    """
    if form is not None and form.method == GGUF:
        return GgufFile(source.gguf(), model, dtype)
    files = SafetensorsFiles(source)
    try:
        if form is not None and form.method == FP8:
            files.join(partial(join_scales, block=form.settings.get("weight_block_size")))
        elif form is not None and form.method == BITSANDBYTES:
            files.join(join_bnb)
        elif form is not None and form.method != MXFP4:
            files.join(partial(join_packed, method=form.method, settings=form.settings))
    except ExpertcastError as error:
        files.close()
        raise ExpertcastError(f"cannot load model {source.name!r}: {error}") from error
    except BaseException:
        files.close()
        raise
    return files


def model_of(
    model: PreTrainedModel,
    tensors: Mapping[str, Tensor | TensorFile],
    source: ModelSource,
    device: str | torch.device = "cpu",
) -> PreTrainedModel:
    """A model in eval mode, by transformers' own loading.

    Args:
        model: without weights, in the dtype to load; its configuration says nothing of quantisation.
        tensors: by the names that transformers reads.
        source: whose.
        device: where each tensor goes as soon as it is read.

    Raises:
        ExpertcastError: transformers refuses them.
    """
    try:
        made: PreTrainedModel = type(model).from_pretrained(
            None, config=model.config, state_dict=dict(tensors), dtype=model.dtype, device_map={"": device}
        )
        if "gguf_file" not in source.options:
            made.generation_config = _generation_config(source)
    except ExpertcastError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ExpertcastError(f"cannot load model {source.name!r}: {first_line(error)}") from error
    made.name_or_path = made.config._name_or_path = source.name
    return made.eval()


def _generation_config(source: ModelSource) -> GenerationConfig:
    """As `from_pretrained` finds it: in its own file, else in the model's configuration."""
    try:
        return GenerationConfig.from_pretrained(source.path, **source.files)
    except OSError:
        return GenerationConfig.from_pretrained(
            source.path, config_file_name="config.json", _from_model_config=True, **source.files
        )


_DEQUANTISED = {FP8: FineGrainedFP8Config, MXFP4: Mxfp4Config}
"""Told to dequantise, they have transformers load plain floats."""


def load_model(model_id: str | Path, *, dtype: str = "auto", device: str = "cpu", **options: object) -> PreTrainedModel:
    """A causal LM (or one that reads images beside text) in eval mode, from a local folder, the hub or a GGUF file.

    What is quantised is dequantised. Each tensor goes to the device as soon as it is read: host memory never holds the
    whole of a model for a GPU.

    Args:
        model_id: whose.
        dtype, device: to load to.
        options: of `from_pretrained`, such as `revision`.

    Raises:
        ExpertcastError: it cannot be loaded, is quantised in a form that is not read, or needs more of the device's
            memory than there is; the line carries the reason.
    """
    source, wanted, target = ModelSource.of(model_id, options), torch_dtype(dtype), torch.device(device)
    config = load_config(source)
    form = form_of(config, source)
    _check_room(source, config, wanted, target)
    if form is None or form.method in _DEQUANTISED:
        model = _by_transformers(source, config, form, wanted, target)
    else:
        model = _tensor_by_tensor(source, config, form, wanted, target)
    model.config._name_or_path = source.name
    return model.eval()


def _check_room(source: ModelSource, config: PretrainedConfig, dtype: torch.dtype | None, device: torch.device) -> None:
    """Say that a model does not fit, before the system ends the process that loads it.

    Raises:
        ExpertcastError: its weights need more of the device's memory than there is.
    """
    available, own = free_memory(device), deepcopy(config)
    forget_quantisation(own)
    model = meta_model(own, dtype or getattr(config, "dtype", None) or torch.bfloat16, source=source)
    needed = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    if available is not None and needed > available:
        kind = "" if device.type == "cpu" else f"{device.type} "
        raise ExpertcastError(
            f"{source.name!r} needs {needed} bytes of {kind}memory and {available} are available: run it from a disk "
            "by --store-folder of generate, serve, collect, train or eval (in Python load_offloaded with store='disk')"
        )


def _by_transformers(
    source: ModelSource,
    config: PretrainedConfig,
    form: Quantised | None,
    wanted: torch.dtype | None,
    device: torch.device,
) -> PreTrainedModel:
    plain = {} if form is None else {"quantization_config": _DEQUANTISED[form.method](dequantize=True)}
    try:
        model: PreTrainedModel = auto_class(config).from_pretrained(
            source.path, config=config, dtype=wanted or "auto", device_map={"": device}, **source.options, **plain
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:  # missing or damaged
        raise source.failure(error) from error
    if form is not None and form.method == FP8 and wanted is not None:
        for parameter in model.parameters():  # transformers leaves what was not in FP8 as it was
            if parameter.dtype == config.dtype:
                parameter.data = parameter.data.to(wanted)
    return model


def _tensor_by_tensor(
    source: ModelSource, config: PretrainedConfig, form: Quantised, wanted: torch.dtype | None, device: torch.device
) -> PreTrainedModel:
    forget_quantisation(config)
    model = meta_model(config, wanted, source=source)
    wanted = wanted or getattr(config, "dtype", None)
    with open_weights(source, form, model, wanted) as files:
        return model_of(model.to(wanted or files.dtype), files.tensors, source, device)


def load_tokenizer(model_id: str | Path, **options: object) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model; that of a GGUF file where nothing lies beside it.

    Args:
        model_id: whose.
        options: as for :func:`load_model`.

    Raises:
        ExpertcastError: there is none.
    """
    source = ModelSource.of(model_id, options)
    given = source.config
    try:
        if "gguf_file" in given and any(map(source.file, ("tokenizer.json", "tokenizer_config.json"))):
            del given["gguf_file"]
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source.path, **given)
    except Exception as error:  # a file that is not right fails in whatever way its family's classes fail
        if isinstance(error, ExpertcastError):
            raise
        lists_files = first_line(error).rstrip().endswith(":")  # transformers names what it would read, over more lines
        reason = ExpertcastError("transformers finds no file of one there") if lists_files else error
        raise source.failure(reason, "no tokenizer for") from error
    return tokenizer


def load_config(model: str | Path | ModelSource) -> PretrainedConfig:
    """A model's configuration, from a local folder, the hub or a GGUF file; no weight is read.

    Raises:
        ExpertcastError: no config there, or transformers is too old.
    """
    check_release("loading")
    source = model if isinstance(model, ModelSource) else ModelSource.of(model)
    paths = source.gguf()
    if paths:
        check_package(source.name)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(source.path, **source.config)
        if paths:
            complete_config(config, paths)
    except Exception as error:  # a config that is not right fails in whatever way its family's classes fail
        untrusted = isinstance(error, ValueError) and "trust_remote_code" in str(error)
        reason = "it holds code of its own: say trust_remote_code=True (--trust-remote-code) if you trust it"
        raise source.failure(ExpertcastError(reason) if untrusted else error) from error
    return config


def meta_model(
    model: str | ModelSource | PretrainedConfig, dtype: torch.dtype | None = None, *, source: ModelSource | None = None
) -> PreTrainedModel:
    """A model's modules without weights (meta device), from its config alone: that in a folder, of a hub id, or given.

    Its parameters have the config's dtype where none is named.

    Args:
        model: where the configuration is, or itself.
        dtype: of the parameters.
        source: of a configuration that is given, for the options with which a model is made.

    Raises:
        ExpertcastError: no config there, or none that makes a model.
    """
    if not isinstance(model, PretrainedConfig):
        source = model if isinstance(model, ModelSource) else ModelSource.of(model)
    config = model if isinstance(model, PretrainedConfig) else load_config(source or model)
    name = str(model) if source is None else source.name
    try:
        with torch.device("meta"):
            made: PreTrainedModel = auto_class(config).from_config(
                config, dtype=dtype or config.dtype, **({} if source is None else source.model)
            )
    except Exception as error:  # a config that is not right fails in whatever way its family's classes fail
        raise ExpertcastError(f"cannot load model {name!r}: {first_line(error)}") from error
    if source is not None:
        made.config._name_or_path = source.name
    return made.eval()


def auto_class(config: PretrainedConfig) -> Any:
    """The class of `transformers` that loads the model of a configuration: the causal LM's, or, for a family that has
    none, that of models that read images too."""
    choices = (AutoModelForCausalLM, AutoModelForImageTextToText)
    return next((cls for cls in choices if type(config) in cls._model_mapping), AutoModelForCausalLM)
