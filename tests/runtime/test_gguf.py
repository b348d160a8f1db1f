"""GGUF files by their path: the weights that transformers' own from_pretrained(gguf_file=) gives, bit for bit."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

from expertcast import load_offloaded
from expertcast.cli import main
from expertcast.data import machine
from expertcast.data.machine import native_dtype
from expertcast.data.models import form_of, load_config, load_model, load_tokenizer, meta_model, open_weights
from expertcast.data.packed_experts import is_packed
from expertcast.data.source import ModelSource
from expertcast.data.weights.gguf import _header, _read_header
from expertcast.predictors import ExpertcastError
from tests.runtime.conftest import assert_same, greedy
from tests.runtime.gguf_files import tiny, write
from tests.runtime.quantised import IDS, inspect_model, same_weights

gguf = pytest.importorskip("gguf")


def test_reads_that_give_less_than_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Linux does above 2 GiB, and network file systems at any size."""
    path, preadv = tmp_path / "model.gguf", os.preadv
    write(path, tiny("qwen3_moe"), "F16")
    expected = load_model(path).state_dict()
    monkeypatch.setattr(os, "preadv", lambda file, views, at: preadv(file, [memoryview(views[0])[:1000]], at))
    found = load_model(path).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def _by_transformers(path: Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Told the size of experts, which it does not read from the file."""
    config = load_config(ModelSource.of(path))
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, config=config, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
    )
    resident: PreTrainedModel = model.eval()
    return resident


@pytest.mark.parametrize(
    ("family", "kind", "dtype"),
    [
        ("qwen3_moe", "Q8_0", None),
        ("qwen3_moe", "Q4_0", torch.bfloat16),
        ("qwen3_moe", "F16", torch.float16),
        ("qwen2_moe", "Q5_1", None),
    ],
)
def test_weights(family: str, kind: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    """In the processor's dtype unless another one is named; inspect says the same of it."""
    path = tmp_path / "model.gguf"
    write(path, tiny(family), kind)
    resident = _by_transformers(path, dtype)
    store = "disk" if kind in ("Q4_0", "F16") else "memory"
    with load_offloaded(path, device="cpu", dtype=dtype, slots=6, store=store, experts="expanded") as offloaded:
        assert offloaded.model.dtype == resident.dtype == (dtype or native_dtype())
        same_weights(offloaded, resident)
        assert_same(greedy(offloaded, IDS, 4), greedy(resident, IDS, 4))
    loaded = dict(load_model(path).named_parameters())
    if dtype is None:
        assert all(torch.equal(loaded[name], parameter) for name, parameter in resident.named_parameters())
    report = inspect_model(str(path))
    assert (report.supported, report.shipped, report.experts) == (True, f"gguf, {kind}", 8)
    assert "experts and linear layers keep their codes" in report.loaded
    assert report.shipped_bytes == path.stat().st_size


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_an_architecture_with_converters(kind: str, tmp_path: Path) -> None:
    """Qwen3.5: norms less one, value heads in another order; its floats are loaded in the file's own dtype."""
    path = tmp_path / "model.gguf"
    write(path, tiny("qwen3_5_moe_text"), kind, "qwen35moe")
    resident = _by_transformers(path, None if kind == "Q8_0" else torch.float16)
    with load_offloaded(path, device="cpu", slots=6, experts="expanded") as offloaded:
        assert offloaded.model.dtype == resident.dtype == (native_dtype() if kind == "Q8_0" else torch.float16)
        same_weights(offloaded, resident)


@pytest.mark.parametrize("experts", ["expanded", "packed"])
def test_a_split_file(experts: str, tmp_path: Path) -> None:
    """Its first part stands for all: the same weights, and the head that lies in the last one."""
    model = tiny("qwen3_moe")
    write(tmp_path / "whole.gguf", model, "Q8_0")
    write(tmp_path / "split.gguf", model, "Q8_0", part=9)
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert len(parts) > 2
    with load_offloaded(tmp_path / "whole.gguf", device="cpu", slots=6, experts=experts) as whole:
        expected = greedy(whole, IDS, 4)
    with load_offloaded(parts[0], device="cpu", slots=6, experts=experts) as offloaded:
        assert_same(greedy(offloaded, IDS, 4), expected)
    assert inspect_model(str(parts[0])).shipped_bytes == sum(part.stat().st_size for part in parts)
    with pytest.raises(ExpertcastError, match=r"is part 2 of \d: use split-00001-of-0000\d.gguf"):
        load_offloaded(parts[1])
    parts[1].unlink()
    with pytest.raises(ExpertcastError, match=f"has no file {parts[1].name}"):
        load_offloaded(parts[0])


def test_one_of_several_files_in_a_folder(tmp_path: Path) -> None:
    """`gguf_file` names it; the configuration and weights are its own."""
    write(tmp_path / "a.gguf", tiny("qwen3_moe"), "Q8_0")
    write(tmp_path / "b.gguf", tiny("qwen2_moe"), "Q8_0")
    with load_offloaded(tmp_path, gguf_file="b.gguf", device="cpu", slots=6, experts="expanded") as offloaded:
        assert type(offloaded.model).__name__ == "Qwen2MoeForCausalLM"
        same_weights(offloaded, _by_transformers(tmp_path / "b.gguf"))


def test_experts_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more of a layer's experts than one: what is read at once is counted."""
    path = tmp_path / "model.gguf"
    write(path, tiny("qwen3_moe"), "Q8_0")
    sizes: list[int] = []
    real = gguf.dequantize

    def counted(data: Any, kind: Any) -> Any:
        sizes.append(len(data) if data.ndim == 3 else 0)
        return real(data, kind)

    monkeypatch.setattr(gguf, "dequantize", counted)
    with load_offloaded(path, device="cpu", slots=6, experts="expanded"):
        pass
    assert max(sizes) == 1
    assert sum(sizes) == 2 * 8 * 3


def test_generate_with_the_files_own_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line takes the file alone; a tokenizer beside it wins."""
    path = tmp_path / "model.gguf"
    write(path, tiny("qwen3_moe"), "Q8_0")
    tokenizer = load_tokenizer(path)
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert tokenizer("ab ab").input_ids == expected("ab ab").input_ids != []
    assert (
        main(["generate", str(path), "--prompt", "ab ab", "--slots", "6", "--new-tokens", "2", "--device", "cpu"]) == 0
    )
    assert capsys.readouterr().out.startswith("ab ab")
    load_tokenizer("reference").save_pretrained(tmp_path)
    assert load_tokenizer(path)("The old man").input_ids == load_tokenizer("reference")("The old man").input_ids


def _cut_off(path: Path, end: int = -1000) -> None:
    write(path, tiny("qwen3_moe"), "Q8_0")
    path.write_bytes(path.read_bytes()[:end])


def _no_gguf(path: Path) -> None:
    path.write_bytes(b"something else entirely, long enough to hold a header")


def _split(path: Path) -> None:
    write(path, tiny("qwen3_moe"), "Q8_0", split__count=2)


def _without_an_expert(path: Path) -> None:
    write(path, tiny("qwen3_moe"), "Q8_0", without="blk.1.ffn_down_exps.weight")


def _unmapped(path: Path) -> None:
    """transformers 5.23 finds none of gpt-oss's experts, and would fill them in at random."""
    write(path, tiny("gpt_oss"), "Q8_0", "gpt-oss")


_CUT_OFF = r"cannot read .*model.gguf, which is cut off or damaged \(.*\): download it again"


@pytest.mark.parametrize("end", [0, 8, 24, 100, 1000, -1])
def test_the_tokenizer_of_a_file_that_is_cut_off(end: int, tmp_path: Path) -> None:
    _cut_off(tmp_path / "model.gguf", end)
    with pytest.raises(ExpertcastError, match=_CUT_OFF):
        load_tokenizer(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (_cut_off, _CUT_OFF),
        (partial(_cut_off, end=100), _CUT_OFF),
        (_no_gguf, "cannot load model .*model.gguf': .*GGUF"),
        (_split, "is one of 2 parts: join them with llama-gguf-split --merge"),
        (_without_an_expert, r"gives model\.layers\.1\.mlp\.experts\.down_proj no weights: it is incomplete, or"),
        (_unmapped, r"gives model\.layers\.0\.mlp\.experts\.\w+ no weights: .* not map all of architecture 'gpt-oss'"),
        (None, "no such file: .*model.gguf; .* gguf_file="),
    ],
)
def test_one_verdict_on_what_is_refused(make: Any, line: str, tmp_path: Path) -> None:
    """By loading and by inspecting, the same line."""
    path = tmp_path / "model.gguf"
    if make is not None:
        make(path)
    said = []
    for load in (load_offloaded, load_model):
        with pytest.raises(ExpertcastError, match=line) as caught:
            load(path)
        said.append(str(caught.value))
    try:
        report = inspect_model(str(path))
        assert not report.supported
        said.append(report.reason)
    except ExpertcastError as error:  # there is no model at all
        said.append(str(error))
    assert len(set(said)) == 1
    assert "\n" not in said[0]


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expertcast.data.weights.gguf.is_gguf_available", lambda: False)
    path = tmp_path / "model.gguf"
    write(path, tiny("qwen3_moe"), "Q8_0")
    for load in (load_offloaded, load_tokenizer):
        with pytest.raises(ExpertcastError, match=r"is a GGUF file, which takes a package: pip install 'gguf>="):
            load(path)


@pytest.mark.parametrize("counted", [True, False], ids=["vocab_size", "tokens alone"])
def test_a_header_is_read_once_and_without_its_vocabulary(
    counted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    if not counted:
        monkeypatch.setattr(gguf.GGUFWriter, "add_vocab_size", lambda _writer, _size: None)
    write(path, tiny("qwen3_moe", vocab_size=5000))
    config = load_config(ModelSource.of(path))
    before = _read_header.cache_info().misses
    assert config.vocab_size == 5000
    assert len(load_tokenizer(path)) >= 5000  # the tokenizer reads it whole
    with open_weights(ModelSource.of(path), form_of(config, ModelSource.of(path)), meta_model(config)) as files:
        assert files.tensors
    assert _read_header.cache_info().misses == before
    short, whole = _header(path), gguf.GGUFReader(path)
    assert [each.name for each in short.tensors] == [each.name for each in whole.tensors]
    assert [each.data_offset for each in short.tensors] == [each.data_offset for each in whole.tensors]
    for name, field in whole.fields.items():
        if len(field.data) <= 1024:
            assert short.fields[name].contents() == field.contents()


def test_a_file_runs_without_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed, in the memory that is free, from its own blocks, with a plan that is said before any weight is read."""
    path, plans = tmp_path / "model.gguf", list[str]()
    write(path, tiny("qwen3_moe"), "Q4_0")
    with load_offloaded(path, device="cpu", experts="expanded", on_plan=plans.append) as offloaded:
        assert offloaded.pool.count == offloaded.store.layers * offloaded.store.experts
    with load_offloaded(path, device="cpu", on_plan=plans.append) as offloaded:
        expected, everything = greedy(offloaded, IDS, 4), offloaded.pool.count
        assert offloaded.store.name == "checkpoint"  # all are in slots: in memory they would lie twice
        assert is_packed(offloaded.view[0].experts)
    with load_offloaded(path, device="cpu", slots=everything // 2) as offloaded:
        assert offloaded.store.name == "memory"
        assert_same(greedy(offloaded, IDS, 4), expected)
    monkeypatch.setattr(machine, "available_memory", lambda: 1000)
    with pytest.raises(ExpertcastError, match=r"1 kB of free memory hold 0 experts .* give \d+ bytes or") as caught:
        load_offloaded(path, device="cpu", on_plan=plans.append)
    least = int(re.search(r"give (\d+)", str(caught.value))[1])  # type: ignore[index]
    with pytest.raises(ExpertcastError, match=f"give {least} bytes or more"):
        load_offloaded(path, device="cpu", on_plan=plans.append, memory=None, context=4096)
    monkeypatch.setattr(machine, "available_memory", lambda: least)
    with load_offloaded(path, device="cpu", on_plan=plans.append) as offloaded:
        assert offloaded.store.name == "checkpoint"
        assert offloaded.pool.count == offloaded.store.top_k < everything
        assert_same(greedy(offloaded, IDS, 4), expected)
    assert [path] == list(tmp_path.iterdir())
    assert ["expanded" in plans[0], "packed as Q4_0, computed in" in plans[1]] == [True, True]
    assert f"2 of {everything} in slots" in plans[2]
    assert "in the checkpoint's own files; once these slots are full, a token reads about" in plans[2]
