"""What a model's configuration says of quantised weights: nothing, a form that can be loaded, or a refusal.

The one verdict of everything that inspects or loads a model: no weight is read for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

from expertcast.predictors.errors import ExpertcastError

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
