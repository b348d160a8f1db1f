"""Published configs of MoE models, as far as they decide what a forward computes.

Sizes are those of the models' own configs. What a paper's table says otherwise was not taken over (GPT-OSS-120B has 36
layers of 128 experts, not 24 of 32; trap 10 under system B).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from expertcast.data.models import REFERENCE, resolve_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One published config, as far as it decides what a forward computes."""

    hub_id: str
    """Where the config was published."""
    model_type: str
    dense_layers: int = 0
    """Decoder layers before the first MoE layer."""
    values: Mapping[str, Any]

    def config(self, layers: int | None = None) -> PretrainedConfig:
        """The config, cut to the first `layers` MoE layers (dense layers before them stay)."""
        values = dict(self.values)
        if layers is not None:
            values["num_hidden_layers"] = layers + self.dense_layers
        return AutoConfig.for_model(self.model_type, **values)

    @property
    def layers(self) -> int:
        """MoE layers of the whole model."""
        return int(self.values["num_hidden_layers"]) - self.dense_layers


_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
}
_GPT_OSS: dict[str, Any] = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "head_dim": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False,
}


def _reference_values() -> dict[str, Any]:
    values: dict[str, Any] = json.loads((Path(resolve_model(REFERENCE)) / "config.json").read_text())
    return {key: value for key, value in values.items() if key not in ("model_type", "architectures", "dtype")}


SHAPES: dict[str, Shape] = {
    "qwen3-30b-a3b": Shape(
        hub_id="Qwen/Qwen3-30B-A3B",
        model_type="qwen3_moe",
        values={
            **_QWEN3,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
        },
    ),
    "qwen3-235b-a22b": Shape(
        hub_id="Qwen/Qwen3-235B-A22B",
        model_type="qwen3_moe",
        values={
            **_QWEN3,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
        },
    ),
    "gpt-oss-20b": Shape(
        hub_id="openai/gpt-oss-20b",
        model_type="gpt_oss",
        values={**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    ),
    "gpt-oss-120b": Shape(
        hub_id="openai/gpt-oss-120b",
        model_type="gpt_oss",
        values={**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    ),
    "glm-4.7-flash": Shape(
        hub_id="zai-org/GLM-4.7-Flash",
        model_type="glm4_moe_lite",
        dense_layers=1,
        values={
            "vocab_size": 154880,
            "hidden_size": 2048,
            "intermediate_size": 10240,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 47,
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "n_shared_experts": 1,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
            "q_lora_rank": 768,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 202752,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": False,
        },
    ),
    "olmoe-1b-7b": Shape(
        hub_id="allenai/OLMoE-1B-7B-0924",
        model_type="olmoe",
        values={
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": False,
        },
    ),
    "mixtral-8x7b": Shape(
        hub_id="mistralai/Mixtral-8x7B-v0.1",
        model_type="mixtral",
        values={
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "tie_word_embeddings": False,
        },
    ),
    REFERENCE: Shape(hub_id="the bundled model", model_type="qwen3_moe", values=_reference_values()),
}
