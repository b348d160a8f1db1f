"""Files of life size, written in pieces, in less than 1 GB of memory.

    python -m benchmarks.life_size_files FOLDER [--kind KIND]

    Q4_0, Q4_K_M  a GGUF file of Qwen3-30B-A3B's shape with random weights: 48 layers of 128 experts, hidden size 2048,
                  151,936 tokens and their merges, 17 GB
    safetensors   Qwen3-30B-A3B in bf16 as published: 18,867 tensors in 16 shards, 61 GB
    deepseek-v3   DeepSeek-V3 in FP8 as published: 92,000 tensors in 163 shards, 688 GB
    gpt-oss-20b   gpt-oss-20b in MXFP4 as published, in 3 shards, 14 GB

The safetensors are sparse: headers, then holes that read as zeros and take no room on the disk. Their tokenizer is that
of the GGUF file.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.core_model_loading import dot_natural_key

from benchmarks.shapes import SHAPES, STD
from expertcast.data.models import meta_model

KINDS = ("Q4_0", "Q4_K_M")
"""Q4_K_M: experts in Q4_K, their down projections in Q6_K in every second layer, the head in Q6_K; the rest is Q4_K."""
SPARSE = {
    "safetensors": ("qwen3-30b-a3b", 16), "deepseek-v3": ("deepseek-v3-fp8", 163), "gpt-oss-20b": ("gpt-oss-20b", 3)
}  # fmt: skip
"""Folder and number of shards of the kinds in safetensors."""
EMBEDDING, LATER_ATTENTION = 0.05, 0.004
"""Standard deviations of the embeddings, and of the attention's output matrix in all layers but the first: routing then
has the locality of a trained model."""
_SMALL = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 16, "num_experts_per_tok": 4,
          "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip
_SIZES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
_BLOCK = 128
"""Rows, and columns, of FP8 weights that share a scale."""
_MXFP4 = 32
"""Weights of MXFP4 that share a scale."""
_DEVIATIONS = {"Q4_0": 4.61, "Q4_K": 147.5, "Q6_K": 592.0}
"""Standard deviation of a weight with uniformly random codes, divided by the block's scale."""
_PIECE = 64 << 20


def deviation(name: str) -> float:
    """Return the standard deviation of a matrix, by its name in transformers."""
    later_attention = "o_proj" in name and "layers.0." not in name
    return EMBEDDING if "embed_tokens" in name else LATER_ATTENTION if later_attention else STD


def qwen3(layers: int, *, small: bool = False) -> PretrainedConfig:
    """Return Qwen3-30B-A3B's config with its first layers and as large a part of its vocabulary; `small`: for tests."""
    shape = SHAPES["qwen3-30b-a3b"]
    config = shape.config(layers)
    config.vocab_size = max(4096, config.vocab_size * layers // shape.layers // 32 * 32)
    for name, value in (_SMALL if small else {}).items():
        setattr(config, name, value)
    return config


def tensors(layers: int, kind: str, config: object) -> Iterator[tuple[str, tuple[int, ...], str, float]]:
    """Yield name, shape, type and standard deviation of each tensor; 0: all ones."""
    get = lambda name: int(getattr(config, name))  # noqa: E731
    hidden, inner, experts, vocabulary = (
        get(each) for each in ("hidden_size", "moe_intermediate_size", "num_experts", "vocab_size")
    )
    width, heads, pairs = get("head_dim"), get("num_attention_heads"), get("num_key_value_heads")
    mixed = kind == "Q4_K_M"
    usual, larger = ("Q4_K", "Q6_K") if mixed else ("Q4_0", "Q4_0")
    yield "token_embd.weight", (vocabulary, hidden), usual, EMBEDDING
    yield "output.weight", (vocabulary, hidden), larger, STD
    yield "output_norm.weight", (hidden,), "F32", 0.0
    for layer in range(layers):
        block = f"blk.{layer}."
        yield f"{block}attn_norm.weight", (hidden,), "F32", 0.0
        yield f"{block}attn_q.weight", (heads * width, hidden), usual, STD
        yield f"{block}attn_k.weight", (pairs * width, hidden), usual, STD
        yield f"{block}attn_v.weight", (pairs * width, hidden), usual, STD
        yield f"{block}attn_output.weight", (hidden, heads * width), usual, LATER_ATTENTION if layer else STD
        yield f"{block}attn_q_norm.weight", (width,), "F32", 0.0
        yield f"{block}attn_k_norm.weight", (width,), "F32", 0.0
        yield f"{block}ffn_norm.weight", (hidden,), "F32", 0.0
        yield f"{block}ffn_gate_inp.weight", (experts, hidden), "F32", STD
        yield f"{block}ffn_gate_exps.weight", (experts, inner, hidden), usual, STD
        yield f"{block}ffn_up_exps.weight", (experts, inner, hidden), usual, STD
        yield f"{block}ffn_down_exps.weight", (experts, hidden, inner), larger if layer % 2 else usual, STD


def write(path: Path, kind: str, config: PretrainedConfig) -> None:
    """Write a GGUF file of Qwen3-30B-A3B's shape.

    Args:
        path: the file; it appears when it is whole.
        kind: one of `KINDS`.
        config: of the shape, or of a part of it.
    """
    count = int(config.num_hidden_layers)
    partial = path.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "qwen3moe")
    _describe(writer, config, count, kind)
    found = list(tensors(count, kind, config))
    for name, dims, stored, _ in found:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[stored]]
        nbytes = int(np.prod(dims)) // block * size
        if stored == "F32":
            writer.add_tensor_info(name, dims, np.dtype(np.float32), nbytes)
        else:
            rows = (*dims[:-1], dims[-1] // block * size)
            writer.add_tensor_info(name, rows, np.dtype(np.uint8), nbytes, raw_dtype=gguf.GGMLQuantizationType[stored])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    assert writer.fout is not None
    file, draw = writer.fout[0], np.random.default_rng(0)
    writer.write_padding(file, file.tell())
    for _, dims, stored, deviation in found:
        for piece in _pieces(int(np.prod(dims)), stored, deviation, draw):
            file.write(piece)
        writer.write_padding(file, file.tell())
    writer.close()
    partial.rename(path)


def _pieces(numbers: int, stored: str, deviation: float, draw: np.random.Generator) -> Iterator[memoryview]:
    """Yield a tensor's bytes, at most `_PIECE` at once."""
    if stored == "F32":
        values = (
            np.ones(numbers, np.float32) if not deviation else draw.standard_normal(numbers, np.float32) * deviation
        )
        yield values.astype(np.float32).data
        return
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[stored]]
    left = numbers // block
    scale = np.frombuffer(np.float16(deviation / _DEVIATIONS[stored]).tobytes(), np.uint8)
    while left:
        count = min(left, _PIECE // size)
        blocks = np.frombuffer(draw.bytes(count * size), np.uint8).reshape(count, size).copy()
        # uniform codes are not symmetric: without random signs the mean weight outgrows all else over 48 layers, and
        # every token then chooses the same experts
        sign = np.bitwise_xor.reduce(blocks[:, 2:18], axis=1) & 128
        if stored == "Q4_0":
            blocks[:, :2] = scale
            blocks[:, 1] |= sign
        elif stored == "Q4_K":  # w = 32 d code - 32 dmin, zero in the mean
            blocks[:, :2] = scale
            blocks[:, 2:4] = np.frombuffer(np.float16(deviation / _DEVIATIONS[stored] * 7.5).tobytes(), np.uint8)
            blocks[:, 4:16] = (160,) * 8 + (0,) * 4
        else:
            blocks[:, 192:208] = 32
            blocks[:, 208:210] = scale
            blocks[:, 209] |= sign
        yield blocks.reshape(-1).data
        left -= count


def _describe(writer: gguf.GGUFWriter, config: object, layers: int, kind: str) -> None:
    get = lambda name: int(getattr(config, name))  # noqa: E731
    writer.add_context_length(get("max_position_embeddings"))
    writer.add_embedding_length(get("hidden_size"))
    writer.add_block_count(layers)
    writer.add_feed_forward_length(get("intermediate_size"))
    writer.add_head_count(get("num_attention_heads"))
    writer.add_head_count_kv(get("num_key_value_heads"))
    writer.add_key_length(get("head_dim"))
    writer.add_value_length(get("head_dim"))
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(get("vocab_size"))
    writer.add_expert_count(get("num_experts"))
    writer.add_expert_used_count(get("num_experts_per_tok"))
    writer.add_expert_feed_forward_length(get("moe_intermediate_size"))
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind}"])
    tokens, merges = vocabulary(get("vocab_size"))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(tokens) - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(len(tokens) - 1)


def vocabulary(size: int) -> tuple[list[str], list[str]]:
    """Return tokens and merges of a byte-level BPE: all bytes, then each token followed by each letter, and an end."""
    tokens, merges = list(bytes_to_unicode().values()), []
    letters = [*"abcdefghijklmnopqrstuvwxyz", "\u0120"]
    for number in range(size):
        for letter in letters:
            if len(tokens) == size - 1:
                return [*tokens, "<|endoftext|>"], merges
            tokens.append(tokens[number] + letter)
            merges.append(f"{tokens[number]} {letter}")
    raise AssertionError


Stored = tuple[str, str, list[int]]
"""Name, dtype and shape of a tensor in safetensors."""


def published(config: PretrainedConfig, fp8: bool) -> list[Stored]:
    """Return a model's tensors as they are published: one tensor for each matrix of each expert.

    Args:
        config: the model's configuration.
        fp8: matrices in the layers are FP8 with scales, and a layer that predicts the next token but one follows.
    """
    found: list[Stored] = []
    for name, tensor in meta_model(config, torch.bfloat16).state_dict().items():
        shape = list(tensor.shape)
        stem, _, last = name.rpartition(".")
        if config.model_type == "gpt_oss" and last in ("gate_up_proj", "down_proj"):
            count, columns, wide_rows = shape  # published transposed
            packed = [count, wide_rows, columns // _MXFP4]
            found += [(f"{name}_blocks", "U8", [*packed, _MXFP4 // 2]), (f"{name}_scales", "U8", packed)]
            continue
        if config.model_type == "gpt_oss" or not stem.endswith(".experts"):
            kept = not fp8 or len(shape) != 2 or ".layers." not in name or stem.endswith(".gate")
            dtype = "F32" if tensor.dtype == torch.float32 else "BF16" if kept else "F8_E4M3"
            found.append((name, dtype, shape))
            continue
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
        rows = [shape[1] // len(parts), shape[2]]
        names = [f"{stem}.{expert}.{part}.weight" for expert in range(shape[0]) for part in parts]
        found += [(each, "F8_E4M3" if fp8 else "BF16", rows) for each in names]
    if fp8:
        layers, hidden = int(config.num_hidden_layers), int(config.hidden_size)
        own, extra = f"model.layers.{layers}.", f"model.layers.{layers - 1}."
        found += [(name.replace(extra, own), *rest) for name, *rest in found if name.startswith(extra)]  # type: ignore[misc]
        wide = [int(config.vocab_size), hidden]
        found += [(f"{own}{name}.weight", "BF16", wide) for name in ("embed_tokens", "shared_head.head")]
        found += [(f"{own}{name}.weight", "BF16", [hidden]) for name in ("enorm", "hnorm", "shared_head.norm")]
        found.append((f"{own}eh_proj.weight", "BF16", [hidden, 2 * hidden]))
        scaled = [(name, shape) for name, dtype, shape in found if dtype == "F8_E4M3"]
        found += [(f"{name}_scale_inv", "F32", [-(-size // _BLOCK) for size in shape]) for name, shape in scaled]
    return sorted(found, key=lambda each: dot_natural_key(each[0]))


def write_tokenizer(folder: Path, size: int) -> None:
    """Write a tokenizer of `vocabulary`."""
    tokens, merges = vocabulary(size)
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, [tuple(each.split(" ")) for each in merges]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=tokens[-1]).save_pretrained(folder)


def write_sparse(folder: Path, config: PretrainedConfig, shards: int, fp8: bool = False) -> None:
    """Write a checkpoint in safetensors whose weights are holes, so that it takes as much of the disk as its headers.

    Args:
        folder: destination; its config.json appears last.
        config: the model's configuration.
        shards: number of files, about equal in size.
        fp8: as for :func:`published`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = published(config, fp8)
    sizes = [math.prod(shape) * _SIZES[dtype] for _, dtype, shape in tensors]
    total, before = sum(sizes), 0
    parts: list[dict[str, dict[str, object]]] = [{} for _ in range(shards)]
    ends, names = [0] * shards, [f"model-{part + 1:05}-of-{shards:06}.safetensors" for part in range(shards)]
    index: dict[str, str] = {}
    for (name, dtype, shape), nbytes in zip(tensors, sizes, strict=True):
        part = min(before * shards // total, shards - 1)
        parts[part][name] = {"dtype": dtype, "shape": shape, "data_offsets": [ends[part], ends[part] + nbytes]}
        index[name], ends[part], before = names[part], ends[part] + nbytes, before + nbytes
    for path, part, end in zip(names, parts, ends, strict=True):
        header = json.dumps(part).encode()
        header += b" " * (-len(header) % 8)
        with (folder / path).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(file.tell() + end)
    written = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(written))
    described = {**config.to_dict(), "dtype": "bfloat16"}
    if config.model_type == "gpt_oss":
        described["quantization_config"] = {"quant_method": "mxfp4"}
    if fp8:
        section = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        described["quantization_config"] = {**section, "weight_block_size": [_BLOCK, _BLOCK]}
    (folder / "config.json").write_text(json.dumps(described, indent=2))


def make(folder: Path, kind: str, layers: int | None = None, config: PretrainedConfig | None = None) -> Path:
    """Write the file or folder of a kind if it is missing; return its path. `config`: of a GGUF file's shape."""
    whole = SHAPES["qwen3-30b-a3b"]
    cut = "" if layers in (None, whole.layers) else f"-{layers}-layers"
    if kind in SPARSE:
        name, shards = SPARSE[kind]
        path = folder / f"{name}{cut}"
        if not (path / "config.json").exists():
            fp8 = kind == "deepseek-v3"
            dense = {} if layers is None else {"num_hidden_layers": layers + 3}
            config = AutoConfig.for_model("deepseek_v3", **dense) if fp8 else SHAPES[name].config(layers)
            write_tokenizer(path, config.vocab_size)
            write_sparse(path, config, shards, fp8)
        return path
    config = config or whole.config(layers)
    if config.vocab_size != whole.config().vocab_size:
        cut += f"-{config.vocab_size}-tokens"
    path = folder / f"qwen3-30b-a3b{cut}{f'-{config.hidden_size}' if config.hidden_size < 2048 else ''}-{kind}.gguf"
    if not path.exists():
        write(path, kind, config)
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files of a kind if they are missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.life_size_files", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=(*KINDS, *SPARSE), default="Q4_0")
    parser.add_argument("--layers", type=int, help="the first so many layers (default: all)")
    args = parser.parse_args(arguments)
    args.folder.mkdir(parents=True, exist_ok=True)
    print(make(args.folder, args.kind, args.layers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
