"""Checkpoints of life size: their tensors, and the work of opening and inspecting them. Work is counted, not timed."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from benchmarks.life_size_files import _pieces, published, write_sparse
from benchmarks.shapes import SHAPES
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from transformers import AutoConfig, PretrainedConfig

from expertcast.cli import main
from expertcast.data.inspection import OpenModel
from expertcast.data.models import load_model
from expertcast.data.source import ModelSource
from expertcast.runtime.storage.checkpoint_experts import ExpertSources
from expertcast.runtime.storage.in_place import ExpertsInPlace
from expertcast.runtime.storage.layout import BlockLayout
from tests.runtime.gguf_files import tiny, write

ONCE = ("load_config", "meta_model", "find_moe_layers", "_forward", "open_weights")
"""Functions that take most of the time of `inspect` at life size."""


def _deepseek(experts: int) -> PretrainedConfig:
    """DeepSeek-V3 with its names and layers, but few experts and small matrices."""
    return AutoConfig.for_model(
        "deepseek_v3", num_hidden_layers=5, n_routed_experts=experts, hidden_size=256, moe_intermediate_size=128,
        intermediate_size=256, vocab_size=64, q_lora_rank=128, kv_lora_rank=128, num_attention_heads=4,
        num_key_value_heads=4, tie_word_embeddings=False,
    )  # fmt: skip


def _calls(run: Callable[[], object]) -> dict[str, int]:
    """Return the calls of Python functions by name, and of all of them as ``."""
    profile = cProfile.Profile(builtins=False)
    profile.runcall(run)
    calls = {"": 0}
    for (_, _, name), (_, count, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        calls[name] = calls.get(name, 0) + count
        calls[""] += count
    return calls


def test_published_tensors() -> None:
    assert len(published(SHAPES["qwen3-30b-a3b"].config(), fp8=False)) == 18_867
    assert len(published(AutoConfig.for_model("deepseek_v3"), fp8=True)) == 91_991


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K"])
def test_random_blocks_have_mean_zero(kind: str) -> None:
    # a mean of .1 deviations outgrows all else over 48 layers: every token then chooses the same experts
    blocks = b"".join(_pieces(1 << 21, kind, 0.02, np.random.default_rng(0)))
    weights = dequantize(np.frombuffer(blocks, np.uint8), GGMLQuantizationType[kind])
    assert abs(weights.mean()) < 0.005 * weights.std()
    assert weights.std() == pytest.approx(0.02, rel=0.02)


def test_a_model_is_built_once_before_it_is_loaded() -> None:
    assert _calls(lambda: load_model("reference"))["meta_model"] == 1


@pytest.mark.parametrize("kind", ["gguf", "sparse"])
def test_inspect_opens_everything_once(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    if kind == "gguf":
        write(path, tiny("qwen3_moe"), "Q4_0")
    else:
        write_sparse(path := tmp_path / "model", _deepseek(32), shards=5, fp8=True)
        assert sum(each.stat().st_blocks * 512 for each in path.iterdir()) < 500_000
    calls = _calls(lambda: main(["inspect", str(path), "--memory", "1GB"]))
    assert {name: calls[name] for name in ONCE} == dict.fromkeys(ONCE, 1)
    assert calls.get("_tensors_of", 0) == (0 if kind == "gguf" else 5)


class _Names(list[str]):
    """A list whose elements are read by calls of Python, so that they are counted."""

    def __getitem__(self, place: int) -> str:  # type: ignore[override]
        return super().__getitem__(place)

    def __iter__(self) -> Iterator[str]:
        return (self[place] for place in range(len(self)))


def test_opening_takes_the_same_work_for_each_tensor(tmp_path: Path) -> None:
    def opened(experts: int) -> tuple[int, dict[str, int]]:
        write_sparse(path := tmp_path / str(experts), _deepseek(experts), shards=4, fp8=True)

        def run() -> int:
            with OpenModel(ModelSource.of(path)) as model:
                files, view = model.files, model.view
                assert files is not None
                assert view is not None
                files._names = _Names(files._names)
                sources = ExpertSources(model.model, view, files)
                assert len(files.fingerprint()) == 64
                ExpertsInPlace(sources, BlockLayout.of(view), len(view), experts)
                return len(files._stored)

        return run(), _calls(run)  # the first one imports

    (few, first), (many, second) = opened(64), opened(256)
    assert many > 3 * few
    assert (second[""] - first[""]) / (many - few) < 60
    assert second["rename_source_key"] == first["rename_source_key"]
