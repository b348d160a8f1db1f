"""Every family of transformers whose experts are decorated, as a tiny random model, or the reason why it is refused.

A configuration takes what its class knows of `TEXT`; `FAMILIES` has what a family needs beside that. Keys that end in
`_config` and those of `TOP` belong to the outer configuration of a family that reads more than text.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from expertcast.data.models import auto_class

TEXT: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 32, "num_hidden_layers": 3, "max_position_embeddings": 256,
    "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    # attention, with and without latents, indexers and linear layers
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "index_head_dim": 16, "index_n_heads": 2,
    "index_topk": 16, "linear_head_dim": 8, "linear_num_heads": 4, "linear_num_key_heads": 4,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "mamba_n_heads": 4,
    "mamba_num_heads": 4, "mamba_d_state": 8, "mamba_head_dim": 16, "ssm_state_size": 8,
    # experts
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_k": 2, "top_k_experts": 2, "intermediate_size": 16, "moe_intermediate_size": 16,
    "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "num_shared_experts": 1, "first_k_dense_replace": 1,
    "shared_intermediate_size": 16, "shared_expert_intermediate_size": 16, "routed_scaling_factor": 1.5,
    "residual_multiplier": 0.25, "vocab_size_per_layer_input": 4096, "hidden_size_per_layer_input": 8,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 4,
    "num_heads": 4, "out_hidden_size": 32, "text_hidden_size": 32,
}  # fmt: skip
TOP = (
    "out_hidden_size", "projector_hidden_size", "vision_start_token_id", "audio_start_token_id", "audio_token_id",
    "image_token_id", "video_token_id",
)  # fmt: skip

_LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_INDEXED = {"layer_types": ["linear_attention", "indexed_attention", "linear_attention"]}
_SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_SLIDING = {
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 8, "d_rel": 4, "rel_extent": 8,
    "sliding_window_size": 16,
}  # fmt: skip
_OCR = {
    "vision_config": {
        "sam_config": {
            "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "output_channels": 32, "mlp_dim": 32,
            "image_size": 64, "global_attn_indexes": [0], "window_size": 2, "downsample_channels": [32, 32],
        },
        "encoder_config": {
            "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
            "intermediate_size": 32, "vocab_size": 16,
        },
    }
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {},
    "aria": {},
    "axk1": {},
    "axk2": {},
    "bailing_hybrid": _LINEAR,
    "beam": _SPARSE,
    "cohere2_moe": {},
    "deepseek_ocr2": {**_SPARSE, **_OCR},
    "deepseek_v2": {"topk_method": "group_limited_greedy"},
    "deepseek_v3": {},
    "deepseek_v32": {},
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe", "moe"]},
    "diffusion_gemma": {},
    "dots1": {},
    "dots3_note": {
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16,
        "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8, "shared_experts_intermediate_size": 16,
    },
    "ernie4_5_moe": {},
    "ernie4_5_vl_moe": {**_MROPE, "moe_intermediate_size": [16, 16]},
    "exaone_moe": {},
    "flex_olmo": {},
    "flint": {"num_hidden_layers": 5},
    "gemma4": {"enable_moe_block": True},
    "glm4_moe": {},
    "glm4_moe_lite": {},
    "glm4v_moe": {**_MROPE, "head_dim": 16},
    "glm5_next": {**_INDEXED, **_SPARSE, "qk_rope_head_dim": 0, "head_dim": 0},
    "glm_moe_dsa": {},
    "gpt_oss": {},
    "granitemoe": {},
    "granitemoe_swa": {},
    "granitemoehybrid": _LINEAR,
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "hy_v4": {},
    "inkling": _SLIDING,
    "inkling2": _SLIDING,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 0, "expert_layer_period": 1, "expert_layer_offset": 0},
    "kimi_linear": _LINEAR,
    "kolibri1": {},
    "laguna": {"moe_router_logit_softcapping": 3.0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "mellum": {},
    "mimo_v2_flash": {
        "num_key_value_heads": 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "minimax": {},
    "minimax_m2": {},
    "minimax_m3_vl": {},
    "mistral4": {"head_dim": 16},
    "mistral_large4": {},
    "mixtral": {},
    "muse_spark": {
        "moe_hidden_size": 24, "output_multiplier": 1.3, "out_hidden_size": 32, "projector_hidden_size": 32,
        "audio_config": {
            "out_hidden_size": 32, "patch_sizes": [2], "hidden_sizes": [32], "depths": [1], "num_hidden_layers": 1,
        },
    },
    "nemotron_h": {
        "n_groups": 1, "moe_shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "moe", "full_attention", "moe"], "num_hidden_layers": 4,
    },
    "olmoe": {},
    "openai_privacy_filter": {},
    "phimoe": {},
    "qwen2_moe": {},
    "qwen3_5_moe": _LINEAR,
    "qwen3_moe": {},
    "qwen3_next": _LINEAR,
    "qwen3_omni_moe": {
        **_MROPE, "vision_start_token_id": 4, "audio_start_token_id": 5, "audio_token_id": 6, "image_token_id": 7,
        "video_token_id": 8,
        "audio_config": {
            "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 32, "output_dim": 32,
            "n_window": 2, "downsample_hidden_size": 32,
        },
    },
    "qwen3_vl_moe": _MROPE,
    "qwen4_exp": {
        **_INDEXED, "indexer_budget": 16, "indexer_compress_ratio": 4, "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
    },
    "solar_open": {},
    "unlimited_ocr": {**_OCR, "sliding_window": 16},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip

REFUSED = {
    "deepseek_v4": "experts is routed by something else than DeepseekV4TopKRouter (by a table of token ids",
    "diffusion_gemma": "for 2 tokens its router DiffusionGemmaTextRouter returns [[256, 8], [256, 2], [256, 2]], not",
    "ernie4_5_vl_moe": "experts is routed by something else than Ernie4_5_VLMoeMoeBlock (by a table",
    "inkling": "its router InklingTopkRouter returns 4 values, not logits, weights and ids",
    "openai_privacy_filter": "Unrecognized configuration class",
    "zaya": "its router ZayaRouter returns 4 values, not logits, weights and ids",
}

WORKING_CLASSES = {
    "diffusion_gemma": ("DiffusionGemmaEncoderModel", None),
    "openai_privacy_filter": ("OpenAIPrivacyFilterForTokenClassification", "grouped_mm"),
}
"""Of refused families, a class that `expertcast.offload` takes, and the experts implementation that it must be loaded
with where transformers' default for the class cannot read slots."""

_TEXT_ALONE = {
    "aria": "aria_text", "inkling": "inkling_text", "inkling2": "inkling2_text", "dots3_note": "dots3_note_text",
    "gemma4": "gemma4_text", "qwen3_5_moe": "qwen3_5_moe_text", "qwen4_exp": "qwen4_exp_text",
    "minimax_m3_vl": "minimax_m3_vl_text", "qwen3_omni_moe": "qwen3_omni_moe_thinker",
}  # fmt: skip
"""Model type of what users load of a family for text."""


def decorated() -> list[str]:
    """The families of the installed transformers that decorate experts, by its source files."""
    models = Path(transformers.__file__).parent / "models"
    files = sorted(models.glob("*/modeling_*.py"))
    mark = re.compile(r"^@use_experts_implementation", re.MULTILINE)
    return [path.parent.name for path in files if mark.search(path.read_text())]


def tiny_config(family: str) -> PretrainedConfig:
    """The family's configuration, small."""
    own = copy.deepcopy(FAMILIES[family])
    cls = CONFIG_MAPPING[_TEXT_ALONE.get(family, family)]
    outer = {name: own.pop(name) for name in list(own) if name in TOP or name.endswith("_config")}
    text = {**TEXT, **own}
    if "text_config" not in cls.sub_configs:
        return cls(**text)
    if "vision_config" in cls.sub_configs:
        outer["vision_config"] = {**VISION, **outer.get("vision_config", {})}
    return cls(text_config=text, **outer)


def tiny_family(family: str) -> PreTrainedModel:
    """A random model of the family in bf16, as `from_pretrained` would load it: some modules keep fp32. Of a family in
    `WORKING_CLASSES` that class."""
    config = tiny_config(family)
    torch.manual_seed(0)
    name, implementation = WORKING_CLASSES.get(family, ("", None))
    make = getattr(transformers, name)._from_config if name else auto_class(config).from_config
    model: PreTrainedModel = make(config, dtype=torch.bfloat16, experts_implementation=implementation).eval()
    kept = {name for part in model.modules() for name in getattr(part, "_keep_in_fp32_modules_strict", None) or ()}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "bias" in name and tensor.is_floating_point():
            tensor.data.normal_(std=0.1)
        if any(part in name for part in kept):
            tensor.data = tensor.data.float()
    return model
