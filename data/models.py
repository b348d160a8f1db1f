"""Load models, tokenizers and configurations from a folder, the hub or a GGUF file."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
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
    Mxfp4Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from expertcast.data.machine import free_memory, torch_dtype
from expertcast.data.source import (
    ADAPTER,
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
from expertcast.data.weights.files import SafetensorsFiles, TensorFile, WeightFiles, check_complete
from expertcast.data.weights.gguf import GgufFile, check_package, complete_config, gguf_form, light_headers
from expertcast.data.weights.groups import grouped
from expertcast.data.weights.packed import join_bnb, join_packed, join_scales
from expertcast.predictors.messages import ExpertcastError, TooLargeError, first_line, format_bytes

LOADING = threading.RLock()
"""Held while a model is built or loaded: transformers then sets torch's default dtype, which all threads share."""

# Weights in any format


def form_of(config: PretrainedConfig, source: ModelSource) -> Quantised | None:
    """Return the quantised format of a model's checkpoint; None for plain floats in safetensors.

    Raises:
        ExpertcastError: the format is not supported.
    """
    paths = source.gguf()
    return gguf_form(paths, source.name) if paths else quantised_form(config, source.name)


def open_weights(
    source: ModelSource, form: Quantised | None, model: PreTrainedModel, dtype: torch.dtype | None = None
) -> WeightFiles:
    """Open a checkpoint's tensors. Quantised tensors are dequantised on reading, except MXFP4 blocks and scales.

    Args:
        source: location of the model.
        form: result of :func:`form_of`.
        model: the model without weights; provides the tensor names of a GGUF file.
        dtype: dtype to load; default: the checkpoint's.

    Raises:
        ExpertcastError: weights are missing or damaged, or quantised weights lack their scales.
    """
    if form is not None and form.method == GGUF:
        return GgufFile(source.gguf(), model, dtype)
    if other := getattr(model.config, "transformers_weights", None):
        raise ExpertcastError(
            f"config.json of {source.name!r} names its weights {other} (transformers_weights): remove it"
        )
    files = SafetensorsFiles(source)
    with ExitStack() as undo, one_line(source.name):
        undo.callback(files.close)
        if form is None:
            files.check_plain()
        elif form.method == FP8:
            files.join(partial(join_scales, block=form.settings.get("weight_block_size")))
        elif form.method == BITSANDBYTES:
            files.join(join_bnb)
        elif form.method != MXFP4:
            files.join(partial(join_packed, method=form.method, settings=form.settings))
        undo.pop_all()
    return files


@contextmanager
def one_line(name: str) -> Iterator[None]:
    """Name the model in what goes wrong while its files are read."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        raise ExpertcastError(f"cannot load model {name!r}: {first_line(error)}") from error


def model_of(
    model: PreTrainedModel,
    tensors: Mapping[str, Tensor | TensorFile],
    source: ModelSource,
    device: str | torch.device = "cpu",
    **options: object,
) -> PreTrainedModel:
    """Load tensors into a model with transformers, in eval mode.

    Args:
        model: model without weights, in the dtype to load.
        tensors: tensors by the names that transformers expects.
        source: location of the model.
        device: destination of each tensor.
        options: further options of `from_pretrained`.

    Raises:
        ExpertcastError: transformers rejects the tensors, or a parameter is not among them.
    """
    loaded: PreTrainedModel
    with one_line(source.name):
        loaded, found = type(model).from_pretrained(
            None, config=model.config, state_dict=dict(tensors), dtype=model.dtype, device_map={"": device},
            output_loading_info=True, **options,
        )  # fmt: skip
        check_complete(found["missing_keys"])
        if "gguf_file" not in source.options and hasattr(loaded, "adjust_generation_fn"):
            loaded.adjust_generation_fn(None, False, False, source.path, **source.generation)
    if unused := sorted(found["unexpected_keys"]):
        warnings.warn(
            f"{source.name!r}: the model has no place for {unused[0]} and {len(unused) - 1} more tensors: check its "
            "config.json",
            stacklevel=2,
        )
    loaded.name_or_path = loaded.config.name_or_path = source.name
    return loaded.eval()


def put_adapter(model: PreTrainedModel, source: ModelSource) -> bool:
    """Put the adapter beside a model's weights on the model, as `from_pretrained` does; return whether there is one.

    Raises:
        ExpertcastError: the adapter cannot be loaded, or PEFT is not installed.
    """
    if source.file(ADAPTER) is None:
        return False
    try:
        check_complete(model.load_adapter(source.path, adapter_kwargs=source.files).missing_keys)
    except Exception as error:  # PEFT raises many kinds
        raise ExpertcastError(f"cannot load the adapter beside model {source.name!r}: {first_line(error)}") from error
    return True


def load_model(model_id: str | Path, *, dtype: str = "auto", device: str = "cpu", **options: object) -> PreTrainedModel:
    """Load a causal LM (or image-text model) in eval mode from a folder, the hub or a GGUF file; quantised weights are
    dequantised.

    Each tensor moves to the device as soon as it is read, so host memory never holds a whole model for a GPU.

    Args:
        model_id: folder, hub id or GGUF file.
        dtype: `auto`, `bf16`, `fp16` or `fp32`.
        device: destination.
        options: options of `from_pretrained`, such as `revision`.

    Raises:
        ExpertcastError: the model cannot be loaded, has an unsupported quantisation, or does not fit the device's
            memory.
    """
    source, wanted, target = ModelSource.of(model_id, options), torch_dtype(dtype), torch.device(device)
    config = load_config(source)
    form = form_of(config, source)
    mxfp4 = form is not None and form.method == MXFP4
    if not mxfp4:
        forget_quantisation(config)
    model = meta_model(config, wanted, source=source)
    wanted = wanted or getattr(config, "dtype", None)
    _check_room(source, model if wanted else model.to(torch.bfloat16), target)
    with LOADING, open_weights(source, form, model, wanted) as files:
        options = {"quantization_config": Mxfp4Config(dequantize=True)} if mxfp4 else {}
        with one_line(source.name):
            grouped(model, files)
        loaded = model_of(model.to(wanted or files.dtype), files.tensors, source, target, **options)
    put_adapter(loaded, source)
    return loaded.eval()


def _check_room(source: ModelSource, model: PreTrainedModel, device: torch.device) -> None:
    """Raise an error if a model exceeds the device's free memory, before the system kills the process.

    Raises:
        TooLargeError: the weights do not fit.
    """
    available = free_memory(device)
    needed = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    if available is not None and needed > available:
        kind = "" if device.type == "cpu" else f"{device.type} "
        raise TooLargeError(
            f"{source.name!r} needs {format_bytes(needed)} of {kind}memory, {format_bytes(available)} are available: "
            "load it offloaded, as load_offloaded and expertcast generate do"
        )


_NO_TOKENIZER = ExpertcastError(
    "transformers finds no tokenizer files: put the model's tokenizer.json and tokenizer_config.json beside its weights"
)


def load_tokenizer(model_id: str | Path, **options: object) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer; the folder of a GGUF file takes precedence over the file.

    Args:
        model_id: folder, hub id or GGUF file.
        options: as for :func:`load_model`.

    Raises:
        ExpertcastError: there is no tokenizer.
    """
    source = ModelSource.of(model_id, options)
    arguments = source.config
    try:
        if "gguf_file" in arguments and any(map(source.file, ("tokenizer.json", "tokenizer_config.json"))):
            del arguments["gguf_file"]
        if "gguf_file" in arguments:
            check_package(source.name)
        with light_headers(source.gguf()) if "gguf_file" in arguments else nullcontext():
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(source.path, **arguments)
    except Exception as error:  # invalid files raise any kind of exception, depending on the family
        if isinstance(error, ExpertcastError):
            raise
        lists_files = first_line(error).rstrip().endswith(":")  # transformers lists the files that it expects
        reason = _NO_TOKENIZER if lists_files else error
        raise source.failure(reason, "no tokenizer for") from error
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):  # some families make an empty one without files
        raise source.failure(_NO_TOKENIZER, "no tokenizer for")
    return tokenizer


def check_token_ids(ids: Any, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Raise an error if a token has no embedding.

    Args:
        ids: token ids of any shape: a tensor, an array or (nested) lists.
        config: the model's configuration.
        tokenizer: where the ids come from, for the message; None: from the user.

    Raises:
        ExpertcastError: names the first such token.
    """
    known, ids_N = getattr(config.get_text_config(), "vocab_size", None), torch.as_tensor(ids).flatten()
    if known is None or not len(wrong_N := ids_N[(ids_N < 0) | (ids_N >= known)]):
        return
    token = int(wrong_N[0])
    if tokenizer is None:
        raise ExpertcastError(f"token {token} has no embedding: the model has tokens 0 to {known - 1}")
    raise ExpertcastError(
        f"the tokenizer has {len(tokenizer)} tokens, the model {known}: token {token} "
        f"({tokenizer.convert_ids_to_tokens(token)}) has no embedding"
    )


def load_config(source: ModelSource) -> PretrainedConfig:
    """Load a model's configuration from a folder, the hub or a GGUF file, without reading weights.

    Raises:
        ExpertcastError: there is no configuration, or transformers is too old.
    """
    check_release("loading")
    paths = source.gguf()
    if paths:
        check_package(source.name)
    try:
        with light_headers(paths) if paths else nullcontext():
            config: PretrainedConfig = AutoConfig.from_pretrained(source.path, **source.config)
        if paths:
            complete_config(config, paths)
        if getattr(config, "tie_word_embeddings", False):  # of an image-text checkpoint, which has no head then
            config.get_text_config().tie_word_embeddings = True
    except Exception as error:  # invalid files raise any kind of exception, depending on the family
        untrusted = isinstance(error, ValueError) and "trust_remote_code" in str(error)
        reason = "it contains custom code: set trust_remote_code=True (--trust-remote-code) if you trust it"
        raise source.failure(ExpertcastError(reason) if untrusted else error) from error
    return config


def meta_model(
    model: ModelSource | PretrainedConfig, dtype: torch.dtype | None = None, *, source: ModelSource | None = None
) -> PreTrainedModel:
    """Build a model's modules without weights (meta device) from its configuration.

    Args:
        model: configuration, or the source to load it from.
        dtype: dtype of the parameters; default: the configuration's.
        source: location of the model, whose options apply if `model` is a configuration.

    Raises:
        ExpertcastError: there is no configuration, or no model can be built from it.
    """
    config, source = (load_config(model), model) if isinstance(model, ModelSource) else (model, source)
    name = str(model) if source is None else source.name
    try:
        with LOADING, torch.device("meta"):
            built: PreTrainedModel = auto_class(config).from_config(
                config, dtype=dtype or config.dtype, **({} if source is None else source.model)
            )
    except Exception as error:  # invalid configs raise any kind of exception, depending on the family
        raise ExpertcastError(f"cannot load model {name!r}: {first_line(error)}") from error
    if source is not None:
        built.config.name_or_path = source.name
    return built.eval()


def auto_class(config: PretrainedConfig) -> Any:
    """Return the auto class of `transformers` for a configuration: causal LM, or else image-text model."""
    choices = (AutoModelForCausalLM, AutoModelForImageTextToText)
    return next((cls for cls in choices if type(config) in cls._model_mapping), AutoModelForCausalLM)
