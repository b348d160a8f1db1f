"""The model that is measured: random weights in a published shape, written to a disk a part at a time.

Experts are normal numbers, so that their exponents are as compressible as trained ones. What else is random is scaled
so that routing has the locality of a trained model's: a token's own embedding is small beside what the first layer's
attention brings of its neighbours, and later layers add little.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from transformers import PretrainedConfig

from expertcast.data.models import load_tokenizer, meta_model
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.text import load_documents
from expertcast.predictors import ExpertcastError
from expertcast.predictors.messages import Json
from expertcast.runtime.benchmarking.shapes import SHAPES, STD, weight_bytes

EMBEDDING, LATER_ATTENTION = 0.05, 0.004
"""Standard deviations of the embeddings, and of the attention's last matrix in all layers but the first."""
_CHUNK = 1 << 24
"""Numbers drawn at a time."""
_ROLLED = 1 << 26
_SMALL = {"hidden_size": 256, "intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4,
          "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 4096}  # fmt: skip


def olmoe(layers: int, *, small: bool) -> PretrainedConfig:
    """OLMoE-1B-7B with so many layers; `small`: of toy size, for tests."""
    config = SHAPES["olmoe-1b-7b"].config(layers)
    for name, value in (_SMALL if small else {}).items():
        setattr(config, name, value)
    return config


def thirty(gigabytes: float) -> PretrainedConfig:
    """Qwen3-30B-A3B with 48 layers of 128 experts. What does not fit the disk or 3 GB of memory is cut: experts in
    their inner size, to so many gigabytes in all; the vocabulary to 32768, and attention to 16 heads."""
    config = SHAPES["qwen3-30b-a3b"].config()
    whole = config.num_hidden_layers * config.num_experts * 3 * config.hidden_size * 2
    config.moe_intermediate_size = min(config.moe_intermediate_size, int(gigabytes * 1e9 / whole) // 32 * 32)
    config.vocab_size, config.num_attention_heads = 32768, 16
    if config.moe_intermediate_size < 32:
        raise ExpertcastError(f"--gigabytes {gigabytes:g}: give {32 * whole / 1e9:.0f} or more")
    return config


def write_model(folder: Path, config: PretrainedConfig, *, experts: bool = True, seed: int = 0) -> Json:
    """Write `config.json` and `model.safetensors`, unless they are there with the same settings.

    Args:
        folder: made if need be.
        config: of the model; weights are bf16.
        experts: False leaves them out, for a store that is filled from elsewhere.
        seed: the same gives the same weights.

    Returns:
        `bytes`, `expert_bytes`, `experts_bytes`, and the settings.

    Raises:
        ExpertcastError: another model lies there.
    """
    skeleton = meta_model(config, torch.bfloat16)
    view = find_moe_layers(skeleton)
    inside = tuple(f"{layer.experts_name}." for layer in view)
    total = sum(weight_bytes(layer.experts) for layer in view)
    made: Json = {
        "config": config.to_diff_dict(), "experts": experts, "seed": seed, "embedding_std": EMBEDDING,
        "later_attention_std": LATER_ATTENTION, "std": STD, "bytes": weight_bytes(skeleton), "experts_bytes": total,
        "expert_bytes": total // (len(view) * view.shape.experts), "shape": view.shape.as_dict(),
    }  # fmt: skip
    made = json.loads(json.dumps(made))
    note = folder / "made.json"
    if note.is_file():
        if json.loads(note.read_text()) != made:
            raise ExpertcastError(f"{str(folder)!r} holds another model: remove it, or give another --keep")
        return made
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = [type(skeleton).__name__]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    chosen = {name: p for name, p in skeleton.named_parameters() if experts or not name.startswith(inside)}
    with (folder / "model.safetensors").open("wb") as file:
        _write_header(file, chosen)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in chosen.items():
            for part in _drawn(name, parameter, generator):
                file.write(part.view(torch.int16).numpy().data)
        os.fsync(file.fileno())
    note.write_text(json.dumps(made))
    return made


def sizes(config: PretrainedConfig) -> int:
    """Bytes of a model in bf16."""
    return weight_bytes(meta_model(config, torch.bfloat16))


def normal_block(seed: int = 0) -> Tensor:
    """bf16 [_ROLLED] of normal numbers: many weights are made of it, each from another place on."""
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([torch.randn(_CHUNK, generator=generator).mul_(STD).bfloat16() for _ in range(_ROLLED // _CHUNK)])


def text_tokens(count: int) -> list[int]:
    """Tokens of English text, as the bundled model's tokenizer counts them: words come again as they do in a text."""
    tokenizer = load_tokenizer("reference")
    found: list[int] = []
    for document in load_documents(["reference"]):
        found += tokenizer(document.text)["input_ids"]
        if len(found) >= count:
            return found[:count]
    raise ExpertcastError(f"the bundled text has {len(found)} tokens, {count} are needed: give fewer --new-tokens")


def _write_header(file: BinaryIO, parameters: dict[str, torch.nn.Parameter]) -> None:
    entries, at = {}, 0
    for name, parameter in parameters.items():
        end = at + 2 * parameter.numel()
        entries[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    text = text.ljust(-(-(len(text) + 8) // 4096) * 4096 - 8)
    file.write(len(text).to_bytes(8, "little") + text)


def _drawn(name: str, parameter: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
    """The numbers of one parameter in order, some at a time."""
    if parameter.dim() == 1:
        yield torch.ones(parameter.numel(), dtype=torch.bfloat16)
        return
    std = STD
    if "embed_tokens" in name:
        std = EMBEDDING
    elif "o_proj" in name and "layers.0." not in name:
        std = LATER_ATTENTION
    for start in range(0, parameter.numel(), _CHUNK):
        count = min(_CHUNK, parameter.numel() - start)
        yield torch.randn(count, generator=generator).mul_(std).bfloat16()
