"""Models of a few thousand weights, one for each family."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
)

REFERENCE = Path(__file__).parents[3] / "checkpoints" / "reference"
FAMILIES = ("mixtral", "olmoe", "deepseek_v2", "deepseek_v3")

_SIZES: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip
_AS_CHECKPOINTS = {"deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}}
"""What their config.json says and transformers does not: vLLM goes by it."""


def make(family: str, folder: Path) -> str:
    """A model of the family, with the reference model's tokenizer; its folder."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_config(family)).float()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("gate.weight"):
                tensor.normal_(std=0.3)
            elif "norm" in name:
                tensor.normal_(mean=1, std=0.1)
            elif name.endswith("e_score_correction_bias"):
                tensor.normal_(std=0.02)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | _AS_CHECKPOINTS.get(family, {})))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(REFERENCE / name, folder / name)
    return str(folder)


def _config(family: str) -> PretrainedConfig:
    if family == "mixtral":
        return MixtralConfig(**_SIZES, num_local_experts=8, num_experts_per_tok=2)
    if family == "olmoe":
        return OlmoeConfig(**_SIZES, num_experts=8, num_experts_per_tok=2)
    if family == "deepseek_v2":
        groups = {"n_group": 1, "topk_group": 1, "topk_method": "greedy"}
        return DeepseekV2Config(**_SIZES, **_LATENT, **groups, q_lora_rank=None, head_dim=16)
    return DeepseekV3Config(**_SIZES, **_LATENT, n_group=2, topk_group=1, q_lora_rank=32)
