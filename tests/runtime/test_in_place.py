"""Experts read from the checkpoint's own files: the bits of a packed store, without a second copy."""

from __future__ import annotations

import gc
import os
import re
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from expertcast import OffloadConfig, load_offloaded, offload
from expertcast.cli import main
from expertcast.data import ggml
from expertcast.data.packed_experts import OrderedRows
from expertcast.predictors import ExpertcastError
from expertcast.runtime.storage import expert_file, reader
from expertcast.runtime.storage.disk_store import DiskStore
from expertcast.runtime.storage.in_place import ExpertsInPlace, _placed
from expertcast.runtime.storage.reader import Range
from tests.families.models import tiny_model
from tests.runtime.conftest import assert_same, greedy, refused
from tests.runtime.gguf_files import tiny, write
from tests.runtime.quantised import IDS, fp8, mxfp4
from tests.runtime.test_packed_experts import FORMS

PLAIN, CONVERTED = True, False
PACKED = {"dtype": "bf16", "experts": "packed"}
Made = Callable[[Path], str]


def saved(family: str, folder: Path, **given: Any) -> str:
    tiny_model(family, dtype=torch.bfloat16).save_pretrained(folder, **given)
    return str(folder)


def mixed(folder: Path) -> str:
    """One expert of each layer in another dtype."""
    file = Path(saved("qwen3_moe", folder)) / "model.safetensors"
    tensors = {name: each.float() if ".experts.1." in name else each for name, each in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    return str(folder)


def gguf(kind: str, folder: Path) -> str:
    write(folder / "model.gguf", tiny("qwen3_moe"), kind)
    return str(folder / "model.gguf")


CHECKPOINTS: dict[str, tuple[Made, dict[str, Any], bool]] = {
    "a tensor per expert": (partial(saved, "qwen3_moe"), {}, PLAIN),
    "a tensor per expert, in shards": (partial(saved, "mixtral", max_shard_size="60KB"), {}, PLAIN),
    "a tensor per layer, with biases": (partial(saved, "gpt_oss"), {}, PLAIN),
    "an expert of another dtype": (mixed, {"dtype": "bf16"}, CONVERTED),
    "another dtype": (partial(saved, "olmoe"), {"dtype": "fp32"}, CONVERTED),
    "fp8, dequantised": (partial(fp8, "qwen3_moe"), {}, CONVERTED),
    "mxfp4, dequantised": (mxfp4, {}, CONVERTED),
    "gguf in fp16": (partial(gguf, "F16"), {"dtype": "fp16"}, PLAIN),
    "gguf": (partial(gguf, "Q4_0"), {}, PLAIN),
    "gguf, dequantised": (partial(gguf, "Q4_0"), {"dtype": "bf16", "experts": "expanded"}, CONVERTED),
    "rounded": (partial(gguf, "F16"), {"dtype": "bf16", "experts": "int4"}, CONVERTED),
    **{
        f"packed {form}": (make, PACKED, CONVERTED if form.startswith(("mxfp4", "gptq")) else PLAIN)
        for form, (make, _) in FORMS.items()
    },
}  # fmt: skip
"""Writer of a checkpoint, options, and whether its bytes are those of the blocks."""


def in_place(offloaded: Any) -> ExpertsInPlace:
    assert isinstance(offloaded.store, DiskStore)
    assert offloaded.store.in_place is not None
    return offloaded.store.in_place


@pytest.mark.parametrize("form", CHECKPOINTS)
def test_same_bits_as_a_packed_store(form: str, tmp_path: Path) -> None:
    make, options, plain = CHECKPOINTS[form]
    path = make(tmp_path)
    given = {"device": "cpu", "slots": 6, "store": "disk", **options}
    with load_offloaded(path, **given) as offloaded:
        expected = greedy(offloaded, IDS, 4)
        views = [offloaded.store.views(layer) for layer in range(offloaded.store.layers)]
        with load_offloaded(path, in_place=True, **given) as own:
            assert_same(greedy(own, IDS, 4), expected)
            assert own.link.name == "disk"
            assert own.link.bytes_read > 0
            for layer, there in enumerate(views):
                assert all(torch.equal(view, there[name]) for name, view in own.store.views(layer).items())
            found = set(in_place(own)._plain)
    assert found == {plain}


def test_interleaved_rows_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of whole groups of rows, by threads at once."""
    if not ggml.interleaves("Q4_0", 8):
        pytest.skip("ggml has no kernel for interleaved rows of Q4_0 on this processor")
    monkeypatch.setattr(reader, "PIECE", 400)
    given = {"device": "cpu", "slots": 6, "store": "disk", **PACKED}
    path = gguf("Q4_0", tmp_path)
    with load_offloaded(path, **given) as offloaded, load_offloaded(path, in_place=True, **given) as own:
        pieces = in_place(own).read(0, own.store.block(0)).pieces
        assert len(pieces) > 3
        assert all(piece.nbytes <= 400 and piece.nbytes % piece.unit == 0 and piece.write for piece in pieces)
        assert_same(greedy(own, IDS, 4), greedy(offloaded, IDS, 4))


def test_ranges_that_share_interleaved_rows_are_converted() -> None:
    """Gates of 12 rows and ups of 12: eight rows of both lie side by side."""
    rows, given = OrderedRows("Q4_0", 256, 256 + 24 * 18, 18), Range(0, 0, 12 * 18)
    for start in (256, 256 + 12 * 18):
        with pytest.raises(ExpertcastError, match="another range"):
            _placed(given, start, [rows])
    assert _placed(given, 1024, [rows]) == given._replace(start=1024)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"link": "instant"},
        {"link": "disk", "bandwidth": 1e9},
        {"predictor": "next_norm", "forecasts": "always"},
        {"cache": False},
        {"draft": "int8"},
        {"policies": "specmd_1"},
        {"slots": 32},
    ],
    ids=str,
)
def test_links_caches_forecasts_and_drafts(options: dict[str, Any], plain: bool, tmp_path: Path) -> None:
    path = saved("qwen3_moe", tmp_path)
    given = {"device": "cpu", "dtype": "bf16" if plain else "fp32", "store": "disk", "slots": 6, **options}
    outputs = []
    for own in (False, True):
        with load_offloaded(path, in_place=own, **given) as offloaded:
            outputs.append(offloaded.generate(**IDS, max_new_tokens=6, do_sample=False))
    assert torch.equal(*outputs)


# Files that change, or cannot be read in place


@pytest.mark.parametrize("link", ["disk", "instant"])
@pytest.mark.parametrize("change", ["written", "truncated"])
def test_a_file_that_changes_is_one_line(change: str, link: str, tmp_path: Path) -> None:
    path = Path(saved("qwen3_moe", tmp_path)) / "model.safetensors"
    with load_offloaded(tmp_path, device="cpu", slots=6, store="disk", in_place=True, link=link) as offloaded:
        greedy(offloaded, IDS, 1)
        with path.open("r+b") as file:
            if change == "truncated":
                file.truncate(path.stat().st_size // 2)
            else:
                file.seek(-5, os.SEEK_END)
                file.write(b"wrong")
        with refused(f"{path.name}' was changed or truncated while it was in use: load the model again"):
            greedy(offloaded, {"input_ids": torch.arange(40)[None]}, 4)


def test_a_replaced_file_is_still_read(tmp_path: Path) -> None:
    path = Path(saved("qwen3_moe", tmp_path)) / "model.safetensors"
    with load_offloaded(tmp_path, device="cpu", slots=6, store="disk", in_place=True) as offloaded:
        expected = greedy(offloaded, IDS, 4)
        (tmp_path / "other").write_bytes(b"other")
        os.replace(tmp_path / "other", path)
        assert_same(greedy(offloaded, IDS, 4), expected)


def test_files_are_closed(tmp_path: Path) -> None:
    path = Path(saved("qwen3_moe", tmp_path)) / "model.safetensors"

    def opened() -> int:
        links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
        return [os.path.realpath(each) for each in links].count(str(path.resolve()))

    with load_offloaded(tmp_path, device="cpu", slots=6, store="disk", in_place=True) as offloaded:
        assert opened() > 0
    del offloaded
    gc.collect()
    assert opened() == 0


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"store": "memory"}, "in_place reads the checkpoint's own files: give store='disk' without store_folder"),
        ({"store": "disk", "store_folder": "store"}, "give store='disk' without store_folder"),
        ({"store": "disk", "codec": "bitsplit"}, "in_place keeps experts as they are: leave codec='bitsplit' out"),
        ({"store": "disk", "pools": "C=1MB"}, "need compressed experts"),
    ],
)
def test_options_that_contradict_it(options: dict[str, Any], line: str) -> None:
    with refused(line):
        OffloadConfig(in_place=True, **options)


def test_a_model_without_files() -> None:
    with refused("in_place reads a checkpoint's files: give its folder to load_offloaded"):
        offload(tiny_model("qwen3_moe"), store="disk", in_place=True)


# A disk without room for a second copy


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(expert_file.shutil, "disk_usage", lambda _folder: usage(10**12, 10**12, 1000))


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("codec", [None, "bitsplit"])
@pytest.mark.parametrize("folder", [True, False])
def test_a_disk_without_room(folder: bool, codec: str | None, tmp_path: Path) -> None:
    path = saved("qwen3_moe", tmp_path / "model")
    with load_offloaded(path, device="cpu", slots=6) as offloaded:
        expected = greedy(offloaded, IDS, 4)
    own = {"store_folder": tmp_path / "store"} if folder else {}
    line = "experts are read in place from .*model.safetensors', without a second copy: .* has 1000 bytes free, but"
    with pytest.warns(UserWarning, match=line):
        offloaded = load_offloaded(path, device="cpu", slots=6, store="disk", codec=codec, **own)
    with offloaded:
        in_place(offloaded)
        assert_same(greedy(offloaded, IDS, 4), expected)
    assert not (tmp_path / "store").exists()


def test_a_store_that_is_there_needs_no_room(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    path, given = saved("qwen3_moe", tmp_path / "model"), {"device": "cpu", "store": "disk", "slots": 6}
    load_offloaded(path, store_folder=tmp_path / "store", **given).close()
    request.getfixturevalue("full")
    with load_offloaded(path, store_folder=tmp_path / "store", **given) as offloaded:
        assert isinstance(offloaded.store, DiskStore)
        assert offloaded.store.in_place is None


@pytest.mark.usefixtures("full")
def test_pools_need_a_store(tmp_path: Path) -> None:
    path = saved("qwen3_moe", tmp_path / "model")
    with refused("has 1000 bytes free, but the experts need at least"):
        load_offloaded(path, device="cpu", slots=6, store="disk", codec="bitsplit", pools="C=50kB")


# Commands


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved("qwen3_moe", tmp_path / "model")
    assert main(["store", path, "--in-place"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"32 experts of 3,072 bytes in place from '.*model.safetensors', 16 bits .*: 98,304 bytes", said)
    assert [each.name for each in tmp_path.iterdir()] == ["model"]


def test_generate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    texts, given = [], ["generate", "reference", "--slots", "192", "--prompt", "It is", "--new-tokens", "4"]
    for own in ([], ["--in-place"]):
        assert main([*given, *own, "--json", str(tmp_path / "run.json")]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0].split("\n\n")[0] == texts[1].split("\n\n")[0]
    assert "all of them 28.3 MB in the checkpoint's own files" in texts[1]
    assert "read from disk" in texts[1]
