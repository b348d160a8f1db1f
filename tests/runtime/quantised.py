"""Tiny checkpoints in the forms in which large ones are shipped: FP8 by blocks, rows or tensors, and MXFP4."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config, PreTrainedModel

from expertcast import OffloadedModel
from expertcast.data.inspection import ModelReport, OpenModel
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.source import ModelSource
from tests.families.models import CONFIGS, tiny_model

WEIGHTS = "model.safetensors"
IDS = {"input_ids": torch.tensor([[5, 9, 2, 77, 31]]), "attention_mask": torch.ones(1, 5, dtype=torch.long)}
PLAIN = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "block_sparse_moe.gate.", "router")
"""Not quantised in FP8 checkpoints."""


def edit_weights(folder: Path, edit: Callable[[dict[str, Tensor]], None]) -> None:
    """Change a checkpoint's tensors."""
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def say_quantised(folder: Path, **settings: Any) -> None:
    """Give a checkpoint's configuration a section on quantisation."""
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(values))


def fp8(
    family: str, folder: Path, block: tuple[int, int] | None = (16, 16), scale_fmt: str = "float", **sizes: int
) -> str:
    """As Qwen3-FP8 and DeepSeek-V3 ship it; without a block, one scale for each tensor.

    Args:
        family: one of the tiny models.
        folder: to write.
        block, scale_fmt: as the configuration says them.
        sizes: fields of the model's configuration that differ.
    """
    model = tiny_model(family) if not sizes else _model(family, **sizes)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)

    def quantise(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".weight") and not any(p in name for p in PLAIN)]:
            tensors[name], tensors[f"{name}_scale_inv"] = quantised(tensors[name], block, scale_fmt)

    edit_weights(folder, quantise)
    say_quantised(folder, quant_method="fp8", weight_block_size=block, activation_scheme="dynamic", scale_fmt=scale_fmt)
    return str(folder)


def quantised(weight_RC: Tensor, block: tuple[int, int] | None, scale_fmt: str = "float") -> tuple[Tensor, Tensor]:
    """Codes, and the scales that they are to be multiplied by; the last blocks may be cut off."""
    rows, columns = weight_RC.shape
    high, wide = block or (rows, columns)
    padded = torch.zeros(-(-rows // high) * high, -(-columns // wide) * wide)
    padded[:rows, :columns] = weight_RC.float()
    tiles = padded.view(len(padded) // high, high, -1, wide)
    scales = tiles.abs().amax((1, 3)).clamp_min(1e-6) / 448
    if scale_fmt == "ue8m0":
        scales = scales.log2().ceil().exp2()
    codes = (tiles / scales[:, None, :, None]).view_as(padded)[:rows, :columns].to(torch.float8_e4m3fn)
    if scale_fmt == "ue8m0":
        scales = (scales.log2() + 127).to(torch.uint8)
    return codes.contiguous(), scales if block else scales.reshape(())


def fp8_resident(folder: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """What transformers dequantises it to."""
    settings = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]
    chosen = FineGrainedFP8Config(dequantize=True, weight_block_size=settings["weight_block_size"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=chosen)
    resident: PreTrainedModel = model.eval()
    return resident


def _model(family: str, **sizes: int) -> PreTrainedModel:
    config = copy.deepcopy(CONFIGS[family])
    for name, size in sizes.items():
        setattr(config, name, size)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.generation_config.eos_token_id = None
    return model


def mxfp4(folder: Path, **sizes: int) -> str:
    """As gpt-oss ships it; `sizes` as for :func:`fp8`."""
    _model("gpt_oss", **({"intermediate_size": 64} | sizes)).save_pretrained(folder)

    def quantise(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_bias") and ".experts." in name]:
            tensors[name] = torch.randn_like(tensors[name])
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, inner, outer = tensors.pop(name).shape
            tensors[f"{name}_blocks"] = torch.randint(256, (experts, outer, inner // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(118, 126, (experts, outer, inner // 32), dtype=torch.uint8)

    edit_weights(folder, quantise)
    say_quantised(folder, quant_method="mxfp4", modules_to_not_convert=["lm_head"])
    return str(folder)


def mxfp4_resident(folder: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """What transformers dequantises it to."""
    chosen = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=chosen)
    resident: PreTrainedModel = model.eval()
    return resident


def same_weights(offloaded: OffloadedModel, resident: PreTrainedModel) -> None:
    """Every expert, and every other parameter, bit for bit."""
    own = dict(offloaded.model.named_parameters())
    for name, parameter in resident.named_parameters():
        assert ".experts." in name or torch.equal(own[name], parameter), name
    for layer in find_moe_layers(resident):
        views = offloaded.store.views(layer.index)
        for name, parameter in layer.experts.named_parameters():
            assert torch.equal(views[name], parameter), (layer.index, name)


def inspect_model(path: str | Path) -> ModelReport:
    """Describe a checkpoint as `expertcast inspect` does."""
    with OpenModel(ModelSource.of(path)) as opened:
        return opened.report()
