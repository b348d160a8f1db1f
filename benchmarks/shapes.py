"""Models of published sizes with random weights, for measuring time without a checkpoint.

The defaults of a model type in transformers are the config of one published model; a shape lists the values that
differ. Tests compare layers, experts and parameter counts with the model cards, which win over a paper's table
(GPT-OSS-120B has 36 layers of 128 experts, not 24 of 32).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from expertcast.checkpoints.bundled import BUNDLED, REFERENCE
from expertcast.data.models import meta_model
from expertcast.predictors.messages import Json

STD = 0.02
_KEEP_AND_SET = {torch.bfloat16: (0x807F, 0x3C80), torch.float16: (0x83FF, 0x2400)}
"""Kept bits (sign and mantissa) and set bits (the exponent of 1/64): any 16 bits become a weight of size 1/64 to 1/32.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One published config, as far as it affects the computation of a forward pass."""

    hub_id: str
    """Hub id of the published model."""
    model_type: str
    dense_layers: int = 0
    """Decoder layers before the first MoE layer."""
    values: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Values that differ from the model type's defaults."""

    def config(self, layers: int | None = None) -> PretrainedConfig:
        """Return the config, cut to the first `layers` MoE layers; dense layers before them stay."""
        cut: Json = {} if layers is None else {"num_hidden_layers": layers + self.dense_layers}
        if cut and "layer_types" in self.values:
            cut["layer_types"] = list(cast(list[str], self.values["layer_types"]))[: cut["num_hidden_layers"]]
        return AutoConfig.for_model(self.model_type, **{**self.values, **cut})

    @property
    def layers(self) -> int:
        """MoE layers of the whole model."""
        return int(self.config().num_hidden_layers) - self.dense_layers


_ROPE = {"rope_type": "default", "rope_theta": 1e6}
_QWEN3 = {"head_dim": 128, "norm_topk_prob": True, "max_position_embeddings": 40960, "rope_parameters": _ROPE}


def _reference_values() -> Json:
    values: Json = json.loads((BUNDLED / "config.json").read_text())
    return {key: value for key, value in values.items() if key not in ("model_type", "architectures", "dtype")}


SHAPES = {
    "qwen3-30b-a3b": Shape(
        hub_id="Qwen/Qwen3-30B-A3B", model_type="qwen3_moe", values=_QWEN3 | {"num_hidden_layers": 48}
    ),
    "qwen3-235b-a22b": Shape(
        hub_id="Qwen/Qwen3-235B-A22B",
        model_type="qwen3_moe",
        values=_QWEN3
        | {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
        },
    ),
    "gpt-oss-20b": Shape(
        hub_id="openai/gpt-oss-20b", model_type="gpt_oss", values={"num_hidden_layers": 24, "num_local_experts": 32}
    ),
    "gpt-oss-120b": Shape(hub_id="openai/gpt-oss-120b", model_type="gpt_oss"),
    "glm-4.7-flash": Shape(
        hub_id="zai-org/GLM-4.7-Flash", model_type="glm4_moe_lite", dense_layers=1, values={"rope_parameters": _ROPE}
    ),
    "olmoe-1b-7b": Shape(hub_id="allenai/OLMoE-1B-7B-0924", model_type="olmoe", values={"intermediate_size": 1024}),
    "mixtral-8x7b": Shape(
        hub_id="mistralai/Mixtral-8x7B-v0.1", model_type="mixtral", values={"max_position_embeddings": 32768}
    ),
    REFERENCE: Shape(hub_id="the bundled model", model_type="qwen3_moe", values=_reference_values()),
}


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters; shared ones count once."""
    return sum(parameter.numel() * parameter.dtype.itemsize for parameter in model.parameters())


def random_model(
    config: PretrainedConfig, *, dtype: torch.dtype, device: str | torch.device, seed: int
) -> PreTrainedModel:
    """Return a model with random matrices, and norms and position tables as transformers initialises them.

    Args:
        config: config of a causal LM in transformers.
        dtype: dtype of the weights.
        device: device of the weights.
        seed: of the random weights.
    """
    model = meta_model(config, dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            if not any(parameter.dim() > 1 for parameter in own):
                model._init_weights(module)
                continue
            for tensor in (*own, *module.buffers(recurse=False)):
                if tensor.dim() > 1:
                    fill(tensor, generator)
                else:
                    tensor.zero_()
    model.tie_weights()
    model.requires_grad_(False)
    return model.eval()


def fill(tensor: Tensor, generator: torch.Generator) -> None:
    """Fill with random numbers of standard deviation near 0.02, in place.

    16-bit numbers on the CPU are drawn 64 bits at a time, five times as fast as a normal distribution: a shape of 60 GB
    is filled in a minute.
    """
    bits = _KEEP_AND_SET.get(tensor.dtype)
    if bits is None or tensor.device.type != "cpu" or tensor.numel() % 4 or not tensor.is_contiguous():
        tensor.uniform_(-STD * math.sqrt(3), STD * math.sqrt(3), generator=generator)
        return
    tensor.view(-1).view(torch.int64).random_(-(2**63), None, generator=generator)
    keep, exponent = bits
    tensor.view(torch.int16).bitwise_and_(keep - 2**16).bitwise_or_(exponent)
