"""Opening a checkpoint in whatever form it lies, and making a model of its tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from expertcast.data.quantisation import BITSANDBYTES, FP8, GGUF, MXFP4, Quantised, quantised_form
from expertcast.data.source import ModelSource
from expertcast.data.weights.bnb import join_bnb
from expertcast.data.weights.files import SafetensorsFiles, TensorFile, WeightFiles
from expertcast.data.weights.fp8 import join_scales
from expertcast.data.weights.gguf import GgufFile, gguf_form
from expertcast.data.weights.packed import join_packed
from expertcast.predictors.errors import ExpertcastError, first_line


def form_of(config: PretrainedConfig, source: ModelSource) -> Quantised | None:
    """The form in which a model's checkpoint lies; None: its weights are plain floats in safetensors.

    Raises:
        ExpertcastError: a form that is not read; the line names it.
    """
    path = source.gguf()
    return quantised_form(config, source.name) if path is None else gguf_form(path, source.name)


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
        path = source.gguf()
        assert path is not None
        return GgufFile(path, model, dtype)
    files = SafetensorsFiles(source)
    try:
        if form is not None and form.method == FP8:
            files.tensors = join_scales(files.tensors, form.settings.get("weight_block_size"))
        elif form is not None and form.method == BITSANDBYTES:
            files.tensors = join_bnb(files.tensors)
        elif form is not None and form.method != MXFP4:
            files.tensors = join_packed(files.tensors, form.method, form.settings)
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
