"""Weights of quantised checkpoints held as blocks of ggml: the same bits offloaded and resident."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from expertcast import OffloadedModel, load_offloaded
from expertcast.data import ggml
from expertcast.data.models import load_model
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.packed_experts import Piece, expanded_experts, make_packed, packed_matrices
from expertcast.data.packed_linear import PackedEmbedding, PackedLinear, PackedModule, other_bytes, pack_linears
from expertcast.data.source import ModelSource
from expertcast.data.weights.files import ComputedTensor, SafetensorsFiles
from expertcast.data.weights.gguf import GgufFile
from expertcast.data.weights.packed import join_packed
from expertcast.predictors import ExpertcastError
from expertcast.predictors.view import ModelShape
from expertcast.runtime import loading
from expertcast.runtime.engine.engine import Engine
from expertcast.runtime.policies import Policies
from expertcast.runtime.storage.layout import BlockLayout, ExpertsForm
from expertcast.runtime.storage.store import ExpertStore
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy, refused
from tests.runtime.gguf_files import tensors_of, tiny, write
from tests.runtime.quantised import IDS, fp8, mxfp4
from tests.runtime.test_packed import Made, awq, checkpoint, compressed, compressed_fp8, four_bits, gptq, of_modules

# Codes of packed weights


def _settings(method: str, bits: int = 4, **more: Any) -> dict[str, Any]:
    if method != "compressed-tensors":
        return {"quant_method": method, "bits": bits, **more}
    return {"quant_method": method, "config_groups": {"all": of_modules(bits, ["Linear"], **more)}}


@contextmanager
def _weight(make: Callable[[Tensor], Made], settings: dict[str, Any], folder: Path) -> Iterator[ComputedTensor]:
    """A matrix as a checkpoint of these settings holds it."""
    tensors, _ = make(torch.randn(48, 768, generator=torch.Generator().manual_seed(0)))
    save_file({f"x.{name}": each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    with SafetensorsFiles(ModelSource.of(folder)) as files:
        file = join_packed(files.tensors, settings["quant_method"], settings)["x.weight"]
        assert isinstance(file, ComputedTensor)
        yield file


@pytest.mark.parametrize(
    ("make", "settings", "kind"),
    [
        (gptq(group=32), _settings("gptq"), "Q4_1"),
        (gptq(group=64, older=False), _settings("gptq", checkpoint_format="gptq_v2"), "Q4_1"),
        (gptq(group=128, indices=False), _settings("gptq"), "Q4_1"),
        (gptq(group=32, symmetric=True), _settings("gptq", sym=True), "Q4_0"),
        (gptq(8, group=128, symmetric=True), _settings("gptq", 8, sym=True), "Q8_0"),
        (gptq(group=768), _settings("gptq", desc_act=True), "Q4_1"),  # one group has no order
        (partial(awq, group=64), _settings("awq"), "Q4_1"),
        (compressed(group=32), _settings("compressed-tensors"), "Q4_0"),
        (compressed(group=128, symmetric=False), _settings("compressed-tensors"), "Q4_1"),
        (compressed(4, channel=True, plain=True), _settings("compressed-tensors"), "Q4_0"),
        (compressed(8, channel=True), _settings("compressed-tensors", 8), "Q8_0"),
        (compressed(8, group=64, plain=True), _settings("compressed-tensors", 8), "Q8_0"),
    ],
)
def test_blocks_are_those_of_the_weights(
    make: Callable[[Tensor], Made], settings: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    """Exactly, in the dtype in which weights are read, but for minima that fp16 does not hold."""
    with _weight(make, settings, tmp_path) as file:
        assert file.pieces() == (Piece(kind, 48),)
        assert file.blocks is not None
        for part in (..., slice(7, 20)):
            weights = file[part]
            found = ggml.dequantise(kind, file.blocks(part).contiguous())
            if kind == "Q4_1":
                assert (found - weights.float()).abs().max() < 2**-8 * weights.float().abs().max()
            else:
                assert torch.equal(found.to(weights.dtype), weights)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (gptq(group=16), _settings("gptq")),
        (gptq(2, group=32), _settings("gptq", 2)),
        (gptq(8, group=32), _settings("gptq", 8)),
        (gptq(group=32, reorder=True), _settings("gptq", desc_act=True)),
        (compressed(group=32, reorder=True), _settings("compressed-tensors")),
        (compressed(8, channel=True, symmetric=False, plain=True), _settings("compressed-tensors", 8)),
    ],
)
def test_codes_that_no_block_holds(make: Callable[[Tensor], Made], settings: dict[str, Any], tmp_path: Path) -> None:
    with _weight(make, settings, tmp_path) as file:
        assert file.pieces() is None


def test_zeros_that_the_configuration_does_not_tell(tmp_path: Path) -> None:
    with _weight(gptq(group=32), _settings("gptq", sym=True), tmp_path) as file:
        assert file.blocks is not None
        with pytest.raises(ExpertcastError, match=r"x\.qzeros are not those of symmetric codes: give experts='expand"):
            file.blocks(...)


# Whole models


def _gguf(kind: str, **others: str) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        named = {name.replace("__", "."): each for name, each in others.items()}
        sizes = {"hidden_size": 256, "moe_intermediate_size": 256} if kind.endswith("K") else {}
        write(folder / "model.gguf", tiny("qwen3_moe", **sizes), kind, others=named)
        return str(folder / "model.gguf")

    return make


def _packed_once(make: Any, inner: int = 32, **settings: Any) -> Callable[[Path], str]:
    sizes = {"hidden_size": 64, "moe_intermediate_size": inner}
    return lambda folder: checkpoint(folder, make, sizes, **settings)[0]


_WIDE = {"blk.0.ffn_down_exps.weight": "Q6_K"}
_MIXED = {name.replace(".", "__"): kind for name, kind in _WIDE.items()}
FORMS: dict[str, tuple[Callable[[Path], str], list[tuple[str, str]]]] = {
    "Q4_0": (_gguf("Q4_0"), [("Q4_0", "Q4_0")] * 2),
    "Q8_0": (_gguf("Q8_0"), [("Q8_0", "Q8_0")] * 2),
    "Q2_K": (_gguf("Q2_K"), [("Q2_K", "Q2_K")] * 2),
    "Q4_K_M": (_gguf("Q4_K", **_MIXED), [("Q4_K", "Q6_K"), ("Q4_K", "Q4_K")]),
    "gate and up of two kinds": (
        _gguf("Q4_0", blk__1__ffn_up_exps__weight="Q5_0"),
        [("Q4_0", "Q4_0"), ("Q4_0 and Q5_0", "Q4_0")],
    ),
    "layers of two kinds with blocks of one size": (
        _gguf("Q4_0", **{f"blk__1__ffn_{name}_exps__weight": "IQ4_NL" for name in ("gate", "up", "down")}),
        [("Q4_0", "Q4_0"), ("IQ4_NL", "IQ4_NL")],
    ),
    "some experts in floats": (
        _gguf("Q4_0", blk__0__ffn_down_exps__weight="F16", blk__1__ffn_down_exps__weight="BF16"),
        [("Q4_0", "F16"), ("Q4_0", "BF16")],
    ),
    "mxfp4": (partial(mxfp4, hidden_size=64), [("MXFP4", "MXFP4")] * 4),
    "gptq": (_packed_once(gptq(group=32), quant_method="gptq", bits=4, group_size=32), [("Q4_1", "Q4_1")] * 2),
    "gptq, symmetric": (
        _packed_once(gptq(group=32, symmetric=True), quant_method="gptq", bits=4, group_size=32, sym=True),
        [("Q4_0", "Q4_0")] * 2,
    ),
}
"""Writer of a checkpoint, and the packed forms of gate_up_proj and down_proj, by layer."""


def _resident(path: str, offloaded: OffloadedModel, dtype: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model whose modules hold all packed experts and linear layers, and the one with expanded weights."""
    packed, plain = load_model(path, dtype=dtype), load_model(path, dtype=dtype)
    for name, module in _linears(offloaded).items():
        replaced, own = packed.get_submodule(name), PackedEmbedding(module.form, packed.dtype)
        if isinstance(module, PackedLinear):
            own = PackedLinear(module.form, replaced.bias, packed.dtype)
        own.load_state_dict(module.state_dict())
        packed.set_submodule(name, own)
    routers = [layer.router_name for layer in offloaded.view] if _linears(offloaded) else []
    pack_linears(packed, {}, {}, routers)  # attention and routers as in a packed model
    for layer in find_moe_layers(packed):
        forms = {name: each.form for name, each in packed_matrices(offloaded.view[layer.index].experts).items()}
        make_packed(layer.experts, layer.num_experts, forms)
        for name, part in offloaded.store.views(layer.index).items():
            layer.experts.get_parameter(name).data.copy_(part)
    return packed, plain


def _linears(offloaded: OffloadedModel) -> dict[str, PackedModule]:
    return {name: each for name, each in offloaded.model.named_modules() if isinstance(each, PackedModule)}


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system has no larger pages")
def test_linear_layers_share_one_mapping_of_large_pages(tmp_path: Path) -> None:
    """Alone, a matrix would leave its ends in pages of 4 KB; each stays a tensor of its own, to be moved or pickled."""
    with load_offloaded(_gguf("Q4_0")(tmp_path), device="cpu", slots=6, experts="packed") as offloaded:
        held = [matrix.blocks for own in _linears(offloaded).values() for matrix in packed_matrices(own).values()]
        assert all(blocks.untyped_storage().nbytes() == blocks.nbytes for blocks in held)
        addresses = sorted(blocks.data_ptr() for blocks in held)
        maps = re.split(r"^(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    ranges = [one.split()[0].split("-") for one in maps if " hg " in one]
    large = [range(int(start, 16), int(end, 16)) for start, end in ranges]
    assert all(any(address in some for some in large) for address in addresses)
    together = sum(-(-blocks.nbytes // 64) * 64 for blocks in held)
    assert addresses[-1] - addresses[0] < together


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("form", FORMS)
def test_offloaded_is_resident(form: str, dtype: str, tmp_path: Path) -> None:
    """Bit for bit, from memory and from a disk; each packed weight near the checkpoint's own."""
    make, by_layer = FORMS[form]
    path = make(tmp_path)
    with load_offloaded(path, device="cpu", slots=6, experts="packed", dtype=dtype) as offloaded:
        for layer, (gate_up, down) in zip(offloaded.view, by_layer, strict=True):
            forms = {name: str(each.form) for name, each in packed_matrices(layer.experts).items()}
            assert forms == {"gate_up_proj": gate_up, "down_proj": down}
        packed, plain = _resident(path, offloaded, dtype)
        expected = greedy(packed, IDS, 4)
        assert_same(greedy(offloaded, IDS, 4), expected)
        _near(offloaded, plain)
    with load_offloaded(path, device="cpu", slots=5, experts="auto", dtype=dtype, store="disk") as offloaded:
        assert_same(greedy(offloaded, IDS, 4), expected)
    batch = {name: each.repeat(17, 1) for name, each in IDS.items()}
    batch["input_ids"] += torch.arange(17)[:, None]
    options: dict[str, Any] = {"link": "emulated", "misses": "host"}
    with load_offloaded(path, device="cpu", slots=10, experts="packed", dtype=dtype, **options) as offloaded:
        for inputs in (IDS, batch):
            assert_same(greedy(offloaded, inputs, 4), greedy(packed, inputs, 4))
        assert offloaded.stats.total.on_host > 0


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_only_the_bytes_of_a_layers_own_form_move(store: str, tmp_path: Path) -> None:
    """A layer in 4 bits beside one in 8: slots have room for the larger experts, copies and reads are shorter."""
    path = FORMS["Q4_K_M"][0](tmp_path)
    with load_offloaded(path, device="cpu", slots=6, experts="packed", dtype="bf16", store=store) as offloaded:
        layout = offloaded.store.layout
        wide, narrow = map(layout.nbytes_of, range(2))
        assert narrow < wide <= layout.block_bytes
        assert [len(offloaded.store.block(key)) for key in (0, offloaded.store.experts)] == [wide, narrow]
        assert [offloaded.link.copy_bytes(key, "full") for key in (0, offloaded.store.experts)] == [wide, narrow]
        greedy(offloaded, IDS, 4)
        copied = [layer.bytes_moved for layer in offloaded.stats.layers]
        assert [count % size for count, size in zip(copied, (wide, narrow), strict=True)] == [0, 0]
        assert offloaded.link.bytes_moved == sum(copied)
        for own in offloaded.experts.weights(offloaded.view[0], "down_proj"):
            assert own.keys() == {"down_proj"}, "default vectors expand no other matrix"


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (48, [((1, 2), 16, 3), ((4,), 8, 2), ((0, 3, 5), 24, 1)]),
        (47, [((1, 2), 15, 3), ((4, 0), 16, 2), ((3, 5), 16, 1)]),
        (23, [((1, 2, 4), 11, 3), ((0, 3, 5), 12, 1)]),
        (13, [((1, 2, 4, 0, 3, 5), 13, 3)]),
    ],
)
def test_regions_of_slots(slots: int, expected: list[tuple[tuple[int, ...], int, int]]) -> None:
    """Each has room for the 2 experts of four tokens, else its layers share larger slots."""
    layouts = [
        BlockLayout.of_tensors({"down_proj_blocks": torch.empty(size << 14, dtype=torch.uint8, device="meta")})
        for size in (1, 3, 3, 1, 2, 1)
    ]
    layout = replace(layouts[1], by_layer=tuple(each.fields for each in layouts))
    shape = ModelShape(layers=6, experts=16, top_k=2, hidden=64)
    store = ExpertStore(ExpertsForm(shape=shape, layout=layout), device=torch.device("cpu"))
    assert [(each.layers, each.slots, each.block_bytes >> 14) for each in store.regions(slots)] == expected
    assert store.slots_in(store.slots_nbytes(slots)) >= slots
    assert store.slots_nbytes(store.slots_in(slots << 14)) <= slots << 14


@pytest.mark.parametrize("options", [{}, {"scope": "layer"}, {"store": "disk", "cache": False}])
def test_slots_are_as_large_as_their_layers_experts(options: dict[str, Any], tmp_path: Path) -> None:
    """More of them in the same memory, with the bits of the resident model; those that fit one another are shared."""
    path, sizes = tmp_path / "model.gguf", {"hidden_size": 256, "moe_intermediate_size": 256}
    write(path, tiny("qwen3_moe", num_hidden_layers=3, num_experts=16, **sizes), "Q4_K", others=_WIDE)
    settings: dict[str, Any] = {"device": "cpu", "experts": "packed", "dtype": "bf16", **options}
    policies = Policies(eviction="lru", scope=settings.pop("scope", "global"))
    with load_offloaded(str(path), slots=24, policies=policies, **settings) as offloaded:
        store, pool = offloaded.store, offloaded.pool
        wide, narrow = (store.layout.nbytes_of(layer) for layer in (0, 1))
        assert pool.nbytes == 8 * wide + 16 * narrow == store.slots_nbytes(24)
        assert [len(pool.block(slot)) for slot in range(24)] == [wide] * 8 + [narrow] * 16
        assert store.slots_in(pool.nbytes) == 24 > pool.nbytes // store.layout.block_bytes
        assert store.slots_nbytes(8) == 8 * store.layout.block_bytes  # too few to divide
        assert store.slots_in(store.layout.block_bytes - 1) == store.slots_in(-1) == 0
        packed, _ = _resident(str(path), offloaded, "bf16")
        assert_same(greedy(offloaded, IDS, 8), greedy(packed, IDS, 8))
        assert {slot < 8 for slot in pool.slots.values()} == {True, False} or options.get("cache") is False
        starts = [pool.block(slot).data_ptr() - pool.block(0).data_ptr() for slot in (8, 23)]
        assert starts == [8 * wide, 8 * wide + 15 * narrow]


def _near(offloaded: OffloadedModel, plain: PreTrainedModel) -> None:
    for name, module in _linears(offloaded).items():
        weight = plain.get_submodule(name).get_parameter("weight").float()
        assert (module.weight.float() - weight).abs().max() <= 0.01 * weight.abs().max(), name
    for layer in find_moe_layers(plain):
        parts = offloaded.store.views(layer.index)
        for expert in range(layer.num_experts):
            own = expanded_experts(
                offloaded.view[layer.index].experts, {name: each[expert] for name, each in parts.items()}
            )
            for name, parameter in layer.experts.named_parameters():
                error = (own[name].float() - parameter[expert].float()).abs().max()
                assert error <= 0.01 * parameter[expert].float().abs().max(), (layer.index, name, expert)


# Linear layers beside the experts

_ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}
_ENDS = {"lm_head", "model.embed_tokens"}
_SHARED = {f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}


def _kinds(offloaded: OffloadedModel) -> set[str]:
    """Names of the packed linear layers, without those of the decoder layers."""
    return {name.partition("layers.")[2].partition(".")[2] or name for name in _linears(offloaded)}


def _tied(folder: Path) -> str:
    write(folder / "model.gguf", tiny("qwen3_moe", tie_word_embeddings=True), without="output.weight")
    return str(folder / "model.gguf")


def _of_family(family: str, kind: str, architecture: str | None = None) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        write(folder / "model.gguf", tiny(family), kind, architecture)
        return str(folder / "model.gguf")

    return make


_HYBRID = {f"linear_attn.in_proj_{name}" for name in ("qkv", "z", "a", "b")}
"""Without the output projection, whose columns GGUF orders in another way."""
LINEARS: dict[str, tuple[Callable[[Path], str], set[str]]] = {
    "qwen3_moe": (_of_family("qwen3_moe", "Q4_0"), {*_ATTENTION, *_ENDS}),
    "qwen2_moe": (_of_family("qwen2_moe", "Q4_1"), {*_ATTENTION, *_SHARED, *_ENDS}),
    "qwen3_5_moe": (
        _of_family("qwen3_5_moe_text", "Q8_0", "qwen35moe"), {*_ATTENTION, *_SHARED, *_HYBRID, *_ENDS},
    ),
    "tied head": (_tied, _ATTENTION),
    "head in Q6_K": (_gguf("Q4_K", output__weight="Q6_K"), {*_ATTENTION - {"self_attn.o_proj"}, *_ENDS}),
    "keys in Q2_K": (
        _gguf("Q4_K", **{f"blk__{layer}__attn_k__weight": "Q2_K" for layer in range(2)}),
        {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", *_ENDS},
    ),
    "gptq": (_packed_once(gptq(group=32), quant_method="gptq", bits=4, group_size=32), _ATTENTION),
    "awq": (_packed_once(partial(awq, group=32), quant_method="awq", bits=4, group_size=32), _ATTENTION),
    "queries by activation order": (
        _packed_once({"q_proj": gptq(group=32, reorder=True), "": gptq(group=32)}, quant_method="gptq", bits=4,
                     group_size=32),
        _ATTENTION - {"self_attn.q_proj"},
    ),
}  # fmt: skip
"""Writer of a checkpoint, and the linear layers and embeddings that stay packed."""


@pytest.mark.parametrize("form", LINEARS)
def test_linear_layers_stay_packed(form: str, tmp_path: Path) -> None:
    """Each near its weights; routers are the checkpoint's; experts in other forms expand them all."""
    make, expected = LINEARS[form]
    path = make(tmp_path)
    options: dict[str, Any] = {"device": "cpu", "slots": 6, "dtype": "bf16"}
    plain = load_model(path, dtype="bf16")
    with load_offloaded(path, experts="packed", **options) as offloaded:
        assert _kinds(offloaded) == expected
        _near(offloaded, plain)
        resident, packed = dict(plain.named_parameters()), dict(offloaded.model.named_parameters())
        others = [name for name in resident if name in packed and ".experts." not in name]
        assert any("mlp.gate." in name for name in others)
        assert all(torch.equal(packed[name], resident[name]) for name in others)
        expanded = sum(each.nbytes for name, each in resident.items() if ".experts." not in name)
        assert other_bytes(offloaded.model, offloaded.view) < expanded
    for experts in ("expanded", "int4"):
        with load_offloaded(path, experts=experts, **options) as offloaded:
            assert not _linears(offloaded)


@pytest.mark.parametrize(
    ("family", "architecture", "exact"),
    [("qwen3_moe", None, 9), ("qwen2_moe", None, 15), ("qwen3_5_moe_text", "qwen35moe", 15)],
)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_of_gguf_matrices(family: str, architecture: str | None, exact: int, kind: str, tmp_path: Path) -> None:
    """Those of linear layers stand for the dequantised weights exactly, in whichever order the file has their rows."""
    path, model = tmp_path / "model.gguf", tiny(family)
    write(path, model, kind, architecture)
    _same_blocks(path, model, exact)


def test_blocks_of_permuted_rows(tmp_path: Path) -> None:
    """Files of architecture llama have the rows of queries and keys in another order."""
    path = tmp_path / "model.gguf"
    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    model: PreTrainedModel = LlamaForCausalLM(config).float()
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(int(gguf.LlamaFileType.MOSTLY_Q4_0))
    named = tensors_of(model) | {
        f"blk.0.ffn_{name}.weight": model.model.layers[0].mlp.get_parameter(f"{name}_proj.weight")
        for name in ("gate", "up", "down")
    }
    for name, tensor in named.items():
        numbers = tensor.detach().numpy()
        if numbers.ndim == 1:
            writer.add_tensor(name, numbers)
        else:
            kind = gguf.GGMLQuantizationType.Q4_0
            writer.add_tensor(name, gguf.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    _same_blocks(path, model, 8)


def _same_blocks(path: Path, model: PreTrainedModel, count: int) -> None:
    found = 0
    with GgufFile([str(path)], model, torch.float32) as files:
        for name, module in model.named_modules():
            file = files.tensors.get(f"{name}.weight")
            if isinstance(module, torch.nn.Linear) and isinstance(file, ComputedTensor) and file.pieces():
                assert file.blocks is not None
                ((kind, outputs),) = file.pieces() or ()
                weights = file[...]
                if kind == "F32":
                    continue
                assert outputs == len(weights)
                for part in (..., slice(8, 24)):
                    dequantised = ggml.dequantise(kind, file.blocks(part).contiguous())
                    assert torch.allclose(dequantised, weights[part], rtol=1e-6, atol=1e-7), name
                found += 1
    assert found == count


def test_conversion_to_the_models_own_dtype(tmp_path: Path) -> None:
    """As pipelines do it; blocks stay."""
    path = _gguf("Q8_0")(tmp_path)
    with load_offloaded(path, device="cpu", slots=6, experts="packed", dtype="fp32") as offloaded:
        expected = greedy(offloaded, IDS, 3)
        offloaded.model.to(torch.float32).float()
        assert_same(greedy(offloaded, IDS, 3), expected)


def test_conversion_to_another_dtype_is_refused(tmp_path: Path) -> None:
    """Blocks would stay, norms would change: also where blocks are the first weights."""
    path = _gguf("Q4_0")(tmp_path)
    with load_offloaded(path, device="cpu", slots=6, experts="packed", dtype="bf16") as offloaded:
        expected, model = greedy(offloaded, IDS, 3), offloaded.model
        assert next(model.parameters()).dtype == torch.uint8
        for move in (model.half, model.double, lambda: model.to(torch.float16), model.model.layers[0].float):
            with refused("close the offload before moving or converting"):
                move()
        assert_same(greedy(offloaded, IDS, 3), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_torchs_default_dtype_changes_no_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    """Neither while a model is loaded nor while it runs."""
    path, given = _gguf("Q4_0")(tmp_path), {"device": "cpu", "slots": 6, "experts": "packed", "dtype": "bf16"}
    with load_offloaded(path, **given) as offloaded:
        expected = greedy(offloaded, IDS, 3)
        torch.set_default_dtype(dtype)
        try:
            found = greedy(offloaded, IDS, 3)
            loaded = load_offloaded(path, **given)
        finally:
            torch.set_default_dtype(torch.float32)
    assert_same(found, expected)
    with loaded:
        assert_same(greedy(loaded, IDS, 3), expected)


def test_models_are_loaded_in_two_threads(tmp_path: Path) -> None:
    """transformers sets torch's default dtype while it loads; it is as before when both are done."""
    path, begin = _gguf("Q4_0")(tmp_path), threading.Barrier(2)

    def loaded(_number: int) -> Any:
        begin.wait()
        with load_offloaded(path, device="cpu", slots=6, experts="packed", dtype="bf16") as offloaded:
            return greedy(offloaded, IDS, 3)

    with ThreadPoolExecutor(2) as threads:
        for _ in range(3):
            assert_same(*threads.map(loaded, range(2)))
            assert torch.get_default_dtype() == torch.float32


def _act_order(said: bool) -> Callable[[Path], str]:
    settings: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": said}
    return _packed_once(gptq(group=32, reorder=True), inner=64, **settings)


def _compressed_fp8(strategy: str, block: tuple[int, int] | None = None) -> Callable[[Path], str]:
    own = {"block_structure": block} if block else {}
    groups = of_modules(8, ["Linear"], type="float", group_size=None, strategy=strategy, **own)
    return _packed_once(
        compressed_fp8(block, channel=strategy == "channel"),
        quant_method="compressed-tensors", format="float-quantized", config_groups={"all": groups},
    )  # fmt: skip


_BNB: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
WITHOUT_BLOCKS: dict[str, Callable[[Path], str]] = {
    "fp8 in blocks": partial(fp8, "qwen3_moe"),
    "fp8, one scale": partial(fp8, "mixtral", block=None),
    "compressed fp8, channels": _compressed_fp8("channel"),
    "gptq by activation order": _act_order(said=True),
    "gptq by an order that the configuration does not tell": _act_order(said=False),
    "gptq in 2 bits": _packed_once(gptq(2, group=32), quant_method="gptq", bits=2, group_size=32),
    "gptq in groups of 8": _packed_once(gptq(), quant_method="gptq", bits=4, group_size=8),
    "nf4": _packed_once(four_bits(), **_BNB),
    "some experts in 8 bits": _packed_once(
        {"experts.3.": gptq(8, group=32, symmetric=True), "": gptq(group=32, symmetric=True)},
        quant_method="gptq", bits=4, group_size=32, sym=True, dynamic={},
    ),
}  # fmt: skip
"""Checkpoints in forms that no type of ggml holds."""


@pytest.mark.parametrize("form", WITHOUT_BLOCKS)
def test_forms_without_blocks(form: str, tmp_path: Path) -> None:
    """Refused in one line; `auto` expands them and says so."""
    path = WITHOUT_BLOCKS[form](tmp_path)
    with pytest.raises(ExpertcastError, match=r"(no blocks of ggml hold|different forms).*: give experts='expanded'"):
        load_offloaded(path, device="cpu", slots=6, experts="packed")
    with pytest.warns(UserWarning, match=r"experts are expanded: .*(no blocks of ggml|different forms)"):
        offloaded = load_offloaded(path, device="cpu", slots=6, experts="auto")
    with offloaded:
        assert not packed_matrices(offloaded.view[0].experts)
        assert greedy(offloaded, IDS, 2)[0].shape[1] == 7


def test_without_ggml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`packed` is refused with the remedy; `auto` expands, in one line with the remedy."""
    path = _gguf("Q4_0")(tmp_path)
    monkeypatch.setenv(ggml.FOLDER, str(tmp_path))
    ggml._library.cache_clear()
    for experts in ("packed", "int4"):
        with pytest.raises(ExpertcastError, match=r"no library ggml-base.*: pip install 'libggml-python"):
            load_offloaded(path, device="cpu", slots=6, experts=experts)
    with pytest.warns(UserWarning, match=r"experts are expanded: ggml in .*: pip install 'libggml-python"):
        load_offloaded(path, device="cpu", slots=6, experts="auto").close()


# Refusals


def _plain(folder: Path) -> str:
    tiny_model("qwen3_moe").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("make", [_plain, _gguf("F16")], ids=["plain", "F16"])
def test_what_is_not_packed(make: Callable[[Path], str], tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """One line that says what else to give; `auto` expands without a word."""
    path = make(tmp_path)
    with pytest.raises(ExpertcastError, match=r"experts='packed' needs .* give experts='expanded', 'int4' or 'int8'"):
        load_offloaded(path, device="cpu", slots=6, experts="packed")
    with load_offloaded(path, device="cpu", slots=6, experts="auto") as offloaded:
        assert not packed_matrices(offloaded.view[0].experts)
        assert greedy(offloaded, IDS, 2)[0].shape[1] == 7
    assert not [warning for warning in recwarn if "expanded" in str(warning.message)]


def test_forms_that_the_cpu_alone_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused for CUDA before anything is read."""
    path = _gguf("Q5_0")(tmp_path)
    monkeypatch.setattr(loading, "torch_device", torch.device)
    with pytest.raises(ExpertcastError, match=r"in Q5_0 are computed on the CPU only: give experts='expanded'"):
        load_offloaded(path, device="cuda", slots=6, experts="packed")


@pytest.mark.parametrize("experts", ["packed", "auto"])
def test_weights_of_another_model(experts: str, tmp_path: Path) -> None:
    """One line that names the checkpoint."""
    path = _packed_once(gptq(group=32), quant_method="gptq", bits=4, group_size=32)(tmp_path)
    save_file({"x.weight": torch.zeros(2)}, Path(path) / "model.safetensors")
    with pytest.raises(ExpertcastError, match=rf"{tmp_path.name}.* has no weights for .*: it is incomplete"):
        load_offloaded(path, device="cpu", slots=6, experts=experts)


def test_experts_in_slots_run_while_others_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's other experts wait; the bits are those of all experts at once, and each is counted once."""
    path, late = FORMS["Q4_0"][0](tmp_path), list[int]()
    run = Engine._run_late_last

    def seen(self: Engine, *args: Any) -> Tensor:
        late.append(len(args[-1]))
        return run(self, *args)

    monkeypatch.setattr(Engine, "_run_late_last", seen)
    with load_offloaded(path, device="cpu", experts="packed", slots=32, dtype="bf16", link="instant") as resident:
        expected = greedy(resident, IDS, 8)
        requests = resident.stats.as_dict()["requests"]
    assert not late
    for options in ({"link": "emulated", "bandwidth": 1e6}, {"store": "disk", "bandwidth": 1e6, "in_place": True}):
        late.clear()
        with load_offloaded(path, device="cpu", experts="packed", slots=6, dtype="bf16", **options) as offloaded:
            assert_same(greedy(offloaded, IDS, 8), expected)
            stats = offloaded.stats.as_dict()
        assert stats["hits"] + stats["misses"] == stats["requests"] == requests
        assert late
