"""Checkpoints of small random models, of families that both transformers and vLLM support."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from engines import REFERENCE
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

LAYERS, HIDDEN = 3, 128
"""Layers (the first may be dense) and hidden size of each model."""
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
_COMMON = {
    "vocab_size": 4096, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.15, "bos_token_id": 0,
    "eos_token_id": 0, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
_LATENT = {
    "intermediate_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 16, "num_experts_per_tok": 4,
    "first_k_dense_replace": 1, "num_key_value_heads": 4, "kv_lora_rank": 512, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64, "v_head_dim": 32,
}  # fmt: skip
FAMILIES: Mapping[str, Mapping[str, object]] = {
    # 3-D tensors of all experts in the checkpoint
    "granitemoe": {"intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2},
    "mixtral": {"intermediate_size": 64, "num_local_experts": 8, "num_experts_per_tok": 2},
    # a shared expert with its own gate; the first layer is dense
    "qwen2_moe": {
        "intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
        "num_experts": 16, "num_experts_per_tok": 4, "mlp_only_layers": [0],
    },
    # inner features that vLLM pads to 32 with zeros
    "olmoe": {"intermediate_size": 24, "num_experts": 16, "num_experts_per_tok": 4},
    # shared experts without a gate, latent attention, scaled weights; the first layer is dense
    "deepseek_v2": {
        **_LATENT, "n_shared_experts": 2, "q_lora_rank": None, "routed_scaling_factor": 2.0, "topk_method": "greedy",
        "n_group": 1, "topk_group": 1,
    },
    # sigmoid scores with a correction bias, groups of experts
    "deepseek_v3": {**_LATENT, "n_shared_experts": 1, "q_lora_rank": 32, "n_group": 2, "topk_group": 1},
}  # fmt: skip
_AS_CHECKPOINTS = {"deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}}
"""Values of published config.json files that transformers does not save and vLLM reads."""


def make_model(folder: Path, family: str, dtype: torch.dtype = torch.bfloat16, **changes: object) -> str:
    """Write a model of a family, with the bundled tokenizer, to `folder`; return the folder's name."""
    config = AutoConfig.for_model(family, **{**_COMMON, **FAMILIES.get(family, {}), **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    _tell_apart(model)
    model.save_pretrained(folder)
    written = folder / "config.json"
    written.write_text(json.dumps(json.loads(written.read_text()) | _AS_CHECKPOINTS.get(family, {})))
    for name in _TOKENIZER:
        shutil.copyfile(Path(REFERENCE) / name, folder / name)
    return str(folder)


def first_layers(folder: Path, count: int) -> str:
    """Write the bundled model's first layers as a model to `folder`; return the folder's name."""
    model = AutoModelForCausalLM.from_pretrained(REFERENCE, num_hidden_layers=count)
    model.save_pretrained(folder)
    for name in _TOKENIZER:
        shutil.copyfile(Path(REFERENCE) / name, folder / name)
    return str(folder)


def _tell_apart(model: nn.Module) -> None:
    """Randomise norms and correction biases, and make the routers' choices distinct."""
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("gate.weight"):
                tensor.normal_(std=0.3)
            elif "norm" in name:
                tensor.normal_(mean=1, std=0.1)
            elif name.endswith("e_score_correction_bias"):
                tensor.normal_(std=0.02)


def top_k(family: str) -> int:
    """Return the experts per token of a family."""
    return int(str(FAMILIES[family]["num_experts_per_tok"]))
