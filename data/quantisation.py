"""What a model's configuration says of quantised weights: nothing, a form that can be loaded, or a refusal.

The one verdict of everything that inspects or loads a model: no weight is read for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from expertcast.predictors.errors import ExpertcastError

FP8, MXFP4 = "fp8", "mxfp4"
LOADED = (FP8, MXFP4)
"""Quantisation methods, as configurations name them, that are dequantised while loading or moved as shipped."""


def shipped_form(config: PretrainedConfig, model_id: str) -> str | None:
    """In which of `LOADED` a model's checkpoint lies; None: its weights are plain floats.

    Raises:
        ExpertcastError: it is quantised in another way; the line names it.
    """
    settings = quantisation_settings(config)
    if settings is None:
        return None
    method = settings.get("quant_method")
    if method in LOADED:
        return str(method)
    raise ExpertcastError(
        f"{model_id!r} is quantised ({_kind(settings)}): load a checkpoint in bf16, fp16, fp32, FP8 or MXFP4"
    )


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
        if getattr(each, "quantization_config", None) is not None:
            del each.quantization_config


def _kind(settings: Mapping[str, Any]) -> str:
    method = settings.get("quant_method")
    if method is None and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"
    bits = settings.get("bits") or (settings.get("load_in_4bit") and 4) or (settings.get("load_in_8bit") and 8)
    return f"{method or 'no method is named'}{f', {bits} bits' if bits else ''}"
