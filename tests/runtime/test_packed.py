"""Checkpoints in GPTQ, AWQ, compressed-tensors and bitsandbytes: the weights that they stand for, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from expertcast.data.inspection import inspect_model
from expertcast.data.models import load_model
from expertcast.data.weights.packed import join_bnb
from expertcast.predictors import ExpertcastError
from expertcast.runtime import load_offloaded
from expertcast.runtime.storage.disk_store import DiskStore
from tests.data.weights.test_fp8 import Held
from tests.runtime.conftest import assert_same, greedy
from tests.runtime.packed import awq, checkpoint, compressed, compressed_fp8, eight_bits, four_bits, gptq, group
from tests.runtime.quantised import IDS, edit_weights, same_weights

_GPTQ = {"quant_method": "gptq", "group_size": 8, "bits": 4}
_V2 = {**_GPTQ, "checkpoint_format": "gptq_v2"}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "version": "GEMM", "zero_point": True}


def _ct(*groups: dict[str, Any], form: str = "pack-quantized") -> dict[str, Any]:
    named = {f"group_{i}": each for i, each in enumerate(groups)}
    status = {"quantization_status": "compressed", "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": named, **status}


_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False}
_LINEAR = ["Linear"]
_FLOAT = {"type": "float", "group_size": None}
FORMS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "gptq": (gptq(), _GPTQ, "gptq, 4 bits"),
    "gptq in 8 bits": (gptq(8), {**_GPTQ, "bits": 8}, "gptq, 8 bits"),
    "gptq in 2 bits": (gptq(2), {**_GPTQ, "bits": 2}, "gptq, 2 bits"),
    "gptq with zeros as they are": (gptq(older=False), _V2, "gptq, gptq_v2, 4 bits"),
    "gptq by activation order": (gptq(reorder=True), {**_GPTQ, "desc_act": True}, "gptq, 4 bits"),
    "gptq without indices": (gptq(indices=False), _GPTQ, "gptq, 4 bits"),
    "gptq, some in 8 bits": ({"down": gptq(8), "": gptq()}, {**_GPTQ, "dynamic": {}}, "gptq, 4 bits"),
    "awq": (awq, _AWQ, "awq, 4 bits"),
    "int4": (compressed(), _ct(group(4, _LINEAR)), "compressed-tensors, pack-quantized, 4 bits"),
    "int4 with zeros": (
        compressed(symmetric=False),
        _ct(group(4, _LINEAR, symmetric=False)),
        "compressed-tensors, pack-quantized, 4 bits",
    ),
    "int4 by activation order": (
        compressed(reorder=True),
        _ct(group(4, _LINEAR, actorder="group")),
        "compressed-tensors, pack-quantized, 4 bits",
    ),
    "int8, packed": (
        compressed(8, channel=True),
        _ct(group(8, _LINEAR, strategy="channel", group_size=None)),
        "compressed-tensors, pack-quantized, 8 bits",
    ),
    "int8 with zeros": (
        compressed(8, channel=True, symmetric=False, plain=True),
        _ct(group(8, _LINEAR, strategy="channel", group_size=None, symmetric=False), form="int-quantized"),
        "compressed-tensors, int-quantized, 8 bits",
    ),
    "fp8 by rows": (
        compressed_fp8(None, channel=True),
        _ct(group(8, _LINEAR, **_FLOAT, strategy="channel"), form="float-quantized"),
        "compressed-tensors, float-quantized, 8 bits",
    ),
    "fp8 by tensors": (
        compressed_fp8(None),
        _ct(group(8, _LINEAR, **_FLOAT, strategy="tensor"), form="naive-quantized"),
        "compressed-tensors, naive-quantized, 8 bits",
    ),
    "fp8 by blocks": (
        compressed_fp8((8, 16)),
        _ct(group(8, _LINEAR, **_FLOAT, strategy="block", block_structure=[8, 16]), form="float-quantized"),
        "compressed-tensors, float-quantized, 8 bits",
    ),
    "nf4": (four_bits(), {**_BNB, "load_in_4bit": True}, "bitsandbytes, 4 bits"),
    "nf4, nested": (four_bits(nested=True), {**_BNB, "load_in_4bit": True}, "bitsandbytes, 4 bits"),
    "int8 by rows": (eight_bits, {**_BNB, "load_in_8bit": True}, "bitsandbytes, 8 bits"),
    "fp8 and int4": (
        {"self_attn": compressed_fp8(None, channel=True), "": compressed()},
        _ct(
            group(8, [r"re:.*self_attn\..*"], **_FLOAT, strategy="channel", format="float-quantized"),
            group(4, [r"re:.*experts\..*"], format="pack-quantized"),
            form="mixed-precision",
        ),
        "compressed-tensors, mixed-precision, 4 and 8 bits",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_weights(form: str, tmp_path: Path) -> None:
    """Of the offloaded model and of the resident one; inspect says the same of it."""
    make, settings, kind = FORMS[form]
    path, plain = checkpoint(tmp_path, make, **settings)
    resident = load_model(plain)
    with load_offloaded(path, device="cpu", slots=6) as offloaded:
        assert offloaded.model.dtype == resident.dtype
        same_weights(offloaded, resident)
        assert not hasattr(offloaded.model.config, "quantization_config")
    loaded = dict(load_model(path).named_parameters())
    assert all(torch.equal(loaded[name], parameter) for name, parameter in resident.named_parameters())
    report = inspect_model(path)
    assert (report.supported, report.shipped) == (True, kind)
    assert report.loaded.startswith("dequantised while loading")
    assert 0 < report.shipped_bytes == (Path(path) / "model.safetensors").stat().st_size


def test_it_runs_packed_once_in_a_folder(tmp_path: Path) -> None:
    """Generates as the plain one; experts dequantised into a store on disk, compressed without loss."""
    make, settings, _ = FORMS["int4"]
    path, plain = checkpoint(tmp_path, make, **settings)
    expected = greedy(load_model(plain), IDS, 4)
    for options in ({}, {"store": "disk", "codec": "bitsplit", "store_folder": tmp_path / "store"}):
        with load_offloaded(path, device="cpu", slots=6, **options) as offloaded:
            assert_same(greedy(offloaded, IDS, 4), expected)


@pytest.mark.parametrize("form", ["fp8 by rows", "fp8 by blocks"])
def test_fp8_of_compressed_tensors_stays_as_shipped(form: str, tmp_path: Path) -> None:
    make, settings, _ = FORMS[form]
    path, plain = checkpoint(tmp_path, make, **settings)
    assert inspect_model(path).loaded.endswith("codec fp8, experts stay as they are shipped")
    with load_offloaded(path, device="cpu", store="disk", codec="fp8", slots=6) as offloaded:
        assert isinstance(offloaded.store, DiskStore)
        assert offloaded.store.stored_nbytes < 0.7 * offloaded.store.nbytes
        same_weights(offloaded, load_model(plain))


@pytest.mark.parametrize("form", ["int4", "int8, packed", "fp8 by rows", "fp8 and int4"])
def test_bits_of_transformers(form: str, tmp_path: Path) -> None:
    """What transformers and compressed-tensors make of the same files."""
    pytest.importorskip("compressed_tensors")
    from transformers import CompressedTensorsConfig

    make, settings, _ = FORMS[form]
    path, _ = checkpoint(tmp_path, make, **settings)
    chosen = CompressedTensorsConfig(dequantize=True)
    resident = AutoModelForCausalLM.from_pretrained(path, dtype="auto", quantization_config=chosen).eval()
    with load_offloaded(path, device="cpu", slots=6) as offloaded:
        same_weights(offloaded, resident)


@pytest.mark.parametrize("form", ["int4 with zeros", "int8 with zeros", "fp8 by tensors", "fp8 by blocks"])
def test_bits_of_the_library(form: str, tmp_path: Path) -> None:
    """What compressed-tensors makes of one expert of forms that transformers does not read for experts."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    make, settings, _ = FORMS[form]
    path, plain = checkpoint(tmp_path, make, **settings)
    tensors, wanted = (load_file(Path(each) / "model.safetensors") for each in (path, plain))
    state = {name.removeprefix(f"{_EXPERT}."): tensor for name, tensor in tensors.items() if name.startswith(_EXPERT)}
    scheme = QuantizationScheme(**settings["config_groups"]["group_0"])
    made = BaseCompressor.get_value_from_registry(settings["format"]).decompress(state, scheme)
    assert torch.equal(made["weight"].bfloat16(), wanted[f"{_EXPERT}.weight"])


@pytest.mark.parametrize("form", ["nf4", "nf4, nested", "int8 by rows"])
def test_bits_of_bitsandbytes(form: str) -> None:
    """What its own functions make of a weight that they quantised."""
    functional = pytest.importorskip("bitsandbytes").functional
    weight = torch.randn(48, 128).bfloat16()  # its CPU kernel is wrong where rows are no whole blocks
    if form == "int8 by rows":
        codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
        tensors, wanted = {"weight": codes, "SCB": scales}, functional.int8_vectorwise_dequant(codes, scales)
    else:
        codes, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=form != "nf4")
        tensors = {"weight": codes, **{f"weight.{key}": each for key, each in state.as_dict(packed=True).items()}}
        wanted = functional.dequantize_4bit(codes, state)
    joined = join_bnb({f"x.{suffix}": Held(tensor) for suffix, tensor in tensors.items()})
    assert list(joined) == ["x.weight"]
    assert joined["x.weight"].get_shape() == [48, 128]
    assert torch.equal(joined["x.weight"][...], wanted)
    assert torch.equal(joined["x.weight"][8:16], wanted[8:16])


_EXPERT = "model.layers.1.mlp.experts.3.up_proj"


def _drop(suffix: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(f"{_EXPERT}.{suffix}")


def _change(suffix: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({f"{_EXPERT}.{suffix}": change(tensors[f"{_EXPERT}.{suffix}"]).contiguous()})


@pytest.mark.parametrize(
    ("form", "edit", "line"),
    [
        ("gptq", _drop("scales"), rf"no {_EXPERT}\.scales: it is incomplete"),
        ("gptq", _drop("qzeros"), rf"no {_EXPERT}\.qzeros: it is incomplete"),
        ("gptq", _change("g_idx", lambda t: t + 9), r"up_proj\.g_idx names a group that is not there"),
        (
            "gptq",
            _change("qzeros", lambda t: t[:1]),
            r"up_proj has qweight \[4, 16\], qzeros \[1, 2\], scales \[4, 16\]",
        ),
        ("awq", _change("scales", lambda t: t[:, :8]), r"up_proj has qweight \[32, 2\], qzeros .* not supported"),
        ("nf4", _drop("weight.absmax"), rf"no {_EXPERT}\.weight\.absmax: it is incomplete"),
        ("int8 by rows", _drop("SCB"), rf"no {_EXPERT}\.SCB: it is incomplete"),
        ("int4", _drop("weight_scale"), rf"no {_EXPERT}\.weight_scale: it is incomplete"),
        (
            "int4",
            _change("weight_scale", lambda t: t[:5]),
            r"up_proj has weight_packed \[16, 4\], weight_scale \[5, 4\]",
        ),
    ],
)
def test_damaged_files_are_one_line(form: str, edit: Any, line: str, tmp_path: Path) -> None:
    make, settings, _ = FORMS[form]
    path, _ = checkpoint(tmp_path, make, **settings)
    edit_weights(Path(path), edit)
    with pytest.raises(ExpertcastError, match=line) as caught:
        load_offloaded(path, device="cpu", slots=6)
    assert "\n" not in str(caught.value)
