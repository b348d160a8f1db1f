"""Tiny checkpoints as GPTQ, AWQ, compressed-tensors and bitsandbytes ship them, each with the plain one it stands for.

Packing is written out here from the forms' documentation: code i of a word is its bits b i to b (i + 1).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.families.models import tiny_model
from tests.runtime.quantised import PLAIN, edit_weights, quantised, say_quantised

GROUP = 8
"""Columns that share a scale."""
_AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Row of eight that lies at each place of a word."""
Made = tuple[dict[str, Tensor], Tensor]
"""Tensors of one weight by what follows its name, and the weight [R, C] that they stand for."""


def words(codes: np.ndarray, bits: int) -> Tensor:
    """int32 words [N, M b/32] of the codes [N, M]."""
    each = codes.astype(np.uint64).reshape(len(codes), -1, 32 // bits)
    packed = (each << (bits * np.arange(32 // bits, dtype=np.uint64))).sum(-1)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32))


def gptq(bits: int = 4, older: bool = True, reorder: bool = False, indices: bool = True) -> Callable[[Tensor], Made]:
    """What packs a weight as GPTQ does; `older`: zeros are stored less one."""

    def make(weight_RC: Tensor) -> Made:
        code_RC, zero_RG, scale_RG, group_C = _drawn(weight_RC, bits, torch.float16, reorder)
        stored_GR = (zero_RG.T - older) % 2**bits
        tensors = {"qweight": words(code_RC, bits).T, "qzeros": words(stored_GR, bits), "scales": scale_RG.T}
        if indices:
            tensors["g_idx"] = torch.from_numpy(group_C.astype(np.int32))
        return tensors, _weight(code_RC, zero_RG, scale_RG, group_C)

    return make


def awq(weight_RC: Tensor) -> Made:
    """A weight as AWQ's gemm kernels read it."""
    code_RC, zero_RG, scale_RG, group_C = _drawn(weight_RC, 4, torch.float16)

    def columns(each: np.ndarray) -> Tensor:
        return words(each.reshape(len(each), -1, 8)[:, :, list(_AWQ_ROWS)].reshape(each.shape), 4)

    tensors = {"qweight": columns(code_RC.T), "qzeros": columns(zero_RG.T), "scales": scale_RG.T}
    return tensors, _weight(code_RC, zero_RG, scale_RG, group_C)


def compressed(
    bits: int = 4, symmetric: bool = True, channel: bool = False, reorder: bool = False, plain: bool = False
) -> Callable[[Tensor], Made]:
    """What packs a weight as compressed-tensors does; `plain`: one code an int8 (`int-quantized`)."""

    def make(weight_RC: Tensor) -> Made:
        group = weight_RC.shape[1] if channel else GROUP
        code_RC, zero_RG, scale_RG, group_C = _drawn(weight_RC, bits, torch.bfloat16, reorder, group)
        half = 2 ** (bits - 1)
        zero_RG = np.full_like(zero_RG, half) if symmetric else zero_RG
        tensors = {"weight_scale": scale_RG}
        if plain:
            tensors["weight"] = torch.from_numpy((code_RC - half).astype(np.int8))
        else:
            tensors |= {"weight_packed": words(code_RC, bits), "weight_shape": torch.tensor(weight_RC.shape)}
        if not symmetric and plain:
            tensors["weight_zero_point"] = torch.from_numpy((zero_RG - half).astype(np.int8))
        elif not symmetric:
            tensors["weight_zero_point"] = words(zero_RG.T, bits).T
        if reorder:
            tensors["weight_g_idx"] = torch.from_numpy(group_C.astype(np.int32))
        return tensors, _weight(code_RC, zero_RG, scale_RG, group_C)

    return make


def compressed_fp8(block: tuple[int, int] | None, channel: bool = False) -> Callable[[Tensor], Made]:
    """What makes FP8 codes and scales for blocks, rows or a tensor, as compressed-tensors names them."""

    def make(weight_RC: Tensor) -> Made:
        shared = (1, weight_RC.shape[1]) if channel else block
        codes, scales = quantised(weight_RC, shared)
        scales = scales.bfloat16().reshape(-1 if shared else 1, *scales.shape[1:])
        high, wide = shared or weight_RC.shape
        each = scales.double().reshape(weight_RC.shape[0] // high, -1)
        wanted = codes.double() * each.repeat_interleave(high, 0).repeat_interleave(wide, 1)
        return {"weight": codes, "weight_scale": scales}, wanted

    return make


def four_bits(nested: bool = False) -> Callable[[Tensor], Made]:
    """What packs a weight as bitsandbytes does in 4 bits; `nested`: the blocks' largest numbers are packed too."""

    def make(weight_RC: Tensor) -> Made:
        draw = np.random.default_rng(int(weight_RC.float().abs().sum() * 1000) % 2**32)
        each = 64
        codes = draw.integers(16, size=weight_RC.numel())
        table = np.sort(draw.uniform(-1, 1, 16)).astype(np.float32)
        largest = draw.uniform(0.01, 0.1, weight_RC.numel() // each).astype(np.float32)
        state = {"quant_type": "nf4", "blocksize": each, "dtype": "bfloat16", "shape": list(weight_RC.shape)}
        tensors = {"weight.absmax": largest}
        if nested:
            octets = draw.integers(256, size=largest.shape).astype(np.uint8)
            outer, outer_table = largest[:1], draw.uniform(-1, 1, 256).astype(np.float32)
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
            tensors = {"weight.absmax": octets, "weight.nested_absmax": outer, "weight.nested_quant_map": outer_table}
            largest = outer_table[octets] * outer[0] + np.float32(0.25)
        weight = torch.from_numpy(table[codes] * largest[np.arange(len(codes)) // each]).view(weight_RC.shape)
        tensors |= {
            "weight": (codes[0::2] * 16 + codes[1::2]).astype(np.uint8)[:, None],
            "weight.quant_map": table,
            "weight.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8).copy(),
        }
        return {suffix: torch.from_numpy(array) for suffix, array in tensors.items()}, weight

    return make


def eight_bits(weight_RC: Tensor) -> Made:
    """A weight as bitsandbytes ships it in 8 bits."""
    scales = weight_RC.float().abs().amax(1)
    codes = (weight_RC.float() / scales[:, None] * 127).round().to(torch.int8)
    weight = codes.float() * scales[:, None] * np.float32(7.874015718698502e-3)
    return {"weight": codes, "SCB": scales, "weight_format": torch.zeros((), dtype=torch.uint8)}, weight


def group(bits: int, targets: list[str], **settings: Any) -> dict[str, Any]:
    """A group of modules in the configuration of compressed-tensors."""
    fields = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    own = settings.pop("format", None)
    return {"targets": targets, "weights": {**fields, **settings}, **({"format": own} if own else {})}


def checkpoint(
    folder: Path, make: Callable[[Tensor], Made] | dict[str, Callable[[Tensor], Made]], **settings: Any
) -> tuple[str, str]:
    """A packed checkpoint, and the plain one that it stands for.

    Args:
        folder: of both.
        make: packs a weight; several by a part of the modules' names, the first that fits.
        settings: the configuration's section on quantisation.
    """
    makers = make if isinstance(make, dict) else {"": make}
    scales = torch.bfloat16 if settings["quant_method"] in ("compressed-tensors", "bitsandbytes") else torch.float16
    model = tiny_model("qwen3_moe", scales)
    model.generation_config.eos_token_id = None
    for name in ("packed", "plain"):
        model.save_pretrained(folder / name)
    wanted: dict[str, Tensor] = {}

    def pack(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".weight") and not any(p in name for p in PLAIN)]:
            stem = name.removesuffix(".weight")
            chosen = next(makers[part] for part in makers if part in stem)
            made, weight = chosen(tensors.pop(name))
            wanted[name] = weight.to(scales)
            tensors |= {f"{stem}.{suffix}": tensor.contiguous() for suffix, tensor in made.items()}
            tensors[f"{stem}.input_scale"] = torch.ones(1)

    edit_weights(folder / "packed", pack)
    edit_weights(folder / "plain", lambda tensors: tensors.update(wanted))
    say_quantised(folder / "packed", **settings)
    return str(folder / "packed"), str(folder / "plain")


def _drawn(
    weight_RC: Tensor, bits: int, dtype: torch.dtype, reorder: bool = False, group: int = GROUP
) -> tuple[np.ndarray, np.ndarray, Tensor, np.ndarray]:
    """Codes of a weight's shape, zeros and scales [R, G], and the group of each column; zeros at both ends too."""
    rows, columns = weight_RC.shape
    draw = np.random.default_rng(int(weight_RC.float().abs().sum() * 1000) % 2**32)
    codes = draw.integers(2**bits, size=(rows, columns))
    zeros = draw.integers(2**bits, size=(rows, columns // group))
    zeros.flat[:2] = 0, 2**bits - 1
    scales = torch.from_numpy(draw.uniform(0.001, 0.02, size=zeros.shape)).to(dtype)
    groups = np.arange(columns) // group
    return codes, zeros, scales, draw.permutation(groups) if reorder else groups


def _weight(code_RC: np.ndarray, zero_RG: np.ndarray, scale_RG: Tensor, group_C: np.ndarray) -> Tensor:
    """Exactly, in float64."""
    return torch.from_numpy(code_RC - zero_RG[:, group_C]).double() * scale_RG.double()[:, group_C]
