"""Small models with random weights, of families that both transformers and vLLM know, as a checkpoint's folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from engines import REFERENCE
from transformers import AutoConfig, AutoModelForCausalLM

LAYERS, HIDDEN = 3, 128
"""Of each model: layers, the first of which may be dense, and what they read and write."""
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_COMMON = {
    "vocab_size": 4096, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.15, "bos_token_id": 0,
    "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES: Mapping[str, Mapping[str, object]] = {
    # 3-D tensors of all experts in the checkpoint
    "granitemoe": {"intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2},
    "mixtral": {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2},
    # an expert that all tokens share, behind a gate of its own; the first layer is dense
    "qwen2_moe": {
        "intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
        "num_experts": 16, "num_experts_per_tok": 4, "mlp_only_layers": [0],
    },
    "olmoe": {"intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4},
    # shared experts without a gate, latent attention, weights scaled; the first layer is dense
    "deepseek_v2": {
        "intermediate_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 16, "num_experts_per_tok": 4,
        "n_shared_experts": 2, "first_k_dense_replace": 1, "num_key_value_heads": 4, "kv_lora_rank": 512,
        "q_lora_rank": None, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32,
        "routed_scaling_factor": 2.0, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip


def make_model(folder: Path, family: str, **changes: object) -> str:
    """A model of a family, and the tokenizer of the bundled one, in `folder`; the folder's name."""
    config = AutoConfig.for_model(family, **{**_COMMON, **FAMILIES[family], **changes})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for name in _TOKENIZER:
        shutil.copyfile(Path(REFERENCE) / name, folder / name)
    return str(folder)


def top_k(family: str) -> int:
    """Experts that a token of a family's model takes."""
    return int(str(FAMILIES[family]["num_experts_per_tok"]))
