"""Checkpoints in FP8 and MXFP4: the bits of transformers' own dequantisation, from the shipped bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from expertcast.data.models import load_model
from expertcast.predictors import ExpertcastError
from expertcast.runtime import load_offloaded
from expertcast.runtime.storage.disk_store import DiskStore
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy
from tests.runtime.quantised import (
    IDS,
    edit_weights,
    fp8,
    fp8_resident,
    mxfp4,
    mxfp4_resident,
    quantised,
    same_weights,
)


@pytest.mark.parametrize(
    ("family", "block", "scale_fmt", "codec"),
    [
        ("qwen3_moe", (16, 16), "float", "fp8:rows=16,columns=16"),
        ("qwen3_moe", (16, 16), "ue8m0", "fp8:rows=16,columns=16"),
        ("qwen3_moe", (1, 16), "float", "fp8:rows=1,columns=16"),
        ("qwen3_moe", None, "float", "fp8:rows=16,columns=16"),  # gate and up have a scale each, down one for 32 rows
        ("mixtral", (8, 16), "float", "fp8:rows=8,columns=16"),
        ("deepseek_v2", (8, 8), "float", "fp8:rows=8,columns=8"),
        ("glm4_moe_lite", None, "float", "fp8:rows=16,columns=16"),
    ],
)
def test_fp8(family: str, block: tuple[int, int] | None, scale_fmt: str, codec: str, tmp_path: Path) -> None:
    """Dequantised while loading, or moved as shipped with the blocks of the checkpoint."""
    path = fp8(family, tmp_path / "model", block, scale_fmt)
    resident = fp8_resident(path)
    expected = greedy(resident, IDS, 4)
    for options in ({}, {"store": "disk"}, {"store": "disk", "codec": "fp8"}):
        with load_offloaded(path, device="cpu", slots=6, **options) as offloaded:
            same_weights(offloaded, resident)
            assert_same(greedy(offloaded, IDS, 4), expected)
            if "codec" in options:
                assert isinstance(offloaded.store, DiskStore)
                assert offloaded.store.codec.text == codec
                assert offloaded.store.stored_nbytes < 0.7 * offloaded.store.nbytes
    assert_same(greedy(load_model(path), IDS, 4), expected)


def test_bytes_of_real_blocks(tmp_path: Path) -> None:
    """Half of bf16 by blocks of 128 x 128, which is the codec without options; in MXFP4 little more than a quarter."""
    made = {
        "fp8": fp8("qwen3_moe", tmp_path / "fp8", (128, 128), hidden_size=256, moe_intermediate_size=128),
        "mxfp4": mxfp4(tmp_path / "mxfp4", hidden_size=256, intermediate_size=256),
    }
    for codec, resident, most in (("fp8", fp8_resident, 0.504), ("mxfp4", mxfp4_resident, 0.27)):
        with load_offloaded(made[codec], store="disk", codec=codec, slots=6) as offloaded:
            assert isinstance(offloaded.store, DiskStore)
            assert offloaded.store.codec.text == codec
            assert offloaded.store.stored_nbytes < most * offloaded.store.nbytes
            same_weights(offloaded, resident(made[codec]))


def test_fp8_by_other_names(tmp_path: Path) -> None:
    """Scales under another name, and those of activations beside them."""
    path = fp8("qwen3_moe", tmp_path / "model")
    with load_offloaded(path, slots=6) as offloaded:
        expected = greedy(offloaded, IDS, 4)

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".weight_scale_inv")]:
            stem = name.removesuffix(".weight_scale_inv")
            tensors[f"{stem}.scale"] = tensors.pop(name)
            tensors[f"{stem}.activation_scale"] = torch.tensor(0.5)

    edit_weights(tmp_path / "model", rename)
    for codec in ("raw", "fp8"):
        with load_offloaded(path, store="disk", codec=codec, slots=6) as offloaded:
            assert_same(greedy(offloaded, IDS, 4), expected)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_fp8_in_another_dtype(dtype: str, tmp_path: Path) -> None:
    """Codes times scales rounded once; what is not in FP8 is cast, which transformers leaves undone."""
    path = fp8("qwen3_moe", tmp_path / "model")
    wanted = {"fp32": torch.float32, "fp16": torch.float16}[dtype]
    resident = fp8_resident(path, wanted)
    for parameter in resident.parameters():
        parameter.data = parameter.data.to(wanted)
    expected = greedy(resident, IDS, 4)
    for codec in ("raw", "fp8"):
        with load_offloaded(path, dtype=dtype, store="disk", codec=codec, slots=6) as offloaded:
            same_weights(offloaded, resident)
            assert_same(greedy(offloaded, IDS, 4), expected)
    assert_same(greedy(load_model(path, dtype=dtype), IDS, 4), expected)


def test_fp8_blocks_that_are_cut_off(tmp_path: Path) -> None:
    """As of DeepSeek-V3's 576 rows, which transformers refuses: the configuration's blocks, the last one smaller."""
    path = fp8("qwen3_moe", tmp_path / "model", (20, 24))
    name = "model.layers.1.self_attn.q_proj.weight"
    model = tiny_model("qwen3_moe")
    codes, scales = quantised(model.get_parameter(name), (20, 24))
    assert scales.shape == (2, 2)
    expected = (codes.float() * scales.repeat_interleave(20, 0)[:32].repeat_interleave(24, 1)[:, :32]).bfloat16()
    with load_offloaded(path, slots=6) as offloaded:
        assert torch.equal(offloaded.model.get_parameter(name), expected)
        assert torch.allclose(
            offloaded.store.views(0)["down_proj"], model.model.layers[0].mlp.experts.down_proj, 0.1, 0.1
        )
    with pytest.raises(
        ExpertcastError, match=r"those of .*gate_up_proj have scales for blocks of .*: choose codec 'raw'"
    ):
        load_offloaded(path, store="disk", codec="fp8")


def test_fp8_fused_experts(tmp_path: Path) -> None:
    """All experts of a layer in one tensor with one of scales."""
    path = fp8("qwen3_moe", tmp_path / "model")
    with load_offloaded(path, slots=6) as offloaded:
        expected = greedy(offloaded, IDS, 4)

    def fuse(tensors: dict[str, Tensor]) -> None:
        for layer in range(4):
            prefix = f"model.layers.{layer}.mlp.experts"
            for end in ("", "_scale_inv"):
                each = [
                    [tensors.pop(f"{prefix}.{e}.{p}_proj.weight{end}") for p in ("gate", "up", "down")]
                    for e in range(8)
                ]
                tensors[f"{prefix}.gate_up_proj{end}"] = torch.stack([torch.cat(three[:2]) for three in each])
                tensors[f"{prefix}.down_proj{end}"] = torch.stack([three[2] for three in each])

    edit_weights(tmp_path / "model", fuse)
    for codec in ("raw", "fp8"):
        with load_offloaded(path, store="disk", codec=codec, slots=6) as offloaded:
            assert_same(greedy(offloaded, IDS, 4), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4(dtype: torch.dtype, tmp_path: Path) -> None:
    """Blocks and scales as they are, biases and interleaved gates too; nothing is quantised again."""
    path = mxfp4(tmp_path / "model")
    resident = mxfp4_resident(path, dtype)
    expected = greedy(resident, IDS, 4)
    for options in ({}, {"store": "disk", "codec": "raw"}, {"store": "disk", "codec": "mxfp4"}):
        with load_offloaded(path, device="cpu", dtype=dtype, slots=6, **options) as offloaded:
            same_weights(offloaded, resident)
            assert_same(greedy(offloaded, IDS, 4), expected)
    assert isinstance(offloaded.store, DiskStore)
    assert offloaded.store.codec.text == "mxfp4"


def test_the_shipped_bytes_are_what_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No expert is dequantised to be packed, and the file is found again."""
    path = mxfp4(tmp_path / "model")

    def dequantised(*_: object) -> None:
        raise AssertionError("an expert was dequantised")

    monkeypatch.setattr("expertcast.runtime.storage.checkpoint_experts.ExpertSources.read_layer", dequantised)
    inodes = set()
    for _ in range(2):
        options = {"store": "disk", "codec": "mxfp4", "store_folder": tmp_path / "store", "slots": 6}
        with load_offloaded(path, **options) as offloaded:
            assert isinstance(offloaded.store, DiskStore)
            inodes.add(offloaded.store.path.stat().st_ino)
    assert len(inodes) == 1


def _plain_experts(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if "layers.2.mlp.experts" in name and name.endswith(".weight")]:
        tensors[name] = tensors[name].to(torch.bfloat16)
        del tensors[f"{name}_scale_inv"]


def test_plain_experts_in_one_layer(tmp_path: Path) -> None:
    """Loaded as they are; as shipped, they do not fit what the others are."""
    path = fp8("qwen3_moe", tmp_path / "model")
    edit_weights(tmp_path / "model", _plain_experts)
    with load_offloaded(path, slots=6) as offloaded:
        same_weights(offloaded, fp8_resident(path))
    with pytest.raises(ExpertcastError, match=r"layers\.2\.mlp\.experts\.gate_up_proj are not shipped in fp8: choose"):
        load_offloaded(path, store="disk", codec="fp8")
