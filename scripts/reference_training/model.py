"""The trained module, transformers' own Qwen3MoeForCausalLM: its making, its kernels and its validation loss.

Legend of shape suffixes: B windows in a batch, T tokens in a window, V vocabulary, N tokens in a row,
D hidden size, K experts per token.
"""

from __future__ import annotations

import ctypes
import math
import platform
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from torch.nn import functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from .data import Stream
from .options import Options

EVALUATION_BATCH = 16
BF16_EXPERTS = "grouped_mm_in_bf16"


def new_model(options: Options) -> Qwen3MoeForCausalLM:
    """Build the untrained model from the size flags, in fp32."""
    config = Qwen3MoeConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.key_value_heads,
        head_dim=options.hidden // options.heads,
        num_experts=options.experts,
        num_experts_per_tok=options.experts_per_token,
        moe_intermediate_size=options.expert_width,
        norm_topk_prob=True,
        max_position_embeddings=4 * options.window,
        router_aux_loss_coef=0.01,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(options.seed)
    return Qwen3MoeForCausalLM(config)


def load_model(folder: Path) -> Qwen3MoeForCausalLM:
    """Load a Qwen3-MoE model in fp32. Raises ValueError if the folder does not hold one."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"there is no config.json in {folder}: name a folder this script has written")
    try:
        return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot load the model in {folder}: {str(error).splitlines()[0]}") from error


def bf16_experts(
    experts: torch.nn.Module, hidden_ND: torch.Tensor, ids_NK: torch.Tensor, weights_NK: torch.Tensor
) -> torch.Tensor:
    """Run transformers' grouped_mm on bf16 copies of the experts' fp32 weights.

    Autocast does not reach grouped_mm, and CUDA's kernel for it is fast in bf16 only.
    """
    inputs = (hidden_ND, ids_NK, weights_NK)
    output: torch.Tensor
    if all(weight.dtype == torch.bfloat16 for weight in experts.parameters()):
        output = grouped_mm_experts_forward(experts, *inputs)
    else:
        copies = {name: weight.to(torch.bfloat16) for name, weight in experts.named_parameters()}
        output = torch.func.functional_call(experts, copies, inputs)
    return output


def choose_kernels(model: Qwen3MoeForCausalLM, *, compile_layers: bool) -> None:
    """Choose the fastest kernels per device.

    Measured on one CPU core, batch 16: grouped_mm experts train 1.3 to 1.8 times as fast as eager ones,
    eager attention 1.2 times as fast as sdpa, compiled layers another 1.2 times.
    """
    on_cuda = model.device.type == "cuda"
    if on_cuda:
        ALL_EXPERTS_FUNCTIONS.register(BF16_EXPERTS, bf16_experts)
    model.set_experts_implementation(BF16_EXPERTS if on_cuda else "grouped_mm")
    model.set_attn_implementation("sdpa" if on_cuda else "eager")
    if compile_layers:
        for layer in model.model.layers:
            layer.compile()


def keep_freed_memory() -> None:
    """Ask glibc to keep freed memory for the next step.

    Giving large activations back to the kernel and taking them again made a CPU step an eighth slower.
    """
    if platform.libc_ver()[0] == "glibc":
        trim_threshold, mmap_max = -1, -4
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)


def domain_loss(model: Qwen3MoeForCausalLM, stream: Stream, window: int, limit: int = 0) -> tuple[float, int]:
    """Sum the cross-entropy over a stream cut into windows, the last one as long as the stream leaves it.

    Returns nats and predicted tokens. `limit` keeps about so many windows, evenly spread; 0 keeps all.
    """
    starts = list(range(0, len(stream) - 1, window))
    if limit:
        starts = starts[:: math.ceil(len(starts) / limit)]
    full = [start for start in starts if start + window <= len(stream)]
    groups = [full[i : i + EVALUATION_BATCH] for i in range(0, len(full), EVALUATION_BATCH)]
    groups += [[start] for start in starts[len(full) :]]
    nats, count = 0.0, 0
    for group in groups:
        ids_BT = torch.stack([torch.from_numpy(stream[s : s + window].astype(np.int64)) for s in group])
        ids_BT = ids_BT.to(model.device)
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
        target_N = ids_BT[:, 1:].reshape(-1)
        nats += F.cross_entropy(logits_BTV[:, :-1].float().flatten(0, 1), target_N, reduction="sum").item()
        count += target_N.numel()
    return nats, count


@torch.no_grad()
def validate(model: Qwen3MoeForCausalLM, streams: dict[str, Stream], window: int, limit: int = 0) -> dict[str, float]:
    """Mean loss in nats per token for each domain, and over all tokens as `all`."""
    was_training = model.training
    model.eval()
    sums = {domain: domain_loss(model, stream, window, limit) for domain, stream in streams.items()}
    model.train(was_training)
    losses = {domain: nats / count for domain, (nats, count) in sums.items() if count}
    losses["all"] = sum(nats for nats, _ in sums.values()) / sum(count for _, count in sums.values())
    return losses
