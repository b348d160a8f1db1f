"""Checkpoints in FP8 and MXFP4: the bits of transformers' own dequantisation, from the shipped bytes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from expertcast import load_offloaded
from expertcast.cli import main
from expertcast.data.models import load_model, load_tokenizer
from expertcast.predictors import ExpertcastError
from expertcast.runtime.storage.disk_store import DiskStore
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy, refused
from tests.runtime.quantised import (
    IDS,
    edit_weights,
    fp8,
    fp8_resident,
    inspect_model,
    mxfp4,
    mxfp4_resident,
    quantised,
    same_weights,
    say_quantised,
)


@pytest.mark.parametrize(
    ("family", "block", "scale_fmt"),
    [
        ("qwen3_moe", (16, 16), "float"),
        ("qwen3_moe", (16, 16), "ue8m0"),
        ("qwen3_moe", (1, 16), "float"),
        ("qwen3_moe", None, "float"),  # gate and up have a scale each, down one for 32 rows
        ("mixtral", (8, 16), "float"),
        ("deepseek_v2", (8, 8), "float"),
        ("glm4_moe_lite", None, "float"),
    ],
)
def test_fp8(family: str, block: tuple[int, int] | None, scale_fmt: str, tmp_path: Path) -> None:
    """Dequantised while loading, or at each read."""
    path = fp8(family, tmp_path / "model", block, scale_fmt)
    resident = fp8_resident(path)
    expected = greedy(resident, IDS, 4)
    for options in ({}, {"store": "disk"}, {"store": "disk", "in_place": True}):
        with load_offloaded(path, device="cpu", slots=6, **options) as offloaded:
            same_weights(offloaded, resident)
            assert_same(greedy(offloaded, IDS, 4), expected)
            if "in_place" in options:
                assert isinstance(offloaded.store, DiskStore)
                assert offloaded.store.stored_nbytes < 0.7 * offloaded.store.nbytes
    assert_same(greedy(load_model(path), IDS, 4), expected)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_fp8_in_another_dtype(dtype: str, tmp_path: Path) -> None:
    """Codes times scales rounded once; what is not in FP8 is cast, which transformers leaves undone."""
    path = fp8("qwen3_moe", tmp_path / "model")
    wanted = {"fp32": torch.float32, "fp16": torch.float16}[dtype]
    resident = fp8_resident(path, wanted)
    for parameter in resident.parameters():
        parameter.data = parameter.data.to(wanted)
    expected = greedy(resident, IDS, 4)
    with load_offloaded(path, dtype=dtype, slots=6) as offloaded:
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


def _rename(tensors: dict[str, Tensor]) -> None:
    """Scales under another name, and those of activations beside them."""
    for name in [name for name in tensors if name.endswith(".weight_scale_inv")]:
        stem = name.removesuffix(".weight_scale_inv")
        tensors[f"{stem}.scale"] = tensors.pop(name)
        tensors[f"{stem}.activation_scale"] = torch.tensor(0.5)


def _fuse(tensors: dict[str, Tensor]) -> None:
    """All experts of a layer in one tensor with one of scales."""
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.experts"
        for end in ("", "_scale_inv"):
            each = [
                [tensors.pop(f"{prefix}.{e}.{p}_proj.weight{end}") for p in ("gate", "up", "down")] for e in range(8)
            ]
            tensors[f"{prefix}.gate_up_proj{end}"] = torch.stack([torch.cat(three[:2]) for three in each])
            tensors[f"{prefix}.down_proj{end}"] = torch.stack([three[2] for three in each])


@pytest.mark.parametrize("edit", [_rename, _fuse])
def test_fp8_in_other_files(edit: Callable[[dict[str, Tensor]], None], tmp_path: Path) -> None:
    path = fp8("qwen3_moe", tmp_path / "model")
    with load_offloaded(path, slots=6) as offloaded:
        expected = greedy(offloaded, IDS, 4)
    edit_weights(tmp_path / "model", edit)
    with load_offloaded(path, slots=6) as offloaded:
        assert_same(greedy(offloaded, IDS, 4), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4(dtype: torch.dtype, tmp_path: Path) -> None:
    """Blocks and scales as they are, biases and interleaved gates too; nothing is quantised again."""
    path = mxfp4(tmp_path / "model")
    resident = mxfp4_resident(path, dtype)
    expected = greedy(resident, IDS, 4)
    for options in ({}, {"store": "disk"}, {"store": "disk", "in_place": True}):
        with load_offloaded(path, device="cpu", dtype=dtype, slots=6, experts="expanded", **options) as offloaded:
            same_weights(offloaded, resident)
            assert_same(greedy(offloaded, IDS, 4), expected)


def _plain_experts(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if "layers.2.mlp.experts" in name and name.endswith(".weight")]:
        tensors[name] = tensors[name].to(torch.bfloat16)
        del tensors[f"{name}_scale_inv"]


def test_plain_experts_in_one_layer(tmp_path: Path) -> None:
    """Loaded as they are."""
    path = fp8("qwen3_moe", tmp_path / "model")
    edit_weights(tmp_path / "model", _plain_experts)
    with load_offloaded(path, slots=6) as offloaded:
        same_weights(offloaded, fp8_resident(path))


# Quantised checkpoints that are refused, in one line, and the one verdict of all who inspect or load them


def _bf16(folder: Path) -> str:
    tiny_model("qwen3_moe").save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that says nothing of quantisation."""
    folder = tmp_path_factory.mktemp("plain") / "model"
    _bf16(folder)
    return folder


def _fp8(folder: Path) -> str:
    return fp8("qwen3_moe", folder)


def _edited(edit: Callable[[dict[str, Tensor]], object], make: Callable[[Path], str] = _fp8) -> Callable[[Path], str]:
    """A checkpoint with other tensors."""

    def edited(folder: Path) -> str:
        path = make(folder)
        edit_weights(folder, edit)
        return path

    return edited


def _all_but(part: str) -> Callable[[Path], str]:
    """Without the tensors of such names."""
    return _edited(lambda tensors: [tensors.pop(name) for name in list(tensors) if part in name])


_UP = "model.layers.1.mlp.experts.3.up_proj.weight"
_without_scales = _all_but(f"{_UP}_scale_inv")
_without_codes = _all_but("layers.1.mlp.experts")
_no_experts = _all_but(".mlp.experts.")
_blocks_alone = _edited(lambda tensors: tensors.pop("model.layers.1.mlp.experts.down_proj_scales"), mxfp4)
_packed_fp4 = _edited(lambda tensors: tensors.update({_UP: tensors[_UP].view(torch.int8)[:, ::2].contiguous()}))
_other_scales = _edited(lambda tensors: tensors.update({f"{_UP}_scale_inv": torch.ones(3, 2)}))


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (_without_scales, r"3\.up_proj\.weight is in FP8 and has no .*weight_scale_inv: it is incomplete"),
        (_without_codes, r"no weights for model\.layers\.1\.mlp\.experts\.down_proj: it is incomplete"),
        (_no_experts, r"no weights for model\.layers\.0\.mlp\.experts\.down_proj: it is incomplete"),
        (_blocks_alone, r"no weights for model\.layers\.1\.mlp\.experts\.down_proj \(.*_scales\$?\): it is incomplete"),
        (_packed_fp4, r"3\.up_proj\.weight is I8 with scales, not FP8"),
        (_other_scales, r"3\.up_proj\.weight is \[16, 32\], its scales are \[3, 2\]: not supported"),
    ],
)
def test_what_is_refused(make: Callable[[Path], str], line: str, tmp_path: Path) -> None:
    path = make(tmp_path / "model")
    with refused(line):
        load_offloaded(path, device="cpu", store="disk", slots=6)


_GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float"}}
_INT4 = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}
_INT3 = {"targets": ["Linear"], "weights": {"num_bits": 3, "type": "int"}}


def _compressed(form: str, group: object, **more: object) -> dict[str, object]:
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, **more}


_OTHERS = set(AUTO_QUANTIZER_MAPPING) - {"fp8", "mxfp4", "gptq", "awq", "compressed-tensors", "gguf"}
KINDS: dict[str, dict[str, object]] = {
    "gptq, 3 bits": {"quant_method": "gptq", "bits": 3, "group_size": 128},
    "gptq, marlin, 4 bits": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
    "awq, gemv, 4 bits": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"},
    "compressed-tensors, pack-quantized": {**_compressed("pack-quantized", 0), "config_groups": {}},
    "compressed-tensors, nvfp4-pack-quantized, 4 bits": _compressed("nvfp4-pack-quantized", _GROUP),
    "compressed-tensors, pack-quantized, 3 bits": _compressed("pack-quantized", _INT3),
    "compressed-tensors, marlin-24, 4 bits": _compressed("marlin-24", _INT4),
    "compressed-tensors, frozen, pack-quantized, 4 bits": _compressed(
        "pack-quantized", _INT4, quantization_status="frozen"
    ),
    "compressed-tensors, sparse, pack-quantized, 4 bits": _compressed(
        "pack-quantized", _INT4, sparsity_config={"format": "sparse-24-bitmask"}
    ),
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "unknown method": {"bits": None},
    **{name: {"quant_method": name} for name in sorted(_OTHERS)},
}
"""By what is said of it: a configuration's section; among them every method that transformers knows and is not read."""


@pytest.mark.parametrize("kind", KINDS)
def test_one_verdict_on_what_is_not_supported(kind: str, plain: Path, tmp_path: Path) -> None:
    path = str(shutil.copytree(plain, tmp_path / "model"))
    say_quantised(tmp_path / "model", **KINDS[kind])
    line = (
        f"{path!r} is quantised ({kind}): load a checkpoint in bf16, fp16, fp32, FP8, MXFP4, GPTQ, AWQ, bitsandbytes, "
    )
    report = inspect_model(path)
    assert not report.supported
    assert report.reason.startswith(line)
    for load in (load_offloaded, load_model):
        with pytest.raises(ExpertcastError) as caught:
            load(path)
        assert str(caught.value) == report.reason


def test_generate_says_what_inspect_says(plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(shutil.copytree(plain, tmp_path / "model"))
    load_tokenizer("reference").save_pretrained(path)
    say_quantised(tmp_path / "model", **KINDS["torchao"])
    assert main(["inspect", path]) == 2
    reason = inspect_model(path).reason
    assert str(reason) in capsys.readouterr().err
    assert main(["generate", path, "--prompt", "It", "--slots", "6", "--device", "cpu"]) == 2
    assert capsys.readouterr().err.strip() == f"expertcast: {reason}"


def test_pickled_weights_are_no_checkpoint(tmp_path: Path) -> None:
    """Not supported, in the line with which loading refuses them."""
    path = _bf16(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    report = inspect_model(path)
    with pytest.raises(ExpertcastError) as caught:
        load_offloaded(path)
    assert (report.supported, report.reason) == (False, str(caught.value))


@pytest.mark.parametrize(("make", "form"), [(_fp8, "fp8"), (mxfp4, "mxfp4"), (_bf16, "")])
def test_one_verdict_on_what_is(make: Callable[[Path], str], form: str, tmp_path: Path) -> None:
    path = make(tmp_path / "model")
    report = inspect_model(path)
    assert (report.supported, report.shipped) == (True, form)
    assert report.dtype == (f"{form}, computed in bfloat16" if form else "bfloat16")
    assert report.loaded.startswith("dequantised while loading" if form else "unchanged")
    with load_offloaded(path, device="cpu", slots=6, experts="expanded") as offloaded:
        assert offloaded.store.layout.block_bytes >= report.expert_bytes
