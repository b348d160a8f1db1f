"""Experts run once where the text is passed over twice, and no byte of the traces is another."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from expertcast.data import collect as collector
from expertcast.data import stand_in as expert_maps
from expertcast.data import trace_format as layout
from expertcast.data.collect import collect
from expertcast.data.experts import ResidentExperts
from expertcast.data.moe_layers import find_moe_layers
from expertcast.data.stand_in import KeptOutputs, fit_stand_in, largest
from expertcast.data.text import Document, load_documents
from tests.data.test_expert_maps import gathered, windows
from tests.families.models import tiny_model

SETTINGS: dict[str, Any] = {"tokens": 600, "window": 32, "batch_size": 4, "early_rank": 2}


@pytest.fixture(scope="module")
def text() -> list[Document]:
    return load_documents("reference")[:80]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Pairs of a token and an expert that were run, by layer."""
    seen: Counter[int] = Counter()
    run = ResidentExperts.run

    def counted(self: ResidentExperts, layer: Any, hidden: Any, ids: Any, weights: Any, inner: Any = None) -> Any:
        seen[layer.index] += len(ids)
        return run(self, layer, hidden, ids, weights, inner)

    monkeypatch.setattr(ResidentExperts, "run", counted)
    return seen


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.suffix in (".arrow", ".safetensors")}


def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as the traces take is free, and nothing beside it."""
    monkeypatch.setattr(collector, "_check_disk", lambda *_: 1)


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_experts_run_once(
    family: str, runs: Counter[int], reference_tokenizer: Any, text: list[Document], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = tiny_model(family)
    monkeypatch.setattr(expert_maps, "DIRECTION_TOKENS", 100)
    traces = collect(model, reference_tokenizer, text, tmp_path / "kept", **SETTINGS)
    assert dict(runs) == dict.fromkeys(range(len(traces.view)), SETTINGS["tokens"])
    assert not (traces.folder / layout.PROGRESS_FOLDER).exists()
    no_room(monkeypatch)
    collect(model, reference_tokenizer, text, tmp_path / "run", **SETTINGS)
    assert runs[0] > 2 * SETTINGS["tokens"], "the second collection runs the train split's twice"
    assert files(tmp_path / "kept") == files(tmp_path / "run")
    without = collect(model, reference_tokenizer, text, tmp_path / "without", **{**SETTINGS, "early_rank": None})
    for name in ("expert_LED", "shared_LD", "count_LE"):
        assert torch.equal(getattr(without.defaults, name), getattr(traces.defaults, name)), name


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "others"])
def test_what_was_damaged_is_run_again(
    damage: str, reference_tokenizer: Any, text: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("qwen3_moe")
    collect(model, reference_tokenizer, text, tmp_path / "whole", **SETTINGS)
    writer = collector.RankWriter

    def damaged(folder: Path, *args: Any, **kwargs: Any) -> Any:
        paths = sorted((folder / layout.PROGRESS_FOLDER).glob("experts-*"))
        assert len(paths) > 3
        content = paths[1].read_bytes()
        if damage == "gone":
            paths[1].unlink()
        elif damage == "flip":
            middle = len(content) // 2
            paths[1].write_bytes(content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :])
        else:
            paths[1].write_bytes(content[: len(content) // 2] if damage == "cut" else paths[-1].read_bytes())
        return writer(folder, *args, **kwargs)

    monkeypatch.setattr(collector, "RankWriter", damaged)
    collect(model, reference_tokenizer, text, tmp_path / "damaged", **SETTINGS)
    assert files(tmp_path / "damaged") == files(tmp_path / "whole")


def test_one_pass_chooses_the_directions_too(monkeypatch: pytest.MonkeyPatch, reference_model: PreTrainedModel) -> None:
    """From the first forward's tokens, and in the end from all: they hold nearly the variance of the best ones."""
    view = find_moe_layers(reference_model)
    forwards: list[int] = []
    hook = reference_model.base_model.register_forward_pre_hook(lambda *_: forwards.append(1))
    exact = fit_stand_in(reference_model, view, windows(), rank=4, batch_size=2)
    assert len(forwards) == 4
    monkeypatch.setattr(expert_maps, "DIRECTION_TOKENS", 60)
    near = fit_stand_in(reference_model, view, windows(), rank=4, batch_size=2)
    hook.remove()
    assert len(forwards) == 6
    for layer, seen in enumerate(gathered(reference_model, view)):
        rows = seen["input"].float() - seen["input"].float().mean(dim=0)
        best, found = (float((rows @ each.projection_LDR[layer]).square().sum()) for each in (exact, near))
        own_RR = near.projection_LDR[layer].T @ near.projection_LDR[layer]
        assert torch.allclose(own_RR, torch.eye(4), atol=1e-4)
        assert 0.9 * best < found <= 1.001 * best


def test_directions_of_large_layers() -> None:
    """By iteration as by all of them."""
    generator = torch.Generator().manual_seed(1)
    scales = torch.cat([torch.tensor([9.0, 8, 7, 6, 5, 4, 3, 2]), torch.linspace(1, 0.1, 592)])
    rows = torch.randn(3000, 600, generator=generator, dtype=torch.float64) * scales
    covariance = rows.T @ rows / len(rows)
    state = torch.random.get_rng_state()
    found = largest(covariance, 6)
    assert torch.equal(state, torch.random.get_rng_state())
    expected = torch.linalg.eigh(covariance).eigenvectors[:, -6:].flip(1)
    torch.testing.assert_close((found.T @ expected).abs(), torch.eye(6, dtype=torch.float64), atol=1e-6, rtol=0)
    assert torch.equal(found, largest(covariance, 6))


def test_room_is_what_the_files_take(reference_tokenizer: Any, text: list[Document], tmp_path: Path) -> None:
    model = tiny_model("qwen2_moe")
    view = find_moe_layers(model)
    kept = KeptOutputs(tmp_path / "kept")
    fit_stand_in(model, view, windows(), rank=2, batch_size=2, keep=kept)
    tokens = sum(len(window.token_ids) for window in windows())
    found = sum(path.stat().st_size for path in (tmp_path / "kept").iterdir())
    expected = KeptOutputs.nbytes(view, tokens, 2, model.dtype.itemsize)
    assert expected < found < expected + 2 * 4096, "the headers beside them"
