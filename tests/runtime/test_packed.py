"""Checkpoints in GPTQ, AWQ, compressed-tensors and bitsandbytes: the weights that they stand for, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from expertcast import load_offloaded
from expertcast.data.models import load_model
from expertcast.data.weights.packed import join_bnb
from tests.data.weights.test_files import Held
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy, refused
from tests.runtime.quantised import IDS, PLAIN, edit_weights, inspect_model, quantised, same_weights, say_quantised

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


def gptq(
    bits: int = 4, older: bool = True, reorder: bool = False, indices: bool = True, group: int = GROUP,
    symmetric: bool = False,
) -> Callable[[Tensor], Made]:  # fmt: skip
    """What packs a weight as GPTQ does; `older`: zeros are stored less one."""

    def make(weight_RC: Tensor) -> Made:
        code_RC, zero_RG, scale_RG, group_C = _drawn(weight_RC, bits, torch.float16, reorder, group)
        zero_RG = np.full_like(zero_RG, 2 ** (bits - 1)) if symmetric else zero_RG
        stored_GR = (zero_RG.T - older) % 2**bits
        tensors = {"qweight": words(code_RC, bits).T, "qzeros": words(stored_GR, bits), "scales": scale_RG.T}
        if indices:
            tensors["g_idx"] = torch.from_numpy(group_C.astype(np.int32))
        return tensors, _weight(code_RC, zero_RG, scale_RG, group_C)

    return make


def awq(weight_RC: Tensor, group: int = GROUP) -> Made:
    """A weight as AWQ's gemm kernels read it."""
    code_RC, zero_RG, scale_RG, group_C = _drawn(weight_RC, 4, torch.float16, group=group)

    def columns(each: np.ndarray) -> Tensor:
        return words(each.reshape(len(each), -1, 8)[:, :, list(_AWQ_ROWS)].reshape(each.shape), 4)

    tensors = {"qweight": columns(code_RC.T), "qzeros": columns(zero_RG.T), "scales": scale_RG.T}
    return tensors, _weight(code_RC, zero_RG, scale_RG, group_C)


def compressed(
    bits: int = 4,
    symmetric: bool = True,
    channel: bool = False,
    reorder: bool = False,
    plain: bool = False,
    group: int = GROUP,
) -> Callable[[Tensor], Made]:
    """What packs a weight as compressed-tensors does; `plain`: one code an int8 (`int-quantized`)."""

    def make(weight_RC: Tensor) -> Made:
        each = weight_RC.shape[1] if channel else group
        code_RC, zero_RG, scale_RG, group_C = _drawn(weight_RC, bits, torch.bfloat16, reorder, each)
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


def of_modules(bits: int, targets: list[str], **settings: Any) -> dict[str, Any]:
    """A group of modules in the configuration of compressed-tensors."""
    fields = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    own = settings.pop("format", None)
    return {"targets": targets, "weights": {**fields, **settings}, **({"format": own} if own else {})}


def checkpoint(
    folder: Path,
    make: Callable[[Tensor], Made] | dict[str, Callable[[Tensor], Made]],
    sizes: dict[str, int] | None = None,
    **settings: Any,
) -> tuple[str, str]:
    """A packed checkpoint, and the plain one that it stands for.

    Args:
        folder: of both.
        make: packs a weight; several by a part of the modules' names, the first that fits.
        sizes: fields of the model's configuration that differ.
        settings: the configuration's section on quantisation.
    """
    makers = make if isinstance(make, dict) else {"": make}
    scales = torch.bfloat16 if settings["quant_method"] in ("compressed-tensors", "bitsandbytes") else torch.float16
    model = tiny_model("qwen3_moe", scales, **(sizes or {}))
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:2], 2
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
    "int4": (compressed(), _ct(of_modules(4, _LINEAR)), "compressed-tensors, pack-quantized, 4 bits"),
    "int4 with zeros": (
        compressed(symmetric=False),
        _ct(of_modules(4, _LINEAR, symmetric=False)),
        "compressed-tensors, pack-quantized, 4 bits",
    ),
    "int4 by activation order": (
        compressed(reorder=True),
        _ct(of_modules(4, _LINEAR, actorder="group")),
        "compressed-tensors, pack-quantized, 4 bits",
    ),
    "int8, packed": (
        compressed(8, channel=True),
        _ct(of_modules(8, _LINEAR, strategy="channel", group_size=None)),
        "compressed-tensors, pack-quantized, 8 bits",
    ),
    "int8 with zeros": (
        compressed(8, channel=True, symmetric=False, plain=True),
        _ct(of_modules(8, _LINEAR, strategy="channel", group_size=None, symmetric=False), form="int-quantized"),
        "compressed-tensors, int-quantized, 8 bits",
    ),
    "fp8 by rows": (
        compressed_fp8(None, channel=True),
        _ct(of_modules(8, _LINEAR, **_FLOAT, strategy="channel"), form="float-quantized"),
        "compressed-tensors, float-quantized, 8 bits",
    ),
    "fp8 by tensors": (
        compressed_fp8(None),
        _ct(of_modules(8, _LINEAR, **_FLOAT, strategy="tensor"), form="naive-quantized"),
        "compressed-tensors, naive-quantized, 8 bits",
    ),
    "fp8 by blocks": (
        compressed_fp8((8, 16)),
        _ct(of_modules(8, _LINEAR, **_FLOAT, strategy="block", block_structure=[8, 16]), form="float-quantized"),
        "compressed-tensors, float-quantized, 8 bits",
    ),
    "nf4": (four_bits(), {**_BNB, "load_in_4bit": True}, "bitsandbytes, 4 bits"),
    "nf4, nested": (four_bits(nested=True), {**_BNB, "load_in_4bit": True}, "bitsandbytes, 4 bits"),
    "int8 by rows": (eight_bits, {**_BNB, "load_in_8bit": True}, "bitsandbytes, 8 bits"),
    "fp8 and int4": (
        {"self_attn": compressed_fp8(None, channel=True), "": compressed()},
        _ct(
            of_modules(8, [r"re:.*self_attn\..*"], **_FLOAT, strategy="channel", format="float-quantized"),
            of_modules(4, [r"re:.*experts\..*"], format="pack-quantized"),
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


_EXPERT, _DENSE = "model.layers.1.mlp.experts.3.up_proj", "model.layers.0.self_attn.k_proj"


def _drop(suffix: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.__delitem__(f"{_EXPERT}.{suffix}")


def _change(
    suffix: str, change: Callable[[Tensor], Tensor], weight: str = _EXPERT
) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({f"{weight}.{suffix}": change(tensors[f"{weight}.{suffix}"]).contiguous()})


@pytest.mark.parametrize(
    ("form", "edit", "line"),
    [
        ("gptq", _drop("scales"), rf"no {_EXPERT}\.scales: it is incomplete"),
        ("gptq", _drop("qzeros"), rf"no {_EXPERT}\.qzeros: it is incomplete"),
        ("gptq", _change("g_idx", lambda t: t + 9), r"up_proj\.g_idx names a group that is not there"),
        ("gptq", _change("g_idx", lambda t: t + 9, _DENSE), rf"{_DENSE}\.g_idx names a group that is not there"),
        ("gptq", _change("g_idx", lambda t: t.view(2, -1)), r"up_proj has g_idx \[2, 16\]: not supported"),
        ("gptq", _change("scales", torch.flatten), r"up_proj has scales \[64\]: not supported"),
        (
            "gptq",
            _change("qzeros", lambda t: t[:1]),
            r"up_proj has qweight \[4, 16\], qzeros \[1, 2\], scales \[4, 16\]",
        ),
        ("awq", _change("qweight", torch.flatten), r"up_proj has qweight \[64\]: not supported"),
        ("awq", _change("scales", lambda t: t[:, :8]), r"up_proj has qweight \[32, 2\], qzeros .* not supported"),
        ("nf4", _drop("weight.absmax"), rf"no {_EXPERT}\.weight\.absmax: it is incomplete"),
        ("int8 by rows", _drop("SCB"), rf"no {_EXPERT}\.SCB: it is incomplete"),
        ("int4", _drop("weight_scale"), rf"no {_EXPERT}\.weight_scale: it is incomplete"),
        (
            "int4",
            _change("weight_scale", lambda t: t[:5]),
            r"up_proj has weight_packed \[16, 4\], weight_scale \[5, 4\]",
        ),
        ("int4", _change("weight_packed", torch.flatten), r"up_proj has weight_packed \[64\]: not supported"),
    ],
)
def test_damaged_files_are_one_line(form: str, edit: Any, line: str, tmp_path: Path) -> None:
    make, settings, _ = FORMS[form]
    path, _ = checkpoint(tmp_path, make, **settings)
    edit_weights(Path(path), edit)
    with refused(f"{path}.*{line}"):
        load_offloaded(path, device="cpu", slots=6)
