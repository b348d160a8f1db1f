"""Tiny randomly initialised models of the eight families, with shared experts and dense first layers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    Glm4MoeLiteConfig,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

_COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_MLA: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
}

CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(
        **_COMMON,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        moe_intermediate_size=16,
        intermediate_size=48,
        norm_topk_prob=True,
    ),
    "gpt_oss": GptOssConfig(
        **_COMMON,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=8,
        intermediate_size=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=16,
    ),
    "glm4_moe_lite": Glm4MoeLiteConfig(
        **_COMMON, **_MLA, n_group=1, topk_group=1, routed_scaling_factor=1.8, norm_topk_prob=True
    ),
    "olmoe": OlmoeConfig(**_COMMON, num_key_value_heads=4, num_experts=8, intermediate_size=16, norm_topk_prob=False),
    "mixtral": MixtralConfig(**_COMMON, num_key_value_heads=2, num_local_experts=8, intermediate_size=16),
    "qwen2_moe": Qwen2MoeConfig(
        **_COMMON,
        num_key_value_heads=2,
        num_experts=8,
        moe_intermediate_size=16,
        intermediate_size=48,
        shared_expert_intermediate_size=24,
    ),
    "phimoe": PhimoeConfig(**_COMMON, num_key_value_heads=2, num_local_experts=8, intermediate_size=16),
    "deepseek_v2": DeepseekV2Config(
        **_COMMON,
        **_MLA,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.0,
    ),
}
DENSE_LAYERS = {"glm4_moe_lite": 1, "deepseek_v2": 1}
SHARED = {"glm4_moe_lite", "qwen2_moe", "deepseek_v2"}


def tiny_model(family: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **sizes: int) -> PreTrainedModel:
    """A tiny model of the family whose routers differ enough between tokens to be worth forecasting; `sizes` are fields
    of its configuration that differ."""
    config = copy.deepcopy(CONFIGS[family])
    for name, size in sizes.items():
        setattr(config, name, size)
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.1)
    for name, parameter in model.named_parameters():
        if name.endswith("_bias"):
            parameter.data.normal_(std=0.1)
    return model.to(dtype).eval()
