"""Quantised checkpoints that are refused, in one line, and the one verdict of all who inspect or load them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from expertcast.cli import main
from expertcast.data.inspection import inspect_model
from expertcast.data.models import load_model, load_tokenizer
from expertcast.predictors import ExpertcastError
from expertcast.runtime import load_offloaded, offload
from tests.families.models import tiny_model
from tests.runtime.quantised import edit_weights, fp8, mxfp4, say_quantised


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


def _without_scales(folder: Path) -> str:
    path = fp8("qwen3_moe", folder)
    edit_weights(folder, lambda tensors: tensors.pop("model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"))
    return path


def _without_codes(folder: Path) -> str:
    path = fp8("qwen3_moe", folder)
    edit_weights(
        folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1.mlp.experts" in name]
    )
    return path


def _blocks_alone(folder: Path) -> str:
    path = mxfp4(folder)
    edit_weights(folder, lambda tensors: tensors.pop("model.layers.1.mlp.experts.down_proj_scales"))
    return path


def _no_experts(folder: Path) -> str:
    path = fp8("qwen3_moe", folder)
    edit_weights(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".mlp.experts." in name])
    return path


def _packed_fp4(folder: Path) -> str:
    path = fp8("qwen3_moe", folder)

    def pack(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.1.mlp.experts.3.up_proj.weight"
        tensors[name] = tensors[name].view(torch.int8)[:, ::2].contiguous()

    edit_weights(folder, pack)
    return path


def _other_scales(folder: Path) -> str:
    path = fp8("qwen3_moe", folder)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"] = torch.ones(3, 2)

    edit_weights(folder, change)
    return path


@pytest.mark.parametrize(
    ("make", "codec", "line"),
    [
        (_bf16, "fp8", "codec 'fp8' moves experts as a checkpoint in fp8 .* is not quantised: choose codec 'raw' or"),
        (_bf16, "mxfp4", "'gate_up_proj' is|has 16 rows|no MXFP4 code"),
        (mxfp4, "fp8", "is shipped in mxfp4: choose codec 'raw' or 'bitsplit'"),
        (_fp8, "mxfp4", "is shipped in fp8: choose codec 'raw' or 'bitsplit'"),
        (_fp8, "fp8:rows=24", "blocks of .24, 128. do not divide; choose codec 'raw'"),
        (_without_scales, "raw", r"3\.up_proj\.weight is in FP8 and has no .*weight_scale_inv: it is incomplete"),
        (_without_codes, "fp8", r"no weights for model\.layers\.1\.mlp\.experts\.down_proj: it is incomplete"),
        (_no_experts, "fp8", r"no weights for model\.layers\.0\.mlp\.experts\.down_proj: it is incomplete"),
        (_blocks_alone, "raw", r"no weights for model\.layers\.1\.mlp\.experts\.down_proj: it is incomplete"),
        (_blocks_alone, "mxfp4", r"no weights for model\.layers\.1\.mlp\.experts\.down_proj: it is incomplete"),
        (_packed_fp4, "raw", r"3\.up_proj\.weight is I8 with scales, not FP8"),
        (_other_scales, "raw", r"3\.up_proj\.weight is \[16, 32\], its scales are \[3, 2\]: not supported"),
    ],
)
def test_what_is_refused(make: Callable[[Path], str], codec: str, line: str, tmp_path: Path) -> None:
    path = make(tmp_path / "model")
    with pytest.raises(ExpertcastError, match=line) as caught:
        load_offloaded(path, device="cpu", store="disk", codec=codec, slots=6)
    assert "\n" not in str(caught.value)


def test_a_loaded_model_has_no_scales(tmp_path: Path) -> None:
    with pytest.raises(
        ExpertcastError, match="only a checkpoint in FP8 says their scales; load one with load_offloaded"
    ):
        offload(tiny_model("qwen3_moe"), store="disk", codec="fp8:rows=16,columns=16")


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
    "no method is named": {"bits": None},
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
    assert report.loaded.startswith("dequantised while loading; " if form else "as it is")
    with load_offloaded(path, device="cpu", slots=6) as offloaded:
        assert offloaded.store.layout.block_bytes >= report.expert_bytes
