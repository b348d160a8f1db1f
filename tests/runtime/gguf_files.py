"""Tiny models as GGUF files, under llama.cpp's names, by gguf's own writer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen3_5MoeTextConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

from expertcast.data import ggml
from tests.families.models import CONFIGS

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
"""llama.cpp's names of the modules; those of layers stand behind `blk.N.`."""


def tiny(family: str, **sizes: int) -> PreTrainedModel:
    """A model whose rows are whole blocks of 32 numbers; `sizes` are fields of its configuration that differ."""
    if family == "qwen3_5_moe_text":
        return _made(_QWEN35)
    config = copy.deepcopy(CONFIGS[family])
    config.hidden_size, config.num_hidden_layers = 64, 2
    config.moe_intermediate_size = config.intermediate_size = 32
    if family == "qwen2_moe":
        config.shared_expert_intermediate_size = 32
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    for name, size in sizes.items():
        setattr(config, name, size)
    return _made(config)


_QWEN35 = Qwen3_5MoeTextConfig(
    vocab_size=4096, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    moe_intermediate_size=32, shared_expert_intermediate_size=32, num_experts=8, num_experts_per_tok=2,
    linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
    linear_num_value_heads=4, full_attention_interval=2, max_position_embeddings=256, initializer_range=0.3,
    rope_parameters={
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
)  # fmt: skip


def _made(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).float().eval()
    return model


def write(
    path: Path,
    model: PreTrainedModel,
    kind: str = "Q8_0",
    architecture: str | None = None,
    without: str = "",
    others: Mapping[str, str] | None = None,
    part: int = 0,
    **more: int,
) -> None:
    """One file, with a tokenizer of bytes and the word `ab`.

    Args:
        path: to write.
        model: in float32.
        kind: how gguf stores matrices; vectors and routers are floats.
        architecture: as GGUF names it; None: the family's without its underscore.
        without: a tensor that is left out.
        others: tensors that are stored in another kind.
        part: tensors of each part of a split file; 0: it is not split.
        more: of its metadata, `__` for a dot.
    """
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, architecture or config.model_type.replace("_", ""), split_max_tensors=part)
    _describe(writer, config)
    for key, value in more.items():
        writer.add_uint32(key.replace("__", "."), value)
    writer.add_file_type(next(int(each) for each in gguf.LlamaFileType if f"{each.name}_".find(f"_{kind}_") > 0))
    for name, tensor in tensors_of(model).items():
        if name == without:
            continue
        numbers = tensor.detach().float().numpy()
        stored = gguf.GGMLQuantizationType[(others or {}).get(name, kind)]
        cut = numbers.shape[-1] % gguf.GGML_QUANT_SIZES[stored][0]
        if numbers.ndim == 1 or "gate_inp" in name or "conv1d" in name or kind == "F32" or cut:
            writer.add_tensor(name, numbers)
        elif kind == "F16":
            writer.add_tensor(name, numbers.astype(np.float16))
        else:
            writer.add_tensor(name, _quantised(numbers, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _quantised(numbers: np.ndarray, kind: Any) -> np.ndarray:
    """By gguf's own quantisation, or ggml's; random codes and small scales of kinds for which it has none."""
    import gguf

    if kind.name == "IQ4_NL":
        return ggml.quantise("IQ4_NL", torch.from_numpy(numbers)).numpy()
    if not kind.name.endswith("_K"):
        return gguf.quantize(numbers, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(numbers.size)
    rows = draw.integers(256, size=(*numbers.shape[:-1], numbers.shape[-1] // block, size), dtype=np.uint8)
    for at in {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind.name]:
        scales = draw.uniform(1e-4, 1e-3, rows.shape[:-1]).astype(np.float16)
        rows[..., at : at + 2] = scales[..., None].view(np.uint8)
    return rows.reshape(*rows.shape[:-2], -1)


def tensors_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """A model's parameters under llama.cpp's names: gate and up apart, the shared expert's gate as a vector."""
    made: dict[str, Tensor] = {}
    for full, tensor in model.state_dict().items():
        block, name = "", full
        if full.startswith("model.layers."):
            _, _, layer, name = full.split(".", 3)
            block = f"blk.{layer}."
        module, _, end = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "weight")
        if module == "mlp.experts.gate_up_proj":
            for part, half in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
                made[f"{block}ffn_{part}_exps.weight"] = half
            continue
        if module == "linear_attn.A_log":
            made[f"{block}ssm_a"] = -tensor.exp()
        elif module == "linear_attn.dt_bias":
            made[f"{block}ssm_dt.bias"] = tensor
        elif module == "linear_attn.conv1d":
            made[f"{block}ssm_conv1d.weight"] = tensor[:, 0]
        elif module == "post_attention_layernorm" and model.config.model_type == "qwen3_5_moe_text":
            made[f"{block}post_attention_norm.weight"] = tensor
        elif module in _NAMES:
            made[f"{block}{_NAMES[module]}.{end}"] = tensor[0] if module == "mlp.shared_expert_gate" else tensor
    return made


def _describe(writer: Any, config: PretrainedConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(getattr(config, "intermediate_size", 0) or config.moe_intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_expert_count(getattr(config, "num_experts", None) or config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    words = [*bytes_to_unicode().values(), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words + [f"<word {i}>" for i in range(config.vocab_size - len(words))])
    writer.add_token_merges(["a b"])
    if config.model_type == "qwen3_5_moe_text":
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
        writer.add_uint32(f"{writer.arch}.full_attention_interval", 2)
        writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
        writer.add_rope_dimension_sections([*config.rope_parameters["mrope_section"], 0])
