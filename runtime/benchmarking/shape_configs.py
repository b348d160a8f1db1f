"""Published configs of MoE models, as far as they decide what a forward computes.

A model type's defaults in transformers are the config of one published model: what is said here is what another one of
that type has other. Tests hold layers, experts and numbers of parameters to the model cards. What a paper's table says
otherwise was not taken over (GPT-OSS-120B has 36 layers of 128 experts, not 24 of 32; trap 10 under system B).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from expertcast.data.models import REFERENCE, resolve_model
from expertcast.predictors.plain import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One published config, as far as it decides what a forward computes."""

    hub_id: str
    """Where the config was published."""
    model_type: str
    dense_layers: int = 0
    """Decoder layers before the first MoE layer."""
    values: Mapping[str, object] = field(default_factory=dict)
    """What is other than the model type's defaults."""

    def config(self, layers: int | None = None) -> PretrainedConfig:
        """The config, cut to the first `layers` MoE layers (dense layers before them stay)."""
        cut = {} if layers is None else {"num_hidden_layers": layers + self.dense_layers}
        return AutoConfig.for_model(self.model_type, **{**self.values, **cut})

    @property
    def layers(self) -> int:
        """MoE layers of the whole model."""
        return int(self.config().num_hidden_layers) - self.dense_layers


_ROPE = {"rope_type": "default", "rope_theta": 1e6}
_QWEN3 = {"head_dim": 128, "norm_topk_prob": True, "max_position_embeddings": 40960, "rope_parameters": _ROPE}


def _reference_values() -> Json:
    values: Json = json.loads((Path(resolve_model(REFERENCE)) / "config.json").read_text())
    return {key: value for key, value in values.items() if key not in ("model_type", "architectures", "dtype")}


SHAPES: dict[str, Shape] = {
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
        hub_id="openai/gpt-oss-20b",
        model_type="gpt_oss",
        values={"num_hidden_layers": 24, "num_local_experts": 32},
    ),
    "gpt-oss-120b": Shape(hub_id="openai/gpt-oss-120b", model_type="gpt_oss"),
    "glm-4.7-flash": Shape(
        hub_id="zai-org/GLM-4.7-Flash",
        model_type="glm4_moe_lite",
        dense_layers=1,
        values={"rope_parameters": _ROPE},
    ),
    "olmoe-1b-7b": Shape(hub_id="allenai/OLMoE-1B-7B-0924", model_type="olmoe", values={"intermediate_size": 1024}),
    "mixtral-8x7b": Shape(
        hub_id="mistralai/Mixtral-8x7B-v0.1", model_type="mixtral", values={"max_position_embeddings": 32768}
    ),
    REFERENCE: Shape(hub_id="the bundled model", model_type="qwen3_moe", values=_reference_values()),
}
