"""Writes a GGUF in bf16 of an OLMoE checkpoint, tensor by tensor; run by an interpreter that has `gguf` and numpy.

python -m disk_sides.gguf_file MODEL_FOLDER FILE
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import gguf
import numpy as np

_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate": "ffn_gate_inp",
}  # fmt: skip
_OUTSIDE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
            "lm_head.weight": "output.weight"}  # fmt: skip


def main(model: Path, out: Path) -> None:
    """Write the file under another name first."""
    config = json.loads((model / "config.json").read_text())
    tensors = _tensors(model / "model.safetensors")
    partial = out.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "olmoe")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    parts = [(name, part) for old, value in tensors.items() for name, part in _renamed(old, value)]
    for name, value in parts:
        if value.ndim == 1:
            writer.add_tensor_info(name, value.shape, np.dtype(np.float32), value.nbytes * 2)
        else:
            shape = (*value.shape[:-1], value.shape[-1] * 2)
            writer.add_tensor_info(
                name, shape, np.dtype(np.uint8), value.nbytes, raw_dtype=gguf.GGMLQuantizationType.BF16
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, value in parts:
        if value.ndim == 1:
            writer.write_tensor_data((value.astype(np.uint32) << 16).view(np.float32))
        else:
            writer.write_tensor_data(np.ascontiguousarray(value))
    writer.close()
    os.replace(partial, out)


def _tensors(path: Path) -> dict[str, np.ndarray]:
    """uint16 views of a mapped safetensors file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    mapped = np.memmap(path, np.uint8, "r", offset=8 + size)
    found = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        assert entry["dtype"] == "BF16", name
        found[name] = mapped[start:end].view(np.uint16).reshape(entry["shape"])
    return found


def _renamed(name: str, value: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """As llama.cpp names it; gate and up apart."""
    if name in _OUTSIDE:
        return [(_OUTSIDE[name], value)]
    _, _, layer, inner = name.split(".", 3)
    if inner == "mlp.experts.gate_up_proj":
        half = value.shape[1] // 2
        return [
            (f"blk.{layer}.ffn_gate_exps.weight", value[:, :half]),
            (f"blk.{layer}.ffn_up_exps.weight", value[:, half:]),
        ]
    if inner == "mlp.experts.down_proj":
        return [(f"blk.{layer}.ffn_down_exps.weight", value)]
    return [(f"blk.{layer}.{_NAMES[inner.removesuffix('.weight')]}.weight", value)]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
