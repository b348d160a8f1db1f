"""load_offloaded: bit for bit what from_pretrained and offload give, from every kind of checkpoint; clear refusals."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import expertcast
from expertcast import OffloadConfig, OffloadedModel, load_offloaded, offload
from expertcast.checkpoints.bundled import REFERENCE
from expertcast.checkpoints.checkpoint import save_predictor
from expertcast.data.models import load_model
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.source import ADAPTER
from expertcast.predictors import ExpertcastError, predictor_class
from expertcast.runtime.plan import context_bytes
from expertcast.runtime.storage.disk_store import DiskStore
from tests.families.models import CONFIGS, tiny_model
from tests.runtime.conftest import assert_same, greedy, refused
from tests.runtime.gguf_files import tiny
from tests.runtime.quantised import inspect_model
from tests.sealed import edit_json

IDS = {"input_ids": torch.tensor([[5, 9, 2, 77, 31]]), "attention_mask": torch.ones(1, 5, dtype=torch.long)}


def _saved(family: str, folder: Path, **arguments: Any) -> str:
    model = tiny_model(family)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder, **arguments)
    return str(folder)


def test_reference_model(reference_model: PreTrainedModel, one: dict[str, Tensor], four: dict[str, Tensor]) -> None:
    with load_offloaded(REFERENCE, slots=60, predictor="next_norm", forecasts="always") as offloaded:
        for inputs in (one, four):
            assert_same(greedy(offloaded, inputs, 6), greedy(reference_model, inputs, 6))
        assert offloaded.view.fingerprint() == offload_fingerprint(reference_model)
        assert not offloaded.model.training
        assert offloaded.model.generation_config.to_dict() == reference_model.generation_config.to_dict()


def test_predictors_are_refused_before_weights_are_loaded(tmp_path: Path, reference_model: PreTrainedModel) -> None:
    view = find_moe_layers(tiny_model("olmoe"))
    cls = predictor_class("next_norm")
    save_predictor(cls(cls.config_class(), view.shape), tmp_path / "p", view=view)
    own = find_moe_layers(reference_model)
    save_predictor(cls(cls.config_class(ahead=(1, 2)), own.shape), tmp_path / "own", view=own)
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"predictor": "estimator"}, "'estimator' must be trained"),
        ({"predictor": "quasi_hidden"}, "'quasi_hidden' must be trained"),
        ({"predictor": "hybrid"}, "'hybrid' must be trained"),
        ({"predictor": tmp_path / "p"}, "has another shape: train a predictor for this model"),
        ({"predictor": "next_norm", "mode": "hybrid"}, r"give layers=\[...\], or a checkpoint"),
        ({"mode": "speculate"}, "give a predictor"),
        ({"predictor": "next_norm", "ahead": 2}, r"next_norm forecasts \[1\] layers ahead, not 2"),
        ({"predictor": cls(cls.config_class(), own.shape), "ahead": 2}, r"forecasts \[1\] layers ahead, not 2"),
        ({"predictor": tmp_path / "own", "ahead": 3}, r"forecasts \[1, 2\] layers ahead, not 3"),
        ({"predictor": "next_norm", "mode": "hybrid", "layers": [3, 12]}, r"layers=\[12\] do not exist"),
    ]
    for fields, line in refusals:
        with refused(line):
            load_offloaded(REFERENCE, on_plan=pytest.fail, **fields)


def test_experts_without_weights_are_one_line(tmp_path: Path) -> None:
    tiny_model("qwen3_moe", moe_intermediate_size=0).save_pretrained(tmp_path)
    said = r"experts have no weights in 'gate_up_proj', whose shape is \[8, 0, 32\]"
    with refused(rf"cannot load model '{tmp_path}': {said}"):
        load_offloaded(tmp_path, device="cpu", slots=8)


def offload_fingerprint(model: PreTrainedModel) -> str:
    with offload(model) as offloaded:
        return offloaded.view.fingerprint()


@pytest.mark.parametrize("original", [True, False], ids=["as on the hub", "fused"])
@pytest.mark.parametrize("family", CONFIGS)
def test_families_and_checkpoint_styles(family: str, original: bool, tmp_path: Path) -> None:
    """From several files, in the checkpoint's dtype and cast, by way of a store on disk too; every parameter and buffer
    outside the experts is that of from_pretrained."""
    path = _saved(family, tmp_path / "model", save_original_format=original, max_shard_size="60KB")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 3
    disk = {"store": "disk", "store_folder": tmp_path / "store", "predictor": "next_norm", "forecasts": "always"}
    for dtype, options in (("auto", {}), ("fp32", disk)) if original else (("auto", disk),):
        model = load_model(path, dtype=dtype)
        expected = greedy(model, IDS, 4)
        others = {name: tensor for name, tensor in model.state_dict().items() if ".experts." not in name}
        with load_offloaded(path, device="cpu", dtype=dtype, slots=7, **options) as offloaded:
            assert isinstance(offloaded.store, DiskStore) == bool(options)
            assert_same(greedy(offloaded, IDS, 4), expected)
            own = dict(offloaded.model.named_parameters()) | dict(offloaded.model.named_buffers())
            for name, tensor in others.items():
                assert own[name].dtype == tensor.dtype, name
                assert torch.equal(own[name], tensor), name
            assert dict(model.named_buffers()).keys() == dict(offloaded.model.named_buffers()).keys()


def test_disk_store_is_made_once_and_again_after_a_change(tmp_path: Path) -> None:
    """The second load reads no expert from the checkpoint: the file is the same one."""
    path = _saved("olmoe", tmp_path / "model")
    folder = tmp_path / "store"

    def load() -> tuple[tuple[Tensor, list[Tensor]], int]:
        with load_offloaded(path, store="disk", store_folder=folder, slots=6) as offloaded:
            return greedy(offloaded, IDS, 4), (folder / "experts.safetensors").stat().st_ino

    first, inode = load()
    second, same = load()
    assert inode == same
    assert_same(second, first)
    tiny_model("olmoe", seed=1).save_pretrained(path)
    with pytest.warns(UserWarning, match="is rebuilt: it was written from other weights"):
        third, other = load()
    assert other != inode
    assert_same(third, greedy(load_model(path), IDS, 4))
    with (
        pytest.warns(UserWarning, match="is rebuilt"),
        load_offloaded(path, dtype="fp32", store="disk", store_folder=folder, slots=6) as offloaded,
    ):
        assert_same(greedy(offloaded, IDS, 4), greedy(load_model(path, dtype="fp32"), IDS, 4))


def test_a_store_is_made_again_for_other_weights_of_one_size_and_time(tmp_path: Path) -> None:
    """As in an image made with SOURCE_DATE_EPOCH, or a copy that keeps the time."""
    path, folder = _saved("qwen3_moe", tmp_path / "model"), tmp_path / "store"
    file, name = tmp_path / "model/model.safetensors", "model.layers.1.mlp.experts.3.down_proj.weight"
    for factor in (1, 2):
        tensors = load_file(file)
        save_file({**tensors, name: tensors[name] * factor}, file, metadata={"format": "pt"})
        os.utime(file, (1, 1))
        caught = pytest.warns(UserWarning, match="is rebuilt") if factor > 1 else nullcontext()
        with caught, load_offloaded(path, store="disk", store_folder=folder, slots=8) as offloaded:
            assert_same(greedy(offloaded, IDS, 4), greedy(load_model(path), IDS, 4))


@pytest.mark.parametrize("predictor", ["next_norm", "router_input"])
def test_norms_in_float32(predictor: str, tmp_path: Path) -> None:
    """transformers keeps them so in gpt-oss of fp16, whose router inputs are in fp16."""
    path = _saved("gpt_oss", tmp_path / "model")
    model = load_model(path, dtype="fp16")
    norm = model.base_model.layers[0].post_attention_layernorm
    assert (norm.weight.dtype, model.dtype) == (torch.float32, torch.float16)
    expected = greedy(model, IDS, 4)
    with load_offloaded(path, dtype="fp16", slots=7, predictor=predictor, forecasts="always") as offloaded:
        assert_same(greedy(offloaded, IDS, 4), expected)
        assert {layer.dtype for layer in offloaded.view} == {torch.float16}


def test_close_frees_the_experts_for_good(tmp_path: Path) -> None:
    path = _saved("gpt_oss", tmp_path / "model")
    offloaded = load_offloaded(path, slots=5)
    model = offloaded.model
    offloaded.close()
    offloaded.close()
    line = "call load_offloaded again"
    for use in (
        lambda: offloaded.generate(**IDS),
        lambda: offloaded(**IDS),
        lambda: model(**IDS),
        lambda: model.state_dict(),
        lambda: model.save_pretrained(tmp_path / "copy"),
        lambda: offload(model),
        lambda: pickle.dumps(model),
        lambda: torch.save(model, tmp_path / "model.pt"),
        lambda: copy.deepcopy(model),
    ):
        with pytest.raises(ExpertcastError, match=line):
            use()
    assert all(parameter.is_meta for name, parameter in model.named_parameters() if ".experts." in name)


def test_it_is_exported_lazily() -> None:
    assert expertcast.load_offloaded is load_offloaded
    assert "load_offloaded" in expertcast.__all__


def _dense(folder: Path) -> str:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def _edited(folder: Path, edit: Any) -> str:
    _saved("qwen3_moe", folder)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


LOST = [
    "lm_head.weight",
    "model.norm.weight",
    "model.embed_tokens.weight",
    "model.layers.1.mlp.gate.weight",
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.1.mlp.experts.3.up_proj.weight",
    "model.layers.1.mlp.experts.7.up_proj.weight",
]


@pytest.mark.parametrize("load", [load_offloaded, load_model])
def test_a_missing_weight_is_named(load: Callable[..., Any], tmp_path: Path) -> None:
    """Whatever it belongs to; transformers would draw it at random."""
    _saved("qwen3_moe", tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    for lost in LOST:
        kept = {name: tensor for name, tensor in whole.items() if name != lost}
        save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with refused(f"cannot load model '{tmp_path}': the checkpoint has no weights for {re.escape(lost)}: it"):
            load(tmp_path, device="cpu")


@pytest.mark.parametrize("load", [load_offloaded, load_model])
def test_tied_by_the_outer_configuration(load: Callable[..., Any], tmp_path: Path) -> None:
    """An image-text model with tied embeddings has no head; its text configuration alone is that of the model."""
    model = tiny("qwen3_5_moe_text")
    model.lm_head.weight = model.model.embed_tokens.weight
    model.config.tie_word_embeddings = True
    model.save_pretrained(tmp_path)
    text = model.config.to_dict() | {"tie_word_embeddings": False}
    outer = {"model_type": "qwen3_5_moe", "tie_word_embeddings": True, "text_config": text, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    loaded = load(tmp_path, device="cpu", **({"slots": 8} if load is load_offloaded else {}))
    whole = loaded.model if isinstance(loaded, OffloadedModel) else loaded
    assert torch.equal(whole.get_output_embeddings().weight, model.lm_head.weight)


def test_an_expert_under_another_number(tmp_path: Path) -> None:
    """As many tensors as experts, but the experts after it would move."""

    def renumber(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.1.mlp.experts.8.up_proj.weight"] = tensors.pop(LOST[-2])

    with refused(f"no weights for {re.escape(LOST[-2])}: it is incomplete"):
        load_offloaded(_edited(tmp_path, renumber))


@pytest.mark.parametrize("load", [load_offloaded, load_model])
@pytest.mark.parametrize("codes", [torch.float8_e4m3fn, torch.int8])
def test_codes_without_a_configuration(load: Callable[..., Any], codes: torch.dtype, tmp_path: Path) -> None:
    def quantise(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "_proj" in name]:
            tensors[f"{name}_scale_inv"] = scale = tensors[name].abs().max().float() / 127
            tensors[name] = (tensors[name].float() / scale).to(codes)

    path = _edited(tmp_path, quantise)
    with refused(f"cannot load model '{path}': .*_proj.weight has codes of type .*no quantization_config"):
        load(path)
    assert "no quantization_config" in inspect_model(path).reason


def test_weights_that_the_model_has_no_place_for(tmp_path: Path) -> None:
    """config.json says that attention has no biases."""
    name = "model.layers.0.self_attn.q_proj.bias"
    path = _edited(tmp_path, lambda tensors: tensors.update({name: torch.ones(32)}))
    with pytest.warns(UserWarning, match=f"the model has no place for {re.escape(name)} and 0 more"):
        load_offloaded(path, slots=8).close()


def test_an_adapter_beside_the_model(tmp_path: Path) -> None:
    """It is put on, as from_pretrained does."""
    path = _saved("qwen3_moe", tmp_path)
    _adapter(AutoModelForCausalLM.from_pretrained(path)).save_pretrained(path)
    expected = AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval()(**IDS).logits
    assert torch.equal(load_model(path)(**IDS).logits, expected)
    with load_offloaded(path, device="cpu", slots=8) as offloaded:
        assert torch.equal(offloaded(**IDS).logits, expected)


def _adapter(model: PreTrainedModel, *modules: str) -> Any:
    torch.manual_seed(3)
    names = [*modules] or ["q_proj", "v_proj"]
    return get_peft_model(model, LoraConfig(r=4, target_modules=names, init_lora_weights=False))


POINTER = "version https://git-lfs.github.com/spec/v1\n"
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (lambda folder, shard: shard.write_text(POINTER), "{shard} is a git LFS pointer.*: run git lfs pull"),
        (lambda folder, shard: (folder / INDEX).write_text(POINTER), f"{INDEX} is a git LFS pointer"),
        (lambda folder, shard: (folder / "config.json").write_text(POINTER), "config.json is a git LFS pointer"),
        (lambda folder, shard: shard.write_bytes(shard.read_bytes()[:999]), "{shard}, which is cut off or damaged"),
        (lambda folder, shard: shard.unlink(), "{shard} is missing"),
        (lambda folder, shard: (folder / INDEX).unlink(), f"and no {INDEX}: download that too"),
        (lambda folder, shard: (folder / INDEX).write_text("{}"), f"cannot read .*{INDEX}, which is"),
        (lambda folder, shard: _moved(folder, shard, "../{name}"), "names a file outside of its folder, ../model-0"),
        (lambda folder, shard: _moved(folder, shard, "{parent}/{name}"), "names a file outside of its folder, /"),
        (lambda folder, shard: (folder / "config.json").rename(folder / "a.gguf"), "but a GGUF file: use .*a.gguf"),
        (lambda folder, shard: (folder / "config.json").rename(folder / ADAPTER), "has an adapter .* and no model"),
        (
            lambda folder, shard: _say(folder, quantization_config={"quant_method": "awq", "w_bit": 4}),
            "awq, without bits",
        ),
        (lambda folder, shard: _say(folder, transformers_weights="a.safetensors"), "names its weights a.safetensors"),
    ],
)
def test_the_file_at_fault_is_named(edit: Callable[[Path, Path], Any], line: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    _saved("qwen3_moe", folder, max_shard_size="100KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    edit(folder, shard)
    for load in (load_offloaded, load_model):
        with refused(line.format(shard=re.escape(str(shard)))):
            load(folder)


def _moved(folder: Path, shard: Path, name: str) -> None:
    """Move a shard out of its folder, and say so in the index."""
    shard.rename(folder.parent / shard.name)
    there = name.format(parent=folder.parent, name=shard.name)
    (folder / INDEX).write_text((folder / INDEX).read_text().replace(shard.name, there))


def test_a_gguf_file_by_another_name(tmp_path: Path) -> None:
    """Such as a blob of Ollama's."""
    path = tmp_path / "sha256-0a1b"
    path.write_bytes(b"GGUF" + bytes(60))
    with refused(f"{path} is a file, and only GGUF files whose names end in .gguf are read: rename or link it"):
        load_offloaded(path)


def _say(folder: Path, **fields: object) -> None:
    edit_json(folder / "config.json", lambda config: config.update(fields))


def _misshapen(folder: Path) -> str:
    def edit(tensors: dict[str, Tensor]) -> None:
        name = "model.layers.1.mlp.experts.4.down_proj.weight"
        tensors[name] = tensors[name][:, :8].contiguous()

    return _edited(folder, edit)


def _mismatched(folder: Path) -> str:
    path = _saved("qwen3_moe", folder)
    _say(folder, num_key_value_heads=3)
    return path


def _pickled(folder: Path) -> str:
    path = _saved("qwen3_moe", folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return path


@pytest.mark.parametrize(
    ("make", "arguments", "line"),
    [
        (str, {}, "cannot load model"),
        (_pickled, {}, "has no model.safetensors: load it with transformers and save it"),
        (_mismatched, {}, "model: Qwen3MoeForCausalLM is not supported: it does not run on two tokens of text"),
        (_dense, {}, "records no router_logits"),
        (_misshapen, {}, r"layers\.1\.mlp\.experts\.down_proj is \[1, 32, 8\], the model's is \[1, 32, 16\]"),
        (None, {"dtype": "int3"}, "unknown dtype 'int3': choose from auto, bf16"),
        (None, {"device": "abacus"}, "unknown device 'abacus'"),
        (None, {"device": "meta"}, "device 'meta' is not supported"),
        (None, {"slots": 1}, r"slots=1 is fewer than the 2 experts one token of '.*model' needs: give slots=2"),
    ],
)
def test_bad_input_is_one_line(make: Any, arguments: dict[str, Any], line: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    path = make(folder) if make is not None else _saved("qwen3_moe", folder)
    with refused(line):
        load_offloaded(path, **arguments)


def test_cuda_where_there_is_none(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ExpertcastError, match="device 'cuda' is not available here: use 'cpu'"):
        load_offloaded(REFERENCE, device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda(reference_tokenizer: Any) -> None:
    inputs = dict(reference_tokenizer("The old man", return_tensors="pt").to("cuda"))
    model = load_model(REFERENCE, device="cuda")
    expected = greedy(model, inputs, 8)
    for store in ("memory", "disk"):
        with load_offloaded(REFERENCE, device="cuda", slots=60, store=store) as offloaded:
            pinned = [memory is not None and memory.pinned for memory in offloaded.store._memory]
            assert all(pinned) == (store == "memory")
            assert_same(greedy(offloaded, inputs, 8), expected)


def test_batches_reserve_activations_of_one_forward_alone() -> None:
    """Their caches hold many more tokens than run at once."""
    model = tiny_model("qwen3_moe")
    whole, few = (
        context_bytes(OffloadConfig(context=64), model.config, find_moe_layers(model), torch.float32, at_once)
        for at_once in (None, 8)
    )
    held = "keys and values of 64 tokens"
    assert few[held] == whole[held] > 0
    assert few["the activations of 8 tokens"] < whole["the activations of 64 tokens"] / 4


def test_more_experts_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before any weight is loaded, with the smallest number of bytes that would do."""

    def refusal(available: int, **fields: Any) -> str:
        monkeypatch.setattr("expertcast.data.machine.available_memory", lambda: available)
        with pytest.raises(ExpertcastError) as caught:
            load_offloaded(REFERENCE, device="cpu", **fields)
        return str(caught.value)

    with monkeypatch.context() as patched:
        patched.setattr("expertcast.runtime.loading._load_others", None)
        line = refusal(1_000_000)
        assert "1 MB of free memory hold 0 experts of 36.9 kB beside " in line
        least = int(re.findall(r"give (\d+) bytes or more", line)[0])
        assert f"give {least} bytes or more" in refusal(least - 1)
        assert f"it takes {least} or more" in refusal(least - 1, slots=4)
        assert "give slots=103 or fewer" in refusal(least + 99 * 36864, slots=200)
    monkeypatch.setattr("expertcast.data.machine.available_memory", lambda: least)
    with load_offloaded(REFERENCE, device="cpu") as offloaded:
        assert offloaded.store.name == "checkpoint"
        assert isinstance(offloaded, OffloadedModel)
