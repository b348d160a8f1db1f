"""Models of published sizes with random weights, for measuring time without a checkpoint.

The defaults of a model type in transformers are the config of one published model; a shape lists the values that
differ. Tests compare layers, experts and parameter counts with the model cards, which win over a paper's table
(GPT-OSS-120B has 36 layers of 128 experts, not 24 of 32).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from expertcast.data.models import meta_model

STD = 0.02
"""Standard deviation of random weights."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One published config, as far as it affects the computation of a forward pass."""

    model_type: str
    values: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Values that differ from the model type's defaults."""

    def config(self, layers: int | None = None) -> PretrainedConfig:
        """Return the config, cut to the first `layers` layers."""
        cut = {} if layers is None else {"num_hidden_layers": layers}
        return AutoConfig.for_model(self.model_type, **{**self.values, **cut})

    @property
    def layers(self) -> int:
        """Layers of the whole model, all MoE layers."""
        return int(self.config().num_hidden_layers)


_QWEN3 = {"head_dim": 128, "norm_topk_prob": True, "max_position_embeddings": 40960, "num_hidden_layers": 48,
          "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}  # fmt: skip
SHAPES = {
    "qwen3-30b-a3b": Shape("qwen3_moe", _QWEN3),
    "gpt-oss-20b": Shape("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "gpt-oss-120b": Shape("gpt_oss"),
    "olmoe-1b-7b": Shape("olmoe", {"intermediate_size": 1024}),
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
                    tensor.uniform_(-STD * math.sqrt(3), STD * math.sqrt(3), generator=generator)
                else:
                    tensor.zero_()
    model.tie_weights()
    model.requires_grad_(False)
    return model.eval()
